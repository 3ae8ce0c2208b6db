"""Evaluate an operator graph in float64, step by step, with logical shapes and no ranks.

The graph may be the builder's or what the rewrite rules made of it: a value means the same in both.
It does not schedule, slice or shard, and it does not reproduce bits.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.isa.op_spec import OpSpec
from k3tool.isa.table import SPECS, Op
from k3tool.model.config import K3Config
from k3tool.model.nodes import Graph, Leaf, Node
from k3tool.model.operators import f32_bits, solve_sizes, units_of
from k3tool.ref.formats import Array, Step
from k3tool.ref.ops import (
    REFERENCE,
    Reference,
    keyword_names,
    operand_names,
    split_result,
)

Value = Any  # an Array, an expert leaf, or None for a state that no step has written


def exact_constants(config: K3Config) -> dict[int, float]:
    """Return the binary64 constant behind each binary32 one that a graph of this model holds.

    The graph stores what every target computes with, rounded once; the released code in float64
    does not round, which shows in the seventh digit of logits and must not be mistaken for a fault.
    """
    values = [
        *config.eps.values(),
        config.activation_situ_beta,
        config.activation_situ_linear_beta,
        config.routed_scaling_factor,
        config.linear_attn_config.gate_lower_bound,
        config.linear_attn_config.head_dim**-0.5,
        config.qk_head_dim**-0.5,
    ]
    return {f32_bits(value): value for value in values}


def f32_value(bits: int) -> float:
    """Return the number that binary32 bits stand for."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


@dataclass(slots=True)
class Sequence64:
    """One sequence on its way through a graph: its states and how many tokens they have seen.

    `ops` and `constants` are what mutants and the comparison with the released code replace.
    """

    graph: Graph
    weights: Mapping[str, Any]
    ops: Mapping[Op, Reference] = field(default_factory=lambda: REFERENCE)
    constants: Mapping[int, float] = field(default_factory=dict)
    states: dict[str, Value] = field(default_factory=dict)
    position: int = 0

    def advance(self, ids: Sequence[int]) -> dict[int, Value]:
        """Run the next tokens through the graph; return every node's value by id.

        Raises: KeyError naming a weight leaf that is absent.
        """
        step = Step(np.asarray(ids, dtype=np.int64), self.position)
        values: dict[int, Value] = {}
        for index in needed_nodes(self.graph):
            node = self.graph.nodes[index]
            values[index] = (
                self._leaf(node) if isinstance(node.op, Leaf) else self._apply(node, values, step)
            )
        self.position += len(step.ids)
        return values

    def logits(self, ids: Sequence[int]) -> Array:
        """Run the next tokens; return their logits. Shapes: ids (T,) -> (T, V)."""
        logits: Array = self.advance(ids)[logits_node(self.graph)]
        return logits

    def _leaf(self, node: Node) -> Value:
        name = str(node.attrs[0][1])
        return self.weights[name] if node.op is Leaf.WEIGHT else self.states.get(name)

    def _apply(self, node: Node, values: Mapping[int, Value], step: Step) -> Value:
        assert isinstance(node.op, Op)
        spec, reference = SPECS[node.op], self.ops[node.op]
        operands = []
        for name, index in zip(operand_names(spec), node.inputs, strict=True):
            is_peer = spec.operand(name).role == "peer"
            operands.append(values[index][None] if is_peer else values[index])
        wanted = keyword_names(reference)
        keywords = self._params(spec, node) | {"step": step}
        if "unit_cols" in wanted:
            keywords["unit_cols"] = _unit_cols(self.graph, node)
        result = reference(*operands, **{name: keywords[name] for name in wanted})
        result, states = split_result(spec, result)
        for name, state in states.items():
            leaf = node.inputs[operand_names(spec).index(name)]
            self.states[str(self.graph.nodes[leaf].attrs[0][1])] = state
        return result

    def _params(self, spec: OpSpec, node: Node) -> dict[str, Any]:
        """Return parameters by name; one rank sees the whole vocabulary, so its base is 0."""
        kinds = {param.name: param.kind for param in spec.params}
        params: dict[str, Any] = {n: 0 for n, kind in kinds.items() if kind == "u32_per_rank"}
        for name, value in node.attrs:
            bits = int(value)
            is_f32 = kinds.get(name) == "f32"
            params[name] = self.constants.get(bits, f32_value(bits)) if is_f32 else bits
        return params


def needed_nodes(graph: Graph) -> list[int]:
    """Return the nodes that the outputs depend on, in topological order."""
    needed, pending = set(graph.outputs), list(graph.outputs)
    while pending:
        for index in graph.nodes[pending.pop()].inputs:
            if index not in needed:
                needed.add(index)
                pending.append(index)
    return sorted(needed)


def logits_node(graph: Graph) -> int:
    """Return the node whose value the token is chosen from."""
    found = {node.inputs[0] for node in graph.nodes if node.op in (Op.ARGMAX, Op.ARGMAX_ALL)}
    assert len(found) == 1, f"{len(found)} nodes of logits"
    return found.pop()


def _unit_cols(graph: Graph, node: Node) -> int:
    """Return the columns of a head (or other slice unit) of a node's result."""
    assert isinstance(node.op, Op)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, index in zip(operand_names(SPECS[node.op]), node.inputs, strict=True):
        source = graph.nodes[index]
        is_weight = SPECS[node.op].operand(name).role == "weight"
        shapes[name] = graph.weight_of(index).shape if is_weight else (source.width,)
    attrs = {name: int(value) for name, value in node.attrs}
    width, sizes = solve_sizes(node.op, SPECS[node.op].name, shapes, attrs, tp=1)
    return units_of(node.op, width, sizes, max_tokens=1)[1]


def greedy(
    sequence: Sequence64, ids: Sequence[int], n_tokens: int
) -> tuple[npt.NDArray[np.int64], Array]:
    """Continue a prompt with the likeliest tokens.

    Shapes: ids (T,) -> tokens (n_tokens,), and the logits each came from (n_tokens, V).
    """
    rows, tokens = [], []
    feed = list(ids)
    for _ in range(n_tokens):
        rows.append(sequence.logits(feed)[-1])
        tokens.append(int(np.argmax(rows[-1])))
        feed = [tokens[-1]]
    return np.array(tokens), np.stack(rows)
