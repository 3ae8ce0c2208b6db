"""Where a token's time went: a trace cut into ops, hand-offs and idle time, which add up to it.

Worker time is wall time times workers. Between two slices a worker waits for a counter or looks for
work: a hand-off. Before its first slice of a step and after its last it is idle. A packet's bytes
are what it must move once: weights read (experts as chosen), states read and written, embedding
rows; activations stay in caches and do not count.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3tool.bench.traffic import state_traffic, weight_traffic
from k3tool.compiler.plan import Tensor
from k3tool.compiler.record_checks import handles_of
from k3tool.errors import UnsoundError
from k3tool.isa.columns import spec_of
from k3tool.isa.table import PAGE_TOKENS, Op
from k3tool.runtime.trace import Trace
from k3tool.tables import Column, Table

Array = npt.NDArray[Any]
NS = 1e-9


class Peaks(NamedTuple):
    """What all workers' multiply-adds reach together, in operations a second, two each."""

    f32: float
    pairs: float | None  # on pairs of bf16; None where the leaves multiply none

    def seconds(self, operations: int, pairs: int) -> float:
        """Return the least time for operations, `pairs` of them on pairs of bf16."""
        return (operations - pairs) / self.f32 + pairs / (self.pairs or self.f32)


class OpShare(NamedTuple):
    """One op in one step: packets, bytes, and worker seconds (over all workers).

    `operations` are multiplications and additions, `pairs` those of them on pairs of bf16.
    """

    op: str
    packets: int
    n_bytes: int
    seconds: float
    operations: int = 0
    pairs: int = 0


class Anatomy(NamedTuple):
    """A step: wall seconds of `n_workers` workers; ops + handoff + idle = wall * n_workers."""

    ops: tuple[OpShare, ...]
    handoff: float
    idle: float
    wall: float
    n_workers: int
    n_bytes: int

    @property
    def worker_seconds(self) -> float:
        """Return what the parts add up to."""
        return self.wall * self.n_workers

    @property
    def sum_of_parts(self) -> float:
        """Return the parts' sum."""
        return sum(op.seconds for op in self.ops) + self.handoff + self.idle

    def share(self, op: str) -> float:
        """Return an op's share of the step, 0 where it has none."""
        return sum(o.seconds for o in self.ops if o.op == op) / self.worker_seconds

    @property
    def whole(self) -> OpShare:
        """Return the step as one op."""
        packets = sum(op.packets for op in self.ops)
        operations, pairs = (
            sum(op.operations for op in self.ops),
            sum(op.pairs for op in self.ops),
        )
        return OpShare("whole", packets, self.n_bytes, self.worker_seconds, operations, pairs)

    def of_peak(self, op: OpShare, peaks: Peaks) -> float:
        """Return the share of the multiply-add peak that an op reached while it ran."""
        least = peaks.seconds(op.operations, op.pairs) * self.n_workers
        return least / op.seconds if op.seconds else 0.0

    def as_dict(self, peaks: Peaks | None = None) -> dict[str, Any]:
        """Return it as plain values; with peaks, each op and the whole with its `peak_share`."""
        ops = [op._asdict() for op in self.ops]
        if peaks is None:
            return {**self._asdict(), "ops": ops}
        for named, op in zip(ops, self.ops, strict=True):
            named["peak_share"] = self.of_peak(op, peaks)
        whole = self.whole
        return {
            **self._asdict(), "ops": ops, "operations": whole.operations, "pairs": whole.pairs,
            "peak_share": self.of_peak(whole, peaks), "peaks": peaks._asdict(),
        }  # fmt: skip

    def lines(self, peaks: Peaks | None = None) -> list[str]:
        """Return it as a table; with peaks, with operations and their share of the peak."""
        by_time = sorted(self.ops, key=lambda op: -op.seconds)
        gaps = [OpShare("hand-off", 0, 0, self.handoff), OpShare("idle", 0, 0, self.idle)]
        columns = [Column("op", "left"), Column("packets"), Column("MB"), Column("ms"),
                   Column("share"), Column("GB/s")]  # fmt: skip
        if peaks is not None:
            columns += [Column("GFLOP/s"), Column("of peak")]
        rows = [self._row(op, peaks) for op in (*by_time, *gaps, self.whole)]
        return list(Table(columns, rows).text_lines())

    def _row(self, op: OpShare, peaks: Peaks | None) -> tuple[str, ...]:
        wall = op.seconds / self.n_workers
        row = (
            op.op, str(op.packets or ""), f"{op.n_bytes / 1e6:.2f}" if op.n_bytes else "",
            f"{wall * 1e3:.3f}", f"{op.seconds / self.worker_seconds:.1%}",
            f"{op.n_bytes / wall / 1e9:.1f}" if op.n_bytes and wall else "",
        )  # fmt: skip
        if peaks is None:
            return row
        if not op.operations or not wall:
            return (*row, "", "")
        return (*row, f"{op.operations / wall / 1e9:.1f}", f"{self.of_peak(op, peaks):.1%}")


def packet_bytes(
    packets: Array,
    tensors: Sequence[Tensor],
    position: int,
    n_tokens: int = 1,
    n_sequences: int = 1,
) -> Array:
    """Return the bytes that each packet of a step moves, (P,) i8; a tensor counts once.

    `position` is the last token's: an attention reads the latents up to it, of every sequence. Of
    experts as many count as `n_tokens` tokens can choose.
    """
    seen: set[int] = set()
    moved = np.zeros(len(packets), np.int64)
    for index, packet in enumerate(packets):
        spec = spec_of(int(packet["op"]))
        assert spec is not None, packet["op"]
        handles = handles_of(spec, packet["handles"].tolist())
        words = dict(zip((p.name for p in spec.params), packet["params"].tolist(), strict=False))
        for operand in spec.operands:
            handle = handles[operand.name]
            if operand.role == "weight" and handle not in seen:
                seen.add(handle)
                tensor, top_k = tensors[handle], words.get("top_k", 0)
                moved[index] += weight_traffic(spec.op, tensor, top_k, n_tokens)
            elif operand.role == "state":
                in_place = spec.output.name == operand.name
                rows = n_tokens if in_place else n_sequences * (position + 1)
                moved[index] += _state_bytes(tensors[handle], in_place, rows)
    return moved


def _state_bytes(tensor: Tensor, in_place: bool, n_rows: int) -> int:
    """Return the bytes of a state that a step moves; `n_rows` of a latent cache are touched."""
    pages, rows, *rest = tensor.local
    if rest and rows == PAGE_TOKENS and not in_place:
        return tensor.n_bytes * n_rows // (pages * rows)
    return state_traffic(tensor, in_place, n_rows)


def anatomy(
    trace: Trace, step: int, packets: Array, moved: Array, n_workers: int, work: Array | None = None
) -> Anatomy:
    """Cut one step of a trace; `packets`, `moved`, `work`: its program, its bytes and operations.

    Raises: UnsoundError where slices overlap, and so could not add up.
    """
    whole = trace.steps[trace.steps["step"] == step]
    assert len(whole) == 1, (step, len(whole))
    slices = trace.slices[trace.slices["step"] == step]
    start, end = int(whole["start_ns"][0]), int(whole["end_ns"][0])
    handoff = idle = 0
    for worker in range(n_workers):
        own = slices[slices["worker"] == worker]
        if not len(own):
            idle += end - start
            continue
        own = own[np.argsort(own["start_ns"])]
        first, last = int(own["start_ns"][0]), int(own["end_ns"][-1])
        gaps = own["start_ns"][1:].astype("<i8") - own["end_ns"][:-1].astype("<i8")
        if first < start or last > end or (gaps < 0).any():
            got = "slices that overlap or leave their step"
            raise UnsoundError(f"trace: step {step}, worker {worker}", got=got, need="neither")
        idle += first - start + end - last
        handoff += int(gaps.sum())
    return Anatomy(
        ops=_op_shares(
            slices, packets, moved, np.zeros((len(packets), 2), "i8") if work is None else work
        ),
        handoff=handoff * NS,
        idle=idle * NS,
        wall=(end - start) * NS,
        n_workers=n_workers,
        n_bytes=int(moved.sum()),
    )


def _op_shares(slices: Array, packets: Array, moved: Array, work: Array) -> tuple[OpShare, ...]:
    took = np.zeros(len(packets))
    np.add.at(took, slices["inst"], (slices["end_ns"] - slices["start_ns"]).astype(float))
    shares = []
    for op in np.unique(packets["op"]):
        of_op = packets["op"] == op
        shares.append(
            OpShare(Op(int(op)).name, int(of_op.sum()), int(moved[of_op].sum()),
                    float(took[of_op].sum()) * NS, int(work[of_op].sum()),
                    int(work[of_op, 1].sum()))
        )  # fmt: skip
    return tuple(shares)


def middle(steps: Sequence[Anatomy]) -> Anatomy:
    """Return the step of the median wall time; there must be one."""
    return sorted(steps, key=lambda step: step.wall)[len(steps) // 2]
