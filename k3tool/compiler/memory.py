"""Where buffers lie: the arena of one rank, and the peer segment that other ranks read.

Reuse is decided on the packet graph, never on packet order: two packets whose order in the list is
fixed may still run at once. A set of packets is a Python integer, bit i for packet i;
`ancestors[i]` are the packets that are complete before packet i may start, on the same rank.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

ALIGN_BYTES = 256  # no two buffers share a cache line on any target


class Buffer(NamedTuple):
    """One result: the packet that writes it first, and the set of all packets that touch it."""

    name: str
    n_bytes: int
    writer: int
    users: int


class PeerUse(NamedTuple):
    """One value that crosses ranks: written by `writer` on each rank, read by `reader` on all.

    Uses of one `kind` share slots.
    """

    name: str
    kind: str
    n_bytes: int
    writer: int
    reader: int


def aligned(n_bytes: int) -> int:
    """Round a size up to the alignment of buffers."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def place_arena(buffers: Sequence[Buffer], ancestors: Sequence[int]) -> tuple[list[int], int]:
    """Return each buffer's offset and the arena's size, in bytes. `buffers` are in writer order.

    A buffer may take the place of another only if all that one's users are ancestors of its writer.
    Lowest free offset first, so equal inputs give equal maps.
    """
    finished = _finished_by_all_later(ancestors)
    offsets: list[int] = []
    placed: list[tuple[int, int, int]] = []  # offset, end, users; less what all later ones follow
    total = 0
    for buffer in buffers:
        placed = [entry for entry in placed if entry[2] & ~finished[buffer.writer]]
        before = ancestors[buffer.writer]
        busy = sorted((start, end) for start, end, users in placed if users & ~before)
        offset = 0
        for start, end in busy:
            if offset + buffer.n_bytes <= start:
                break
            offset = max(offset, end)
        end = offset + aligned(buffer.n_bytes)
        offsets.append(offset)
        placed.append((offset, end, buffer.users))
        total = max(total, end)
    return offsets, total


def _finished_by_all_later(ancestors: Sequence[int]) -> list[int]:
    """Return for each packet the ancestors it has in common with every packet after it."""
    common = [0] * len(ancestors)
    meet = -1
    for index in range(len(ancestors) - 1, -1, -1):
        meet &= ancestors[index]
        common[index] = meet
    return common


def check_arena(
    buffers: Sequence[Buffer], offsets: Sequence[int], ancestors: Sequence[int]
) -> tuple[str, str] | None:
    """Return the names of two buffers that overlap while both may be in use, else None.

    Independent of how `place_arena` chose: all pairs that overlap in bytes, found by a sweep.
    """
    order = sorted(range(len(buffers)), key=lambda i: offsets[i])
    for position, first in enumerate(order):
        end = offsets[first] + buffers[first].n_bytes
        for second in order[position + 1 :]:
            if offsets[second] >= end:
                break
            old, new = sorted((first, second), key=lambda i: buffers[i].writer)
            if buffers[old].users & ~ancestors[buffers[new].writer]:
                return buffers[old].name, buffers[new].name
    return None


def place_peers(
    uses: Sequence[PeerUse], ancestors: Sequence[int], base: int
) -> tuple[list[int], int]:
    """Return each use's offset in the peer segment and the segment's end, in bytes from `base`.

    A channel has two slots that alternate. "Arrived" is not "has read": a rank may write use n + 2
    into the slot of use n only when every rank has read use n. It knows that from use n + 1: a rank
    arrives there after it has read use n, so the condition is that the reader of each use is an
    ancestor of the writer of the next one. Uses of one kind that run side by side get channels of
    their own. `uses` are in writer order.
    """
    channels: list[list[int]] = []
    for index, use in enumerate(uses):
        for channel in channels:
            last = uses[channel[-1]]
            if last.kind == use.kind and ancestors[use.writer] >> last.reader & 1:
                channel.append(index)
                break
        else:
            channels.append([index])
    offsets = [0] * len(uses)
    end = base
    for channel in channels:
        for slot in (0, 1):
            members = channel[slot::2]
            for index in members:
                offsets[index] = end
            end += aligned(max((uses[index].n_bytes for index in members), default=0))
    return offsets, end


def check_peers(
    uses: Sequence[PeerUse], offsets: Sequence[int], ancestors: Sequence[int]
) -> tuple[str, str] | None:
    """Return two uses whose slot is written again before all ranks are known to have read it.

    Rank A may write `new` into the place of `old` if some third use lies between them: B wrote it
    after reading `old`, and A read it before writing `new`.
    """
    order = sorted(range(len(uses)), key=lambda i: offsets[i])
    for position, first in enumerate(order):
        end = offsets[first] + uses[first].n_bytes
        for second in order[position + 1 :]:
            if offsets[second] >= end:
                break
            old, new = sorted((uses[first], uses[second]), key=lambda use: use.writer)
            if not _read_everywhere(old, new, uses, ancestors):
                return old.name, new.name
    return None


def _read_everywhere(
    old: PeerUse, new: PeerUse, uses: Sequence[PeerUse], ancestors: Sequence[int]
) -> bool:
    return any(
        ancestors[use.writer] >> old.reader & 1 and ancestors[new.writer] >> use.reader & 1
        for use in uses
    )


def packet_set(packets: Sequence[int]) -> int:
    """Return a set of packets as an integer."""
    return functools.reduce(lambda bits, packet: bits | 1 << packet, packets, 0)
