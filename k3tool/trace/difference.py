"""What a comparison of two traces says: its first difference, in words, and its checks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from k3tool.trace.results import Result
from k3tool.verdict import Check


class Difference(NamedTuple):
    """A result whose bits differ; positions first to last, a step's tokens in both traces.

    `lo` to `hi` are columns of a run over all ranks; `ranks` and `slices` are the first file's.
    """

    value: str
    op: str
    inst: int
    layer: int | None
    phase: str
    step: int
    first: int
    last: int
    lo: int
    hi: int
    ranks: tuple[int, ...]
    slices: tuple[int, ...]

    @property
    def text(self) -> str:
        """Return it in words."""
        where = f"position {self.first}" if self.first == self.last else (
            f"positions {self.first} to {self.last}")  # fmt: skip
        layer = "" if self.layer is None else f", layer {self.layer}"
        parts = [f"packet {self.inst} {self.op} {self.value}{layer}"]
        if self.ranks:
            parts.append(_listed("rank", self.ranks))
        if self.slices:
            parts.append(_listed("slice", self.slices))
        columns = f" (columns {self.lo} to {self.hi - 1})" if self.hi > self.lo else ""
        return f"step {self.step}, {where}, {self.phase}: {', '.join(parts)}{columns}"


def _listed(word: str, numbers: Sequence[int]) -> str:
    few = ", ".join(map(str, numbers[:4]))
    more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
    return f"{word}{'s' if len(numbers) > 1 else ''} {few}{more}"


@dataclass(slots=True)
class Comparison:
    """What a comparison found: its checks, the first difference, and how much was compared."""

    checks: list[Check] = field(default_factory=list)
    difference: Difference | None = None
    n_results: int = 0  # equal ones, each counted once a group of positions
    n_left_out: int = 0


def difference_at(
    result: Result, phase: str, step: int, first: int, end: int,
    ranks: tuple[int, ...] = (), slices: tuple[int, ...] = (), lo: int = 0, hi: int = 0,
) -> Difference:  # fmt: skip
    """Return a result as the difference, at positions first up to end, where it is told apart."""
    return Difference(result.name, result.op, result.inst, result.layer, phase, step, first,
                      end - 1, lo, hi, ranks, slices)  # fmt: skip
