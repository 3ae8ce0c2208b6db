"""Where a slot's state lies in a rank's memory: what has to be copied to keep a sequence.

A state has a row for each slot (delta rule, convolution taps), or pages of positions, of which slot
s owns pages s * n .. in order: the page table that every interpreter is given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from k3tool.compiler.record_checks import is_paged
from k3tool.isa.stream import Isa
from k3tool.isa.table import PAGE_TOKENS
from k3tool.runtime.requests import Span


@dataclass(frozen=True, slots=True)
class StateRow:
    """One state of a rank. `slot_bytes` are one slot's; of pages, `position_bytes` a position's,
    else 0: the whole row is the sequence's.
    """

    handle: int
    slot_bytes: int
    position_bytes: int


def state_rows(isa: Isa) -> tuple[StateRow, ...]:
    """Return the states of a program, in the order of the handle table."""
    n_slots = int(isa.params["batch"])
    pages = -(-int(isa.params["ctx"]) // PAGE_TOKENS)
    rows = []
    for handle, tensor in enumerate(isa.tensors):
        if tensor.role != "state":
            continue
        row_bytes = tensor.n_bytes // tensor.local[0]
        if is_paged(tensor):
            rows.append(StateRow(handle, pages * row_bytes, row_bytes // PAGE_TOKENS))
        else:
            assert tensor.local[0] == n_slots, tensor
            rows.append(StateRow(handle, row_bytes, 0))
    return tuple(rows)


def spans_of(rows: Sequence[StateRow], slot: int, length: int) -> Iterator[Span]:
    """Yield what holds a slot after `length` tokens: whole rows, and pages up to there."""
    at = 0
    for row in rows:
        n_bytes = _kept(row, length)
        if n_bytes:
            yield Span(row.handle, slot * row.slot_bytes, n_bytes, at)
        at += n_bytes


def saved_bytes(rows: Sequence[StateRow], length: int) -> int:
    """Return what `spans_of` adds up to."""
    return sum(_kept(row, length) for row in rows)


def _kept(row: StateRow, length: int) -> int:
    return length * row.position_bytes if row.position_bytes else row.slot_bytes
