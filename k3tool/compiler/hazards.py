"""Bytes in memory: every conflict ordered (D), no live buffers overlapping (C), steps apart.

Accesses come from records and the handle table (``k3tool.isa.access``), orders from waits: a plan's
(``k3tool.compiler.order``) or an emitted stream's (``k3tool.isa.stream_order``). Nothing is taken
from the scheduler's own account of them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from k3tool.compiler.memory import aligned
from k3tool.compiler.order import Ordering
from k3tool.compiler.plan import Tensor
from k3tool.isa.access import Access, accesses


@dataclass(slots=True)
class _Segment:
    """A run of bytes that an access covers whole or not at all: last writer, readers since."""

    writer: int | None = None
    handle: int = -1
    readers: list[tuple[int, Access]] = field(default_factory=list)


def _segments(found: Sequence[Sequence[Access]]) -> dict[str, tuple[list[int], list[_Segment]]]:
    bounds: dict[str, set[int]] = {}
    for packet in found:
        for access in packet:
            bounds.setdefault(access.space, set()).update((access.byte0, access.byte1))
    return {
        space: (sorted(edges), [_Segment() for _ in range(len(edges) - 1)])
        for space, edges in bounds.items()
    }


def _accesses(c: Ordering) -> tuple[list[list[Access]], list[str]]:
    """Return every packet's accesses, and faults where a record does not fit its tensors."""
    found: list[list[Access]] = []
    faults = []
    for index, packet in enumerate(c.rows):
        try:
            found.append(list(accesses(packet, c.tensors)))
        except ValueError as error:
            found.append([])
            faults.append(f"{c.name(index)}: {error}")
    return found, faults


def _touched(
    c: Ordering, found: Sequence[Sequence[Access]]
) -> Iterator[tuple[int, Access, _Segment]]:
    """Yield (packet, access, segment) in packet order, noting each access after it was yielded."""
    yield from _touch(found, _segments(found))


def _touch(
    found: Sequence[Sequence[Access]], spaces: Mapping[str, tuple[list[int], list[_Segment]]]
) -> Iterator[tuple[int, Access, _Segment]]:
    for index, packet in enumerate(found):
        for access in packet:
            edges, segments = spaces[access.space]
            low, high = bisect_left(edges, access.byte0), bisect_left(edges, access.byte1)
            for segment in segments[low:high]:
                yield index, access, segment
                if access.is_write:
                    segment.writer, segment.handle = index, access.handle
                    segment.readers = []
                else:
                    segment.readers.append((index, access))


def check_ordered(c: Ordering, spaces: Sequence[str] = ()) -> tuple[str, list[str]]:
    """D: each pair of accesses to the same bytes, one of them a write, is ordered by counters.

    `spaces` narrows it to some memory spaces: "peer" asks whether peers' slots are read in time.
    """
    found, faults = _accesses(c)
    if spaces:
        found = [[access for access in packet if access.space in spaces] for packet in found]
    pairs, seen = 0, set()

    def fault(kind: str, index: int, other: int, access: Access, across: bool) -> None:
        key = (kind, index, other, access.handle)
        if key not in seen:
            seen.add(key)
            tensor = c.tensors[access.handle].name
            where = " on every rank" if across else ""
            faults.append(
                f"{c.name(index)}: {kind} of {tensor} not ordered after {c.name(other)}{where}"
            )

    for kind, index, other, access, before in _pairs(c, found):
        order = c.before_everywhere if before.every_rank else c.before
        pairs += 1
        # One packet's slices are not ordered among themselves: only a state, which is one
        # operand, may be read and written by a packet, never an input and the result.
        is_update = other == index and before.operand == access.operand
        if not order[index] >> other & 1 and not is_update:
            fault(kind, index, other, access, before.every_rank)
    return f"{pairs} pairs of accesses to the same bytes", faults


def _pairs(
    c: Ordering, found: Sequence[Sequence[Access]]
) -> Iterator[tuple[str, int, int, Access, Access]]:
    """Yield (kind, row, row that has to be over before, access, access that crosses ranks or not).

    The last access is the one that says in whose memory the earlier row's bytes are meant.
    """
    for index, access, segment in _touched(c, found):
        verb = "write" if access.is_write else "read"
        if segment.writer is not None and segment.writer != index:
            yield f"{verb} after write", index, segment.writer, access, access
        if access.is_write:
            for reader, read in segment.readers:
                yield "write after read", index, reader, access, read


def conflicts(c: Ordering) -> list[set[tuple[int, bool]]]:
    """Return for each row the others that have to be over before it, and whether on every rank."""
    need: list[set[tuple[int, bool]]] = [set() for _ in c.rows]
    for _, index, other, _, before in _pairs(c, _accesses(c)[0]):
        if other != index:
            need[index].add((other, before.every_rank))
    return need


def data_edges(c: Ordering) -> list[tuple[int, int]]:
    """Return the (writer, reader) pairs of rows of which one reads bytes that the other wrote."""
    found, _ = _accesses(c)
    edges = {
        (segment.writer, index)
        for index, access, segment in _touched(c, found)
        if not access.is_write and segment.writer is not None and segment.writer != index
    }
    return sorted(edges)


def check_memory(c: Ordering) -> tuple[str, list[str]]:
    """C: what is read under a handle was last written under it, whole: no live buffers overlap."""
    found, faults = _accesses(c)
    limits = c.limits
    reads = 0
    held = held_at_end(c)
    for index, access, segment in _touched(c, found):
        tensor = c.tensors[access.handle]
        if access.space not in limits:
            if tensor.is_weight:
                faults.append(f"{tensor.name} lies in the {access.space}: the plan has none")
            continue
        if access.byte1 > limits[access.space]:
            got = f"{tensor.name} ends at byte {access.byte1} of {limits[access.space]}"
            faults.append(f"{c.name(index)}: {got} in the {access.space}")
        if tensor.phase != c.phase_name and not tensor.is_weight:
            faults.append(f"{c.name(index)}: {tensor.name} belongs to phase {tensor.phase}")
        if access.is_write:
            continue
        reads += 1
        if segment.writer is None and access.space == "ring" and access.handle in held:
            continue  # from the step before, or from the start of the run
        if segment.writer is None:
            faults.append(f"{c.name(index)} reads {tensor.name}, which nothing has written")
        elif segment.handle != access.handle:
            other = c.tensors[segment.handle].name
            text = f"{c.name(index)} reads {tensor.name}, whose bytes {other} overwrote"
            faults.append(f"{text} in {c.name(segment.writer)}")
    faults += _size_faults(c)
    return f"{reads} reads of placed memory", list(dict.fromkeys(faults))


def _size_faults(c: Ordering) -> Iterator[str]:
    """A phase's arena and its part of the peer segment end where their last buffers do."""
    for space in ("arena", "peer"):
        own = [t for t in c.tensors if t.role == space and t.phase == c.phase_name]
        need = max((aligned(t.offset + t.n_bytes) for t in own), default=0)
        if c.limits[space] != need:
            yield f"the {space} of {c.phase_name} has {c.limits[space]} bytes, its buffers {need}"


def held_at_start(c: Ordering) -> set[int]:
    """Return the handles of the ring that a step reads as the step before left them."""
    found, _ = _accesses(c)
    return {
        access.handle
        for _, access, segment in _touched(c, found)
        if access.space == "ring" and not access.is_write and segment.writer is None
    }


def held_at_end(c: Ordering) -> set[int]:
    """Return the handles whose bytes of the ring are theirs when a step ends.

    What a step reads before any LOAD is there at its start, so unless a LOAD takes its place it is
    there at its end.
    """
    found, _ = _accesses(c)
    packets = [[access for access in packet if access.space == "ring"] for packet in found]
    edges, segments = _segments(packets).get("ring", ([], []))
    spans = {access.handle: access for packet in packets for access in packet}
    for _ in _touch(packets, {"ring": (edges, segments)}):
        pass
    held = set()
    for handle, span in spans.items():
        own = segments[bisect_left(edges, span.byte0) : bisect_left(edges, span.byte1)]
        if all(segment.writer is None or segment.handle == handle for segment in own):
            held.add(handle)
    return held


def check_steps(contexts: Sequence[Ordering]) -> tuple[str, list[str]]:
    """D: a peer buffer is not written in a step before every rank has read it in the step before,
    and what a step finds in the ring of weights is what any step before it left there.

    "Arrived" is not "has read". A reader is safe if something later in its own step waits for it on
    all ranks; else whoever writes those bytes next has to be behind a gate of its own step.
    """
    readers, writers = [], []
    for c in contexts:
        waited_for = 0
        for done in c.before_everywhere:
            waited_for |= done
        for index, packet in enumerate(_accesses(c)[0]):
            for access in packet:
                if access.every_rank and not waited_for >> index & 1:
                    readers.append((c, index, access))
                if access.is_write and access.space == "peer" and not c.before_everywhere[index]:
                    writers.append((c, index, access))
    faults = [
        f"{w.phase_name} {w.name(j)} may write {w.tensors[b.handle].name} while another "
        f"rank's {r.phase_name} {r.name(i)} still reads those bytes"
        for r, i, a in readers
        for w, j, b in writers
        if a.byte0 < b.byte1 and b.byte0 < a.byte1
    ]
    faults += [
        f"{c.phase_name} reads {c.tensors[handle].name}, which {other.phase_name} overwrites"
        for other in contexts
        for c in contexts
        for handle in sorted(held_at_start(c) - held_at_end(other))
    ]
    faults += _start_overlaps(contexts)
    return f"{len(readers)} last readers, {len(writers)} first writers of peer buffers", faults


def _start_overlaps(contexts: Sequence[Ordering]) -> list[str]:
    """Return what of the ring's contents at a step's start lies on each other's bytes.

    Nothing of the step need have written them, so no order within it would show this.
    """
    spans: dict[int, Access] = {}
    tensors: Sequence[Tensor] = ()
    for c in contexts:
        start, tensors = held_at_start(c), c.tensors
        found, _ = _accesses(c)
        spans |= {a.handle: a for packet in found for a in packet if a.handle in start}
    order = sorted(spans.values(), key=lambda access: access.byte0)
    return [
        f"{tensors[a.handle].name} and {tensors[b.handle].name} share bytes of the ring at first"
        for a, b in pairwise(order)
        if b.byte0 < a.byte1
    ]
