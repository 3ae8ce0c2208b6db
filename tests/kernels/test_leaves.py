"""The leaves against rule 3 written in NumPy, and AVX2 and AVX-512 against the scalar definition.

Bits, not tolerances. Kills: even element first, halving before quads, +0 padding of tails, missing
flush, scale byte 0 that keeps a sign, a tile shape that changes an order.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import rule3
from tests.kernels.conftest import NO_FLUSH, ROOT

TAILS = list(range(1, 131))
K3_LENGTHS = [192, 256, 384, 448, 512, 576, 768, 1536, 3072, 3584, 4224, 7168]
KINDS = ["plain", "subnormal", "huge", "specials", "cancel", "anybits"]


def f32_bits(rng, kind, shape):
    """Adversarial binary32 without NaN."""
    n = int(np.prod(shape))
    sign = rng.integers(0, 2, n).astype(np.uint32) << 31
    mantissa = rng.integers(0, 1 << 23, n).astype(np.uint32)
    low, high = {
        "plain": (110, 130), "subnormal": (0, 70), "huge": (180, 254), "specials": (110, 130),
        "cancel": (58, 70), "anybits": (0, 255),
    }[kind]  # fmt: skip
    bits = sign | rng.integers(low, high, n).astype(np.uint32) << 23 | mantissa
    if kind == "specials":
        pick = rng.integers(0, 64, n)
        bits = np.where(pick < 20, sign, bits)
        bits = np.where(pick == 63, sign | np.uint32(0x7F800000), bits)
    return bits.astype(np.uint32).view(np.float32).reshape(shape)


def bf16_words(rng, kind, shape):
    return (f32_bits(rng, kind, shape).view(np.uint32) >> 16).astype(np.uint16)


def mxfp4_bytes(rng, kind, rows, K):
    packed = rng.integers(0, 256, (rows, K // 2)).astype(np.uint8)
    low, high = {
        "plain": (118, 126), "subnormal": (0, 40), "huge": (200, 253), "specials": (0, 4),
        "cancel": (55, 75), "anybits": (0, 253),
    }[kind]  # fmt: skip
    scales = rng.integers(low, high, (rows, K // 32)).astype(np.uint8)
    if kind == "specials":
        packed = np.where(rng.integers(0, 2, packed.shape) == 1, packed & 0x88, packed)
    return packed.astype(np.uint8), scales


def unaligned(a, shift=1):
    """A copy of ``a`` whose first element is not on a vector boundary."""
    room = np.empty(a.size + 64, a.dtype)
    start = room.ctypes.data % 64 // a.itemsize
    view = room[(64 // a.itemsize - start) % (64 // a.itemsize) + shift :][: a.size]
    view = view.reshape(a.shape)
    view[...] = a
    return view


def assert_bits(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    where = np.argwhere(~same)
    assert where.size == 0, f"{len(where)} of {same.size} differ, first at {where[0]}"


def differing(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    nan = np.isnan(got) & np.isnan(want)
    return np.count_nonzero((got.view(np.uint32) != want.view(np.uint32)) & ~nan)


# ---- the scalar definition against the rule, written twice ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [1, 2, 3, 12, 63, 64, 65, 127, 128, 129, 200, 257, 513, 768])
def test_scalar_is_rule_3(scalar, kind, K):
    rng = np.random.default_rng([K, KINDS.index(kind)])
    W, X = bf16_words(rng, kind, (6, K)), f32_bits(rng, kind, (2, K))
    want = rule3.dot(rule3.bf16(W)[None], X[:, None])
    assert_bits(scalar.rows("bf16", W, X), want)
    F = f32_bits(rng, kind, (6, K))
    assert_bits(scalar.rows("f32", F, X), rule3.dot(F[None], X[:, None]))
    assert_bits([scalar.one("sum_f32", row) for row in F], rule3.plain_sum(F))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("K", "n_blocks"), [(32, 1), (96, 8), (160, 1), (192, 2), (256, 8), (448, 4)]
)
def test_scalar_mxfp4_is_rule_3(scalar, kind, K, n_blocks):
    rng = np.random.default_rng([K, KINDS.index(kind)])
    P, S = mxfp4_bytes(rng, kind, 5, K)
    X = f32_bits(rng, kind, (2, K))
    parts = rule3.blocks(rule3.mxfp4(P, S)[None], X[:, None], n_blocks)
    assert_bits(scalar.rows("mxfp4", (P, S), X, n_blocks), rule3.tree(parts))
    assert_bits(scalar.blocks(P, S, X[1], n_blocks), parts[1])


@pytest.mark.parametrize("n_blocks", [1, 2, 4, 8])
def test_scalar_blocks_and_tree(scalar, n_blocks):
    rng = np.random.default_rng(n_blocks)
    W, X = bf16_words(rng, "anybits", (5, 528)), f32_bits(rng, "plain", (3, 528))
    parts = rule3.blocks(rule3.bf16(W)[None], X[:, None], n_blocks)
    assert_bits(scalar.rows("bf16", W, X, n_blocks), rule3.tree(parts))


def test_scalar_columns_are_rule_3(scalar):
    rng = np.random.default_rng(5)
    for n in (1, 2, 34, 127, 128, 200):
        M, x = f32_bits(rng, "plain", (n, 21)), f32_bits(rng, "plain", (n,))
        assert_bits(scalar.cols("f32", M, x), rule3.dot(M.T, x))
        H = bf16_words(rng, "plain", (n, 21))
        assert_bits(scalar.cols("bf16", H, x), rule3.dot(rule3.bf16(H).T, x))


@pytest.mark.parametrize("K", [16, 512, 528, 7168])
def test_axis_dot_is_rule_6(leaves, K):
    rng = np.random.default_rng(K)
    a, b = f32_bits(rng, "plain", (K,)), f32_bits(rng, "plain", (K,))
    whole = rule3.dot(a, b)
    want = whole if K <= 512 else rule3.tree(rule3.blocks(a, b, 8))
    assert_bits(leaves.one("axis_dot", a, b), want)
    if K > 512:  # control: rule 6 switched off
        assert differing(want, whole) == 1


# ---- negative controls: each mistake must show ----


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [
        ({"odd_first": False}, "plain"),
        ({"tree": "halving"}, "plain"),
        ({"ftz": False}, "subnormal"),
    ],
)
def test_control_a_mistake_is_seen(leaves, mistake, kind):
    rng = np.random.default_rng(11)
    W, X = bf16_words(rng, kind, (32, 384)), f32_bits(rng, kind, (1, 384))
    got = leaves.rows("bf16", W, X)
    assert_bits(got, rule3.dot(rule3.bf16(W)[None], X[:, None]))
    assert differing(got, rule3.dot(rule3.bf16(W)[None], X[:, None], **mistake)) > 4


def test_control_missing_flush_is_seen(leaves):
    rng = np.random.default_rng(12)
    W, X = bf16_words(rng, "subnormal", (32, 384)), f32_bits(rng, "subnormal", (1, 384))
    assert differing(leaves.rows("bf16", W, X), leaves.rows("bf16", W, X, csr=NO_FLUSH)) > 4
    assert leaves.lib.t_canary(leaves.csr) == 0
    assert leaves.lib.t_canary(NO_FLUSH) == 2


def test_control_left_to_right_blocks_are_seen(leaves):
    rng = np.random.default_rng(13)
    W, X = bf16_words(rng, "plain", (32, 1024)), f32_bits(rng, "plain", (1, 1024))
    parts = rule3.blocks(rule3.bf16(W)[None], X[:, None], 8)
    left = parts[..., 0]
    for b in range(1, 8):
        left = left + parts[..., b]
    assert differing(leaves.rows("bf16", W, X, 8), left) > 4


# ---- vector leaves against the definition ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_", ["bf16", "f32"])
def test_rows_equal_scalar(scalar, vector, type_, kind):
    rng = np.random.default_rng([KINDS.index(kind), len(type_)])
    make = bf16_words if type_ == "bf16" else f32_bits
    for K in TAILS + K3_LENGTHS:
        W, X = unaligned(make(rng, kind, (9, K))), unaligned(f32_bits(rng, kind, (1, K)))
        assert_bits(vector.rows(type_, W, X), scalar.rows(type_, W, X))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_change_no_bit(scalar, vector, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for K, n_blocks in [(34, 1), (130, 1), (528, 8), (1536, 1), (3072, 4), (4224, 2)]:
        W, X = unaligned(bf16_words(rng, kind, (11, K))), unaligned(f32_bits(rng, kind, (11, K)))
        want = scalar.rows("bf16", W, X, n_blocks)
        for T in (1, 2, 3, 4, 7, 11):
            assert_bits(vector.rows("bf16", W, X[:T], n_blocks), want[:T])
        assert_bits(vector.rows("bf16", W, X, n_blocks, rows=(3, 10), ldy=40), want[:, 3:10])


@pytest.mark.parametrize("n_blocks", [1, 2, 4, 8])
def test_blocks_equal_scalar(scalar, vector, n_blocks):
    rng = np.random.default_rng(n_blocks)
    for K in (16, 96, 160, 272, 528, 1024, 12288):
        for kind in ("plain", "anybits"):
            W, X = bf16_words(rng, kind, (6, K)), f32_bits(rng, kind, (1, K))
            assert_bits(vector.rows("bf16", W, X, n_blocks), scalar.rows("bf16", W, X, n_blocks))


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4_equals_scalar(scalar, vector, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    shapes = [(32 * g, 1) for g in range(1, 22)] + [(3584, 1), (3072, 8), (384, 1), (7168, 1)]
    shapes += [(96, 8), (96, 2), (256, 8), (160, 4), (544, 8), (768, 8), (8192, 2)]
    shapes += [(1024, 8), (512, 4), (2048, 8)]  # a block is one chunk, or two
    for K, n_blocks in shapes:
        P, S = (unaligned(a, 3) for a in mxfp4_bytes(rng, kind, 7, K))
        X = unaligned(f32_bits(rng, kind, (5, K)))
        want = scalar.rows("mxfp4", (P, S), X, n_blocks)
        for T in (1, 2, 5):
            assert_bits(vector.rows("mxfp4", (P, S), X[:T], n_blocks), want[:T])
        assert_bits(
            vector.blocks(P, S, X[0], n_blocks, (1, 6)), scalar.blocks(P, S, X[0], n_blocks, (1, 6))
        )


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_and_tokens_equal_scalar(scalar, vector, kind):
    """More rows than a block of them holds, more elements than a segment of x."""
    rng = np.random.default_rng(KINDS.index(kind))
    for type_, make, K, n_blocks in [("bf16", bf16_words, 4352, 1), ("f32", f32_bits, 4100, 2),
                                     ("bf16", bf16_words, 256, 8)]:  # fmt: skip
        W, X = make(rng, kind, (70, K)), f32_bits(rng, kind, (7, K))
        want = scalar.rows(type_, W, X, n_blocks)
        assert_bits(vector.rows(type_, W, X, n_blocks, rows=(1, 70), ldy=71), want[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_many_heads_equal_scalar(scalar, vector, kind):
    """Vectors of x that are whole, more than half full, less; tiles of rows likewise."""
    rng = np.random.default_rng(KINDS.index(kind))
    for K, rows in [(8, 16), (88, 37), (128, 16), (576, 50), (584, 19), (1032, 17), (90, 20)]:
        W, X = unaligned(f32_bits(rng, kind, (rows, K))), unaligned(f32_bits(rng, kind, (37, K)))
        want = scalar.rows("f32", W, X)
        for T in (5, 8, 9, 12, 16, 21, 37):
            assert_bits(vector.rows("f32", W, X[:T]), want[:T])
        assert_bits(vector.rows("f32", W, X, rows=(1, rows), ldy=64), want[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_picked_tokens_equal_one_by_one(scalar, vector, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for K, n_blocks in [(32, 2), (96, 8), (1024, 8), (3584, 1), (3072, 8), (4128, 1)]:
        P, S = mxfp4_bytes(rng, kind, 71 if K < 2000 else 13, K)
        X, rows = f32_bits(rng, kind, (9, K)), (2, len(P))
        for at in ([4], [8, 0], [1, 7, 3], [5, 0, 8, 2], [5, 0, 8, 2, 7], [0, 1, 2, 3, 8, 7, 6]):
            Y, D = vector.picked(P, S, X, at, n_blocks, rows)
            one = [scalar.picked(P, S, X, [t], n_blocks, rows) for t in at]
            assert_bits(Y, np.concatenate([y for y, _ in one]))
            assert_bits(D, np.concatenate([d for _, d in one]))
        assert_bits(scalar.picked(P, S, X, [3], n_blocks, rows)[1][0],
                    scalar.blocks(P, S, X[3], n_blocks, rows))  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_mixes_equal_scalar_and_go_row_by_row(scalar, vector, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for n, cols, n_mix in [(1, 512, 4), (256, 130, 5), (77, 24, 3), (3, 67, 1)]:
        rows, E = f32_bits(rng, kind, (n, cols + 5)), f32_bits(rng, kind, (n_mix, n))
        assert_bits(vector.mixes(rows, E, cols), scalar.mixes(rows, E, cols))
    whole = np.float32(1 << 24)  # 2^24 + 1 + 1 is 2^24 in this order, 2^24 + 2 in the other
    rows = np.array([[whole], [1], [1]], np.float32)
    ones = np.ones((1, 3), np.float32)
    assert vector.mixes(rows, ones, 1)[0, 0] == whole
    assert vector.mixes(rows[::-1].copy(), ones, 1)[0, 0] == whole + 2


@pytest.mark.parametrize("s", [0, 1, *range(2, 253, 25), 252])
def test_mxfp4_scale_bytes(scalar, vector, s):
    """Every code under one scale byte; x of both signs and accumulators that reach -0."""
    P = np.tile(np.arange(256, dtype=np.uint8), (4, 1))
    S = np.full((4, 16), s, np.uint8)
    X = np.full((2, 512), np.float32(-(2.0**-100)))
    X[1, ::2] = 2.0**-20
    want = scalar.rows("mxfp4", (P, S), X)
    assert_bits(want, rule3.dot(rule3.mxfp4(P, S)[None], X[:, None]))
    assert_bits(vector.rows("mxfp4", (P, S), X[:1]), want[:1])
    assert_bits(vector.rows("mxfp4", (P, S), X), want)


def test_scale_zero_is_plus_zero(leaves):
    """Every lane reaches -0 in the first chunk. A group of scale 0 in the second adds +0 and
    leaves +0; one that kept its codes' signs would leave -0."""
    P, S = np.full((1, 128), 0x99, np.uint8), np.full((1, 8), 127, np.uint8)
    X = np.full((2, 256), np.float32(2.0**-126))
    for T in (1, 2):
        S[0, 4:] = 127
        assert np.all(leaves.rows("mxfp4", (P, S), X[:T]).view(np.uint32) == 0x80000000)
        S[0, 4:] = 0
        assert np.all(leaves.rows("mxfp4", (P, S), X[:T]).view(np.uint32) == 0)
    codes, scales = np.meshgrid(np.arange(16), np.arange(253))
    value = leaves.map("mxfp4", codes.ravel(), scales.ravel())
    pair = np.zeros((codes.size, 16), np.uint8)
    pair[:, 0] = codes.ravel()
    want = rule3.mxfp4(pair, scales.reshape(-1, 1).astype(np.uint8))[:, 0]
    assert_bits(value, want)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_equal_scalar(scalar, vector, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for n in [*range(1, 40), 64, 127, 128, 129, 256, 300]:
        x = f32_bits(rng, kind, (n,))
        for columns in (5, 16, 34, 128):
            M, H = f32_bits(rng, kind, (n, columns)), bf16_words(rng, kind, (n, columns))
            assert_bits(vector.cols("f32", M, x), scalar.cols("f32", M, x))
            assert_bits(vector.cols("bf16", H, x), scalar.cols("bf16", H, x))
        assert_bits(vector.cols("f32", M, x, (7, 60)), scalar.cols("f32", M, x, (7, 60)))


@pytest.mark.parametrize("kind", KINDS)
def test_single_sums_equal_scalar(scalar, vector, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for K in TAILS + K3_LENGTHS:
        a, b = unaligned(f32_bits(rng, kind, (K,))), unaligned(f32_bits(rng, kind, (K,)))
        assert_bits(vector.one("dot_f32", a, b), scalar.one("dot_f32", a, b))
        assert_bits(vector.one("sum_f32", a), scalar.one("sum_f32", a))


# ---- real bytes ----


def test_released_bytes_decode_exactly(leaves):
    """Low nibble = even column, seen on the first rows of a released expert."""
    with np.load(ROOT / "tests/data/real-mxfp4-l1-e0-w1.npz") as file:
        P, S, expected = file["packed"], file["scales"], file["expected"]
    assert np.array_equal(rule3.mxfp4(P, S), expected)
    swapped = rule3.mxfp4(P, S, low_is_even=False)
    assert not np.array_equal(swapped, expected)
    X = f32_bits(np.random.default_rng(1), "plain", (1, 3584))
    want = leaves.rows("f32", np.ascontiguousarray(expected), X)
    assert_bits(leaves.rows("mxfp4", (P, S), X), want)
    assert differing(leaves.rows("mxfp4", (P >> 4 | P << 4, S), X), want) > 32
