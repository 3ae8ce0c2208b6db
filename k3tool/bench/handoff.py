"""`bench handoff`: what a packet costs that does nothing, against a barrier that does nothing else.

A program of empty packets in a row, each waiting for the one before, runs on the interpreter as any
program does: its queues, counters, gates and loop. The barrier has as many threads as all ranks
have workers, and nothing but one counter and one word.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.bench.frame import (
    BenchReport,
    Paired,
    Spread,
    interleave,
    machine_line,
    other_line,
    rows_of_both,
    spread,
)
from k3tool.bench.probe import Probe
from k3tool.compiler.plan import Tensor
from k3tool.errors import UsageError
from k3tool.isa import device, queues
from k3tool.isa.columns import GATE, PACKET_REARM, WAIT_DTYPE, empty_packets
from k3tool.isa.stream import Isa, Stream
from k3tool.isa.table import ALL_PHASES, Op
from k3tool.runtime import records
from k3tool.runtime.image import Request, build_image
from k3tool.runtime.interpreter import load
from k3tool.runtime.ranks import Launch, RankGroup
from k3tool.runtime.weights import ExpertBytes, TensorBytes

Array = npt.NDArray[Any]
ALONE, PASSED, LOCAL, GATES = (
    "one worker alone", "from worker to worker", "all workers of a rank", "all workers of all ranks"
)  # fmt: skip
PACKETS, MOST_PACKETS = 2000, 100_000
TOKENS, WARM_UP = 12, 2  # steps of a run; the first ones fill caches
_ROW = 4  # values of the one result, which nobody writes
_VOCAB = 8
_PROBE_BYTES = 16 << 20  # a thread: the least that the child takes


@dataclass(frozen=True, slots=True)
class Asked:
    """Workers of a rank, ranks, and empty packets in a step.

    `versus` is another interpreter, whose packets are timed in turn with this one's.
    """

    threads: int | None = None
    tp: int = 1
    packets: int = PACKETS
    repeats: int = 7
    versus: Path | None = None


class NoWeights:
    """The weights of a program that reads none."""

    def tensor(self, tensor: Tensor) -> TensorBytes:
        """Refuse."""
        raise AssertionError(tensor.name)

    def experts(self, tensor: Tensor) -> list[ExpertBytes]:
        """Refuse."""
        raise AssertionError(tensor.name)

    def copies(self, path: str) -> list[tuple[str, int]]:
        """Refuse."""
        raise AssertionError(path)


def bench_handoff(asked: Asked) -> BenchReport:
    """Measure all shapes, each in turn with the barrier.

    Raises: UsageError for sizes that are none; as RankGroup where the interpreter does not run.
    """
    if not 2 <= asked.packets <= MOST_PACKETS:
        raise UsageError("--packets", got=asked.packets, need=f"2 to {MOST_PACKETS}")
    if asked.versus is not None:
        load(asked.versus, any_source=True)  # refused before anything is measured
    threads = asked.threads or Probe.default_threads()
    rows: list[tuple[str, Spread, str]] = []
    shapes: dict[str, Any] = {}
    n_threads = threads * asked.tp
    with Probe(n_threads, _PROBE_BYTES * n_threads) as probe:
        for shape in _shapes(threads, asked.tp):
            paired = _measure(probe, asked, threads, shape)
            packet, barrier = (spread([1e9 * s for s in side]) for side in (paired[1], paired[0]))
            rows.append((f"packet: {shape}", packet, "ns"))
            rows.append((f"barrier of {n_threads}, beside: {shape}", barrier, "ns"))
            rows.append((f"packet / barrier: {shape}", paired.ratio, "times"))
            rows += _beside_other(asked, threads, shape)
            shapes[shape] = {"packet_ns": packet.median, "barrier_ns": barrier.median,
                            "ratio": paired.ratio.median}  # fmt: skip
    definition = [
        f"{asked.packets} empty packets in a row, each waiting for the one before; "
        f"{threads} workers a rank, {asked.tp} ranks; time of a step over its packets, the median "
        f"of {TOKENS - WARM_UP} steps a run; runs in turn with a barrier of {n_threads} threads",
        "alone: each packet one slice, all in one queue; from worker to worker: one slice, queues "
        "in turn; all workers: a slice each, all wait for all, of their rank or of all ranks",
        *([] if asked.versus is None else [other_line(asked.versus)]),
        machine_line(),
    ]
    facts = {
        "threads": threads, "tp": asked.tp, "packets": asked.packets, "shapes": shapes,
    }  # fmt: skip
    return BenchReport("handoff", definition, rows, (), facts)


def _shapes(threads: int, tp: int) -> tuple[str, ...]:
    """Return the shapes that differ: one worker passes to nobody, one rank has no gates."""
    return (
        ALONE, *((PASSED, LOCAL) if threads > 1 else ()), *((GATES,) if tp > 1 else ()),
    )  # fmt: skip


def local_handoff_us(threads: int) -> float:
    """Return what a packet costs that all workers of one rank wait for, in us: a median of five."""
    launch = _launch(program(threads, 1, PACKETS, LOCAL), threads)
    return 1e6 * spread([packet_seconds(launch, PACKETS) for _ in range(5)]).median


def _launch_of(asked: Asked, threads: int, shape: str) -> Launch:
    workers = 1 if shape == ALONE else threads
    return _launch(program(workers, asked.tp, asked.packets, shape), workers)


def _beside_other(asked: Asked, threads: int, shape: str) -> list[tuple[str, Spread, str]]:
    """Return the rows of both interpreters' packets, in turn; none where there is one."""
    if asked.versus is None:
        return []
    launch = _launch_of(asked, threads, shape)
    other = replace(launch, interpreter=load(asked.versus, any_source=True).path)
    seconds = interleave(
        lambda: packet_seconds(other, asked.packets),
        lambda: packet_seconds(launch, asked.packets),
        asked.repeats,
    )
    return rows_of_both(f"packet: {shape}", seconds, 1e9, "ns")


def _measure(probe: Probe, asked: Asked, threads: int, shape: str) -> Paired:
    launch = _launch_of(asked, threads, shape)
    return interleave(
        lambda: probe.barrier(asked.packets),
        lambda: packet_seconds(launch, asked.packets),
        asked.repeats,
    )


def _launch(isa: Isa, threads: int) -> Launch:
    request = Request((0,), TOKENS, (), 1, first_phase="decode")
    weights: Any = NoWeights()
    images = [build_image(isa, rank, weights, request, _VOCAB) for rank in range(isa.tp)]
    return Launch(Path(load().path), images, threads)


def packet_seconds(launch: Launch, packets: int) -> float:
    """Run a program of empty packets; return the median step's seconds over its packets."""
    with RankGroup(launch) as group:
        group.wait_ready()
        steps = [
            int(rows["ns"].max()) for rows in group.steps() if rows["kind"][0] == records.TOKEN
        ]
    return float(np.median(steps[WARM_UP:])) * 1e-9 / packets


# -- the program -----------------------------------------------------------------------------------


def program(threads: int, tp: int, packets: int, shape: str) -> Isa:
    """Return a decode program of so many empty packets in a row, of one shape.

    The one before the last is a gate that rearms, as an argmax is: a step needs that.
    """
    rows = empty_packets(packets)
    waits: list[tuple[int, int]] = []
    slices = threads if shape in (LOCAL, GATES) else 1
    for index in range(packets):
        row = rows[index : index + 1]
        rearms = index == packets - 2
        is_gate = rearms or (shape == GATES and index < packets - 1)
        row["op"], row["flags"] = Op.NOP, PACKET_REARM if rearms else 0
        row["handles"][0, 0] = 0
        n_slices = 1 if rearms and shape != GATES else slices
        row["n_units"], row["width"], row["grain"], row["n_slices"] = n_slices, _ROW, 1, n_slices
        gate = 0 if shape != GATES else index
        row["counter"] = GATE | gate if is_gate else index
        row["threshold"] = n_slices * (tp if is_gate else 1)
        row["wait_ofs"] = len(waits)
        if index:
            waits.append((int(rows["counter"][index - 1]), int(rows["threshold"][index - 1])))
            row["n_waits"] = 1
    built = queues.build(rows, np.array(waits, WAIT_DTYPE), queues.Crew(threads), tp)
    records_of = tuple(device.pack(rows, rank) for rank in range(tp))
    stream = Stream(ALL_PHASES[0], 1, 0, 64, 64, records_of, built)
    params = {"tp": tp, "workgroups": threads, "ctx": TOKENS + 1, "batch": 1, "target": "cpu"}
    return Isa("cpu", _tensors(), {ALL_PHASES[0]: stream}, params, ())


def _tensors() -> tuple[Tensor, ...]:
    phase = ALL_PHASES[0]

    def row(name: str, role: str, width: int) -> Tensor:
        return Tensor(name, role, "f32", (1, width), (1, width), 4 * width, 0, phase)

    return row("y", "arena", _ROW), row("token", "output", 4), row("logits", "logits", _VOCAB)
