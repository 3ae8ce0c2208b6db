"""Which layer a packet belongs to, and how many hand-offs of the longest chain each layer has."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from k3tool.compiler.order import Order, depths, waited_for
from k3tool.compiler.plan import Plan, Tensor
from k3tool.compiler.record_checks import handles_of
from k3tool.isa.columns import spec_of
from k3tool.isa.table import Op

Array = npt.NDArray[Any]
OUTSIDE = -1  # the layer of what is in none: embedding and head
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class ChainLink(NamedTuple):
    """One packet of the longest chain, in order: its op, its layer or OUTSIDE, its hand-offs."""

    op: str
    layer: int
    handoffs: int


def packet_layers(packets: Array, tensors: Sequence[Tensor]) -> list[int]:
    """Return the layer of each packet, OUTSIDE for none.

    Shapes: packets (P,) rows -> P numbers, from 0. A fused packet has operands of two layers: it
    belongs to that of its weights, without weights to that of its result.
    """
    found = []
    for packet in packets:
        spec = spec_of(int(packet["op"]))
        assert spec is not None, packet["op"]
        handles = handles_of(spec, packet["handles"].tolist())
        weights = [_layer_of(t) for t in map(tensors.__getitem__, handles.values()) if t.is_weight]
        results = [_layer_of(tensors[handles[operand.name]]) for operand in spec.outputs]
        found.append(max(weights, default=OUTSIDE) if weights else max(results, default=OUTSIDE))
    return found


def _layer_of(tensor: Tensor) -> int:
    match = _LAYER.search(tensor.leaf or tensor.name)
    return OUTSIDE if match is None else int(match[1])


def longest_chain(plan: Plan, phase_name: str) -> list[ChainLink]:
    """Return one longest chain of a phase from its first packet to its last.

    Its hand-offs add up to the plan's critical path. Of several chains that are as long the one
    through later packets is taken.
    """
    phase = plan.phases[phase_name]
    order = Order(plan, phase)
    handoffs = depths(order)[1]
    layers = packet_layers(phase.packets, plan.tensors)
    at: int | None = max(range(len(handoffs)), key=lambda index: (handoffs[index], index))
    chain = []
    while at is not None:
        before = waited_for(order, at)
        last = max(before, key=lambda index: (handoffs[index], index), default=None)
        own = handoffs[at] - (0 if last is None else handoffs[last])
        chain.append(ChainLink(Op(int(phase.packets["op"][at])).name, layers[at], own))
        at = last
    return chain[::-1]
