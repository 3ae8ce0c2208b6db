"""Worst orders of a real stream: what can have run while one entry has not.

Counters only grow, so whatever an execution can do, one that does more before it can do too. Hold
one entry back and let everything else run as far as it goes: an entry runs then if and only if some
interleaving runs it before the one held back is over. One run a held entry decides it exactly; no
sampling is involved, and by symmetry holding rank 0's entries decides for all ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from k3tool.compiler.plan import Plan
from k3tool.isa.access import Access, accesses
from k3tool.isa.columns import GATE, Columns
from k3tool.isa.device import unpack
from k3tool.isa.stream import Isa, Stream

Place = tuple[int, int]  # rank, entry


@dataclass
class Machine:
    """All ranks' workers on one phase's entries, one step from zero."""

    isa: Isa
    stream: Stream
    waits: list[list[tuple[int, int]]] = field(init=False)
    signals: list[list[int]] = field(init=False)
    inst: list[int] = field(init=False)

    def __post_init__(self) -> None:
        queues = self.stream.queues
        listed, sent = queues.waits.tolist(), queues.signals.tolist()
        rows = queues.entries
        spans = zip(rows["wait_ofs"].tolist(), rows["n_waits"].tolist(), strict=True)
        self.waits = [listed[start : start + count] for start, count in spans]
        spans = zip(rows["signal_ofs"].tolist(), rows["n_signals"].tolist(), strict=True)
        self.signals = [sent[start : start + count] for start, count in spans]
        self.inst = rows["inst"].tolist()

    def order(self, held: Place | None = None) -> tuple[list[Place], int]:
        """Return entries in an order in which `held` runs as late as it can.

        The second value says how many ran before it: all that any interleaving can run before it.
        """
        run = _Run(self, held)
        run.drain()
        before = len(run.done)
        if held is not None:
            run.release()
        return run.done, before


class _Run:
    def __init__(self, machine: Machine, held: Place | None) -> None:
        self.machine, self.held = machine, held
        ofs = machine.stream.queues.queue_ofs.tolist()
        self.at = [list(ofs[:-1]) for _ in range(machine.isa.tp)]
        self.end = ofs[1:]
        self.values: dict[tuple[int, int], int] = {}
        self.asleep: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.awake = [(r, w) for r in range(machine.isa.tp) for w in range(len(self.end))]
        self.done: list[Place] = []
        self.holder: tuple[int, int] | None = None

    def drain(self) -> None:
        while self.awake:
            self._advance(*self.awake.pop())

    def release(self) -> None:
        assert self.holder is not None, "the held entry was never reached"
        self.held, self.awake = None, [self.holder]
        self.drain()

    def _advance(self, rank: int, worker: int) -> None:
        while (entry := self.at[rank][worker]) < self.end[worker]:
            for counter, threshold in self.machine.waits[entry]:
                if self.values.get((rank, counter), 0) < threshold:
                    self.asleep.setdefault((rank, counter), []).append((rank, worker))
                    return
            if (rank, entry) == self.held:
                self.holder = (rank, worker)
                return
            self.done.append((rank, entry))
            self.at[rank][worker] += 1
            for counter in self.machine.signals[entry]:
                for other in range(self.machine.isa.tp) if counter & GATE else (rank,):
                    self.values[other, counter] = self.values.get((other, counter), 0) + 1
                    self.awake += self.asleep.pop((other, counter), [])


def conflicts(isa: Isa, stream: Stream) -> dict[tuple[int, int], bool]:
    """Return pairs of instructions that touch the same bytes, one of them writing.

    The value says whether one of them touches every rank's bytes. Read off the records by pairwise
    comparison: nothing of the checkers' bookkeeping is used.
    """
    rows = unpack(stream.instructions[0])
    found = [list(accesses(row, isa.tensors)) for row in rows]
    pairs: dict[tuple[int, int], bool] = {}
    for later, mine in enumerate(found):
        for earlier in range(later):
            for a in found[earlier]:
                for b in mine:
                    if _conflict(a, b):
                        across = a.every_rank or b.every_rank
                        pairs[earlier, later] = pairs.get((earlier, later), False) or across
    return pairs


def _conflict(a: Access, b: Access) -> bool:
    touch = a.space == b.space and a.byte0 < b.byte1 and b.byte0 < a.byte1
    return touch and (a.is_write or b.is_write)


def races(
    machine: Machine, pairs: Mapping[tuple[int, int], bool], held: Iterable[int]
) -> Iterator[int]:
    """Yield entries that, held back on rank 0, let a conflicting later instruction run too soon."""
    later_of: dict[int, list[tuple[int, bool]]] = {}
    for (earlier, later), across in pairs.items():
        later_of.setdefault(earlier, []).append((later, across))
    for entry in held:
        after = later_of.get(machine.inst[entry], [])
        order, before = machine.order((0, entry)) if after else ([], 0)
        early = {(rank, machine.inst[e]) for rank, e in order[:before]}
        ranks = range(machine.isa.tp)
        if any((r, later) in early for later, across in after for r in (ranks if across else (0,))):
            yield entry


def without_wait(plan: Plan, phase: str, packet: int, nth: int) -> Plan:
    """Return a plan in which one packet lacks one of its waits."""
    old = plan.phases[phase]
    packets, lists = old.packets.copy(), [old.waits_of(i) for i in range(len(old.packets))]
    lists[packet] = np.delete(lists[packet], nth)
    packets["n_waits"] = [len(waits) for waits in lists]
    packets["wait_ofs"] = np.cumsum(packets["n_waits"]) - packets["n_waits"]
    waits: Columns = np.concatenate(lists)
    changed = replace(old, packets=packets, waits=waits)
    return replace(plan, phases={**plan.phases, phase: changed})


def spread(stream: Stream) -> Stream:
    """Return a stream with a queue an entry: as many workers as could be, so only waits order."""
    queues = stream.queues
    order = np.argsort(queues.entries["inst"], kind="stable")
    ofs = np.arange(len(order) + 1, dtype="<u4")
    return replace(stream, queues=replace(queues, entries=queues.entries[order], queue_ofs=ofs))
