"""What an emitted stream's entries imply: which instruction is over when another one starts.

Everything is derived from one phase's entries, wait lists, signal lists and records, as an
interpreter reads them. Plans, packets and their thresholds are not consulted. An instruction's
slices may wait and signal differently: it starts when any of its entries may, and it is over when
every one of them has signalled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from k3tool.compiler.order import weight_spaces
from k3tool.compiler.plan import Tensor
from k3tool.isa import device
from k3tool.isa.columns import GATE, Columns, spec_of
from k3tool.isa.stream import Isa, Stream


@dataclass(slots=True)
class StreamOrder:
    """One phase of a program with what its entries imply (``compiler.order.Ordering``).

    `arrivals[c]` are the signals that counter c gets in a step, from all ranks if it is a gate.
    `producers[c]` are the instructions with an entry that signals c. `wait_lists[i]` and
    `signal_lists[i]` are the distinct lists among the entries of instruction i.
    """

    isa: Isa
    stream: Stream
    rows: Columns = field(init=False)
    arrivals: dict[int, int] = field(init=False)
    producers: dict[int, list[int]] = field(init=False)
    wait_lists: list[list[tuple[int, int]]] = field(init=False)
    signal_lists: list[list[tuple[int, int]]] = field(init=False)
    before: list[int] = field(init=False)
    before_everywhere: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Collect lists and arrivals, then follow the waits in instruction order."""
        self.rows = device.unpack(self.stream.instructions[0])
        n = len(self.rows)
        self.wait_lists = self._lists("wait", n)
        self.signal_lists = self._lists("signal", n)
        self._count()
        self.before, self.before_everywhere = [], []
        for index in range(n):
            here, everywhere = self._implied(index)
            self.before.append(here)
            self.before_everywhere.append(everywhere)

    @property
    def phase_name(self) -> str:
        """Return the phase's name."""
        return self.stream.name

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Return the program's handle table."""
        return self.isa.tensors

    @property
    def limits(self) -> dict[str, int]:
        """Return the bytes of the arena and of the peer segment."""
        own = {"arena": self.stream.arena_bytes, "peer": self.stream.peer_bytes}
        return own | weight_spaces(self.isa.params)

    def name(self, index: int) -> str:
        """Return how messages call an instruction."""
        spec = spec_of(int(self.rows["op"][index]))
        return f"instruction {index} ({spec.name if spec else '?'})"

    def waits_of(self, index: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the distinct wait lists of an instruction's entries as (counter, threshold)."""
        for start, count in self.wait_lists[index]:
            yield [(int(c), int(t)) for c, t in self.stream.queues.waits[start : start + count]]

    def signals_of(self, index: int) -> Iterator[list[int]]:
        """Yield the distinct signal lists of an instruction's entries."""
        for start, count in self.signal_lists[index]:
            yield self.stream.queues.signals[start : start + count].tolist()

    # -- derivation ------------------------------------------------------------------------------

    def _lists(self, kind: str, n: int) -> list[list[tuple[int, int]]]:
        """Return for each instruction the distinct (offset, count) of one kind of list."""
        entries = self.stream.queues.entries
        columns = (entries["inst"], entries[f"{kind}_ofs"], entries[f"n_{kind}s"])
        distinct = np.unique(np.stack([c.astype(np.int64) for c in columns], axis=1), axis=0)
        found: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for index, start, count in distinct.tolist():
            found[index].append((start, count))
        return found

    def _count(self) -> None:
        """Count the arrivals at every counter, entry by entry."""
        queues = self.stream.queues
        count = queues.entries["n_signals"].astype(np.int64)
        owner = np.repeat(np.arange(len(count)), count)
        nth = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
        signalled = queues.signals[queues.entries["signal_ofs"].astype(np.int64)[owner] + nth]
        counters, times = np.unique(signalled, return_counts=True)
        ranks = self.isa.tp
        self.arrivals = {
            counter: number * (ranks if counter & GATE else 1)
            for counter, number in zip(counters.tolist(), times.tolist(), strict=True)
        }
        self.producers = {counter: [] for counter in self.arrivals}
        for index in range(len(self.rows)):
            for counter in {c for signals in self.signals_of(index) for c in signals}:
                self.producers[counter].append(index)

    def _implied(self, index: int) -> tuple[int, int]:
        """Return what is over, here and on all ranks, when the first entry of one may start."""
        here = everywhere = -1
        for waits in self.waits_of(index):
            # Only an exact count says anything: fewer arrivals leave entries running.
            met = {c for c, threshold in waits if threshold == self.arrivals.get(c)}
            own, all_ranks = self._over(met, index)
            here, everywhere = here & own, everywhere & all_ranks
        return (here, everywhere) if self.wait_lists[index] else (0, 0)

    def _over(self, met: set[int], index: int) -> tuple[int, int]:
        here = everywhere = 0
        for producer in {p for counter in met for p in self.producers[counter]}:
            if producer >= index:
                continue
            lists = list(self.signals_of(producer))
            if not all(met.intersection(signals) for signals in lists):
                continue  # some of its slices signal another counter and may still run
            done = self.before[producer] | 1 << producer
            here |= done
            everywhere |= self.before_everywhere[producer]
            if all(any(c & GATE for c in met.intersection(signals)) for signals in lists):
                everywhere |= done
        return here, everywhere
