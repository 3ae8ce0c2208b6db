"""`bench decode --batch`: tokens a second of several sequences at once against one, in one run.

A decode step reads its weights once, however many tokens it has; of experts it reads those that any
of its tokens chose. Two engines run in turn, on the same threads: one of a slot, one of N.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from k3tool.bench.frame import BenchReport, Paired, interleave, spread
from k3tool.runtime.engine import StepToken
from k3tool.runtime.options import RunOptions
from k3tool.runtime.prepare import prepare, running
from k3tool.runtime.stepping import Stepping
from k3tool.targets import DEFAULT_CONTEXT

WARM_UP = 1


class _Sequences:
    """Sequences of one engine, each at the same position, that go on greedily."""

    def __init__(self, engine: Stepping, position: int) -> None:
        self._engine, self._position = engine, position
        self._ids: Sequence[int] = [7919 * slot % 251 for slot in range(engine.n_slots)]

    def rate(self, n_steps: int) -> float:
        """Return tokens a second by the step of the median time."""
        n, times = self._engine.n_slots, []
        for _ in range(n_steps):
            tokens = [StepToken(token, self._position, i) for i, token in enumerate(self._ids)]
            found = self._engine.step(tokens, n)
            self._ids, self._position = [choice.id for choice in found.choices], self._position + 1
            times.append(found.ns)
        return n * 1e9 / spread(times).median


def decode_several(
    checkpoint: Path, batch: int, *, context: int, tokens: int, repeats: int, threads: int,
    numerics: str, leaves: str, cache: Path | None, workgroups: int | None = None,
) -> Paired:  # fmt: skip
    """Return tokens a second of one sequence and of `batch` at once, behind `context` positions.

    Raises: as `run`.
    """
    positions = context + (repeats + WARM_UP) * tokens + 1

    def silent(text: str) -> None:
        """Say nothing."""

    with ExitStack() as stack:
        sides = []
        for n in (1, batch):
            asked = RunOptions(
                checkpoint, (), 1, tp=1, threads=threads, ctx=max(DEFAULT_CONTEXT, positions),
                batch=n, numerics=numerics, leaves=leaves, cache=cache, weights="mapped",
                workgroups=workgroups,
            )  # fmt: skip
            job = prepare(asked, silent, silent, is_engine=True)
            job = replace(job, launch=replace(job.launch, first_position=context))
            sides.append(_Sequences(stack.enter_context(running(job, silent)), context))
        first, second = sides
        return interleave(lambda: first.rate(tokens), lambda: second.rate(tokens), repeats, WARM_UP)


def with_several(report: BenchReport, batch: int, found: Paired) -> BenchReport:
    """Return the report with what several sequences at once give."""
    rows = [
        *report.rows,
        ("one sequence", spread(found.first), "tokens/s"),
        (f"{batch} sequences at once", spread(found.second), "tokens/s"),
        (f"{batch} at once / one", found.ratio, "times"),
    ]
    definition = [
        *report.definition[:-1],
        f"{batch} sequences at once against one: an engine of {batch} slots and one of one slot, "
        "weights mapped, their decode steps in turn, each sequence going on greedily",
        report.definition[-1],
    ]
    facts = report.facts | {
        "batch": batch, "batch_over_one": found.ratio.median,
        "batch_over_one_spread": found.ratio._asdict(),
    }  # fmt: skip
    return replace(report, rows=rows, definition=definition, facts=facts)
