"""Where two streams of tokens first differ, and whether arithmetic alone can explain it.

A **near tie** is a step where every known margin (largest logit less the second) is at most a
bound: two implementations that are each right to within rounding may then choose differently. It
is a difference all the same. The default bound is what the contract's own gate allows: a right
binary32 implementation keeps every logit within 2e-4 of the float64 model's, so a gap between two
logits within 4e-4, and two of them, one on each side of a flip, have margins of at most 8e-4.
Source: the gate of tests/oracle, whose tolerances were measured on models of 6 to 13 layers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from k3tool.compare.records import margins, values
from k3tool.compare.spill import BLOCK_ROWS, Columns
from k3tool.errors import quoted
from k3tool.tables import count_text

MAX_LOGIT_ERROR = 2e-4  # of one right binary32 implementation against the float64 model
NEAR_TIE = 4 * MAX_LOGIT_ERROR

Verdict = Literal["near tie", "real", "prefix"]
Decode = Callable[[Sequence[int]], str]
_CONTEXT_TOKENS = 8  # that both have, before the difference


@dataclass(frozen=True, slots=True)
class Side:
    """One stream at a step; what was not recorded is None."""

    name: str
    id: int
    logit: float | None
    margin: float | None
    text: str | None = None

    def words(self) -> str:
        """Return the side as a person reads it."""
        text = "" if self.text is None else f" {quoted(self.text)}"
        logit = "" if self.logit is None else f"logit {self.logit:.9g}, "
        margin = "margin unknown" if self.margin is None else f"margin {self.margin:.3g}"
        return f"{self.name} has id {self.id}{text} ({logit}{margin})"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two streams differ.

    `fields` are the columns that do, none where one stream only ended; then `left` and `right` are
    None. `ids_step` is where ids first differ, None where they do not.
    """

    step: int
    fields: tuple[str, ...]
    left: Side | None
    right: Side | None
    verdict: Verdict
    ids_step: int | None
    text: str


def first_row(a: Columns, b: Columns, fields: Sequence[str]) -> tuple[int, tuple[str, ...]] | None:
    """Return the first row, of those that both have, in which a field differs, and the fields."""
    for start in range(0, min(len(a), len(b)), BLOCK_ROWS):
        size = min(BLOCK_ROWS, len(a) - start, len(b) - start)
        left, right = a[start : start + size], b[start : start + size]
        differs = {field: values(left, field) != values(right, field) for field in fields}
        anywhere = np.logical_or.reduce(list(differs.values()))
        if anywhere.any():
            row = int(np.argmax(anywhere))
            return start + row, tuple(field for field in fields if differs[field][row])
    return None


def compare_streams(
    a: Columns, b: Columns, fields: Sequence[str], names: tuple[str, str],
    *, near_tie: float | None, decode: Decode | None = None,
) -> Difference | None:  # fmt: skip
    """Return where two streams first differ in any field or in length; None where nowhere.

    `near_tie` None: tokens were drawn, so that no difference is one of rounding.
    Shapes: a (N,), b (M,) with `step`, `id` and all of `fields`.
    """
    found = first_row(a, b, fields)
    if found is None:
        return _lengths(a, b, names)
    row, which = found
    if {"best", "second"} & set(which):  # a margin says nothing beyond its two logits
        which = tuple(field for field in which if field != "margin")
    left, right = (_side(rows[row : row + 1], name, decode)
                   for rows, name in zip((a, b), names, strict=True))  # fmt: skip
    verdict: Verdict = "near tie" if "id" in which and _is_near(left, right, near_tie) else "real"
    ids = row if "id" in which else None
    note = ""
    if ids is None:
        later = first_row(a[row:], b[row:], ("id",))
        ids = None if later is None else row + later[0]
        note = " (equal ids, other bits)"
        if ids is not None:
            both = [float(margins(rows[ids : ids + 1])[0]) for rows in (a, b)]
            known = ", ".join(f"{margin:.3g}" for margin in both if not math.isnan(margin))
            note = f" (ids from step {a['step'][ids]} on, margins {known or 'unknown'})"
    step = int(a["step"][row])
    if decode is not None:
        before = a["id"][max(0, row - _CONTEXT_TOKENS) : row].tolist()
        note += f", behind {quoted(decode(before))}"
    text = (
        f"first difference at step {step} in {', '.join(which)}{note}: "
        f"{left.words()}; {right.words()}: {_reason(verdict, left, right, which, near_tie)}"
    )
    ids_step = None if ids is None else int(a["step"][ids])
    return Difference(step, which, left, right, verdict, ids_step, text)


def _lengths(a: Columns, b: Columns, names: tuple[str, str]) -> Difference | None:
    if len(a) == len(b):
        return None
    shorter = names[0] if len(a) < len(b) else names[1]
    text = (
        f"{names[0]} has {count_text(len(a), 'step')}, {names[1]} {len(b)}; equal up to there: "
        f"{shorter} is a prefix of the other"
    )
    return Difference(min(len(a), len(b)), (), None, None, "prefix", None, text)


def _side(row: Columns, name: str, decode: Decode | None) -> Side:
    token, margin = int(row["id"][0]), float(margins(row)[0])
    has_logit = "best" in (row.dtype.names or ())
    return Side(
        name, token,
        float(row["best"][0]) if has_logit else None,
        None if math.isnan(margin) and not has_logit else margin,
        None if decode is None else decode([token]),
    )  # fmt: skip


def _is_near(left: Side, right: Side, near_tie: float | None) -> bool:
    if near_tie is None:
        return False
    known = [side.margin for side in (left, right) if side.margin is not None]
    return bool(known) and all(0 <= margin <= near_tie for margin in known)


def _reason(
    verdict: Verdict, left: Side, right: Side, fields: Sequence[str], near_tie: float | None
) -> str:
    if near_tie is None:
        return "real (tokens were drawn: no margin explains it)"
    if verdict == "near tie":
        return f"near tie (margin at most {near_tie:.3g})"
    if "id" not in fields:
        return "real (bits have no tolerance)"
    if left.margin is None and right.margin is None:
        return "real (no margin known: it cannot be said to be a near tie)"
    return f"real (a margin above {near_tie:.3g})"
