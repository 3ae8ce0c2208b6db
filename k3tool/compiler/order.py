"""What a phase's waits imply: which packet is over when another one starts, here and everywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from k3tool.compiler.plan import Phase, Plan, Tensor
from k3tool.isa.columns import GATE, Columns, spec_of

EXPERT_MATRICES = 3  # w1, w3 and w2 lie side by side in a slot of the expert cache


class Ordering(Protocol):
    """One phase as the checks of memory see it, whether it is a plan's or a stream's.

    Bit a of before[b]: row a of a rank is over before row b of the same rank starts. Bit a of
    before_everywhere[b]: row a is over on all ranks.
    """

    before: list[int]
    before_everywhere: list[int]

    @property
    def phase_name(self) -> str:
        """Return the phase's name."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Return the handle table."""

    @property
    def rows(self) -> Columns:
        """Return op, handles and parameters of every packet or instruction, PACKET_DTYPE."""

    @property
    def limits(self) -> dict[str, int]:
        """Return the bytes of each memory space that a plan lays out."""

    def name(self, index: int) -> str:
        """Return how messages call a row."""


@dataclass(slots=True)
class Order:
    """One phase of a plan with what its waits imply (see `Ordering`).

    Only an exact threshold counts: fewer arrivals leave slices running, more never come.
    """

    plan: Plan
    phase: Phase
    producers: dict[int, list[int]] = field(init=False)
    before: list[int] = field(init=False)
    before_everywhere: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Follow the waits in packet order."""
        self.producers = {}
        for index, counter in enumerate(self.phase.packets["counter"].tolist()):
            self.producers.setdefault(counter, []).append(index)
        self.before, self.before_everywhere = [], []
        for index in range(len(self.phase.packets)):
            self._order(index)

    @property
    def phase_name(self) -> str:
        """Return the phase's name."""
        return self.phase.name

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Return the plan's handle table."""
        return self.plan.tensors

    @property
    def rows(self) -> Columns:
        """Return the packets."""
        return self.phase.packets

    @property
    def limits(self) -> dict[str, int]:
        """Return the bytes of the arena and of the peer segment."""
        own = {"arena": self.phase.arena_bytes, "peer": self.phase.peer_bytes}
        return own | weight_spaces(self.plan.params)

    def total(self, counter: int) -> int:
        """Return the arrivals at a counter when all its producers are done, 0 if it has none."""
        ranks = self.plan.tp if counter & GATE else 1
        slices = self.phase.packets["n_slices"]
        return ranks * sum(int(slices[p]) for p in self.producers.get(counter, ()))

    def _order(self, index: int) -> None:
        here = everywhere = 0
        for counter, threshold in self.phase.waits_of(index).tolist():
            if threshold != self.total(counter):
                continue
            for producer in self.producers[counter]:
                if producer >= index:
                    continue
                done = self.before[producer] | 1 << producer
                here |= done
                everywhere |= self.before_everywhere[producer]
                if counter & GATE:
                    everywhere |= done
        self.before.append(here)
        self.before_everywhere.append(everywhere)

    def name(self, index: int) -> str:
        """Return how messages call a packet."""
        spec = spec_of(int(self.phase.packets["op"][index]))
        return f"packet {index} ({spec.name if spec else '?'})"


def depths(c: Order) -> tuple[list[int], list[int]]:
    """Return for each packet the packets and the hand-offs on the longest chain that ends in it."""
    packets: list[int] = []
    handoffs: list[int] = []
    for index, op in enumerate(c.rows["op"].tolist()):
        before = waited_for(c, index)
        spec = spec_of(op)
        assert spec is not None, op
        own = 1 + spec.inner_waits
        packets.append(1 + max((packets[p] for p in before), default=0))
        handoffs.append(own + max((handoffs[p] for p in before), default=0))
    return packets, handoffs


def waited_for(c: Order, index: int) -> set[int]:
    """Return the packets that a packet waits for, all earlier ones."""
    waits = c.phase.waits_of(index)["counter"].tolist()
    return {p for counter in waits for p in c.producers.get(counter, ()) if p < index}


def longest_paths(c: Order) -> tuple[int, int]:
    """Return packets and hand-offs on the longest chain of waits."""
    packets, handoffs = depths(c)
    return max(packets, default=0), max(handoffs, default=0)


def weight_spaces(params: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of the ring of weights and a slot's matrices, none without a budget."""
    residency = params.get("residency")
    if residency is None:
        return {}
    return {"ring": int(residency["ring_bytes"]), "slots": EXPERT_MATRICES}


def counter_name(counter: int) -> str:
    """Return how messages call a counter or gate."""
    return f"gate {counter & ~GATE}" if counter & GATE else f"counter {counter}"
