"""Recognise a header that holds what an earlier one held, in another order.

Experts need not lie in the order of their numbers, nor in the same order in every layer. Apart from
offsets such headers have the same entries, so that their text need only be cut at the offsets and
each entry looked up: no entry becomes an object. It accepts only what has the plainest form, byte
for byte, and else says nothing; headers.py then reads the text in full.
"""

import re
from collections.abc import Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from k3tool.checkpoint.header_table import TensorTable, contiguous

# An entry ends in its offsets and is followed by the next name or the end of the object. Numbers
# are JSON's (no leading zero) and fit 64 bits.
_NUMBER = rb"(0|[1-9][0-9]{0,17})"
_OFFSETS = re.compile(
    rb',"data_offsets":\[' + _NUMBER + rb"," + _NUMBER + rb'\]\}(?:,(?=")|(?=\}))'
)
_METADATA = re.compile(rb'\{(?:"__metadata__":\{[^{}]*\},)?')


class Entries:
    """A header's text cut at its offsets: what stands before the first entry, texts and places."""

    def __init__(self, head: bytes, texts: list[bytes], starts: list[bytes], ends: list[bytes]):
        """Take the parts; see cut."""
        self.head = head
        self.texts = texts
        self.starts = starts
        self.ends = ends


def cut(text: bytes) -> Entries | None:
    """Cut a header's text, or return None where its form is not the plainest."""
    start = _METADATA.match(text)
    if start is None:
        return None
    *parts, rest = _OFFSETS.split(text[start.end() :])
    if rest != b"}":
        return None
    return Entries(start[0], parts[0::3], parts[1::3], parts[2::3])


class KnownLayout:
    """A header that was read in full, to be found again in another order."""

    def __init__(self, text: bytes, metadata: dict[str, str], table: TensorTable) -> None:
        """Take a header's text, with the layer's number taken out of it, and what it says."""
        self._text = text
        self._metadata = metadata
        self._table = table

    def reordered(
        self, entries: Entries, dtype_bytes: Mapping[str, int]
    ) -> tuple[dict[str, str], TensorTable] | None:
        """Return (metadata, table) if a header has the same entries at other offsets, else None.

        The table's rows stand in the order of the header that was read in full.
        """
        n_rows = len(self._table.names)
        if len(entries.texts) != n_rows or entries.head != self._head:
            return None
        rows = [*map(self._rows.get, entries.texts)]
        if len(self._rows) != n_rows or None in rows or len(set(rows)) != n_rows:
            return None
        order = np.array(rows)
        places = np.empty((n_rows, 2), dtype=np.int64)
        places[order, 0] = _numbers(entries.starts)
        places[order, 1] = _numbers(entries.ends)
        if not contiguous(places, self._table.sizes(dtype_bytes)):
            return None
        return self._metadata, self._table.moved(places[:, 0].tolist())

    @cached_property
    def _head(self) -> bytes | None:
        return self._entries.head if self._entries else None

    @cached_property
    def _rows(self) -> dict[bytes, int]:
        """Each entry's text before its offsets, and its row."""
        return {text: row for row, text in enumerate(self._entries.texts if self._entries else ())}

    @cached_property
    def _entries(self) -> Entries | None:
        return cut(self._text)


def _numbers(texts: list[bytes]) -> npt.NDArray[np.int64]:
    return np.fromstring(b",".join(texts), dtype=np.int64, sep=",")  # a third of map(int)'s time
