"""Many tokens at many ranks whose workers stop at random: no drift, no leak, no hang.

The stalled run is of an interpreter compiled for it, in which one slice in `STALL_EVERY` waits up
to 0.4 ms first and one in 64 of those 20 ms, so that every hand-off meets every order of arrival.
One rank without stalls says what the tokens and their two best logits are to be, to the bit. A hang
ends with the run's deadline. Memory is the ranks' resident sizes, added, without what a longer
context takes by its nature: so many bytes a position in each rank's caches.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from k3tool.bench.frame import BenchReport, Limit, machine_line, spread
from k3tool.runtime.build import build
from k3tool.runtime.foresee import context_bytes, model_of
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import Event, RunResult, run_model

STALL_EVERY = 400
SAME = ("id", "best", "second")  # of a token, at every degree; digests are of a rank's own part
GROWTH_BAR = 0.01
SAMPLES = 40  # of memory, over the run
SETTLED = 0.25  # of the run, after which memory is to be flat


@dataclass(frozen=True, slots=True)
class Asked:
    """What to run; `stalls` False leaves them out."""

    source: Path
    tp: int
    gen: int
    ids: tuple[int, ...] = (1, 2, 3)
    cache: Path | None = None
    stalls: bool = True


def bench_long(asked: Asked) -> BenchReport:
    """Run both. Raises: what run_model raises; K3Error where the interpreter cannot be built."""
    options = RunOptions(
        asked.source, asked.ids, asked.gen, tp=1, cache=asked.cache, ignore_eos=True
    )
    model_of(asked.source, asked.tp)  # a degree is refused before the first run
    alone = run_model(options)
    memory: list[int] = []
    each_position = asked.tp * context_bytes(asked.source, asked.tp)
    with tempfile.TemporaryDirectory() as folder:
        interpreter = None
        if asked.stalls:
            define = f"K3_CONTROL_STALLS={STALL_EVERY}u"
            interpreter = build(Path(folder) / "k3-cpu", defines=[define], only=["interp"])
        start = time.monotonic()
        many = run_model(
            replace(options, tp=asked.tp, interpreter=interpreter),
            _sampler(memory, max(1, asked.gen // SAMPLES), each_position),
        )
        seconds = time.monotonic() - start
    return _report(asked, alone, many, memory, seconds)


def _sampler(memory: list[int], every: int, each_position: int) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        if event["event"] == "token" and event["step"] % every == 0:
            context = each_position * (event["position"] + 1)
            memory.append(sum(map(_resident_bytes, _ranks())) - context)

    return on_event


def _ranks() -> list[int]:
    """Return the processes that this one has started."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def drift(alone: RunResult, many: RunResult) -> int | None:
    """Return the first token at which any rank's id or logits differ from one rank's, or None."""
    want = alone.records[0][list(SAME)]
    for index in range(max(len(want), *(len(rank) for rank in many.records))):
        for rank in many.records:
            if index >= min(len(rank), len(want)):
                return index
            if rank[list(SAME)][index] != want[index]:
                return index
    return None


def _report(
    asked: Asked, alone: RunResult, many: RunResult, memory: list[int], seconds: float
) -> BenchReport:
    first = drift(alone, many)
    settled = memory[int(len(memory) * SETTLED) :] or memory
    growth = max(settled) / settled[0] - 1
    steps = len(many.tokens)
    return BenchReport(
        name="long",
        definition=[
            f"{asked.source}: {asked.gen} tokens at TP {asked.tp}, "
            + (f"one slice in {STALL_EVERY} stalled" if asked.stalls else "no stalls")
            + ", against one rank without stalls",
            f"memory: resident sizes of the ranks added, without the context's caches, "
            f"{len(memory)} times; growth: the most after a quarter of the run over the quarter's",
            machine_line(),
        ],
        rows=[
            ("ranks' memory", spread([n / 1e6 for n in memory]), "MB"),
            ("time of a token", spread([seconds / steps * 1e3]), "ms"),
        ],
        limits=[
            Limit("tokens with the id and best logits of one rank",
                  steps if first is None else first, at_least=asked.gen),
            Limit("growth of the ranks' memory", growth, at_most=GROWTH_BAR),
        ],
        facts={"first_difference": first, "memory_bytes": memory, "seconds": seconds},
    )  # fmt: skip
