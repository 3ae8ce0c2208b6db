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


class OpShare(NamedTuple):
    """One op in one step: packets, bytes, and worker seconds (over all workers)."""

    op: str
    packets: int
    n_bytes: int
    seconds: float


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

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**self._asdict(), "ops": [op._asdict() for op in self.ops]}

    def lines(self) -> list[str]:
        """Return it as a table."""

        def row(name: str, packets: str, n_bytes: int, seconds: float) -> tuple[str, ...]:
            rate = n_bytes / seconds * self.n_workers / 1e9 if n_bytes and seconds else 0.0
            share = seconds / self.worker_seconds
            return (name, packets, f"{n_bytes / 1e6:.2f}" if n_bytes else "",
                    f"{seconds * 1e3 / self.n_workers:.3f}", f"{share:.1%}",
                    f"{rate:.1f}" if rate else "")  # fmt: skip

        by_time = sorted(self.ops, key=lambda op: -op.seconds)
        rows = [row(op.op, str(op.packets), op.n_bytes, op.seconds) for op in by_time]
        rows += [row("hand-off", "", 0, self.handoff), row("idle", "", 0, self.idle)]
        packets = sum(op.packets for op in self.ops)
        rows.append(row("whole", str(packets), self.n_bytes, self.worker_seconds))
        columns = [Column("op", "left"), Column("packets"), Column("MB"), Column("ms"),
                   Column("share"), Column("GB/s")]  # fmt: skip
        return list(Table(columns, rows).text_lines())


def packet_bytes(packets: Array, tensors: Sequence[Tensor], position: int) -> Array:
    """Return the bytes that each packet of a one-token step moves, (P,) i8; a tensor counts once.

    `position` is the token's: an attention reads the latents up to it.
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
                moved[index] += weight_traffic(spec.op, tensor, top_k, 1)
            elif operand.role == "state":
                in_place = spec.output.name == operand.name
                moved[index] += _state_bytes(tensors[handle], in_place, position)
    return moved


def _state_bytes(tensor: Tensor, in_place: bool, position: int) -> int:
    """Return the bytes of a state that a token moves; of a latent cache only what is filled."""
    pages, rows, *rest = tensor.local
    if rest and rows == PAGE_TOKENS and not in_place:
        return tensor.n_bytes * (position + 1) // (pages * rows)
    return state_traffic(tensor, in_place, 1)


def anatomy(trace: Trace, step: int, packets: Array, moved: Array, n_workers: int) -> Anatomy:
    """Cut one step of a trace; `packets` and `moved` are the step's program and its bytes.

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
        ops=_op_shares(slices, packets, moved),
        handoff=handoff * NS,
        idle=idle * NS,
        wall=(end - start) * NS,
        n_workers=n_workers,
        n_bytes=int(moved.sum()),
    )


def _op_shares(slices: Array, packets: Array, moved: Array) -> tuple[OpShare, ...]:
    took = np.zeros(len(packets))
    np.add.at(took, slices["inst"], (slices["end_ns"] - slices["start_ns"]).astype(float))
    shares = []
    for op in np.unique(packets["op"]):
        of_op = packets["op"] == op
        shares.append(
            OpShare(Op(int(op)).name, int(of_op.sum()), int(moved[of_op].sum()),
                    float(took[of_op].sum()) * NS)
        )  # fmt: skip
    return tuple(shares)


def middle(steps: Sequence[Anatomy]) -> Anatomy:
    """Return the step of the median wall time; there must be one."""
    return sorted(steps, key=lambda step: step.wall)[len(steps) // 2]
