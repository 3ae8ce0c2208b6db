"""The packets of a graph as a graph of their own: what each makes, order, producers, ancestors.

One op node is one packet, with two exceptions. The parts of a group are values of the group's
packet. And block parts that mix the same finished blocks are packed, eight to a packet: they are
many, small, off the chain, and nothing waits for one that does not wait for all.

Order is by level (longest way from the inputs), so that a workgroup's queue, which is in packet
order, seldom waits in front of work that is ready; correctness rests on waits alone. A packet's
producers are the fewest whose completion implies that of all it reads.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from k3tool.compiler.memory import packet_set
from k3tool.isa.table import SPECS, Op
from k3tool.model.nodes import Graph, Leaf


class Packet(NamedTuple):
    """What one packet does: an op, the values it reads in operand order, the values it makes."""

    op: Op
    name: str
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    attrs: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Dag:
    """Packets in order: their producers, all their ancestors as a set, their depth."""

    packets: tuple[Packet, ...]
    producers: tuple[tuple[int, ...], ...]  # transitively reduced
    ancestors: tuple[int, ...]
    depth: tuple[int, ...]  # packets on the longest chain that ends here

    def handoffs(self) -> int:
        """Return the hand-offs on the longest chain: a gate per packet, and waits inside it."""
        found: list[int] = []
        for packet, before in zip(self.packets, self.producers, strict=True):
            own = 1 + SPECS[packet.op].inner_waits
            found.append(own + max((found[p] for p in before), default=0))
        return max(found)


# Leaves that stand together in the handle table, by the name of each.
Runs = Mapping[str, tuple[str, ...]]


def packet_dag(graph: Graph, taken: Runs = MappingProxyType({})) -> Dag:
    """Return the packets that the graph's outputs need, in level order, with their producers.

    `taken` are the runs of leaves that other phases' packets need: both phases name weights by the
    same handles, so no packet here may need one of their leaves in another run.
    """
    made = _pack_parts(graph, list(_packets(graph)), taken)
    maker = {value: packet for packet, entry in enumerate(made) for value in entry.results}
    needs = [sorted({maker[i] for i in entry.inputs if i in maker}) for entry in made]
    level, height = _levels(needs)
    order = sorted(range(len(made)), key=lambda p: (level[p], -height[p], made[p].results[0]))
    position = {packet: index for index, packet in enumerate(order)}
    ancestors: list[int] = []
    producers: list[tuple[int, ...]] = []
    for packet in order:
        direct = sorted(position[i] for i in needs[packet])
        covered = 0
        for producer in direct:
            covered |= ancestors[producer]
        producers.append(tuple(p for p in direct if not covered >> p & 1))
        ancestors.append(covered | packet_set(direct))
    depth = tuple(level[packet] for packet in order)
    return Dag(tuple(made[p] for p in order), tuple(producers), tuple(ancestors), depth)


def _packets(graph: Graph) -> Iterator[Packet]:
    """Yield the packets that the outputs depend on, in topological order."""
    needed = _reachable(graph)
    parts: dict[int, dict[int, int]] = {}  # group -> index -> the node that names the value
    for node_id in needed:
        node = graph.nodes[node_id]
        if node.op is Op.PART:
            parts.setdefault(node.inputs[0], {})[int(node.attrs[0][1])] = node_id
    for node_id in needed:
        node = graph.nodes[node_id]
        assert isinstance(node.op, Op), node
        if node.op is Op.PART:
            continue
        results: tuple[int, ...] = (node_id,)
        count = len(SPECS[node.op].outputs)
        if count > 1:
            results = tuple(parts[node_id][index] for index in range(count))
        attrs = {key: int(value) for key, value in node.attrs}
        yield Packet(node.op, graph.names[node_id], node.inputs, results, attrs)


# Ops that only packing makes, and the op that they do several times.
PACKINGS: Mapping[Op, Op] = {Op.ATTN_PARTS_8: Op.ATTN_PART}
_PACKED = len(SPECS[Op.ATTN_PARTS_8].outputs)


def _pack_parts(graph: Graph, packets: Sequence[Packet], taken: Runs) -> list[Packet]:
    """Return packets with full sets of block parts as one packet each, at the first one's place."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, packet in enumerate(packets):
        if packet.op is Op.ATTN_PART:
            key = (packet.inputs[0], *packet.attrs.items())
            alike.setdefault(key, []).append(index)
    packed: dict[int, Packet] = {}
    gone: set[int] = set()
    for found in alike.values():
        first = 0
        while first + _PACKED <= len(found):
            group = [packets[i] for i in found[first : first + _PACKED]]
            candidate = _packed(group)
            if not _fits(graph, candidate, taken):
                first += 1
                continue
            packed[found[first]] = candidate
            gone.update(found[first + 1 : first + _PACKED])
            first += _PACKED
    return [packed.get(i, packet) for i, packet in enumerate(packets) if i not in gone]


def _packed(group: Sequence[Packet]) -> Packet:
    """Return what does a full set of block parts."""
    return Packet(
        Op.ATTN_PARTS_8,
        f"{group[0].name} and {len(group) - 1} more",
        (group[0].inputs[0], *(value for packet in group for value in packet.inputs[1:])),
        tuple(packet.results[0] for packet in group),
        group[0].attrs,
    )


def _fits(graph: Graph, packet: Packet, taken: Runs) -> bool:
    """Return whether no leaf that a packet reads through a slot of several is in another run."""
    runs = [tuple(graph.names[value] for value in run) for run in runs_of(packet)]
    return all(taken.get(name, run) == run for run in runs for name in run)


def runs_of(packet: Packet) -> list[tuple[int, ...]]:
    """Return the values of each of a packet's slots that holds more than one."""
    values, results = iter(packet.inputs), iter(packet.results)
    slots: dict[int, list[int]] = defaultdict(list)
    for operand in SPECS[packet.op].operands:
        slots[operand.slot].append(next(results) if operand.role == "out" else next(values))
    return [tuple(run) for run in slots.values() if len(run) > 1]


def _reachable(graph: Graph) -> list[int]:
    """Return the op nodes that the outputs depend on, in topological order."""
    seen: set[int] = set()
    stack = list(graph.outputs)
    while stack:
        node = stack.pop()
        if node not in seen and not isinstance(graph.nodes[node].op, Leaf):
            seen.add(node)
            stack.extend(graph.nodes[node].inputs)
    return sorted(seen)


def _levels(needs: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return each packet's longest way from the inputs and to the outputs, in packets."""
    level: list[int] = []
    height = [1] * len(needs)
    for direct in needs:
        level.append(1 + max((level[i] for i in direct), default=0))
    for packet in reversed(range(len(needs))):
        for i in needs[packet]:
            height[i] = max(height[i], height[packet] + 1)
    return level, height
