"""Leaves for x of bf16 values against the plain scalar leaves, whose bits define theirs.

Bits, not tolerances. Kills: another order inside a pair of vdpbf16ps, a tail padded with +0, x
packed in the wrong order, blocks packed without a gap, a CPU whose instruction does other things.
"""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from k3tool.runtime.build import build
from tests.kernels import rule3
from tests.kernels.conftest import NEEDS, cpu_flags
from tests.kernels.test_leaves import (
    K3_LENGTHS,
    KINDS,
    TAILS,
    assert_bits,
    bf16_words,
    differing,
    f32_bits,
    mxfp4_bytes,
    unaligned,
)


def bf16_values(rng, kind, shape):
    """Adversarial binary32 that bf16 represents."""
    return (bf16_words(rng, kind, shape).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_equal_scalar(scalar, leaves, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for K in TAILS + K3_LENGTHS:
        W, X = unaligned(bf16_words(rng, kind, (9, K))), unaligned(bf16_values(rng, kind, (1, K)))
        assert_bits(leaves.rows("bf16_x16", W, X), scalar.rows("bf16", W, X))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_equal_scalar(scalar, leaves, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for K in (16, 96, 160, 272, 528, 1024, 3072, 12288, 33792):
        for n_blocks in (1, 2, 4, 8):
            W, X = bf16_words(rng, kind, (6, K)), bf16_values(rng, kind, (1, K))
            want = scalar.rows("bf16", W, X, n_blocks)
            assert_bits(leaves.rows("bf16_x16", W, X, n_blocks), want)


def test_a_row_too_long_to_pack(scalar, leaves):
    rng = np.random.default_rng(3)
    W, X = bf16_words(rng, "plain", (5, 40960)), bf16_values(rng, "plain", (1, 40960))
    assert_bits(leaves.rows("bf16_x16", W, X, 8), scalar.rows("bf16", W, X, 8))
    P, S = mxfp4_bytes(rng, "plain", 5, 40960)
    assert_bits(leaves.rows("mxfp4_x16", (P, S), X, 8), scalar.rows("mxfp4", (P, S), X, 8))
    got = leaves.blocks(P, S, X[0], 8, kind="mxfp4_x16")
    assert_bits(got, scalar.blocks(P, S, X[0], 8))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_change_no_bit(scalar, leaves, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for K, n_blocks in [(34, 1), (130, 1), (528, 8), (1536, 1), (3072, 4), (4224, 2)]:
        W, X = unaligned(bf16_words(rng, kind, (11, K))), unaligned(bf16_values(rng, kind, (11, K)))
        want = scalar.rows("bf16", W, X, n_blocks)
        for T in (1, 2, 3, 4, 7, 11):
            assert_bits(leaves.rows("bf16_x16", W, X[:T], n_blocks), want[:T])
        got = leaves.rows("bf16_x16", W, X, n_blocks, rows=(3, 10), ldy=40)
        assert_bits(got, want[:, 3:10])


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4_equals_scalar(scalar, leaves, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    shapes = [(32 * g, 1) for g in range(1, 22)] + [(3584, 1), (3072, 8), (384, 1), (7168, 1)]
    shapes += [(96, 8), (96, 2), (256, 8), (160, 4), (544, 8), (768, 8), (8192, 2), (1024, 8)]
    shapes += [(512, 4), (2048, 8)]  # blocks of one chunk and of two
    for K, n_blocks in shapes:
        P, S = (unaligned(a, 3) for a in mxfp4_bytes(rng, kind, 11, K))
        X = unaligned(bf16_values(rng, kind, (9, K)))
        want = scalar.rows("mxfp4", (P, S), X, n_blocks)
        for T in (1, 2, 5, 9):
            assert_bits(leaves.rows("mxfp4_x16", (P, S), X[:T], n_blocks), want[:T])
        for rows in ((1, 6), (0, 11)):
            got = leaves.blocks(P, S, X[0], n_blocks, rows, kind="mxfp4_x16")
            assert_bits(got, scalar.blocks(P, S, X[0], n_blocks, rows))


@pytest.mark.parametrize("s", [0, 1, *range(2, 253, 25), 252])
def test_mxfp4_scale_bytes(scalar, leaves, s):
    """Every code under one scale byte; accumulators that reach -0."""
    P = np.tile(np.arange(256, dtype=np.uint8), (4, 1))
    S = np.full((4, 16), s, np.uint8)
    X = np.full((2, 512), np.float32(-(2.0**-100)))
    X[1, ::2] = 2.0**-20
    want = scalar.rows("mxfp4", (P, S), X)
    assert_bits(leaves.rows("mxfp4_x16", (P, S), X[:1]), want[:1])
    assert_bits(leaves.rows("mxfp4_x16", (P, S), X), want)


@pytest.mark.parametrize("kind", KINDS)
def test_picked_tokens_equal_scalar(scalar, leaves, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for K, n_blocks in [(96, 8), (1024, 8), (3584, 1)]:
        P, S = mxfp4_bytes(rng, kind, 13, K)
        X, rows = bf16_values(rng, kind, (9, K)), (2, len(P))
        for at in ([4], [8, 0], [5, 0, 8, 2, 7]):
            Y, D = leaves.picked(P, S, X, at, n_blocks, rows, kind="mxfp4_at_x16")
            want = [scalar.picked(P, S, X, [t], n_blocks, rows) for t in at]
            assert_bits(Y, np.concatenate([y for y, _ in want]))
            assert_bits(D, np.concatenate([d for _, d in want]))


# ---- negative controls ----


@pytest.mark.parametrize("mistake", [{"odd_first": False}, {"tree": "halving"}])
def test_control_a_mistake_is_seen(leaves, mistake):
    rng = np.random.default_rng(11)
    W, X = bf16_words(rng, "plain", (32, 384)), bf16_values(rng, "plain", (1, 384))
    got = leaves.rows("bf16_x16", W, X)
    assert_bits(got, rule3.dot(rule3.bf16(W)[None], X[:, None]))
    assert differing(got, rule3.dot(rule3.bf16(W)[None], X[:, None], **mistake)) > 4


def test_control_the_instruction_is_used(leaf_library):
    """On x that bf16 does not represent the set with vdpbf16ps must differ, or it is not used."""
    rng = np.random.default_rng(14)
    W, X = bf16_words(rng, "plain", (32, 384)), f32_bits(rng, "plain", (1, 384))
    P, S = mxfp4_bytes(rng, "plain", 32, 384)
    here = leaf_library("avx512_bf16")
    assert differing(here.rows("bf16_x16", W, X), here.rows("bf16", W, X)) > 16
    assert differing(here.rows("mxfp4_x16", (P, S), X), here.rows("mxfp4", (P, S), X)) > 16


def test_a_cpu_that_sums_in_another_order_falls_back(tmp_path):
    """The self-test, its expectation turned round: the set is given up with a line that says so."""
    if not NEEDS["avx512_bf16"] <= cpu_flags():
        pytest.skip("NOT RUN: no avx512_bf16 on this CPU")
    units = ("avx512_bf16",)
    odd = build(tmp_path / "k3-cpu", defines=["K3_CONTROL_EVEN_FIRST"], only=units, keep=False)
    for path, has in ((odd, False), (build(tmp_path / "as-is"), True)):
        done = subprocess.run([path, "--identity"], capture_output=True, text=True, check=True)
        assert ('"avx512_bf16"' in done.stdout) == has
        assert '"avx512"' in done.stdout
        assert ("vdpbf16ps" in done.stderr) == (not has)
        assert len(done.stderr.splitlines()) == (0 if has else 1)
