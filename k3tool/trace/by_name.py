"""Compare two traces of other programs: by the names of graph values, over all ranks.

A term of a sum over ranks (numerics rule 5) is another number at another TP degree: it is left out
there, and the sum itself is compared at the next collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from k3tool.trace.difference import Comparison, Difference, difference_at
from k3tool.trace.file import TraceFile
from k3tool.trace.groups import Group, totals
from k3tool.trace.results import Array, Result, named


class _Value(NamedTuple):
    """A value over a group's steps: its hash over all ranks, or each rank's if partial."""

    result: Result
    phase: str
    sums: tuple[int, ...]
    covered: tuple[tuple[int, int], ...]


def _values(file: TraceFile, group: Group) -> dict[str, _Value]:
    out: dict[str, _Value] = {}
    for phase in group.sums:
        program = file.programs[phase]
        found = totals(program, group.sums[phase])
        for number, result in enumerate(program.results):
            value = _Value(result, phase, _over_ranks(result, found[:, number]),
                           _positions(group.covered[phase], result.rows == "head"))  # fmt: skip
            known = out.get(result.name)
            out[result.name] = value if known is None else _joined(known, value)
    return out


def _over_ranks(result: Result, hashes: Array) -> tuple[int, ...]:
    if result.place == "partial":
        return tuple(hashes.tolist())
    if result.place == "replicated":
        return (int(hashes[0]),)
    return (int(hashes.sum(dtype=np.uint64)),)


def _positions(steps: Sequence[tuple[int, int, int]], is_head: bool) -> tuple[tuple[int, int], ...]:
    """Return the positions that are covered, neighbours joined."""
    out: list[tuple[int, int]] = []
    for first, end, head in sorted(steps):
        lo = head if is_head else first
        if lo == end:
            continue
        if out and out[-1][1] == lo:
            out[-1] = (out[-1][0], end)
        else:
            out.append((lo, end))
    return tuple(out)


def _joined(a: _Value, b: _Value) -> _Value:
    """Return one value of two phases' steps; sums are modulo 2^64."""
    sums = tuple((x + y) % (1 << 64) for x, y in zip(a.sums, b.sums, strict=True))
    both = _positions([(lo, hi, lo) for lo, hi in a.covered + b.covered], False)
    return _Value(a.result, a.phase, sums, both)


def _is_comparable(a: _Value, b: _Value) -> bool:
    x, y = a.result, b.result
    if not a.covered or a.covered != b.covered:
        return False
    if "partial" in (x.place, y.place) and (x.place != y.place or len(a.sums) != len(b.sums)):
        return False
    # Of a softmax by pages there is room for as many as a context has; those not seen are not there
    return x.run_cols == y.run_cols and (x.n_runs == y.n_runs or x.rows == y.rows == "pages")


def first_value(
    left: TraceFile, right: TraceFile, a: Group, b: Group, found: Comparison
) -> Difference | None:
    """Return the first value of a group that differs, or None after counting what is equal."""
    mine, others = _values(left, a), _values(right, b)
    for name, value in mine.items():
        other = others.get(name)
        if other is None or not _is_comparable(value, other):
            found.n_left_out += 1
        elif value.sums == other.sums:
            found.n_results += 1
        else:
            return _localised(left, right, a, b, value, other)
    return None


def _localised(
    left: TraceFile, right: TraceFile, a: Group, b: Group, value: _Value, other: _Value
) -> Difference:
    """Return a differing value with the columns that both cuts tell apart."""
    at = (value.phase, a.number, a.first, a.end)
    pieces = [_pieces(file, group, value.result.name) for file, group in ((left, a), (right, b))]
    mine, others = pieces
    if value.result.place == "partial":
        ranks = tuple(i for i, x in enumerate(value.sums) if x != other.sums[i])
        return difference_at(value.result, *at, ranks if left.tp > 1 else ())
    if mine is None or others is None:
        return difference_at(value.result, *at)
    cut = sorted(mine.ends() & others.ends())
    lo = 0
    for hi in cut:
        if mine.upto(hi) != others.upto(hi):
            ranks, slices = mine.who(lo, hi)
            return difference_at(value.result, *at, ranks if left.tp > 1 else (), slices, lo, hi)
        lo = hi
    return difference_at(value.result, *at)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A value's slices on all ranks, by columns of a run: (lo, hi, hash, rank, slice) rows."""

    rows: tuple[tuple[int, int, int, int, int], ...]

    def ends(self) -> set[int]:
        """Return where pieces end and none goes on."""
        ends = {row[1] for row in self.rows}
        return {end for end in ends if not any(row[0] < end < row[1] for row in self.rows)}

    def upto(self, hi: int) -> int:
        """Return the hash of all columns before one."""
        return sum(row[2] for row in self.rows if row[1] <= hi) % (1 << 64)

    def who(self, lo: int, hi: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks and slices that wrote columns."""
        rows = [row for row in self.rows if row[0] < hi and row[1] > lo]
        ranks, slices = (tuple(sorted({row[i] for row in rows})) for i in (3, 4))
        return ranks, slices


def _pieces(file: TraceFile, group: Group, name: str) -> _Pieces | None:
    """Return a value's slices; None where steps of several programs wrote it."""
    if group.phase is None:
        return None
    program, sums = file.programs[group.phase], group.sums[group.phase]
    number = named(program.results)[name]
    result = program.results[number]
    sharded = result.place == "sharded"
    shift = result.words // result.n_runs if sharded else 0
    rows = []
    for rank in range(file.tp if sharded else 1):
        for cell in np.flatnonzero(program.result == number).tolist():
            lo, hi = (rank * shift + int(bound[cell]) for bound in (program.lo, program.hi))
            rows.append((lo, hi, int(sums[rank, cell]), rank, int(program.slice[cell])))
    return _Pieces(tuple(rows))
