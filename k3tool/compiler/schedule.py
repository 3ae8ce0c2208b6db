"""From an operator graph to the packets of one phase: order, sizes, slices, waits, buffers.

One op node is one packet. Order is by level (longest way from the inputs), so that a workgroup's
queue, which is in packet order, seldom waits in front of work that is ready; correctness rests on
waits alone. Batch, chunk and context enter only as buffer sizes.

It does not choose ops (rules and extraction do) and does not know the device record.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
    FLAG_DIGEST,
    FLAG_REARM,
    GATE,
    PACKET_DTYPE,
    WAIT_DTYPE,
    Phase,
    Records,
    Tensor,
    n_slices,
)
from k3tool.isa.table import N_HANDLES, NO_HANDLE, SPECS, Op
from k3tool.model.nodes import Graph, Leaf, Node
from k3tool.model.operators import input_operands, params_of, solve_sizes, units_of

F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The options that size packets: ranks, workgroups, tokens in a step of this phase."""

    tp: int
    workgroups: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Dag:
    """Packets as a graph: node of each packet, its producers, all its ancestors as a set."""

    nodes: tuple[int, ...]
    producers: tuple[tuple[int, ...], ...]  # transitively reduced
    ancestors: tuple[int, ...]
    depth: tuple[int, ...]  # packets on the longest chain that ends here


# -- order ---------------------------------------------------------------------------------------


def packet_dag(graph: Graph) -> Dag:
    """Return the packets that the graph's outputs need, in level order, with their producers."""
    needed = _reachable(graph)
    inputs = {
        node: sorted({i for i in graph.nodes[node].inputs if i in needed}) for node in needed
    }
    level, height = _levels(needed, inputs)
    order = sorted(needed, key=lambda node: (level[node], -height[node], node))
    position = {node: packet for packet, node in enumerate(order)}
    ancestors: list[int] = []
    producers: list[tuple[int, ...]] = []
    for node in order:
        direct = sorted(position[i] for i in inputs[node])
        above = [ancestors[packet] for packet in direct]
        covered = 0
        for bits in above:
            covered |= bits
        producers.append(tuple(packet for packet in direct if not covered >> packet & 1))
        ancestors.append(covered | packet_set(direct))
    depth = tuple(level[node] for node in order)
    return Dag(tuple(order), tuple(producers), tuple(ancestors), depth)


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


def _levels(
    needed: Sequence[int], inputs: Mapping[int, Sequence[int]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return each node's longest way from the inputs and to the outputs, in nodes."""
    level: dict[int, int] = {}
    height = dict.fromkeys(needed, 1)
    for node in needed:
        level[node] = 1 + max((level[i] for i in inputs[node]), default=0)
    for node in reversed(needed):
        for i in inputs[node]:
            height[i] = max(height[i], height[node] + 1)
    return level, height


# -- handles ---------------------------------------------------------------------------------------


class Handles:
    """The handle table while it grows: weights and states first, then each phase's buffers."""

    def __init__(self, graph: Graph, tp: int, slots: int, pages: int) -> None:
        """Enter the weights that the graph reads, in table order, then its states by name."""
        self.tensors: list[Tensor] = []
        self.index: dict[str, int] = {}
        claimed = graph.claimed_weights()
        for weight in graph.weights.values():
            if weight.leaf in claimed:
                role = "experts" if weight.dtype == "mxfp4" else "weight"
                shapes = weight.shape, weight.local_shape
                n_bytes = weight_bytes(weight.dtype, weight.local_shape)
                row = Tensor(weight.leaf, role, weight.dtype, *shapes, n_bytes, leaf=weight.leaf)
                self.add(row._replace(source=weight.source, split=weight.split))
        for name in sorted(graph.states):
            state = graph.states[name]
            part = [
                size // tp if axis == state.sharded_axis else size
                for axis, size in enumerate(state.shape)
            ]
            rows = slots if state.rows == "slots" else pages
            n_bytes = rows * math.prod(part) * F32_BYTES
            self.add(Tensor(name, "state", "f32", (rows, *state.shape), (rows, *part), n_bytes))

    def add(self, tensor: Tensor) -> int:
        """Return the handle of a new tensor."""
        assert tensor.name not in self.index, tensor.name
        self.index[tensor.name] = len(self.tensors)
        self.tensors.append(tensor)
        return self.index[tensor.name]


def weight_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the stored bytes of one rank's part; MXFP4: packed values plus a scale per 32."""
    elements = math.prod(shape)
    sizes = {"bf16": elements * 2, "f32": elements * 4, "mxfp4": elements // 2 + elements // 32}
    return sizes[dtype]


# -- packets ---------------------------------------------------------------------------------------


class _Phase:
    """Builds one phase; its steps run in the order of `build`."""

    def __init__(self, name: str, graph: Graph, dag: Dag, shape: Shape, handles: Handles) -> None:
        self.name, self.graph, self.dag, self.shape = name, graph, dag, shape
        self.handles = handles
        self.position = {node: packet for packet, node in enumerate(dag.nodes)}
        self.readers = self._readers()
        self.width: dict[int, int] = {}  # of a node's result on one rank
        self.handle: dict[int, int] = {}  # of a node's result
        self.packets = np.zeros(len(dag.nodes), PACKET_DTYPE)

    def _readers(self) -> dict[int, list[tuple[int, str, str]]]:
        """Return for each node its (packet, operand, operand role) readers."""
        readers: dict[int, list[tuple[int, str, str]]] = defaultdict(list)
        for packet, node_id in enumerate(self.dag.nodes):
            node = self.graph.nodes[node_id]
            assert isinstance(node.op, Op)
            for operand, value in zip(input_operands(node.op), node.inputs, strict=True):
                readers[value].append((packet, operand.name, operand.role))
        return readers

    def build(self, rules: Mapping[int, str], peer_base: int) -> Phase:
        self._sizes()
        peers = self._peer_nodes()
        arena_bytes, peer_bytes = self._buffers(peers, peer_base)
        self._counters(peers)
        waits = self._waits()
        for packet, node_id in enumerate(self.dag.nodes):
            self._operands(packet, self.graph.nodes[node_id])
        self._check_fold()
        depth = max(self.dag.depth)
        return Phase(
            name=self.name,
            max_tokens=self.shape.max_tokens,
            packets=self.packets,
            waits=waits,
            rules=tuple(rules.get(node, "") for node in self.dag.nodes),
            n_gates=len(peers),
            arena_bytes=arena_bytes,
            peer_bytes=peer_bytes,
            packet_path=depth,
            critical_path=depth,  # no packet waits inside itself yet
        )

    # -- sizes and slices --------------------------------------------------------------------------

    def _sizes(self) -> None:
        """Solve each packet's sizes for one rank; a split that does not fit is refused here."""
        for leaf in (i for i, node in enumerate(self.graph.nodes) if node.op is Leaf.BLOCKS):
            self.width[leaf] = self.graph.nodes[leaf].width
        shape = self.shape
        for packet, node_id in enumerate(self.dag.nodes):
            node = self.graph.nodes[node_id]
            assert isinstance(node.op, Op)
            spec, attrs = SPECS[node.op], {k: int(v) for k, v in node.attrs}
            shapes = self._local_shapes(node)
            width, sizes = solve_sizes(
                node.op, self.graph.names[node_id], shapes, attrs, tp=shape.tp
            )
            ranks = shape.tp if node.placement == "sharded" else 1
            assert width * ranks == node.width, (self.graph.names[node_id], width, node)
            self.width[node_id] = width
            row = self.packets[packet]
            row["op"] = int(node.op)
            row["width"] = width
            row["n_units"], row["unit_cols"] = units_of(node.op, width, sizes, shape.max_tokens)
            words = params_of(node.op, attrs, sizes, shape.tp)
            row["params"][: len(words)] = words
            row["grain"] = spec.grain
            row["n_slices"] = n_slices(int(row["n_units"]), spec.grain, shape.workgroups)
            if node.placement == "replicated" and spec.output.role == "out":
                row["flags"] |= FLAG_DIGEST
            if node.op is Op.ARGMAX:
                row["flags"] |= FLAG_REARM

    def _local_shapes(self, node: Node) -> dict[str, tuple[int, ...]]:
        assert isinstance(node.op, Op)
        shapes: dict[str, tuple[int, ...]] = {}
        for operand, value in zip(input_operands(node.op), node.inputs, strict=True):
            if operand.role == "weight":
                shapes[operand.name] = self.graph.weight_of(value).local_shape
            elif operand.role != "state":
                shapes[operand.name] = (self.width[value],)
        return shapes

    # -- buffers -----------------------------------------------------------------------------------

    def _peer_nodes(self) -> list[int]:
        """Return the nodes whose results cross ranks, in packet order."""
        peers = []
        for node in self.dag.nodes:
            roles = {role for _, _, role in self.readers[node]}
            if "peer" in roles:
                assert len(self.readers[node]) == 1, f"{self.graph.names[node]}: two collectives"
                peers.append(node)
        return peers

    def _buffers(self, peers: Sequence[int], peer_base: int) -> tuple[int, int]:
        """Give every result a handle; return the bytes of the arena and of the peer segment."""
        dag, arena, arena_nodes, in_place = self.dag, [], [], {}
        for packet, node_id in enumerate(dag.nodes):
            node = self.graph.nodes[node_id]
            assert isinstance(node.op, Op)
            output = SPECS[node.op].output
            if output.role != "out":
                operands = [operand.name for operand in input_operands(node.op)]
                in_place[node_id] = node.inputs[operands.index(output.name)]
            elif node_id not in peers and self._role(node_id) == "arena":
                users = packet_set([packet, *(reader for reader, _, _ in self.readers[node_id])])
                arena.append(Buffer(self.graph.names[node_id], self._bytes(node_id), packet, users))
                arena_nodes.append(node_id)
        self._stack(arena, arena_nodes, in_place)
        offsets, arena_bytes = place_arena(arena, dag.ancestors)
        clash = check_arena(arena, offsets, dag.ancestors)
        assert clash is None, f"{self.name}: {clash} share bytes while both are in use"
        uses = [self._peer_use(node) for node in peers]
        places, peer_bytes = place_peers(uses, dag.ancestors, peer_base)
        clash = check_peers(uses, places, dag.ancestors)
        assert clash is None, f"{self.name}: {clash} share a peer slot before all ranks read it"
        offset_of = dict(zip(arena_nodes, offsets, strict=True))
        offset_of |= dict(zip(peers, places, strict=True))
        for node_id in dag.nodes:
            if node_id not in in_place:
                self._add_buffer(node_id, "peer" if node_id in peers else "", offset_of)
        self._add_in_place(in_place, offset_of)
        return arena_bytes, peer_bytes

    def _role(self, node: int) -> str:
        if node in self.graph.outputs:
            return "output"
        argmax = [p for p, name, _ in self.readers[node] if self._op(p) is Op.ARGMAX]
        return "logits" if argmax else "arena"

    def _op(self, packet: int) -> Op:
        op = self.graph.nodes[self.dag.nodes[packet]].op
        assert isinstance(op, Op)
        return op

    def _bytes(self, node: int) -> int:
        return self.shape.max_tokens * self.width[node] * F32_BYTES

    def _stack(
        self, arena: list[Buffer], nodes: list[int], in_place: Mapping[int, int]
    ) -> None:
        """Enter the AttnRes stack as one buffer: pushes write its rows, mixes read some of them."""
        for leaf, node in enumerate(self.graph.nodes):
            if node.op is not Leaf.BLOCKS:
                continue
            versions = [leaf]
            for push, before in sorted(in_place.items()):
                if before in versions:  # a push of a push: a comprehension would see only the first
                    versions.append(push)
            users = {self.position[push] for push in versions[1:]}
            users |= {packet for v in versions for packet, _, _ in self.readers[v]}
            size = self.graph.n_blocks * self.shape.max_tokens * node.width * F32_BYTES
            name = self.graph.names[leaf]
            arena.append(Buffer(name, size, min(users), packet_set(sorted(users))))
            nodes.append(leaf)
        order = sorted(range(len(arena)), key=lambda i: arena[i].writer)
        arena[:], nodes[:] = [arena[i] for i in order], [nodes[i] for i in order]

    def _peer_use(self, node: int) -> PeerUse:
        (reader, operand, _) = self.readers[node][0]
        kind = f"{self._op(reader).name}.{operand}"
        writer = self.position[node]
        return PeerUse(self.graph.names[node], kind, self._bytes(node), writer, reader)

    def _add_buffer(self, node: int, role: str, offset_of: Mapping[int, int]) -> None:
        tokens, name = self.shape.max_tokens, f"{self.name}/{self.graph.names[node]}"
        logical, local = (tokens, self.graph.nodes[node].width), (tokens, self.width[node])
        role, dtype = role or self._role(node), "f32"
        if self.graph.nodes[node].op is Op.ROUTER_TOPK:
            dtype = "u32"  # expert ids first; the weights behind them are f32 bits
        offset, size = offset_of.get(node, 0), self._bytes(node)
        row = Tensor(name, role, dtype, logical, local, size, offset, self.name)
        self.handle[node] = self.handles.add(row)

    def _add_in_place(self, in_place: Mapping[int, int], offset_of: Mapping[int, int]) -> None:
        """Give leaves that are updated, and every version of them, one handle each."""
        for leaf, node in enumerate(self.graph.nodes):
            if node.op is Leaf.BLOCKS and leaf in offset_of:
                shape = (self.graph.n_blocks, self.shape.max_tokens, node.width)
                name = f"{self.name}/{self.graph.names[leaf]}"
                size, offset = math.prod(shape) * F32_BYTES, offset_of[leaf]
                row = Tensor(name, "arena", "f32", shape, shape, size, offset, self.name)
                self.handle[leaf] = self.handles.add(row)
            elif isinstance(node.op, Leaf):
                self.handle[leaf] = self.handles.index.get(str(node.attrs[0][1]), NO_HANDLE)
        for version, before in sorted(in_place.items()):
            self.handle[version] = self.handle[before]

    # -- counters ----------------------------------------------------------------------------------

    def _counters(self, peers: Sequence[int]) -> None:
        """Give each packet its counter: its own, or a gate that all ranks' slices arrive at."""
        gates = {self.position[node]: gate for gate, node in enumerate(peers)}
        for packet, row in enumerate(self.packets):
            gate = gates.get(packet)
            row["counter"] = packet if gate is None else GATE | gate
            row["threshold"] = row["n_slices"] * (1 if gate is None else self.shape.tp)

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

    def _operands(self, packet: int, node: Node) -> None:
        assert isinstance(node.op, Op)
        values = iter(node.inputs)
        handles = self.packets[packet]["handles"]
        handles[:] = [NO_HANDLE] * N_HANDLES
        for slot, operand in enumerate(SPECS[node.op].operands):
            value = self.dag.nodes[packet] if operand.role == "out" else next(values)
            handles[slot] = self.handle[value]
            assert self.handle[value] != NO_HANDLE, (self.graph.names[value], operand)

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
            name = self.graph.names[self.dag.nodes[(loose & -loose).bit_length() - 1]]
            raise AssertionError(f"{self.name}: {name} may still run when the step ends")


def build_phase(
    name: str,
    graph: Graph,
    dag: Dag,
    shape: Shape,
    handles: Handles,
    rules: Mapping[int, str],
    peer_base: int,
) -> Phase:
    """Return one phase of the plan; its buffers are added to `handles`.

    `rules` says for a node which rewrite rules made it. `peer_base` is where the phase's part of
    the peer segment starts: phases do not share peer bytes, because a rank may start the next step,
    in another phase, while a slower one still reads the last step's fold.
    Raises: K3Error where one rank's sizes do not fit together.
    """
    return _Phase(name, graph, dag, shape, handles).build(rules, peer_base)
