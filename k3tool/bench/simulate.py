"""Predicts a token's time from the real stream: what each entry waits for, on all ranks.

Modelled: every workgroup executes its queue in order; an entry starts when its workgroup is free
and its counters have reached their thresholds, a hand-off after the last arrival; gates complete at
all ranks together; an entry takes its share of the packet's bytes at an even share of the
bandwidth, at most what one workgroup can move, then what slices read again (from a cache, so at
what one workgroup can move), plus a random stall. Not modelled: arithmetic, packets that share the
bandwidth, a cache that many workgroups read at once, and workers of one domain taking each other's
entries. Times follow exactly from these rules, as every wait is on an earlier instruction (check
F): one pass in instruction order computes them.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from k3tool.bench.traffic import reread_bytes, traffic_bytes
from k3tool.errors import UnsoundError
from k3tool.isa.columns import GATE, Columns
from k3tool.isa.stream import Isa, Stream
from k3tool.isa.stream_order import StreamOrder
from k3tool.isa.table import Op


@dataclass(frozen=True, slots=True)
class Costs:
    """What things cost, in us, and bytes a second of one rank's memory."""

    handoff_us: float
    gate_us: float  # a hand-off that all ranks arrive at
    bandwidth: float
    unit_bandwidth: float  # bytes a second that one workgroup can move alone, or read from a cache
    stall_rate: float  # part of entries that stall
    stall_us: float  # mean of an exponential distribution


@dataclass(frozen=True, slots=True)
class Simulated:
    """One step of one seed: its time, and what the chain that determined it was made of, in us."""

    seed: int
    token_us: float
    handoffs: int  # on that chain, from packet to packet: its first packet waits for nothing
    gates: int  # of them, crossing ranks
    handoff_us: float
    gate_us: float
    work_us: float
    stall_us: float
    work_us_by_op: Mapping[str, float]


@dataclass(slots=True)
class Timeline:
    """The stream of one phase in the form that a pass over it needs; made once for all seeds."""

    isa: Isa
    stream: Stream
    order: StreamOrder = field(init=False)
    first: Columns = field(init=False)  # of each instruction's entries, in `entry` order
    workgroup: Columns = field(init=False)  # of each entry
    before: Columns = field(init=False)  # the entry before it in its queue, -1 for the first
    share: Columns = field(init=False)  # bytes of each entry
    again: Columns = field(init=False)  # bytes of each entry that other slices read too

    def __post_init__(self) -> None:
        """Sort entries by instruction and find each one's predecessor in its queue."""
        stream = self.stream
        self.order = StreamOrder(self.isa, stream)
        _require_exact(self.order)
        entries, n = stream.queues.entries, len(stream.queues.signals)
        by_inst = np.lexsort((entries["unit0"], entries["inst"]))
        counts = np.bincount(entries["inst"], minlength=n)
        self.first = np.concatenate([[0], np.cumsum(counts)])
        ofs = stream.queues.queue_ofs.astype(np.int64)
        queue = np.repeat(np.arange(len(ofs) - 1), np.diff(ofs))
        self.workgroup = queue[by_inst]
        rank_of = np.empty(len(entries), np.int64)
        rank_of[by_inst] = np.arange(len(entries))
        previous = np.arange(len(entries)) - 1
        starts = ofs[:-1][ofs[:-1] < ofs[1:]]
        before = np.where(previous >= 0, rank_of[previous], -1)
        before[starts] = -1
        self.before = before[by_inst]
        self.share = self._shares(entries[by_inst], counts)
        reread = np.array([
            reread_bytes(row, slices, self.isa.tensors, stream.max_tokens)
            for row, slices in zip(self.order.rows, counts.tolist(), strict=True)
        ], np.float64)  # fmt: skip
        self.again = np.repeat(reread / np.maximum(counts, 1), counts)

    def _shares(self, entries: Columns, counts: Columns) -> Columns:
        rows, tensors = self.order.rows, self.isa.tensors
        moved = np.array([
            traffic_bytes(row, tensors, self.stream.max_tokens, self.isa.tp) for row in rows
        ], np.float64)  # fmt: skip
        units = (entries["unit1"] - entries["unit0"]) / rows["n_units"][entries["inst"]]
        assert len(counts) == len(rows)
        return np.asarray(moved[entries["inst"]] * units)


def _require_exact(order: StreamOrder) -> None:
    for index in range(len(order.rows)):
        for waits in order.waits_of(index):
            for counter, threshold in waits:
                if threshold != order.arrivals.get(counter):
                    raise UnsoundError(
                        order.name(index), got=f"a wait for {threshold}",
                        need=f"{order.arrivals.get(counter, 0)}: see verify plan",
                    )  # fmt: skip


def simulate(timeline: Timeline, costs: Costs, seed: int) -> Simulated:
    """Return one seed's step. Raises: UnsoundError where a wait is on nothing earlier."""
    run = _Pass(timeline, costs, np.random.default_rng(seed))
    for index in range(len(timeline.order.rows)):
        run.instruction(index)
    return _anatomy(run, seed)


class _Pass:
    """One pass in instruction order. Times in us; R ranks, E entries, P instructions."""

    def __init__(self, timeline: Timeline, costs: Costs, rng: np.random.Generator) -> None:
        self.t, self.costs, self.rng = timeline, costs, rng
        ranks, n = timeline.isa.tp, len(timeline.share)
        self.start, self.end, self.stall = (np.zeros((ranks, n)) for _ in range(3))
        slices = np.diff(timeline.first)
        speed = np.minimum(costs.bandwidth / np.maximum(slices, 1), costs.unit_bandwidth)
        own = timeline.share / np.repeat(speed, slices)
        self.work = (own + timeline.again / costs.unit_bandwidth) * 1e6
        self.ready = np.zeros((ranks, len(timeline.order.rows)))
        self.cause: list[list[int | None]] = []  # [instruction][rank]: counter that came last
        self.done: dict[int, Columns] = {}  # counter -> when it is complete, by rank

    def instruction(self, index: int) -> None:
        """Start and end every entry of one instruction on all ranks."""
        t = self.t
        span = slice(int(t.first[index]), int(t.first[index + 1]))
        self._wait(index)
        before = t.before[span]
        free = np.where(before >= 0, self.end[:, before], 0.0)
        start = np.maximum(free, self.ready[:, index, None])
        stall = self._stalls(start.shape)
        self.start[:, span], self.stall[:, span] = start, stall
        self.end[:, span] = start + self.work[span] + stall
        self._signal(index, self.end[:, span].max(axis=1))

    def _wait(self, index: int) -> None:
        """Take the latest of all lists' waits: entries of one instruction start together here."""
        ranks = self.t.isa.tp
        latest = np.zeros(ranks)
        cause: list[int | None] = [None] * ranks
        for waits in self.t.order.waits_of(index):
            for counter, _ in waits:
                if counter not in self.done:
                    raise UnsoundError(
                        self.t.order.name(index), got="a wait on nothing earlier",
                        need="an order in which the step can end",
                    )  # fmt: skip
                cost = self.costs.gate_us if counter & GATE else self.costs.handoff_us
                at = self.done[counter] + cost
                for rank in np.flatnonzero(at > latest).tolist():
                    cause[rank] = counter
                latest = np.maximum(latest, at)
        self.ready[:, index] = latest
        self.cause.append(cause)

    def _signal(self, index: int, end: Columns) -> None:
        """Complete the counters of an instruction as far as it arrives at them."""
        for counter in {c for signals in self.t.order.signals_of(index) for c in signals}:
            at = np.full_like(end, end.max()) if counter & GATE else end
            self.done[counter] = np.maximum(at, self.done.get(counter, at))

    def _stalls(self, shape: tuple[int, ...]) -> Columns:
        if not self.costs.stall_rate:
            return np.zeros(shape)
        hit = self.rng.random(shape) < self.costs.stall_rate
        return np.where(hit, self.rng.exponential(self.costs.stall_us, shape), 0.0)


def _anatomy(run: _Pass, seed: int) -> Simulated:
    """Walk back from the entry that ended last along what each one started after."""
    t, costs = run.t, run.costs
    rank, entry = divmod(int(np.argmax(run.end)), run.end.shape[1])
    token_us = float(run.end[rank, entry])
    inst_of = np.repeat(np.arange(len(t.first) - 1), np.diff(t.first))
    handoffs = gates = 0
    work = stall = 0.0
    by_op: dict[str, float] = defaultdict(float)
    while True:
        index = int(inst_of[entry])
        work += float(run.work[entry])
        by_op[Op(int(t.order.rows["op"][index])).name] += float(run.work[entry])
        stall += float(run.stall[rank, entry])
        counter = run.cause[index][rank]
        if run.start[rank, entry] == run.ready[rank, index] and counter is not None:
            handoffs += 1
            gates += bool(counter & GATE)
            rank, entry = _last_arrival(run, counter, rank)
        elif t.before[entry] >= 0:
            entry = int(t.before[entry])
        else:
            break
    return Simulated(
        seed, token_us, handoffs, gates, (handoffs - gates) * costs.handoff_us,
        gates * costs.gate_us, work, stall, dict(sorted(by_op.items(), key=lambda item: -item[1])),
    )  # fmt: skip


def _last_arrival(run: _Pass, counter: int, rank: int) -> tuple[int, int]:
    """Return (rank, entry) of the arrival that completed a counter at a rank."""
    ranks = range(run.t.isa.tp) if counter & GATE else (rank,)
    best = (-1.0, rank, -1)
    for producer in run.t.order.producers[counter]:
        first, last = int(run.t.first[producer]), int(run.t.first[producer + 1])
        for r in ranks:
            at = first + int(np.argmax(run.end[r, first:last]))
            best = max(best, (float(run.end[r, at]), r, at))
    return best[1], best[2]
