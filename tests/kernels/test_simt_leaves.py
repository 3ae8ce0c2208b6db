"""The GPU leaves with emulated lanes against the scalar definition: bits, in every order of lanes.

No GPU runs here. What this holds: kernels_common/simt_leaves.h computes the contract's bits, takes
every barrier and exchange together, and loads nothing misaligned. What it cannot hold: what a GPU's
compiler and arithmetic make of it (tests/kernels/test_compile_gpu.py reads their text).
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from tests.kernels import rule3
from tests.kernels.conftest import ROOT, Leaves
from tests.kernels.test_leaves import (
    KINDS,
    assert_bits,
    bf16_words,
    differing,
    f32_bits,
    mxfp4_bytes,
    unaligned,
)

FORWARD, REVERSE, STRIDED = 0, 1, 2
VENDOR_LANES = {"cuda": 256, "hip": 512}
FOLDER = ROOT / "tests/kernels/simt_host"
FLAGS = ["-std=c++17", "-O2", "-mfma", "-ffp-contract=off", "-fno-fast-math", "-Wall", "-Wextra",
         "-Werror", "-Wno-unused-function", "-fPIC", "-shared"]  # fmt: skip


@pytest.fixture(scope="session")
def simt_library(tmp_path_factory):
    """Return ``load(vendor) -> path`` of the leaves compiled for that vendor's block."""
    folder, made = tmp_path_factory.mktemp("simt"), {}

    def load(vendor: str):
        if vendor not in made:
            path = folder / f"{vendor}.so"
            command = ["g++", *FLAGS, f"-DK3_HOST_LANES={VENDOR_LANES[vendor]}", "-I", str(FOLDER),
                       str(FOLDER / "leaves_simt.cpp"), "-o", str(path)]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made[vendor] = path
        return made[vendor]

    return load


@pytest.fixture(params=[("cuda", FORWARD), ("cuda", STRIDED), ("hip", FORWARD), ("hip", REVERSE)],
                ids=lambda p: f"{p[0]}-order{p[1]}")  # fmt: skip
def simt(request, simt_library):
    """The leaves of one vendor's block, its lanes in one order."""
    vendor, order = request.param
    leaves = Leaves(vendor, simt_library(vendor))
    leaves.csr = order
    return leaves


LENGTHS = [1, 2, 7, 8, 9, 31, 64, 127, 128, 129, 130, 200, 256, 264, 384, 520, 1536, 3584]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_", ["bf16", "f32"])
def test_rows_equal_scalar(scalar, simt, type_, kind):
    """Aligned and unaligned, so that vector and element path run; 131 rows: four a team."""
    rng = np.random.default_rng([KINDS.index(kind), len(type_)])
    make = bf16_words if type_ == "bf16" else f32_bits
    for K in LENGTHS:
        W, X = make(rng, kind, (9, K)), f32_bits(rng, kind, (1, K))
        want = scalar.rows(type_, W, X)
        assert_bits(simt.rows(type_, W, X), want)
        assert_bits(simt.rows(type_, unaligned(W), unaligned(X)), want)
    W, X = make(rng, kind, (131, 256)), f32_bits(rng, kind, (1, 256))
    assert_bits(simt.rows(type_, W, X, rows=(1, 130)), scalar.rows(type_, W, X, rows=(1, 130)))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_change_no_bit(scalar, simt, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for K, n_blocks in [(34, 1), (136, 1), (528, 8), (1536, 4), (4224, 2)]:
        W, X = bf16_words(rng, kind, (11, K)), f32_bits(rng, kind, (7, K))
        want = scalar.rows("bf16", W, X, n_blocks)
        for T in (1, 2, 4, 7):
            assert_bits(simt.rows("bf16", W, X[:T], n_blocks), want[:T])
        assert_bits(simt.rows("bf16", W, X, n_blocks, rows=(3, 10), ldy=40), want[:, 3:10])


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4_equals_scalar(scalar, simt, kind):
    """Blocks of whole scale groups and blocks that begin inside one."""
    rng = np.random.default_rng(KINDS.index(kind))
    shapes = [
        (32, 1),
        (96, 1),
        (160, 1),
        (512, 1),
        (3584, 1),
        (3072, 8),
        (96, 8),
        (160, 4),
        (544, 8),
    ]
    for K, n_blocks in shapes:
        packed, scales = mxfp4_bytes(rng, kind, 7, K)
        X = f32_bits(rng, kind, (3, K))
        want = scalar.rows("mxfp4", (packed, scales), X, n_blocks)
        for T in (1, 3):
            assert_bits(simt.rows("mxfp4", (packed, scales), X[:T], n_blocks), want[:T])
        odd = unaligned(packed, 3)
        assert_bits(simt.rows("mxfp4", (odd, scales), X, n_blocks), want)
        want = scalar.blocks(packed, scales, X[0], n_blocks, (1, 6))
        assert_bits(simt.blocks(packed, scales, X[0], n_blocks, (1, 6)), want)


def test_many_expert_rows(scalar, simt):
    rng = np.random.default_rng(3)
    packed, scales = mxfp4_bytes(rng, "plain", 140, 256)
    X = f32_bits(rng, "plain", (1, 256))
    want = scalar.rows("mxfp4", (packed, scales), X, 8)
    assert_bits(simt.rows("mxfp4", (packed, scales), X, 8), want)
    want = scalar.blocks(packed, scales, X[0], 8)
    assert_bits(simt.blocks(packed, scales, X[0], 8), want)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_equal_scalar(scalar, simt, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for n in [1, 2, 9, 64, 127, 128, 129, 300]:
        x = f32_bits(rng, kind, (n,))
        M, H = f32_bits(rng, kind, (n, 34)), bf16_words(rng, kind, (n, 34))
        assert_bits(simt.cols("f32", M, x), scalar.cols("f32", M, x))
        assert_bits(simt.cols("bf16", H, x, (7, 30)), scalar.cols("bf16", H, x, (7, 30)))
    M, x = f32_bits(rng, kind, (16, 600)), f32_bits(rng, kind, (16,))
    assert_bits(simt.cols("f32", M, x), scalar.cols("f32", M, x))


@pytest.mark.parametrize("kind", KINDS)
def test_single_sums_equal_scalar(scalar, simt, kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for K in [*LENGTHS, 528, 7168]:
        a, b = f32_bits(rng, kind, (K,)), f32_bits(rng, kind, (K,))
        for x, y in ((a, b), (unaligned(a), unaligned(b))):
            assert_bits(simt.one("dot_f32", x, y), scalar.one("dot_f32", x, y))
        assert_bits(simt.one("sum_f32", a), scalar.one("sum_f32", a))
        if K <= 512 or K % 16 == 0:
            assert_bits(simt.one("axis_dot", a, b), scalar.one("axis_dot", a, b))


@pytest.mark.parametrize("mistake", [{"odd_first": False}, {"tree": "halving"}])
def test_control_a_mistake_is_seen(simt, mistake):
    rng = np.random.default_rng(11)
    W, X = bf16_words(rng, "plain", (32, 384)), f32_bits(rng, "plain", (1, 384))
    got = simt.rows("bf16", W, X)
    assert_bits(got, rule3.dot(rule3.bf16(W)[None], X[:, None]))
    assert differing(got, rule3.dot(rule3.bf16(W)[None], X[:, None], **mistake)) > 4


# ---- the emulation itself: what would hang or race on a GPU is seen ----


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("barrier_in_a_branch()", "waits for lanes that will never come"),
        ("exchange_in_a_branch()", "waits for lanes that will never come"),
        ("misaligned_load(ctypes.create_string_buffer(64))", "a 16-byte load is not aligned"),
    ],
)
def test_control_wrong_block_programs_stop(simt_library, vendor, call, message):
    script = f"import ctypes; ctypes.CDLL({str(simt_library(vendor))!r}).{call}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize("order", [FORWARD, REVERSE, STRIDED])
def test_control_a_missing_barrier_is_seen(simt_library, order):
    """A race that one order of lanes hides shows in another; this one shows in each."""
    lib = ctypes.CDLL(str(simt_library("cuda")))
    x = np.arange(200, dtype=np.float32)
    for with_barrier in (1, 0):
        y, z = np.full_like(x, np.nan), np.empty_like(x)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, y, z)]
        lib.reverse(order, *pointers, x.size, with_barrier)
        assert np.array_equal(z, x[::-1]) == bool(with_barrier)


@pytest.mark.parametrize("order", [FORWARD, REVERSE])
def test_control_overwriting_what_others_read_is_seen(simt_library, order):
    """A team that writes in place before the next has read: seen only because teams run ahead."""
    lib = ctypes.CDLL(str(simt_library("hip")))
    for with_barrier in (1, 0):
        x = np.ones(600, np.float32)
        lib.scale_in_place(order, ctypes.c_void_p(x.ctypes.data), x.size, with_barrier)
        assert np.all(x == 600) == bool(with_barrier)
