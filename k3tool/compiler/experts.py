"""Who chooses experts, and whether a fetch brings what its readers choose.

An EXPERT_FETCH makes the router's choice by itself, from the same scores and bias as the packets
that use it. One that chose anything else would leave its readers without their experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from k3tool.compiler.order import Ordering
from k3tool.compiler.plan import EXPERT_ROLES, Records, Tensor
from k3tool.compiler.ring import spec_of_row, weights_of
from k3tool.isa.access import paged_bytes
from k3tool.isa.table import Op

EXPERT_OPERANDS = ("w1", "w3", "w2")  # of an EXPERT_FETCH: the order in a slot


class Choice(NamedTuple):
    """What makes a router's choice: handles of scores and bias, how many of how many experts.

    `written` is how often the scores had been written: a later value of the buffer chooses others.
    """

    scores: int
    bias: int
    top_k: int
    n_experts: int
    written: int = 1


class ExpertRow(NamedTuple):
    """A row that chooses experts: which, of which tensors, and whether it brings or reads them."""

    at: int
    choice: Choice | None  # None: by a route that no router has made
    matrices: tuple[int, ...]
    is_fetch: bool


def expert_rows(rows: Records, tensors: Sequence[Tensor]) -> Iterator[ExpertRow]:
    """Yield the rows that bring or read experts, in order; every handle has a tensor."""
    written: dict[int, int] = {}
    routers: dict[int, Choice] = {}  # by the handle of the route
    for index, row in enumerate(rows):
        spec = spec_of_row(row)
        slots = spec.handles(row["handles"].tolist())
        handles = dict(zip((o.name for o in spec.operands), slots, strict=True))
        words = dict(zip((p.name for p in spec.params), row["params"].tolist(), strict=False))
        is_fetch = spec.op is Op.EXPERT_FETCH
        experts = [h for h in weights_of(row) if tensors[h].role in EXPERT_ROLES]
        if is_fetch:
            experts = [handles[name] for name in EXPERT_OPERANDS]
        if experts and "route" in handles:
            yield ExpertRow(index, routers.get(handles["route"]), tuple(experts), is_fetch)
        elif experts:
            own = _choice(handles, "scores", words, written) if "scores" in handles else None
            yield ExpertRow(index, own, tuple(experts), is_fetch)
        for operand, handle in zip(spec.operands, slots, strict=True):
            if operand.role == "out":
                written[handle] = written.get(handle, 0) + 1
        if spec.op is Op.ROUTER_TOPK:
            routers[handles["y"]] = _choice(handles, "logits", words, written)


def _choice(
    handles: Mapping[str, int], scores: str, words: Mapping[str, int], written: Mapping[int, int]
) -> Choice:
    handle = handles[scores]
    times = written.get(handle, 0)
    return Choice(handle, handles["bias"], words["top_k"], words["n_experts"], times)


def fetch_faults(c: Ordering) -> Iterator[str]:
    """Yield fetches that choose otherwise than the rows that read what they bring."""
    if any(h >= len(c.tensors) for row in c.rows for h in _handles(row)):
        return  # the order check names it
    brought: dict[int, ExpertRow] = {}  # by the handle of a matrix
    for row in expert_rows(c.rows, c.tensors):
        if row.is_fetch:
            brought |= dict.fromkeys(row.matrices, row)
            continue
        for fetch in {brought[h].at: brought[h] for h in row.matrices if h in brought}.values():
            if fetch.choice != row.choice:
                got, need = (_words(choice, c.tensors) for choice in (fetch.choice, row.choice))
                yield f"{c.name(fetch.at)}: fetches {got}, {c.name(row.at)} reads {need}"


def _handles(row: Any) -> tuple[int, ...]:
    return spec_of_row(row).handles(row["handles"].tolist())


def _words(choice: Choice | None, tensors: Sequence[Tensor]) -> str:
    if choice is None:
        return "what no router chose"
    names = (
        f"{tensors[choice.scores].name} (value {choice.written}) and {tensors[choice.bias].name}"
    )
    return f"{choice.top_k} of {choice.n_experts} by {names}"


def slot_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the pages of an expert whose six parts lie apart, the largest layer's."""
    largest = 0
    for tensor in tensors:
        if tensor.role in EXPERT_ROLES and len(tensor.local) == 3:  # others fail C tensors
            rows, cols = tensor.local[1:]
            largest = max(largest, paged_bytes(rows * cols // 2) + paged_bytes(rows * cols // 32))
    return len(EXPERT_OPERANDS) * largest
