"""Of three streams or more: which say what most say, and which do not."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from k3tool.compare.differences import first_row
from k3tool.compare.records import values
from k3tool.compare.spill import BLOCK_ROWS, Columns

LEAST_STREAMS = 3


@dataclass(frozen=True, slots=True)
class Majority:
    """`agree` are the streams that are equal and more than half, none where no group is.

    `others` are the rest, each with the step at which it first differs from them (its length where
    only that differs); None where there is no majority to differ from.
    """

    agree: tuple[str, ...]
    others: Mapping[str, int | None]

    def words(self) -> str:
        """Return it as a person reads it."""
        if not self.agree:
            return "no majority: no more than half of the streams are equal"
        apart = ", ".join(f"{name} from step {step} on" for name, step in self.others.items())
        n_streams = len(self.agree) + len(self.others)
        return f"{len(self.agree)} of {n_streams} streams are equal; apart: {apart}"


def majority(streams: Mapping[str, Columns], fields: Sequence[str]) -> Majority | None:
    """Return who is with most, by name; None for fewer than three streams, or all equal ones.

    Shapes: each stream (N,), with every one of `fields`.
    """
    if len(streams) < LEAST_STREAMS:
        return None
    groups: dict[bytes, list[str]] = {}
    for name, rows in streams.items():
        groups.setdefault(_digest(rows, fields), []).append(name)
    if len(groups) == 1:
        return None
    largest = max(groups.values(), key=len)
    if 2 * len(largest) <= len(streams):
        return Majority((), dict.fromkeys(streams))
    model = streams[largest[0]]
    others: dict[str, int | None] = {}
    for name, rows in streams.items():
        if name not in largest:
            found = first_row(model, rows, fields)
            row = min(len(model), len(rows)) if found is None else found[0]
            others[name] = int(model["step"][row]) if row < len(model) else row
    return Majority(tuple(largest), others)


def _digest(rows: Columns, fields: Sequence[str]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(rows), BLOCK_ROWS):
        block = rows[start : start + BLOCK_ROWS]
        for field in fields:
            digest.update(np.ascontiguousarray(values(block, field)).tobytes())
    digest.update(len(rows).to_bytes(8, "little"))
    return digest.digest()
