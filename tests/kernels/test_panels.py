"""Several tokens by panels (kernels_cpu/leaves/panel.h) against the scalar definition.

Bits, not tolerances. Kills: positions added in another order than quads are halved, a batch or a
tile of rows that begins at the wrong token or row, block sums of another block, a tail of a block
that is not neutral, MXFP4 scales of a neighbouring row, and scale bytes 0 and 1 decoded as others.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import rule3
from tests.kernels.test_leaves import (
    KINDS,
    assert_bits,
    bf16_words,
    differing,
    f32_bits,
    mxfp4_bytes,
    unaligned,
)
from tests.kernels.test_leaves_x16 import bf16_values

# rows, K, blocks, tokens: more than a tile of rows, a batch of tokens, packed blocks; ragged ends;
# blocks whose pairs stay in registers, of one and of two chunks.
SHAPES = [(135, 160, 1, 70), (17, 4608, 2, 66), (131, 576, 2, 9), (33, 96, 1, 13), (20, 8224, 1, 5),
          (37, 2048, 8, 64), (18, 1600, 8, 11)]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_equals_scalar(scalar, leaves, shape, kind):
    n_rows, K, n_blocks, T = shape
    rng = np.random.default_rng([KINDS.index(kind), K])
    W = unaligned(bf16_words(rng, kind, (n_rows, K)))
    for suffix, make in (("", f32_bits), ("_x16", bf16_values)):
        X = unaligned(make(rng, kind, (T, K)))
        want = scalar.rows("bf16", W, X, n_blocks)
        got = leaves.rows(f"bf16{suffix}", W, X, n_blocks, rows=(1, n_rows), ldy=n_rows + 3)
        assert_bits(got, want[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp4_equals_scalar(scalar, leaves, shape, kind):
    n_rows, K, n_blocks, T = shape
    rng = np.random.default_rng([KINDS.index(kind), K])
    P, S = (unaligned(a, 3) for a in mxfp4_bytes(rng, kind, n_rows, K))
    at, rows = rng.permutation(T)[: T - 1].tolist(), (1, n_rows)
    for suffix, make in (("", f32_bits), ("_x16", bf16_values)):
        X = unaligned(make(rng, kind, (T, K)))
        want = scalar.rows("mxfp4", (P, S), X, n_blocks)
        assert_bits(leaves.rows(f"mxfp4{suffix}", (P, S), X, n_blocks), want)
        Y, D = scalar.picked(P, S, X, at, n_blocks, rows)
        got = leaves.picked(P, S, X, at, n_blocks, rows, kind=f"mxfp4_at{suffix}")
        assert_bits(got[0], Y)
        assert_bits(got[1], D)


@pytest.mark.parametrize("T", range(1, 14))
def test_any_number_of_tokens(scalar, leaves, T):
    rng = np.random.default_rng(T)
    W, X = bf16_words(rng, "anybits", (19, 320)), bf16_values(rng, "anybits", (T, 320))
    want = scalar.rows("bf16", W, X)
    assert_bits(leaves.rows("bf16", W, X), want)
    assert_bits(leaves.rows("bf16_x16", W, X), want)


@pytest.mark.parametrize("T", range(1, 14))
@pytest.mark.parametrize("n_blocks", [1, 2])
def test_any_number_of_tokens_of_an_expert(scalar, leaves, T, n_blocks):
    """Few tokens: codes are decoded between the products; blocks of 1.25 and 2.5 chunks."""
    rng = np.random.default_rng([T, n_blocks])
    P, S = mxfp4_bytes(rng, "anybits", 37, 320)
    X = bf16_values(rng, "plain", (T, 320))
    want = scalar.rows("mxfp4", (P, S), X, n_blocks)
    assert_bits(leaves.rows("mxfp4", (P, S), X, n_blocks), want)
    assert_bits(leaves.rows("mxfp4_x16", (P, S), X, n_blocks), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("B", [128, 96, 32])
def test_blocks_of_one_chunk(scalar, leaves, kind, B):
    """A lane with one pair has no accumulator that lasts (panel_once.h)."""
    for T, n_blocks in ((1, 8), (2, 8), (3, 4), (8, 8), (9, 2), (19, 1)):
        rng = np.random.default_rng([KINDS.index(kind), B, T])
        K = B * n_blocks
        P, S = (unaligned(a, 3) for a in mxfp4_bytes(rng, kind, 37, K))
        at = rng.permutation(T).tolist()
        for suffix, make in (("", f32_bits), ("_x16", bf16_values)):
            X = unaligned(make(rng, kind, (T, K)))
            want, blocks = scalar.picked(P, S, X, at, n_blocks, (0, 37))
            got = leaves.picked(P, S, X, at, n_blocks, (0, 37), kind=f"mxfp4_at{suffix}")
            assert_bits(got[0], want)
            assert_bits(got[1], blocks)


@pytest.mark.parametrize("s", [0, 1, 2, 127, 252])
def test_scale_bytes(scalar, leaves, s):
    """Every code under one scale byte, beside rows of another; accumulators that reach -0."""
    P = np.tile(np.arange(256, dtype=np.uint8), (16, 1))
    S = np.full((16, 16), 127, np.uint8)
    S[::3] = s
    X = np.full((7, 512), np.float32(-(2.0**-100)))
    X[1::2, ::2] = 2.0**-20
    want = scalar.rows("mxfp4", (P, S), X)
    assert_bits(want, rule3.dot(rule3.mxfp4(P, S)[None], X[:, None]))
    assert_bits(leaves.rows("mxfp4", (P, S), X), want)
    assert_bits(leaves.rows("mxfp4_x16", (P, S), X), want)


def test_scale_zero_is_plus_zero(leaves):
    """The control of the one above: lanes at -0 stay there for weights of -0, not of +0."""
    P, S = np.full((16, 128), 0x99, np.uint8), np.full((16, 8), 127, np.uint8)
    X = np.full((7, 256), np.float32(2.0**-126))
    assert np.all(leaves.rows("mxfp4", (P, S), X).view(np.uint32) == 0x80000000)
    S[:, 4:] = 0
    for kind in ("mxfp4", "mxfp4_x16"):
        assert np.all(leaves.rows(kind, (P, S), X).view(np.uint32) == 0)


@pytest.mark.parametrize("mistake", [{"odd_first": False}, {"tree": "halving"}])
def test_control_a_mistake_is_seen(leaves, mistake):
    rng = np.random.default_rng(11)
    W, X = bf16_words(rng, "plain", (32, 384)), bf16_values(rng, "plain", (8, 384))
    wrong = rule3.dot(rule3.bf16(W)[None], X[:, None], **mistake)
    for kind in ("bf16", "bf16_x16"):
        got = leaves.rows(kind, W, X)
        assert_bits(got, rule3.dot(rule3.bf16(W)[None], X[:, None]))
        assert differing(got, wrong) > 32
