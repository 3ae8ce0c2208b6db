"""The bytes that a packet moves on one rank: from its record and the handle table, at full context.

Weights, states and activations count once per packet, however many slices read them: repeats come
from a cache, and `reread_bytes` counts them. Experts count as far as the router can pick them, an
embedding by its rows.
"""

from collections.abc import Sequence
from typing import Any

from k3tool.compiler.plan import EXPERT_ROLES, Tensor
from k3tool.compiler.record_checks import handles_of
from k3tool.isa.access import accesses
from k3tool.isa.columns import spec_of
from k3tool.isa.table import PAGE_TOKENS, ROW_LOOKUPS, Op


def traffic_bytes(packet: Any, tensors: Sequence[Tensor], max_tokens: int, n_ranks: int) -> int:
    """Return the bytes one rank reads and writes for a packet in a full step."""
    spec = spec_of(int(packet["op"]))
    assert spec is not None, packet["op"]
    handles = handles_of(spec, packet["handles"].tolist())
    words = dict(zip((p.name for p in spec.params), packet["params"].tolist(), strict=False))
    total = 0
    for operand in spec.operands:
        if operand.role == "weight":
            tensor = tensors[handles[operand.name]]
            total += weight_traffic(spec.op, tensor, words.get("top_k", 0), max_tokens)
        elif operand.role == "state":
            in_place = spec.output.name == operand.name
            total += state_traffic(tensors[handles[operand.name]], in_place, max_tokens)
    for access in accesses(packet, tensors):
        tensor = tensors[access.handle]
        if tensor.role != "state" and not tensor.is_weight:
            total += (access.byte1 - access.byte0) * (n_ranks if access.every_rank else 1)
    return total


def reread_bytes(packet: Any, slices: int, tensors: Sequence[Tensor], max_tokens: int) -> int:
    """Return the bytes that `slices` slices read beyond the packet's own, in a full step.

    Two kinds (the op table says which operands): what every slice reads whole counts for all slices
    but one, as often as its body reads it; a slice's own part of a weight that it reads again for
    every token counts for all tokens but one.
    """
    spec = spec_of(int(packet["op"]))
    assert spec is not None, packet["op"]
    total = 0
    handles = handles_of(spec, packet["handles"].tolist())
    reads = {access.operand: access.byte1 - access.byte0 for access in accesses(packet, tensors)}
    for operand in spec.operands:
        size = reads.get(operand.name, tensors[handles[operand.name]].n_bytes)
        times = spec.whole.get(operand.name, 0)
        total += size * max(0, slices * times - 1) if times else 0
        total += size * (max_tokens - 1) if operand.name in spec.again else 0
    return total


def state_traffic(tensor: Tensor, in_place: bool, max_tokens: int) -> int:
    """Return the bytes of a state that a step moves.

    A latent cache is appended to by the op whose result it is and read whole by the others; what
    lives per slot is read and written.
    """
    pages, rows, *rest = tensor.local
    if rest and rows == PAGE_TOKENS:
        return tensor.n_bytes * max_tokens // (pages * rows) if in_place else tensor.n_bytes
    return 2 * tensor.n_bytes


def weight_traffic(op: Op, tensor: Tensor, top_k: int, max_tokens: int) -> int:
    """Return the bytes of a weight that a step of `max_tokens` tokens touches at most."""
    rows = tensor.local[0]
    if tensor.role in EXPERT_ROLES:
        return tensor.n_bytes * min(rows, top_k * max_tokens) // rows
    if op in ROW_LOOKUPS:
        return tensor.n_bytes * min(rows, max_tokens) // rows
    return tensor.n_bytes
