"""A hash-consed operator graph: nodes, the leaves they read, and nothing of any particular model.

Equal (op, inputs, attributes) is one node, so sharing is identity. Node ids are in topological
order. Sizes and placements are inferred as nodes are added; a node that does not fit is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from k3tool.errors import K3Error
from k3tool.isa.table import SPECS, Op
from k3tool.model.operators import (
    Placement,
    attr_names,
    input_operands,
    place,
    result_widths,
    solve_sizes,
)


class Leaf(StrEnum):
    """Say what a node without inputs stands for."""

    WEIGHT = "weight"
    STATE = "state"  # lives across steps, one row per sequence slot or page
    BLOCKS = "blocks"  # the empty stack of finished AttnRes blocks: lives for one step


class Node(NamedTuple):
    """One value: what makes it, from what.

    `attrs` are (name, value) in the order of `attr_names`, f32 as bits; a leaf's only one is its
    name. `width` is elements per token over all ranks, 0 for weights and states.
    """

    op: Op | Leaf
    inputs: tuple[int, ...]
    attrs: tuple[tuple[str, int | str], ...]
    width: int
    placement: Placement


class WeightLeaf(NamedTuple):
    """One weight as the graph sees it: all experts of a matrix in a layer are one leaf.

    `shape` is logical ([experts, rows, columns] for experts), without padding; `local_shape` one
    rank's part, the same on every rank. `source` is the stored tensor's full name; an expert leaf's
    holds `{E}` and lacks `.weight_packed` and `.weight_scale`.
    """

    leaf: str
    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    split: str
    source: str


class StateLeaf(NamedTuple):
    """One tensor that lives across steps: `rows` of `shape`, `rows` being "slots" or "pages".

    `sharded_axis` is the axis of `shape` that is divided over ranks, None if each rank has it all.
    """

    name: str
    rows: str
    shape: tuple[int, ...]
    sharded_axis: int | None


@dataclass(slots=True)
class Graph:
    """The nodes of one model in topological order. `outputs` are the ids that must be computed."""

    weights: Mapping[str, WeightLeaf]
    nodes: list[Node] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    states: dict[str, StateLeaf] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    n_blocks: int = 0  # depth of the AttnRes stack
    pages: int = 1  # of latent cache that a sequence may fill
    _index: dict[tuple[object, ...], int] = field(default_factory=dict)

    def leaf(self, kind: Leaf, name: str, width: int = 0) -> int:
        """Return the node of a leaf. Raises: K3Error if the weight table has no such weight."""
        if kind is Leaf.WEIGHT and name not in self.weights:
            raise K3Error(f"operator graph: {name}", got="no such leaf", need="a known weight")
        return self._intern(Node(kind, (), (("name", name),), width, "replicated"), name)

    def state(self, state: StateLeaf) -> int:
        """Return the node of a state, declaring it on first use."""
        assert self.states.setdefault(state.name, state) == state, state.name
        return self.leaf(Leaf.STATE, state.name)

    def add(self, op: Op, name: str, inputs: Sequence[int], **attrs: int) -> int:
        """Return the node (op, inputs, attrs), made if it is new; `name` is for people.

        A flag that is left out is 0.
        Raises: K3Error naming the node where sizes or placements do not fit.
        """
        attrs = dict.fromkeys(SPECS[op].flags, 0) | attrs
        wanted = attr_names(op)
        assert set(attrs) == set(wanted), f"{op.name}: attributes {sorted(attrs)}, need {wanted}"
        ordered = tuple((key, attrs[key]) for key in wanted)
        key = (op, tuple(inputs), ordered)
        if key in self._index:
            return self._index[key]
        width, placement = self._infer(op, name, inputs, attrs)
        return self._intern(Node(op, tuple(inputs), ordered, width, placement), name)

    def _intern(self, node: Node, name: str) -> int:
        key = (node.op, node.inputs, node.attrs)
        if key not in self._index:
            self._index[key] = len(self.nodes)
            self.nodes.append(node)
            self.names.append(name)
        return self._index[key]

    def _infer(
        self, op: Op, name: str, inputs: Sequence[int], attrs: Mapping[str, int]
    ) -> tuple[int, Placement]:
        if op is Op.PART:
            return self._part(inputs[0], attrs["index"])
        if op is Op.DEQUANT_MXFP4:
            return 0, "replicated"  # as the weight it is made of
        operands = input_operands(op)
        assert len(operands) == len(inputs), f"{op.name}: {len(inputs)} inputs"
        shapes: dict[str, tuple[int, ...]] = {}
        splits: dict[str, str] = {}
        placements = []
        for operand, node_id in zip(operands, inputs, strict=True):
            assert node_id < len(self.nodes), f"{name}: input {node_id} does not exist"
            node = self.nodes[node_id]
            if operand.role == "weight":
                weight = self.weight_of(node_id)
                shapes[operand.name], splits[operand.name] = weight.shape, weight.split
            elif operand.role != "state":
                shapes[operand.name] = (node.width,)
                placements.append((operand, node.placement))
        width, _ = solve_sizes(op, name, shapes, attrs, tp=1)
        return width, place(op, name, placements, splits)

    def _part(self, group: int, index: int) -> tuple[int, Placement]:
        """Return width and place of one value of a group of linears: those of its own weight."""
        node = self.nodes[group]
        assert isinstance(node.op, Op), node
        shapes: dict[str, tuple[int, ...]] = {}
        splits = {}
        for operand, value in zip(input_operands(node.op), node.inputs, strict=True):
            if operand.role == "weight":
                weight = self.weight_of(value)
                shapes[operand.name], splits[operand.name] = weight.shape, weight.split
            else:
                shapes[operand.name] = (self.nodes[value].width,)
        attrs = {key: int(value) for key, value in node.attrs}
        _, sizes = solve_sizes(node.op, self.names[group], shapes, attrs, tp=1)
        assert len(SPECS[node.op].outputs) > 1, f"{self.names[group]} is no group"
        sharded = splits[f"w{index}"] == "rows"
        return result_widths(node.op, sizes)[index], "sharded" if sharded else "replicated"

    def weight_of(self, node_id: int) -> WeightLeaf:
        """Return the weight a node stands for, itself or in numbers. Raises: K3Error for none."""
        node = self.nodes[node_id]
        if node.op is Op.DEQUANT_MXFP4:
            return self.weight_of(node.inputs[0])
        if node.op is not Leaf.WEIGHT:  # of a file's packet, that takes another operand for one
            raise K3Error(self.names[node_id], got="no weight", need="a weight of the model")
        return self.weights[str(node.attrs[0][1])]

    def claimed_weights(self) -> set[str]:
        """Return the leaf names of all weights that nodes read."""
        return {str(node.attrs[0][1]) for node in self.nodes if node.op is Leaf.WEIGHT}
