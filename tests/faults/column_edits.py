"""Every column of a plan or a stream, found by walking it, and small edits of its values.

A column is named by its path; what is alike in both phases or in all rows of a table has one name.
Nothing is listed here, so a column that is added later is found as well.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from k3tool.isa.columns import Columns

WHOLE = ("config",)  # what is a matter of one reader, and of its own tests
Edit = tuple[str, str, Any]  # column, what was done, the value with it


def edits(value: Any, dice: random.Random, at: str = "") -> Iterator[Edit]:
    """Yield single edits of everything in a value: of each column those of one or two rows."""
    if isinstance(value, np.ndarray):
        yield from _of_array(value, dice, at)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if field.init:
                inner = edits(getattr(value, field.name), dice, f"{at}.{field.name}".lstrip("."))
                for column, what, new in inner:
                    yield column, what, replace(value, **{field.name: new})
    elif isinstance(value, Mapping):
        yield from _of_mapping(value, dice, at)
    elif isinstance(value, tuple) and value and hasattr(value[0], "_fields"):
        yield from _of_rows(value, dice, at)
    elif isinstance(value, tuple) and value and isinstance(value[0], tuple | np.ndarray):
        row = dice.randrange(len(value))
        for column, what, new in edits(value[row], dice, at):
            yield column, f"row {row}: {what}", (*value[:row], new, *value[row + 1 :])
    else:
        for what, new in _of_leaf(value):
            yield at, what, new


def _of_mapping(value: Mapping[str, Any], dice: random.Random, at: str) -> Iterator[Edit]:
    phases = set(value) <= {"decode", "prefill"}
    for key, item in value.items():
        column = f"{at}.*" if phases else f"{at}.{key}"
        inner = _of_leaf(item) if key in WHOLE else edits(item, dice, column)
        for found in inner:
            name, what, new = found if len(found) == 3 else (column, *found)
            yield name, f"{key}: {what}" if phases else what, {**value, key: new}
        if not phases:
            yield column, "left out", {k: v for k, v in value.items() if k != key}
    if not phases:
        yield f"{at} (keys)", "another key", {**value, "another": 1}


def _of_rows(value: tuple[Any, ...], dice: random.Random, at: str) -> Iterator[Edit]:
    """Of a table of named rows: one row's columns, and the same swapped with another row's."""
    for name in value[0]._fields:
        row = dice.randrange(len(value))
        mine = getattr(value[row], name)
        for what, new in _of_leaf(mine):
            yield f"{at}.{name}", f"row {row}: {what}", _set(value, {row: {name: new}})
        others = [i for i, other in enumerate(value) if getattr(other, name) != mine]
        if others:
            other = dice.choice(others)
            theirs = getattr(value[other], name)
            swapped = _set(value, {row: {name: theirs}, other: {name: mine}})
            yield f"{at}.{name}", f"rows {row} and {other} swapped", swapped


def _set(rows: tuple[Any, ...], changes: Mapping[int, Mapping[str, Any]]) -> tuple[Any, ...]:
    return tuple(row._replace(**changes.get(i, {})) for i, row in enumerate(rows))


def _of_array(value: Columns, dice: random.Random, at: str) -> Iterator[Edit]:
    if value.dtype.names:
        for name in value.dtype.names:
            for column, what, new in _of_array(value[name], dice, f"{at}.{name}"):
                whole = value.copy()
                whole[name] = new
                yield column, what, whole
        return
    if value.ndim > 1:  # slots, words: each is a column
        for nth in range(value.shape[1]):
            for column, what, new in _of_array(value[:, nth], dice, at):
                whole = value.copy()
                whole[:, nth] = new
                yield column, f"{nth}: {what}", whole
        return
    if len(value):
        yield from ((at, what, new) for what, new in _of_column(value, dice))


def _of_column(value: Columns, dice: random.Random) -> Iterator[tuple[str, Columns]]:
    row, most = dice.randrange(len(value)), int(np.iinfo(value.dtype).max)
    mine = int(value[row])
    for what, new in (("+1", mine + 1), ("-1", mine - 1), ("0", 0), ("max", most)):
        if 0 <= new <= most and new != mine:
            altered = value.copy()
            altered[row] = new
            yield f"row {row}: {what}", altered
    behind = np.flatnonzero(value[row:] != mine)
    if len(behind):
        other = row + int(behind[0])
        altered = value.copy()
        altered[[row, other]] = altered[[other, row]]
        yield f"rows {row} and {other} swapped", altered


def _of_leaf(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool):
        yield "turned over", not value
    elif isinstance(value, int | float):
        for what, new in (("+1", value + 1), ("-1", value - 1), ("0", 0), ("max", 1 << 40)):
            if new >= 0 and new != value:
                yield what, new
    elif isinstance(value, str):
        yield "longer", f"{value}x"
        if value:
            yield "empty", ""
    elif isinstance(value, tuple | list):
        kind = type(value)
        if value:
            yield "one less", kind(value[:-1])
            yield "the last twice", kind([*value, value[-1]])
        if list(value) != list(value)[::-1]:
            yield "from behind", kind(value[::-1])
        if value and isinstance(value[0], int):
            yield "+1", kind([value[0] + 1, *value[1:]])
