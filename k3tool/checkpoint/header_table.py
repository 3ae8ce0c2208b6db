"""A header's tensors as columns, and the quick reader that checks whole columns at once.

It accepts a header only if nothing is wrong or unusual with it, and else says nothing; headers.py
reads what was declined again and explains. A loop over half a million tensors takes seconds in
Python, a pass over a column milliseconds.
"""

import gc
import math
from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import orjson

Kind = tuple[str, tuple[int, ...]]
ANY_LAYER = "#"  # stands for the layer's number in names that equal layers share
MOST_AXES = 32  # of an array in NumPy 1; the product of thousands of extents takes seconds
MAX_BYTES = 1 << 62  # beyond it offsets do not fit NumPy's integers: left to the careful reader


class TensorTable:
    """Names, kinds (dtype and shape) and offsets from the start of the data, column by column.

    Tables with the same `layout` differ in `starts` alone.
    """

    def __init__(
        self,
        names: list[str],
        kinds: list[Kind],
        kind_of: list[int],
        starts: list[int],
        n_bytes: int,
        layout: object = None,
    ) -> None:
        """Take checked columns; `n_bytes` is the length of all data."""
        self.layout = layout or object()
        self.names = names
        self.kinds = kinds
        self.kind_of = kind_of
        self.starts = starts
        self.n_bytes = n_bytes

    def moved(self, starts: list[int]) -> "TensorTable":
        """Return the table of the same tensors in other places of as many bytes."""
        moved = TensorTable(self.names, self.kinds, self.kind_of, starts, self.n_bytes, self.layout)
        moved._text = self._text
        return moved

    def sizes(self, dtype_bytes: Mapping[str, int]) -> Any:
        """Return each tensor's bytes as an array."""
        of_kind = [math.prod(shape) * dtype_bytes[dtype] for dtype, shape in self.kinds]
        return np.array(of_kind, dtype=np.int64)[self.kind_of]

    @cached_property
    def _text(self) -> str:
        return "\n".join(self.names)

    @property
    def can_renumber(self) -> bool:
        """Return whether names can be joined to one text: a line break in one would split it."""
        return self._text.count("\n") == max(0, len(self.names) - 1)

    def names_at(self, layer: int) -> list[str]:
        """Return the names with a layer's number in them."""
        return self._text.replace(ANY_LAYER, str(layer)).split("\n") if self.names else []


def quick_table(
    raw: bytes, dtype_bytes: Mapping[str, int]
) -> tuple[dict[str, str], TensorTable] | None:
    """Return (metadata, table) of a header's JSON, or None where it is not plainly sound."""
    collects = gc.isenabled()
    gc.disable()  # thousands of new objects without a cycle: each collection walks all before them
    try:
        parsed = orjson.loads(raw)
        if not raw.startswith(b"{"):
            return None
        metadata = parsed.pop("__metadata__", None)
        if not _names_once(raw, parsed, metadata):
            return None
        table = _columns(parsed, dtype_bytes)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    finally:
        if collects:
            gc.enable()
    return None if table is None else (metadata or {}, table)


def _names_once(raw: bytes, parsed: dict[str, Any], metadata: Any) -> bool:
    """Return whether no key stands twice, which a parsed dict no longer shows.

    Every string of the text has two quotes. A sound entry has five strings (name, three keys,
    dtype); one string more than the parsed value has means a key was there twice.
    """
    if b"\\\\" in raw:
        return False  # an escaped backslash may stand before a closing quote
    n_strings = 5 * len(parsed)
    if metadata is not None:
        if type(metadata) is not dict or not {*map(type, metadata.values())} <= {str}:
            return False
        n_strings += 1 + 2 * len(metadata)
    return count_quotes(raw) == 2 * n_strings


def count_quotes(raw: bytes) -> int:
    """Return the double quotes of a text that no backslash precedes."""
    bytes_ = np.frombuffer(raw, dtype=np.uint8)
    count = int(np.count_nonzero(bytes_ == ord('"')))  # bytes.count takes ten times as long
    return count - (raw.count(b'\\"') if b"\\" in raw else 0)


def _columns(parsed: dict[str, Any], dtype_bytes: Mapping[str, int]) -> TensorTable | None:
    entries = parsed.values()
    dtypes = [entry["dtype"] for entry in entries]
    shapes = [entry["shape"] for entry in entries]
    offsets = [entry["data_offsets"] for entry in entries]
    numbers = chain(chain.from_iterable(shapes), chain.from_iterable(offsets))
    if not (
        {*map(len, entries)} <= {3}
        and {*map(type, dtypes)} <= {str}
        and {*map(type, shapes), *map(type, offsets)} <= {list}
        and {*map(len, offsets)} <= {2}
        and {*map(type, numbers)} <= {int}  # True and 1.0 would compare equal to 1
    ):
        return None
    ids: dict[Kind, int] = {}
    kinds = zip(dtypes, map(tuple, shapes), strict=True)
    kind_of = [ids.setdefault(kind, len(ids)) for kind in kinds]
    if any(len(shape) > MOST_AXES or min(shape, default=0) < 0 for _, shape in ids):
        return None
    sizes = [math.prod(shape) * dtype_bytes[dtype] for dtype, shape in ids]
    if sum(sizes) > MAX_BYTES:
        return None
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    if not contiguous(places, np.array(sizes, dtype=np.int64)[kind_of]):
        return None
    starts = places[:, 0].tolist()
    return TensorTable(list(parsed), list(ids), kind_of, starts, int(places.max(initial=0)))


def contiguous(places: Any, sizes: Any) -> bool:
    """Return whether each range has its tensor's size and they follow each other from 0 on."""
    starts, ends = places[:, 0], places[:, 1]
    if not np.array_equal(ends - starts, sizes):
        return False
    order = np.lexsort((sizes, starts))
    return bool((starts[order] == np.concatenate(([0], ends[order][:-1]))[: len(order)]).all())
