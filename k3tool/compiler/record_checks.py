"""What a record must satisfy given the handle table: sizes, units, parameters, bytes of tensors.

The sizes of an op hang together in one way (``model.operators.SIZES``), so width, units and derived
parameters are solved again here from the tensors that the record names and compared to its words.
It serves plans and emitted streams alike and knows nothing of waits.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from k3tool.compiler.experts import fetch_faults
from k3tool.compiler.handles import weight_bytes
from k3tool.compiler.memory import ALIGN_BYTES
from k3tool.compiler.order import Ordering
from k3tool.compiler.plan import EXPERT_ROLES, Tensor, n_slices
from k3tool.compiler.residency import load_faults
from k3tool.errors import K3Error
from k3tool.isa.columns import PACKET_DIGEST, PACKET_REARM, spec_of
from k3tool.isa.op_spec import Operand, OpSpec
from k3tool.isa.queues import Crew, kinds_of
from k3tool.isa.table import IO_PAGE_BYTES, PAGE_TOKENS, Op
from k3tool.model.operators import input_operands, params_of, record_attrs, solve_sizes, units_of

_DENSE, _EXPERTS = ("bf16", "f32"), ("mxfp4",)
_WEIGHT_DTYPES = {"weight": _DENSE, "ring": _DENSE, "experts": _EXPERTS, "slots": _EXPERTS}


class ShortState(NamedTuple):
    """A state with fewer pages or slots than batch and context ask for."""

    name: str
    unit: str
    got: int
    need: int


def short_states(tensors: Sequence[Tensor], params: Mapping[str, Any]) -> Iterator[ShortState]:
    """Yield states that the page table would reach past: op bodies index them without looking."""
    n_slots = int(params["batch"])
    n_pages = n_slots * -(-int(params["ctx"]) // PAGE_TOKENS)
    for tensor in tensors:
        if tensor.role != "state":
            continue
        need, unit = (n_pages, "pages") if is_paged(tensor) else (n_slots, "slots")
        if tensor.local[0] < need:
            yield ShortState(tensor.name, unit, int(tensor.local[0]), need)


def is_paged(state: Tensor) -> bool:
    """Return whether a state is a latent cache, with rows by position; others have one by slot."""
    return len(state.local) == 3 and state.local[1] == PAGE_TOKENS


def state_faults(tensors: Sequence[Tensor], params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the same as sentences."""
    for state in short_states(tensors, params):
        yield f"{state.name}: {state.got} {state.unit}, batch and ctx need {state.need}"


def tensor_faults(tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yield what is wrong with rows of the handle table: places, roles, dtypes, a shape's bytes."""
    for handle, tensor in enumerate(tensors):
        yield from _place_faults(handle, tensor)
        yield from _label_faults(handle, tensor)
        allowed = _WEIGHT_DTYPES.get(tensor.role, ("f32", "u32"))
        if tensor.dtype not in allowed:
            need = " or ".join(allowed)
            yield f"tensor {handle} ({tensor.name}) is {tensor.dtype}, a {tensor.role} is {need}"
            continue
        if tensor.role in EXPERT_ROLES and len(tensor.local) != 3:
            yield f"tensor {handle} ({tensor.name}) has {len(tensor.local)} axes, experts have 3"
            continue
        kind = "f32" if tensor.dtype == "u32" else tensor.dtype
        need_bytes = weight_bytes(kind, tensor.local)
        if tensor.n_bytes != need_bytes:
            yield (
                f"tensor {handle} ({tensor.name}) has {tensor.n_bytes} bytes, {tensor.dtype} of "
                f"{list(tensor.local)} has {need_bytes}"
            )


def _place_faults(handle: int, tensor: Tensor) -> Iterator[str]:
    """A buffer of the arena or a peer segment begins on its alignment; others lie by themselves.

    A load of several words would trap on a GPU, and two ranks could write one cache line.
    """
    at = f"tensor {handle} ({tensor.name})"
    if tensor.role in ("arena", "peer"):
        if tensor.offset % ALIGN_BYTES:
            yield f"{at} begins at byte {tensor.offset}, need a multiple of {ALIGN_BYTES}"
    elif tensor.role == "ring":
        if tensor.offset % IO_PAGE_BYTES:
            yield f"{at} begins at byte {tensor.offset}, need a multiple of {IO_PAGE_BYTES}"
    elif tensor.offset and tensor.role != "slots":
        yield f"{at} begins at byte {tensor.offset}, a {tensor.role} has a place of its own"
    if (tensor.is_weight or tensor.role == "state") and tensor.phase:
        yield f"{at} belongs to phase {tensor.phase}, a {tensor.role} outlives phases"


def _label_faults(handle: int, tensor: Tensor) -> Iterator[str]:
    """A weight is named by its leaf, a buffer by its phase; only a weight is stored and split."""
    at = f"tensor {handle} ({tensor.name})"
    if tensor.is_weight:
        if tensor.name != tensor.leaf:
            yield f"{at} is the weight {tensor.leaf}"
        return
    if not tensor.name.startswith(tensor.phase) or tensor.name == tensor.phase:
        yield f"{at}, need a name that begins with its phase, {tensor.phase or 'none'}"
    for name in ("leaf", "source", "split"):
        if getattr(tensor, name):
            yield f"{at} has {name} {getattr(tensor, name)}, a {tensor.role} is not stored"


def record_faults(c: Ordering, max_tokens: int, tp: int, rank_of_params: int) -> Iterator[str]:
    """Yield each row whose words are not what its tensors' sizes make them.

    `rank_of_params` multiplies per-rank parameters: 1 for a plan, whose words are strides.
    """
    for index, row in enumerate(c.rows):
        for fault in _row_faults(row, c.tensors, max_tokens, tp, rank_of_params):
            yield f"{c.name(index)}: {fault}"
    yield from fetch_faults(c)


def tile_units(row: Any) -> int:
    """Return the units of a tile: the op's grain, of which neighbouring columns may be one."""
    spec = spec_of(int(row["op"]))
    assert spec is not None, row["op"]
    joined = int(row["unit_cols"]) if spec.unit in ("column", "channel") else 1
    return max(1, spec.grain // max(1, joined))


def cut_faults(row: Any, crew: Crew) -> Iterator[str]:
    """Yield how a packet is cut otherwise than into whole tiles, as many as it has workers."""
    if int(row["grain"]) != tile_units(row):
        yield f"tiles of {int(row['grain'])} units, the op's are of {tile_units(row)}"
        return
    workers = crew[int(kinds_of(row["op"]))]
    need = n_slices(int(row["n_units"]), int(row["grain"]), workers)
    if int(row["n_slices"]) != need:
        yield f"{int(row['n_slices'])} slices, its tiles and {workers} workers give {need}"


def handles_of(spec: OpSpec, slots: Sequence[int]) -> dict[str, int]:
    """Return the handle of every operand of a record, by name."""
    names = [operand.name for operand in spec.operands]
    return dict(zip(names, spec.handles(slots), strict=True))


def results_of(spec: OpSpec) -> list[Operand]:
    """Return the operands that hold an op's results: those written whole, else the one in place."""
    return list(spec.outputs) or [spec.output]


def _row_faults(
    row: Any, tensors: Sequence[Tensor], max_tokens: int, tp: int, rank_of_params: int
) -> Iterator[str]:
    spec = spec_of(int(row["op"]))
    assert spec is not None, row["op"]
    handles = handles_of(spec, row["handles"].tolist())
    if any(handle >= len(tensors) for handle in handles.values()):
        return  # the order check names it
    known = 0 if spec.is_load else PACKET_DIGEST | PACKET_REARM | spec.flag_mask
    if unknown := int(row["flags"]) & ~known:
        yield f"flags {unknown:#x}, which the op has not"
    if spec.is_load:
        yield from load_faults(row, spec, handles, tensors)
        return
    shapes = _local_shapes(spec, handles, tensors)
    attrs = record_attrs(spec, row)
    key = (spec.op, tuple(sorted(shapes.items())), tuple(sorted(attrs.items())), tp, max_tokens)
    solved = _solve(*key)
    if isinstance(solved, str):
        yield solved
        return
    width, units, params = solved
    factors = [rank_of_params if p.kind == "u32_per_rank" else 1 for p in spec.params]
    need_params = [value * factor for value, factor in zip(params, factors, strict=True)]
    cut = (int(row["n_units"]), int(row["unit_cols"]))
    if spec.unit in ("column", "channel") and cut[0] * cut[1] == units[0] * units[1]:
        cut = units  # neighbouring columns may be cut anywhere
    for name, got, need in (
        ("width", int(row["width"]), width),
        ("(units, columns a unit)", cut, units),
        ("parameters", row["params"].tolist()[: len(spec.params)], need_params),
    ):
        if got != need:
            yield f"{name} {got}, its tensors give {need}"
    yield from _result_faults(spec, handles, tensors, width, max_tokens)
    if tp > 1:  # one rank has nobody to differ from, and holds every value whole
        yield from _digest_faults(row, spec, handles, tensors)


@cache
def _solve(
    op: Op,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    attrs: tuple[tuple[str, int], ...],
    tp: int,
    max_tokens: int,
) -> str | tuple[int, tuple[int, int], list[int]]:
    """Return width, units and parameters, or in words why the sizes have no solution."""
    named = dict(attrs)
    try:
        width, sizes = solve_sizes(op, "sizes", dict(shapes), named, tp=tp)
        return (
            width,
            units_of(op, width, sizes, max_tokens),
            params_of(op, named, sizes, tp),
        )
    except K3Error as error:
        return f"{error.object.removeprefix('sizes: ')} is {error.got}, need {error.need}"
    except ZeroDivisionError:
        return "a size of 0"


def _local_shapes(
    spec: OpSpec, handles: Mapping[str, int], tensors: Sequence[Tensor]
) -> Mapping[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for operand in input_operands(spec.op):
        local = tensors[handles[operand.name]].local
        if operand.role == "weight":
            shapes[operand.name] = local
        elif operand.role != "state":
            shapes[operand.name] = local[-1:]
    return shapes


def _digest_faults(
    row: Any, spec: OpSpec, handles: Mapping[str, int], tensors: Sequence[Tensor]
) -> Iterator[str]:
    """What every rank holds is compared between ranks: without the flag they agree on nothing."""
    held = [o.name for o in spec.outputs if tensors[handles[o.name]].is_replicated]
    if bool(held) != bool(row["flags"] & PACKET_DIGEST):
        need = f"every rank holds {' and '.join(held)}" if held else "no rank holds it whole"
        yield f"digest flag {'missing' if held else 'set'}: {need}"


def _result_faults(
    spec: OpSpec, handles: Mapping[str, int], tensors: Sequence[Tensor], width: int, max_tokens: int
) -> Iterator[str]:
    """The results' tensors hold a row of `width` for every token, no more and no less."""
    if spec.output.role != "out":
        return
    results = [tensors[handles[operand.name]] for operand in results_of(spec)]
    dtype = "u32" if spec.op is Op.ROUTER_TOPK else "f32"  # ids come first; weights are f32 bits
    for tensor in results:
        if len(tensor.local) != 2 or tensor.local[0] != max_tokens:
            yield f"{tensor.name} is {list(tensor.local)}, need a row for each of {max_tokens}"
        if tensor.dtype != dtype:
            yield f"{tensor.name} is {tensor.dtype}, the op writes {dtype}"
    elements = sum(math.prod(tensor.local) for tensor in results)
    if elements != max_tokens * width:
        names = " and ".join(tensor.name for tensor in results)
        yield f"{names} has {elements} elements, need {max_tokens} rows of {width}"
