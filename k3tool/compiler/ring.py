"""The ring that streamed weights come through: places, readers, and when each may be overwritten.

It is walked once and again in the order of first use. What its first turn holds is there when a
step begins and is brought back at its end. ``k3tool.compiler.residency`` makes packets of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from k3tool.compiler.plan import Phase, Plan
from k3tool.isa.access import paged_bytes
from k3tool.isa.columns import spec_of
from k3tool.isa.op_spec import OpSpec
from k3tool.isa.table import ROW_LOOKUPS


class Uses(NamedTuple):
    """The packets of one phase that read a weight: the first, the last, all."""

    first: int
    last: int
    packets: tuple[int, ...]


class Place(NamedTuple):
    """A weight's place in the ring, and in which turn of a step it is first needed."""

    handle: int
    offset: int
    n_bytes: int
    turn: int


class _Piece(NamedTuple):
    """Bytes first .. last of the ring that hold a part of `owner`."""

    first: int
    last: int
    owner: Place

    def without(self, first: int, last: int) -> "list[_Piece]":
        """Return what is left of it when first .. last is overwritten."""
        rest = [(self.first, min(self.last, first)), (max(self.first, last), self.last)]
        return [_Piece(a, b, self.owner) for a, b in rest if a < b]


class Load(NamedTuple):
    """One LOAD: what it brings, and the weights whose bytes it takes."""

    place: Place
    overwrites: tuple[int, ...]
    after: int  # the original packet behind which it stands


def uses_of(plan: Plan, phase: Phase) -> dict[int, Uses]:
    """Return which packets read each weight."""
    readers: dict[int, list[int]] = {}
    for index, row in enumerate(phase.packets):
        for handle in weights_of(row):
            readers.setdefault(handle, []).append(index)
    return {h: Uses(found[0], found[-1], tuple(found)) for h, found in readers.items()}


def weights_of(row: Any) -> Iterator[int]:
    """Yield the handles that a packet reads as weights."""
    spec = spec_of_row(row)
    for operand, handle in zip(spec.operands, spec.handles(row["handles"].tolist()), strict=True):
        if operand.role == "weight":
            yield handle


def spec_of_row(row: Any) -> OpSpec:
    """Return the op of a packet; the plan's checks have seen that it is one."""
    spec = spec_of(int(row["op"]))
    assert spec is not None, row["op"]
    return spec


def row_tables(plan: Plan) -> set[int]:
    """Return the weights that are read by rows of token ids: a step needs as many as its tokens."""
    return {
        int(row["handles"][0])
        for phase in plan.phases.values()
        for row in phase.packets
        if int(row["op"]) in ROW_LOOKUPS
    }


def ring_places(plan: Plan, streamed: Sequence[str], ring_bytes: int) -> list[Place] | None:
    """Return the places of weights in a ring, or None where it is too small.

    Too small: some packet's weights do not fit together, or one would have to be loaded while what
    lies there is still to be read. The order of first use is the first phase's; others have to
    fit it too.
    """
    uses = [uses_of(plan, phase) for phase in plan.phases.values()]
    handles = sorted((plan.handles[name] for name in streamed), key=lambda h: (uses[0][h].first, h))
    places, at, turn = [], 0, 0
    for handle in handles:
        size = paged_bytes(plan.tensors[handle].n_bytes)
        if size > ring_bytes:
            return None
        if at + size > ring_bytes:
            at, turn = 0, turn + 1
        places.append(Place(handle, at, size, turn))
        at += size
    if all(loads_of(places, of_phase) is not None for of_phase in uses):
        return places
    return None


def least_ring(plan: Plan, streamed: Sequence[str]) -> int:
    """Return the bytes of the smallest ring found that works, within a 32nd of the largest need."""
    sizes = {plan.handles[n]: paged_bytes(plan.tensors[plan.handles[n]].n_bytes) for n in streamed}
    largest = 0
    for phase in plan.phases.values():
        for row in phase.packets:
            own = {h for h in weights_of(row) if h in sizes}
            largest = max(largest, sum(sizes[h] for h in own))
    step = max(4096, largest // 32 // 4096 * 4096)
    total = sum(sizes.values())
    ring = largest
    while ring < total and ring_places(plan, streamed, ring) is None:
        ring += step
    return min(ring, total)


def loads_of(places: Sequence[Place], uses: Mapping[int, Uses]) -> list[Load] | None:
    """Return the LOADs of one step in order, or None where one would come too late for its reader.

    The first turn is in place when a step starts; what overwrites it is followed, at the end, by
    LOADs that bring it back.
    """
    # Bytes by whose they are; of a place that was partly overwritten the rest is still to be read.
    pieces = [_Piece(p.offset, p.offset + p.n_bytes, p) for p in places if p.turn == 0]
    loads: list[Load] = []
    after = -1
    again = [place for place in places if place.turn == 0]
    for place in [*(p for p in places if p.turn > 0), *again]:
        first, last = place.offset, place.offset + place.n_bytes
        if _Piece(first, last, place) in pieces:
            continue
        gone = [piece for piece in pieces if piece.first < last and first < piece.last]
        after = max([after, *(uses[piece.owner.handle].last for piece in gone)])
        if place.turn > 0 and after >= uses[place.handle].first:
            return None
        if place.turn == 0:
            after = max(after, uses[place.handle].last)
        pieces = [rest for piece in pieces for rest in piece.without(first, last)]
        pieces.append(_Piece(first, last, place))
        loads.append(Load(place, tuple({p.owner.handle: 0 for p in gone}), after))
    return loads
