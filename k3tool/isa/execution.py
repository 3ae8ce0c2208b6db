"""Executes a stream's protocol without its arithmetic: queues, waits and signals of all ranks.

Workers advance in rounds; in each one a random part of those that could take a step does, so a seed
is an interleaving. Counters are those of one step from zero. An execution that stops before every
queue is empty is a deadlock and names the earliest instruction that waits.
"""

from dataclasses import dataclass

import numpy as np

from k3tool.errors import UnsoundError
from k3tool.isa.columns import GATE, Columns
from k3tool.isa.stream import Isa, Stream


@dataclass(frozen=True, slots=True)
class Executed:
    """What one execution did: rounds until all was done, entries over all ranks."""

    rounds: int
    entries: int


class _Counters:
    """All ranks' local counters and gates, and entries' lists padded to rectangles."""

    def __init__(self, isa: Isa, stream: Stream) -> None:
        queues = stream.queues
        self.n_local = len(queues.local_counts)
        self.values = np.zeros((isa.tp, self.n_local + len(queues.gate_counts)), np.int64)
        entries = queues.entries
        place = self._place(queues.waits["counter"])
        self.waits, self.wait_used = _padded(entries["wait_ofs"], entries["n_waits"])
        self.wait_place = place[self.waits] if len(place) else self.waits
        threshold = queues.waits["threshold"].astype(np.int64)
        self.wait_need = threshold[self.waits] if len(threshold) else self.waits
        signals, self.signal_used = _padded(entries["signal_ofs"], entries["n_signals"])
        self.is_gate = (queues.signals[signals] & GATE) != 0
        self.signal_place = self._place(queues.signals)[signals]

    def _place(self, counters: Columns) -> Columns:
        number = (counters & ~np.uint32(GATE)).astype(np.int64)
        return np.where(counters & GATE, number + self.n_local, number)

    def met(self, rank: Columns, entry: Columns) -> Columns:
        """Return for each (rank, entry) whether all its waits are met."""
        have = self.values[rank[:, None], self.wait_place[entry]]
        good = (have >= self.wait_need[entry]) | ~self.wait_used[entry]
        return np.asarray(good.all(axis=1))

    def signal(self, rank: Columns, entry: Columns) -> None:
        """Add the signals of entries that are done, a gate's at every rank."""
        used, gate, place = (a[entry] for a in (self.signal_used, self.is_gate, self.signal_place))
        own = used & ~gate
        ranks = np.broadcast_to(rank[:, None], place.shape)
        np.add.at(self.values, (ranks[own], place[own]), 1)
        np.add.at(self.values.T, place[used & gate], 1)


def _padded(first: Columns, count: Columns) -> tuple[Columns, Columns]:
    """Return (entries, longest) indices of lists and which of them are in a list."""
    width = max(1, int(count.max(initial=0)))
    used = np.arange(width) < count[:, None]
    return np.where(used, first.astype(np.int64)[:, None] + np.arange(width), 0), used


def execute(isa: Isa, stream: Stream, seed: int, *, by_window: bool = False) -> Executed:
    """Execute one step on all ranks; `by_window` takes entries through the domains' cursors.

    Raises: UnsoundError when it locks, or when counters do not end where the audit expects them.
    """
    rng = np.random.default_rng(seed)
    counters = _Counters(isa, stream)
    source = _Windowed(isa, stream) if by_window else _Queued(isa, stream)
    rounds = done = 0
    keep = rng.uniform(0.2, 1.0)  # how many of those that could advance do, in this interleaving
    while (held := source.held(rng))[0].size:
        worker, rank, entry = held
        ready = counters.met(rank, entry)
        if not ready.any():
            raise UnsoundError(
                f"{stream.name}: seed {seed}",
                got=f"no worker can go on, first waits instruction "
                f"{int(stream.queues.entries['inst'][entry].min())}",
                need="a stream that cannot lock",
            )
        chosen = ready & (rng.random(len(ready)) < keep)
        if not chosen.any():
            chosen[np.flatnonzero(ready)[0]] = True
        counters.signal(rank[chosen], entry[chosen])
        source.finish(worker[chosen])
        rounds += 1
        done += int(chosen.sum())
    _audit(isa, stream, counters, seed)
    return Executed(rounds, done)


def _audit(isa: Isa, stream: Stream, counters: _Counters, seed: int) -> None:
    queues = stream.queues
    expected = np.concatenate([queues.local_counts, queues.gate_counts]).astype(np.int64)
    wrong = counters.values != expected
    if wrong.any():
        rank, place = np.argwhere(wrong)[0].tolist()
        raise UnsoundError(
            f"{stream.name}: seed {seed}: rank {rank}: counter {place}",
            got=int(counters.values[rank, place]),
            need=int(expected[place]),
        )


class _Queued:
    """Workers with a queue each."""

    def __init__(self, isa: Isa, stream: Stream) -> None:
        ofs = stream.queues.queue_ofs.astype(np.int64)
        self.at = np.tile(ofs[:-1], isa.tp)
        self.end = np.tile(ofs[1:], isa.tp)
        self.rank = np.repeat(np.arange(isa.tp), len(ofs) - 1)

    def held(self, rng: np.random.Generator) -> tuple[Columns, Columns, Columns]:
        """Return (worker, rank, entry) of all workers that have something left to do."""
        worker = np.flatnonzero(self.at < self.end)
        return worker, self.rank[worker], self.at[worker]

    def finish(self, worker: Columns) -> None:
        """Let workers go on to their next entry."""
        self.at[worker] += 1


class _Windowed:
    """Workers that take the next entry of their domain's window through a cursor."""

    def __init__(self, isa: Isa, stream: Stream) -> None:
        windows = stream.windows
        assert windows is not None, "the target has no windows"
        ofs = windows.window_ofs.astype(np.int64)
        self.order, self.n_domains = windows.order.astype(np.int64), len(ofs) - 1
        self.cursor = np.tile(ofs[:-1], (isa.tp, 1))
        self.end = ofs[1:]
        self.rank = np.repeat(np.arange(isa.tp), stream.n_workgroups)
        self.domain = np.tile(np.arange(stream.n_workgroups) % self.n_domains, isa.tp)
        self.entry = np.full(len(self.rank), -1)

    def held(self, rng: np.random.Generator) -> tuple[Columns, Columns, Columns]:
        """Let free workers fetch, in random order; return (worker, rank, entry) of busy ones."""
        free = np.flatnonzero(self.entry < 0)
        for worker in rng.permutation(free).tolist():
            rank, domain = self.rank[worker], self.domain[worker]
            if self.cursor[rank, domain] < self.end[domain]:
                self.entry[worker] = self.order[self.cursor[rank, domain]]
                self.cursor[rank, domain] += 1
        busy = np.flatnonzero(self.entry >= 0)
        return busy, self.rank[busy], self.entry[busy]

    def finish(self, worker: Columns) -> None:
        """Free workers."""
        self.entry[worker] = -1
