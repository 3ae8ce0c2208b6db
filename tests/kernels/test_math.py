"""Elementwise mathematics: bits equal in every compilation, errors in ulp against mpmath.

Kills: a last scaling that keeps subnormals, exp(0) that is not 1, a tanh that loses the sign of
zero or does not reach 1, sigmoid by another formula, a reciprocal instead of a division.
"""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from tests.kernels.conftest import NO_FLUSH

LEAST = np.float32(2.0**-126)
ENDS = [0.0, 1e-45, 5e-39, LEAST, 1.0, 3.4028235e38, np.inf]
EXP_LIMITS = [87.33, 87.3365, 87.34, 87.3401, 88.72283, 88.72284, 88.73, 88.731, 100.0]
TANH_LIMITS = [0.5, 0.79999995, 0.8, 9.01, 9.0109, 9.011, 25.0]
SPECIALS = np.array([*ENDS, *EXP_LIMITS, *TANH_LIMITS], np.float32)
SPECIALS = np.concatenate([SPECIALS, -SPECIALS])


def every_exponent():
    """Both signs, every exponent, three mantissas each."""
    exponent = np.repeat(np.arange(255, dtype=np.uint32) << 23, 3)
    mantissa = np.tile(np.array([0, 0x2AAAAB, 0x7FFFFF], np.uint32), 255)
    bits = exponent | mantissa
    return np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)


def samples(low, high, n, seed=1):
    rng = np.random.default_rng(seed)
    return rng.uniform(low, high, n).astype(np.float32)


def ulps(got, exact):
    """Distance in units of the last place of ``exact`` (binary64), subnormal results flushed."""
    exact = np.asarray(exact, np.float64)
    expected = np.where(np.abs(exact) < 2.0**-126, 0.0, exact)
    unit = np.spacing(np.maximum(np.abs(expected), 2.0**-126).astype(np.float32)).astype(np.float64)
    wrong = np.abs(got.astype(np.float64) - expected) / unit
    near_least = np.abs(np.abs(exact) - 2.0**-126) < 2.0**-148  # either side of the flush is right
    return np.where(near_least & (np.abs(got) <= 2.0**-126), 0.0, wrong)


def assert_ulps(got, exact, bound):
    finite = np.isfinite(exact) & (np.abs(exact) < 3.4028235e38)
    assert np.array_equal(np.isfinite(got), np.isfinite(exact.astype(np.float32)))
    wrong = ulps(got[finite], exact[finite])
    assert wrong.max() <= bound, f"{wrong.max()} ulp at {np.argmax(wrong)}"
    return wrong.max()


def numpy_tanh(x):
    return np.tanh(x.astype(np.float64))


def numpy_sigmoid(x):
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x.astype(np.float64)))


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "silu", "softcap", "situ", "sqrt"])
def test_bits_equal_in_every_compilation(scalar, vector, name):
    x = np.concatenate(
        [every_exponent(), SPECIALS, samples(-100, 100, 200_000), samples(-2, 2, 200_000)]
    )
    u = np.roll(x, 1)
    got, want = vector.map(name, x, u), scalar.map(name, x, u)
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), x[~same][:5]


def test_exp_within_one_ulp(leaves):
    x = np.concatenate(
        [samples(-88, 89, 2_000_000), samples(-1, 1, 500_000), every_exponent(), SPECIALS]
    )
    x = np.where(np.abs(x) < LEAST, np.float32(0), x)
    with np.errstate(over="ignore"):
        assert_ulps(leaves.map("exp", x), np.exp(x.astype(np.float64)), 1.0)


def test_tanh_within_two_ulp(leaves):
    x = np.concatenate(
        [samples(-10, 10, 1_000_000), samples(-1, 1, 1_000_000), every_exponent(), SPECIALS]
    )
    x = np.where(np.abs(x) < LEAST, np.float32(0), x)
    assert_ulps(leaves.map("tanh", x), numpy_tanh(x), 2.0)


def test_sigmoid_within_three_ulp(leaves):
    x = np.concatenate([samples(-87, 20, 1_000_000), samples(-2, 2, 500_000)])
    assert_ulps(leaves.map("sigmoid", x), numpy_sigmoid(x), 3.0)


def test_binary64_yardstick_against_mpmath(scalar):
    """The dense samples lean on NumPy's binary64; mpmath judges both on fewer points."""
    x = np.concatenate(
        [samples(-87, 88, 3000), samples(-3, 3, 2000), every_exponent()[::3], SPECIALS]
    )
    x = x[np.isfinite(x) & (np.abs(x) >= LEAST) & (np.abs(x) < 88)]
    mpmath.mp.prec = 120
    for name, exact, numpy_value, bound in (
        ("exp", mpmath.exp, np.exp(x.astype(np.float64)), 1.0),
        ("tanh", mpmath.tanh, numpy_tanh(x), 2.0),
        ("sigmoid", lambda v: 1 / (1 + mpmath.exp(-v)), numpy_sigmoid(x), 3.0),
    ):
        true = np.array([float(exact(mpmath.mpf(float(v)))) for v in x])
        assert np.max(np.abs(numpy_value / true - 1)) < 1e-14
        assert_ulps(scalar.map(name, x), true, bound)


def test_exp_special_values(leaves):
    x = np.array(
        [0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, np.nan, 88.74, -87.35, -1e30, 1e30], np.float32
    )
    want = np.array([1, 1, 1, 1, np.inf, 0, np.nan, np.inf, 0, 0, np.inf], np.float32)
    got = leaves.map("exp", x)
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32)) or np.isnan(got[6])
    assert np.array_equal(got, want, equal_nan=True)
    assert not np.signbit(got[~np.isnan(got)]).any()
    # The last scaling flushes: between the limit and ln 2^-126 the result is 0, not a subnormal.
    low = np.linspace(-87.34, -87.33655, 50).astype(np.float32)
    assert np.all(leaves.map("exp", low) == 0)
    assert np.any(leaves.map("exp", low, csr=NO_FLUSH) != 0)  # control


def test_exp_is_monotonic_where_segments_meet(leaves):
    for n in range(-120, 120, 7):
        at = np.float32((n + 0.5) * np.log(2))
        x = np.array([at], np.float32).view(np.int32) + np.arange(-200, 200, dtype=np.int32)
        y = leaves.map("exp", np.sort(x.view(np.float32)))
        assert np.all(np.diff(y) >= 0)


def test_tanh_is_odd_and_saturates_exactly(leaves):
    x = np.concatenate([samples(0, 12, 200_000), every_exponent(), SPECIALS])
    x = x[~np.isnan(x)]
    plus, minus = leaves.map("tanh", x), leaves.map("tanh", -x)
    assert np.array_equal(plus.view(np.uint32) ^ np.uint32(1 << 31), minus.view(np.uint32))
    rounded = numpy_tanh(x).astype(np.float32)
    assert np.all(np.abs(plus[np.abs(rounded) == 1]) == 1)
    assert np.all(np.abs(plus) <= 1)
    assert np.isnan(leaves.map("tanh", np.array([np.nan], np.float32)))[0]
    assert leaves.map("tanh", np.array([-0.0], np.float32)).view(np.uint32)[0] == 0x80000000


def test_compositions_are_their_formulas(leaves):
    """The order of the contract's page, in single binary32 operations."""
    rng = np.random.default_rng(3)
    x = rng.normal(0, 6, 20_000).astype(np.float32)
    u = rng.normal(0, 20, 20_000).astype(np.float32)
    one = np.float32(1)
    sigmoid = one / (one + leaves.map("exp", -x))
    assert np.array_equal(leaves.map("sigmoid", x), sigmoid)
    assert np.array_equal(leaves.map("silu", x), x * sigmoid)
    cap = np.float32(25) * leaves.map("tanh", u / np.float32(25))
    assert np.array_equal(leaves.map("softcap", u), cap)
    gate = np.float32(4) * leaves.map("tanh", x / np.float32(4))
    assert np.array_equal(leaves.map("situ", x, u), (gate * sigmoid) * cap)
    # control: a reciprocal in place of the division has other bits
    reciprocal = np.float32(25) * leaves.map("tanh", u * (one / np.float32(25)))
    assert np.count_nonzero(reciprocal != cap) > 100
    known = leaves.map(
        "situ", np.array([1, -1, 5, 100], np.float32), np.array([1, 2, -30, 100], np.float32)
    )
    assert np.allclose(known, [0.715817828, -0.525828896, -70.2442544, 99.93293], rtol=1e-6)


def test_division_and_root_are_correctly_rounded(leaves):
    rng = np.random.default_rng(4)
    x = np.exp(rng.uniform(-40, 40, 100_000)).astype(np.float32)
    u = np.exp(rng.uniform(-40, 40, 100_000)).astype(np.float32)
    assert np.array_equal(leaves.map("sqrt", x), np.sqrt(x))
    assert np.array_equal(leaves.map("div", x, u), x / u)
    assert leaves.map("sqrt", np.array([-0.0], np.float32)).view(np.uint32)[0] == 0x80000000


def test_bf16_rounds_to_nearest_even(leaves):
    x = np.array(
        [1.0, 1.00390625, 1.01171875, -1.00390625, 3.4e38, np.inf, -np.inf, 0.0, -0.0], np.float32
    )
    want = np.array([1.0, 1.0, 1.015625, -1.0, np.inf, np.inf, -np.inf, 0.0, -0.0], np.float32)
    assert np.array_equal(leaves.map("bf16", x).view(np.uint32), want.view(np.uint32))
    nan = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(leaves.map("bf16", nan)).all()
