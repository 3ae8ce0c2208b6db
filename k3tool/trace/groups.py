"""A trace's steps, summed between positions at which steps of both traces end.

So chunks of other lengths compare as well. A hash is a sum modulo 2^64, so
the hash of several steps is the sum of theirs.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from k3tool.trace.file import Program, TraceFile
from k3tool.trace.recorder import Step
from k3tool.trace.results import Array


class Group(NamedTuple):
    """Steps of one trace that cover the same positions as steps of another.

    `sums` are hashes by phase, (R, C), summed over the steps; `covered` of a phase the positions
    of its steps, and from which position each has computed its head.
    """

    number: int  # of the first step
    first: int
    end: int
    sums: dict[str, Array]
    covered: dict[str, list[tuple[int, int, int]]]

    @property
    def phase(self) -> str | None:
        """Return the one phase of all steps, None where there are several."""
        return next(iter(self.sums)) if len(self.sums) == 1 else None


def groups(file: TraceFile, bounds: Array) -> Iterator[Group]:
    """Yield a trace's steps between neighbouring bounds, whole groups only.

    Shapes: bounds (B,), ascending positions -> at most B - 1 groups.
    """
    steps: list[Step] = []
    number = 0
    inside = list(pairwise(bounds.tolist()))
    for index, step in enumerate(file.steps()):
        while number < len(inside) and step.position >= inside[number][1]:
            number += 1
        fits = number < len(inside) and inside[number][0] <= step.position
        if fits:
            steps.append(step)
            if step.end == inside[number][1]:
                yield _summed(index + 1 - len(steps), steps)
                steps = []


def _summed(index: int, steps: Sequence[Step]) -> Group:
    sums: dict[str, Array] = {}
    covered: dict[str, list[tuple[int, int, int]]] = {}
    for step in steps:
        known = sums.get(step.phase)
        sums[step.phase] = step.hashes if known is None else known + step.hashes
        head = step.position + min(step.head_from, step.n_tokens)
        covered.setdefault(step.phase, []).append((step.position, step.end, head))
    return Group(index, steps[0].position, steps[-1].end, sums, covered)


def totals(program: Program, sums: Array) -> Array:
    """Return hashes of whole results on every rank, (R, results), from those of cells (R, C)."""
    out = np.zeros((len(program.results), len(sums)), np.uint64)
    np.add.at(out, program.result, np.ascontiguousarray(sums.T))
    return np.ascontiguousarray(out.T)


def step_bounds(file: TraceFile) -> set[int]:
    """Return the positions at which a trace's steps begin or end."""
    rows = file.step_rows.astype(np.int64)
    return {*rows[:, 2].tolist(), *(rows[:, 2] + rows[:, 1]).tolist()}
