"""From packets as a graph to the records of one phase: sizes, slices, waits, buffers.

Batch, chunk and context enter only as buffer sizes. It does not choose ops (rules and extraction
do) nor their order (`dag`), and does not know the device record.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from k3tool.compiler.dag import Dag, Packet, runs_of
from k3tool.compiler.handles import F32_BYTES, Handles
from k3tool.compiler.memory import (
    Buffer,
    PeerUse,
    check_arena,
    check_peers,
    packet_set,
    place_arena,
    place_peers,
)
from k3tool.compiler.plan import (
    Phase,
    Records,
    Tensor,
    n_slices,
)
from k3tool.isa.columns import GATE, PACKET_DIGEST, PACKET_DTYPE, PACKET_REARM, WAIT_DTYPE
from k3tool.isa.op_spec import N_HANDLES, NO_HANDLE
from k3tool.isa.table import SPECS, Op
from k3tool.model.nodes import Graph, Leaf
from k3tool.model.operators import (
    flags_of,
    input_operands,
    params_of,
    result_widths,
    solve_sizes,
    units_of,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The options that size packets: ranks, workgroups, tokens in a step of this phase."""

    tp: int
    workgroups: int
    max_tokens: int


class _Phase:
    """Builds one phase; its steps run in the order of `build`."""

    def __init__(self, name: str, graph: Graph, dag: Dag, layout: Layout, handles: Handles) -> None:
        self.name, self.graph, self.dag, self.layout = name, graph, dag, layout
        self.handles = handles
        self.results = [value for packet in dag.packets for value in packet.results]
        self.position = {v: i for i, packet in enumerate(dag.packets) for v in packet.results}
        self.readers = self._readers()
        self.width: dict[int, int] = {}  # of a value on one rank
        self.handle: dict[int, int] = {}  # of a value
        self.packets = np.zeros(len(dag.packets), PACKET_DTYPE)

    def _readers(self) -> dict[int, list[tuple[int, str, str]]]:
        """Return for each value its (packet, operand, operand role) readers."""
        readers: dict[int, list[tuple[int, str, str]]] = defaultdict(list)
        for index, packet in enumerate(self.dag.packets):
            for operand, value in zip(input_operands(packet.op), packet.inputs, strict=True):
                readers[value].append((index, operand.name, operand.role))
        for leaf, node in enumerate(self.graph.nodes):
            once = node.op is not Leaf.STATE or len(readers[leaf]) <= 1
            assert once, f"{self.graph.names[leaf]} is updated twice in a step"
        return readers

    def build(self, made_by: Mapping[int, tuple[int, ...]], peer_base: int) -> Phase:
        self._sizes()
        peers = self._peer_nodes()
        arena_bytes, peer_bytes = self._buffers(peers, peer_base)
        self._counters(peers)
        waits = self._waits()
        for index, packet in enumerate(self.dag.packets):
            self._operands(index, packet)
        self._check_fold()
        return Phase(
            name=self.name,
            max_tokens=self.layout.max_tokens,
            packets=self.packets,
            waits=waits,
            made_by=tuple(_applications(packet, made_by) for packet in self.dag.packets),
            n_gates=len(peers),
            arena_bytes=arena_bytes,
            peer_bytes=peer_bytes,
            packet_path=max(self.dag.depth),
            critical_path=self.dag.handoffs(),
        )

    # -- sizes and slices --------------------------------------------------------------------------

    def _sizes(self) -> None:
        """Solve each packet's sizes for one rank; a split that does not fit is refused here."""
        for leaf in (i for i, node in enumerate(self.graph.nodes) if node.op is Leaf.BLOCKS):
            self.width[leaf] = self.graph.nodes[leaf].width
        layout = self.layout
        for index, packet in enumerate(self.dag.packets):
            spec, shapes = SPECS[packet.op], self._local_shapes(packet)
            width, sizes = solve_sizes(packet.op, packet.name, shapes, packet.attrs, tp=layout.tp)
            for value, part in zip(packet.results, result_widths(packet.op, sizes), strict=True):
                node = self.graph.nodes[value]
                ranks = layout.tp if node.placement == "sharded" else 1
                assert part * ranks == node.width, (self.graph.names[value], part, node)
                self.width[value] = part
            row = self.packets[index]
            row["op"] = int(packet.op)
            row["width"] = width
            row["n_units"], row["unit_cols"] = units_of(packet.op, width, sizes, layout.max_tokens)
            words = params_of(packet.op, packet.attrs, sizes, layout.tp)
            row["params"][: len(words)] = words
            row["flags"] = flags_of(packet.op, packet.attrs)
            row["grain"] = spec.grain
            row["n_slices"] = n_slices(int(row["n_units"]), spec.grain, layout.workgroups)
            # Of a group the members that are a rank's own are left out when the digest is made.
            placements = {self.graph.nodes[value].placement for value in packet.results}
            if spec.outputs and "replicated" in placements:
                row["flags"] |= PACKET_DIGEST
            if packet.op is Op.ARGMAX:
                row["flags"] |= PACKET_REARM

    def _local_shapes(self, packet: Packet) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for operand, value in zip(input_operands(packet.op), packet.inputs, strict=True):
            if operand.role == "weight":
                shapes[operand.name] = self.graph.weight_of(value).local_shape
            elif operand.role != "state":
                shapes[operand.name] = (self.width[value],)
        return shapes

    # -- buffers -----------------------------------------------------------------------------------

    def _peer_nodes(self) -> list[int]:
        """Return the values that cross ranks, in packet order."""
        peers = []
        for node in self.results:
            roles = {role for _, _, role in self.readers[node]}
            if "peer" in roles:
                assert len(self.readers[node]) == 1, f"{self.graph.names[node]}: two collectives"
                peers.append(node)
        return peers

    def _buffers(self, peers: Sequence[int], peer_base: int) -> tuple[int, int]:
        """Give every result a handle; return the bytes of the arena and of the peer segment."""
        in_place = self._in_place()
        own = [value for value in self.results if value not in in_place]
        arena = [self._arena_buffer(n) for n in own if n not in peers and self._role(n) == "arena"]
        arena = sorted(arena + self._stacks(in_place), key=lambda entry: entry[1].writer)
        buffers = [buffer for _, buffer in arena]
        offsets, arena_bytes = place_arena(buffers, self.dag.ancestors)
        clash = check_arena(buffers, offsets, self.dag.ancestors)
        assert clash is None, f"{self.name}: {clash} share bytes while both are in use"
        uses = [self._peer_use(node) for node in peers]
        slots, peer_bytes = place_peers(uses, self.dag.ancestors, peer_base)
        clash = check_peers(uses, slots, self.dag.ancestors)
        assert clash is None, f"{self.name}: {clash} share a peer slot before all ranks read it"
        offset_of = {node: offset for (node, _), offset in zip(arena, offsets, strict=True)}
        offset_of |= dict(zip(peers, slots, strict=True))
        for node in _in_runs(own, self._runs()):
            self._add_buffer(node, "peer" if node in peers else self._role(node), offset_of)
        self._add_in_place(in_place, offset_of)
        return arena_bytes, peer_bytes

    def _in_place(self) -> dict[int, int]:
        """Return the values that update an input in place, and which input."""
        found = {}
        for packet in self.dag.packets:
            output = SPECS[packet.op].output
            if output.role != "out":
                operands = [operand.name for operand in input_operands(packet.op)]
                found[packet.results[0]] = packet.inputs[operands.index(output.name)]
        return dict(sorted(found.items()))

    def _runs(self) -> list[tuple[int, ...]]:
        """Return the values that need consecutive handles, for all packets."""
        return [run for packet in self.dag.packets for run in runs_of(packet)]

    def _arena_buffer(self, node: int) -> tuple[int, Buffer]:
        writer = self.position[node]
        users = packet_set([writer, *(reader for reader, _, _ in self.readers[node])])
        return node, Buffer(self.graph.names[node], self._bytes(node), writer, users)

    def _role(self, node: int) -> str:
        if node in self.graph.outputs:
            return "output"
        argmax = [p for p, name, _ in self.readers[node] if self._op(p) is Op.ARGMAX]
        return "logits" if argmax else "arena"

    def _op(self, packet: int) -> Op:
        return self.dag.packets[packet].op

    def _bytes(self, node: int) -> int:
        return self.layout.max_tokens * self.width[node] * F32_BYTES

    def _stacks(self, in_place: Mapping[int, int]) -> list[tuple[int, Buffer]]:
        """Return the AttnRes stack as one buffer: pushes write rows of it, mixes read some."""
        found = []
        for leaf, node in enumerate(self.graph.nodes):
            if node.op is not Leaf.BLOCKS or not self.readers[leaf]:
                continue
            versions = [leaf]
            for push, before in in_place.items():
                if before in versions:  # a push of a push: a comprehension would see only the first
                    versions.append(push)
            users = {self.position[push] for push in versions[1:]}
            users |= {packet for v in versions for packet, _, _ in self.readers[v]}
            size = self.graph.n_blocks * self.layout.max_tokens * node.width * F32_BYTES
            name = self.graph.names[leaf]
            found.append((leaf, Buffer(name, size, min(users), packet_set(sorted(users)))))
        return found

    def _peer_use(self, node: int) -> PeerUse:
        (reader, operand, _) = self.readers[node][0]
        kind = f"{self._op(reader).name}.{operand}"
        writer = self.position[node]
        return PeerUse(self.graph.names[node], kind, self._bytes(node), writer, reader)

    def _add_buffer(self, node: int, role: str, offset_of: Mapping[int, int]) -> None:
        tokens, name = self.layout.max_tokens, f"{self.name}/{self.graph.names[node]}"
        logical, local = (tokens, self.graph.nodes[node].width), (tokens, self.width[node])
        # A route's expert ids come first; the weights behind them are f32 bits.
        dtype = "u32" if self.graph.nodes[node].op is Op.ROUTER_TOPK else "f32"
        offset, size = offset_of.get(node, 0), self._bytes(node)
        row = Tensor(name, role, dtype, logical, local, size, offset, self.name)
        self.handle[node] = self.handles.add(row)

    def _add_in_place(self, in_place: Mapping[int, int], offset_of: Mapping[int, int]) -> None:
        """Give leaves that are updated, and every version of them, one handle each."""
        for leaf, node in enumerate(self.graph.nodes):
            if node.op is Leaf.BLOCKS and leaf in offset_of:
                shape = (self.graph.n_blocks, self.layout.max_tokens, node.width)
                name = f"{self.name}/{self.graph.names[leaf]}"
                size, offset = prod(shape) * F32_BYTES, offset_of[leaf]
                row = Tensor(name, "arena", "f32", shape, shape, size, offset, self.name)
                self.handle[leaf] = self.handles.add(row)
            elif isinstance(node.op, Leaf):
                self.handle[leaf] = self.handles.index.get(str(node.attrs[0][1]), NO_HANDLE)
        for version, before in in_place.items():
            self.handle[version] = self.handle[before]

    # -- counters ----------------------------------------------------------------------------------

    def _counters(self, peers: Sequence[int]) -> None:
        """Give each packet its counter: its own, or a gate that all ranks' slices arrive at."""
        gates = {self.position[node]: gate for gate, node in enumerate(peers)}
        for packet, row in enumerate(self.packets):
            gate = gates.get(packet)
            row["counter"] = packet if gate is None else GATE | gate
            row["threshold"] = row["n_slices"] * (1 if gate is None else self.layout.tp)

    def _waits(self) -> Records:
        """Fill in every packet's wait list: all slices of its direct producers."""
        waits: list[tuple[int, int]] = []
        for packet, producers in enumerate(self.dag.producers):
            self.packets[packet]["wait_ofs"] = len(waits)
            self.packets[packet]["n_waits"] = len(producers)
            for producer in producers:
                row = self.packets[producer]
                waits.append((int(row["counter"]), int(row["threshold"])))
        return np.array(waits, dtype=WAIT_DTYPE)

    def _operands(self, index: int, packet: Packet) -> None:
        """Fill in a packet's handles: one for each slot, the first of its run."""
        values, results = iter(packet.inputs), iter(packet.results)
        slots = self.packets[index]["handles"]
        slots[:] = [NO_HANDLE] * N_HANDLES
        for operand in SPECS[packet.op].operands:
            value = next(results) if operand.role == "out" else next(values)
            handle = self.handle[value]
            assert handle != NO_HANDLE, (self.graph.names[value], operand)
            if operand.run == 0:
                slots[operand.slot] = handle
            found = int(slots[operand.slot]) + operand.run
            assert found == handle, f"{packet.name}: {operand.name} is {handle}, its run {found}"

    def _check_fold(self) -> None:
        """Assert that all packets are done when a rank arrives at the fold.

        The arrival clears the other bank of counters and tells other ranks that this rank's reads
        of their slots are over; a packet beside that chain would race with the next step.
        """
        arrival = next(p for p in range(len(self.packets)) if self._op(p) is Op.ARGMAX)
        others = packet_set(range(len(self.packets))) & ~(1 << arrival)
        for fold in (p for p in range(len(self.packets)) if self._op(p) is Op.ARGMAX_FOLD):
            others &= ~(1 << fold)
        loose = others & ~self.dag.ancestors[arrival]
        if loose:
            name = self.dag.packets[(loose & -loose).bit_length() - 1].name
            raise AssertionError(f"{self.name}: {name} may still run when the step ends")


def _in_runs(values: Sequence[int], runs: Sequence[tuple[int, ...]]) -> list[int]:
    """Return values with each run together, at its first member's place."""
    run_of = {value: run for run in runs for value in run}
    return list(dict.fromkeys(v for value in values for v in run_of.get(value, (value,))))


def _applications(packet: Packet, made_by: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Return what made any of a packet's values, and the value they are parts of."""
    found = {number for value in packet.results for number in made_by.get(value, ())}
    return tuple(sorted(found))


def build_phase(
    name: str,
    graph: Graph,
    dag: Dag,
    layout: Layout,
    handles: Handles,
    made_by: Mapping[int, tuple[int, ...]],
    peer_base: int,
) -> Phase:
    """Return one phase of the plan; its buffers are added to `handles`.

    `made_by` says which rule applications a node rests on. `peer_base` is where the phase's part of
    the peer segment starts: phases do not share peer bytes, because a rank may start the next step,
    in another phase, while a slower one still reads the last step's fold.
    Raises: K3Error where one rank's sizes do not fit together.
    """
    return _Phase(name, graph, dag, layout, handles).build(made_by, peer_base)
