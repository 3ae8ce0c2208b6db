"""Where a rank's weights lie when they are not mapped: pinned, or in the ring and which at first.

It places what a plan has decided (``k3tool.compiler.residency``) and decides nothing.
"""

from collections.abc import Collection, Sequence

from k3tool.compiler.hazards import held_at_start
from k3tool.compiler.plan import Tensor
from k3tool.errors import ArtifactError
from k3tool.isa import device
from k3tool.isa.access import paged_bytes
from k3tool.isa.columns import spec_of
from k3tool.isa.stream import Isa
from k3tool.isa.stream_order import StreamOrder
from k3tool.isa.table import ROW_LOOKUPS
from k3tool.runtime.weights import TensorBytes


def weight_homes(isa: Isa) -> dict[int, int]:
    """Return where weights are read to under a memory budget: in the ring, or one behind the other.

    A table of rows by token id is mapped instead: a step needs as many rows as it has tokens.
    """
    if isa.residency is None:
        return {}
    tables = row_tables(isa)
    homes, at = {}, 0
    for handle, tensor in enumerate(isa.tensors):
        if tensor.role == "ring":
            homes[handle] = tensor.offset
        elif tensor.role == "weight" and handle not in tables:
            homes[handle] = at
            at += paged_bytes(tensor.n_bytes)
    return homes


def pinned_bytes(tensors: Sequence[Tensor], tables: Collection[int]) -> int:
    """Return the bytes of the weights that stay in memory under a budget, with their pages."""
    return sum(
        paged_bytes(tensor.n_bytes)
        for handle, tensor in enumerate(tensors)
        if tensor.role == "weight" and handle not in tables
    )


def row_tables(isa: Isa) -> set[int]:
    """Return the handles of weights that are read by rows of token ids only."""
    tables: set[int] = set()
    others: set[int] = set()
    for stream in isa.streams.values():
        for row in device.unpack(stream.instructions[0]):
            spec = spec_of(int(row["op"]))
            assert spec is not None, row["op"]
            read = set(spec.handles(row["handles"].tolist()))
            (tables if spec.op in ROW_LOOKUPS else others).update(read)
    return {h for h in tables - others if isa.tensors[h].is_weight}


def primed_handles(isa: Isa) -> set[int]:
    """Return the handles of the ring that are there when a step of any phase starts."""
    if isa.residency is None:
        return set()
    return {h for s in isa.streams.values() for h in held_at_start(StreamOrder(isa, s))}


def check_alignment(tensor: Tensor, found: TensorBytes, size: int) -> None:
    """Refuse a weight whose elements would not be aligned where its pages are read to."""
    if found.offset % size:
        raise ArtifactError(
            f"{found.path}: {tensor.source}", got=f"at byte {found.offset}",
            need=f"a multiple of {size} to be read in place under a memory budget",
            hint="k3tool shard writes aligned copies",
        )  # fmt: skip
