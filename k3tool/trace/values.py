"""How far kept values of two traces are apart, at their first difference or everywhere."""

from dataclasses import dataclass

import numpy as np

from k3tool.trace.difference import Difference
from k3tool.trace.file import TraceFile
from k3tool.trace.results import Array
from k3tool.verdict import Check, failed, not_run, passed


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest difference of a value; `ulps` counts binary32 numbers between the two."""

    value: str
    position: int
    column: int
    left: float
    right: float
    ulps: int
    n_different: int

    @property
    def text(self) -> str:
        """Return it in words."""
        return (
            f"largest difference {abs(self.left - self.right):.3g} at (position {self.position}, "
            f"column {self.column}): {self.left:.9g} and {self.right:.9g}, {self.ulps} ulp; "
            f"{self.n_different} numbers differ"
        )


def compare_values(
    left: TraceFile, right: TraceFile, first: Difference | None
) -> tuple[Check, Largest | None]:
    """Return a check of what both traces kept, and the largest difference where there is one.

    It is of the value at the first difference of hashes, of all kept ones where there is none, and
    NOT RUN where nothing was kept there, with the option that keeps it.
    """
    name = f"{left.name} and {right.name}: kept values"
    if first is not None:
        largest = _of_value(left, right, first.value, first.phase, (first.first, first.last))
        if largest is not None:
            return failed(f"{name} of {first.value}", largest.text), largest
        span = f"{first.first}-{first.last}" if first.first < first.last else f"{first.first}"
        layer = "" if first.layer is None else f":{first.layer}"
        reason = f"none of {first.value}: run both with --trace-at {span}{layer}"
        return not_run(name, reason), None
    n_values = 0
    for phase in left.programs:
        for value in left.value_names(phase):
            largest = _of_value(left, right, value, phase, None)
            n_values += largest is not None
            if largest is not None and largest.n_different:
                return failed(f"{name} of {value}", largest.text), largest
    if not n_values:
        return not_run(name, "the traces have none in common: run both with --trace-at"), None
    return passed(name, f"{n_values} values, bit by bit"), None


def _of_value(
    left: TraceFile, right: TraceFile, value: str, phase: str, span: tuple[int, int] | None
) -> Largest | None:
    """Return the largest difference of a value at positions of a span that both kept."""
    sides = []
    for file in (left, right):
        number = next((names[value] for p in (phase, *file.programs)
                       if value in (names := file.value_names(p))), None)  # fmt: skip
        if number is None or file.kept is None:
            return None
        sides.append((*file.values(number), file.kept.first))
    (a, in_a, first_a), (b, in_b, first_b) = sides
    if a.shape[1:] != b.shape[1:]:
        return None  # a partial sum of another TP degree, or another context's pages
    first, end = max(first_a, first_b), min(first_a + len(a), first_b + len(b))
    if span is not None:
        first, end = max(first, span[0]), min(end, span[1] + 1)
    if first >= end:
        return None
    a, in_a = a[first - first_a : end - first_a], in_a[first - first_a : end - first_a]
    b, in_b = b[first - first_b : end - first_b], in_b[first - first_b : end - first_b]
    return _largest(value, a, b, in_a & in_b, first)


def _largest(value: str, a: Array, b: Array, both: Array, first: int) -> Largest | None:
    """Return the largest difference of rows that both have; None where there is no such row."""
    rows = np.flatnonzero(both)
    if not len(rows):
        return None
    a, b = (np.ascontiguousarray(x[rows]).reshape(len(rows), -1) for x in (a, b))
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.view("<f4").astype(np.float64) - b.view("<f4"))
    apart = np.where((a != b) & np.isnan(apart), np.inf, np.nan_to_num(apart, nan=0.0))
    ulps = np.abs(_order(a) - _order(b))
    # Of equally large differences (-0 and +0 are none in numbers) the one with most ulps.
    row, column = divmod(int(np.lexsort((ulps.ravel(), apart.ravel()))[-1]), a.shape[1])
    left, right = (float(x.view("<f4")[row, column]) for x in (a, b))
    return Largest(value, first + int(rows[row]), column, left, right, int(ulps[row, column]),
                   int((a != b).sum()))  # fmt: skip


def _order(bits: Array) -> Array:
    """Return bits of binary32 as integers in the order of the numbers."""
    signed = bits.view("<i4").astype(np.int64)
    return np.where(signed < 0, -(1 << 31) - signed, signed)
