"""Which bytes a packet reads and writes, from its record and the handle table alone.

The op table says what each operand is; the only thing beyond it is the stack of AttnRes blocks, of
which an instruction touches a part that a parameter names. Weights are left out where they stay for
the whole run; under a memory budget they lie in a ring or in slots, which LOAD and EXPERT_FETCH
write.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from k3tool.compiler.plan import Tensor
from k3tool.isa.columns import spec_of
from k3tool.isa.op_spec import OpSpec, Role
from k3tool.isa.table import IO_PAGE_BYTES, Op

# Operands of which a part is touched: the parameter that says which part, and whether it is a count
# of leading blocks or the index of one. Taking the whole stack would order pushes after mixes that
# read other blocks, which nothing has to order.
_PARTS = {
    (Op.ATTN_RES, "blocks"): ("n_blocks", "count"),
    (Op.ATTN_RES_NORM, "blocks"): ("n_blocks", "count"),
    (Op.ATTN_PART, "blocks"): ("n_blocks", "count"),
    (Op.ATTN_PARTS_8, "blocks"): ("n_blocks", "count"),
    (Op.BLOCK_PUSH, "blocks"): ("index", "index"),
    (Op.EMBED_PUSH, "blocks"): ("index", "index"),
}
# A state is read and written by every op that has it: an attention's cache too, which costs
# nothing, because its writer is ordered before it anyway.
_READS: tuple[Role, ...] = ("in", "peer", "state")
_WRITES: tuple[Role, ...] = ("out", "inout", "state")


class Access(NamedTuple):
    """Bytes byte0 .. byte1 of a memory space, touched through one operand.

    `space` is "arena", "peer", "ring", "slots" (whose bytes are a slot's matrices, because which
    slots a fetch takes is known only when it runs), or one tensor of its own. `every_rank`: the
    bytes are read in every rank's memory.
    """

    space: str
    byte0: int
    byte1: int
    operand: str
    handle: int
    is_write: bool
    every_rank: bool


def accesses(packet: Any, tensors: Sequence[Tensor]) -> Iterator[Access]:
    """Yield a packet's accesses, reads before writes.

    Raises: ValueError in words where the record asks for bytes that its tensor does not have, or
    writes what is read-only.
    """
    spec = spec_of(int(packet["op"]))
    assert spec is not None, packet["op"]
    found = list(_operand_accesses(spec, packet, tensors))
    yield from (access for access in found if not access.is_write)
    yield from (access for access in found if access.is_write)


def paged_bytes(n_bytes: int) -> int:
    """Return the bytes of the pages that enclose a tensor, wherever in a file it starts."""
    return -(-(n_bytes + IO_PAGE_BYTES - 1) // IO_PAGE_BYTES) * IO_PAGE_BYTES


def _operand_accesses(spec: OpSpec, packet: Any, tensors: Sequence[Tensor]) -> Iterator[Access]:
    for operand, handle in zip(spec.operands, spec.handles(packet["handles"]), strict=True):
        if handle >= len(tensors):
            raise ValueError(f"{operand.name} has handle {handle} of {len(tensors)}")
        tensor = tensors[handle]
        loads = operand.role == "load"
        if tensor.is_weight != (loads or operand.role == "weight"):
            raise ValueError(f"{operand.name} ({operand.role}) is {tensor.name} ({tensor.role})")
        if tensor.role in ("weight", "experts"):
            if loads:
                raise ValueError(f"{operand.name}: {tensor.name} is in memory from the start")
            continue
        if tensor.is_weight:
            size = paged_bytes(tensor.n_bytes) if tensor.role == "ring" else 1
            first, last = tensor.offset, tensor.offset + size
            yield Access(tensor.role, first, last, operand.name, handle, loads, False)
            continue
        if operand.role == "peer" and tensor.role != "peer":
            raise ValueError(f"{operand.name}: {tensor.name} ({tensor.role}) is not a peer buffer")
        byte0, byte1 = _extent(spec, operand.name, packet, tensor)
        space = tensor.role if tensor.role in ("arena", "peer") else tensor.name
        for kinds, is_write in ((_READS, False), (_WRITES, True)):
            if operand.role in kinds:
                peer = operand.role == "peer"
                yield Access(space, byte0, byte1, operand.name, handle, is_write, peer)


def _extent(spec: OpSpec, operand: str, packet: Any, tensor: Tensor) -> tuple[int, int]:
    part = _PARTS.get((spec.op, operand))
    if part is None:
        return tensor.offset, tensor.offset + tensor.n_bytes
    param, kind = part
    value = int(packet["params"][[p.name for p in spec.params].index(param)])
    first, last = (0, value) if kind == "count" else (value, value + 1)
    if last > tensor.local[0]:
        raise ValueError(f"{param} {value} of {tensor.name}, which has {tensor.local[0]} blocks")
    block_bytes = tensor.n_bytes // tensor.local[0]
    return tensor.offset + first * block_bytes, tensor.offset + last * block_bytes
