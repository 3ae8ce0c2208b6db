"""The arena and the peer slots: nothing in use is overwritten, and the checks can tell."""

import random

import pytest

from k3tool.compiler.memory import (
    ALIGN_BYTES,
    Buffer,
    PeerUse,
    check_arena,
    check_peers,
    packet_set,
    place_arena,
    place_peers,
)


def ancestors_of(producers: list[list[int]]) -> list[int]:
    out: list[int] = []
    for direct in producers:
        bits = packet_set(direct)
        for packet in direct:
            bits |= out[packet]
        out.append(bits)
    return out


def test_a_chain_uses_two_places() -> None:
    chain = ancestors_of([[], [0], [1], [2], [3]])
    buffers = [Buffer(f"b{i}", 256, i, packet_set([i, i + 1])) for i in range(4)]
    offsets, total = place_arena(buffers, chain)
    assert offsets == [0, 256, 0, 256]
    assert total == 512
    assert check_arena(buffers, offsets, chain) is None


def test_parallel_packets_do_not_share_bytes_whatever_their_order() -> None:
    # 1 and 2 both read 0; 3 reads only 2. Packet 3 comes after 1, but does not wait for it.
    ancestors = ancestors_of([[], [0], [0], [2], [1, 3]])
    users = ([0, 1, 2], [1, 4], [2, 3], [3, 4])
    buffers = [Buffer(f"b{i}", 256, i, packet_set(u)) for i, u in enumerate(users)]
    offsets, _ = place_arena(buffers, ancestors)
    assert offsets[3] != offsets[0], "packet 1 may still read b0 while packet 3 writes"
    by_order = [0, 256, 512, 0]  # what freeing after the last reader in list order would give
    assert check_arena(buffers, by_order, ancestors) == ("b0", "b3")
    assert check_arena(buffers, offsets, ancestors) is None


def test_sizes_are_aligned_and_gaps_are_reused() -> None:
    ancestors = ancestors_of([[], [0], [1], [2]])
    buffers = [
        Buffer("long", 100, 0, packet_set([0, 3])),
        Buffer("big", 600, 1, packet_set([1, 2])),
        Buffer("next", 1000, 2, packet_set([2, 3])),
        Buffer("small", 10, 3, packet_set([3])),
    ]
    offsets, total = place_arena(buffers, ancestors)
    assert offsets == [0, ALIGN_BYTES, 4 * ALIGN_BYTES, ALIGN_BYTES]
    assert total == 8 * ALIGN_BYTES


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_are_placed_without_overlap(seed: int) -> None:
    rng = random.Random(seed)
    n = 40
    producers = [
        sorted({rng.randrange(max(0, i - 6), i) for _ in range(rng.randint(1, 2))}) if i else []
        for i in range(n)
    ]
    ancestors = ancestors_of(producers)
    readers = [[j for j in range(n) if i in producers[j]] for i in range(n)]
    buffers = [
        Buffer(f"b{i}", rng.randint(1, 2000), i, packet_set([i, *readers[i]])) for i in range(n)
    ]
    offsets, total = place_arena(buffers, ancestors)
    assert check_arena(buffers, offsets, ancestors) is None
    assert total < sum(b.n_bytes for b in buffers), "something is reused"
    assert check_arena(buffers, [0] * n, ancestors) is not None, "the control: all in one place"


# -- peer slots ------------------------------------------------------------------------------------

# Writers and readers of one collective, one after another: 0 writes, 1 reduces, 2 writes, 3 ...
CHAIN = ancestors_of([[], [0], [1], [2], [3], [4], [5], [6]])
USES = [PeerUse(f"u{i}", "sum", 100, 2 * i, 2 * i + 1) for i in range(4)]


def test_uses_of_a_kind_alternate_between_two_slots() -> None:
    offsets, end = place_peers(USES, CHAIN, base=512)
    assert offsets == [512, 768, 512, 768]
    assert end == 1024
    assert check_peers(USES, offsets, CHAIN) is None


def test_one_slot_is_not_enough() -> None:
    """Arrived is not read: another rank may still read use n when this one writes use n + 1."""
    assert check_peers(USES, [0, 0, 0, 0], CHAIN) == ("u0", "u1")


def test_uses_side_by_side_get_slots_of_their_own() -> None:
    # Two writers, both of packet 0, then both reductions; then the same again.
    ancestors = ancestors_of([[], [0], [0], [1], [2], [3, 4], [5], [5], [6], [7]])
    uses = [
        PeerUse("a0", "sum", 100, 1, 3),
        PeerUse("b0", "sum", 100, 2, 4),
        PeerUse("a1", "sum", 100, 6, 8),
        PeerUse("b1", "sum", 100, 7, 9),
    ]
    offsets, _ = place_peers(uses, ancestors, 0)
    assert len(set(offsets)) == 4
    assert check_peers(uses, offsets, ancestors) is None
    # Alternation by count alone: b0 lies between a0 and a1, but nobody waits for a0's reader there.
    assert check_peers(uses, [0, 256, 0, 256], ancestors) == ("a0", "a1")


def test_kinds_do_not_share_slots() -> None:
    uses = [use._replace(kind=f"kind{i % 2}") for i, use in enumerate(USES)]
    offsets, _ = place_peers(uses, CHAIN, 0)
    assert len(set(offsets)) == 4
