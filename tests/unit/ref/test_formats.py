"""Stored formats decode exactly; the usual misreadings do not."""

from pathlib import Path

import numpy as np
import pytest

from k3tool.ref.formats import FP4_VALUES, decode_bf16, decode_mxfp4

REAL = Path(__file__).parents[2] / "data" / "real-mxfp4-l1-e0-w1.npz"


def test_bf16_is_the_high_half_of_binary32() -> None:
    values = np.array([1.0, -2.5, 0.0, 2.0**-126], dtype=np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(decode_bf16(bits), values.astype(np.float64))


def test_the_low_nibble_is_the_even_column() -> None:
    # k3_spec D, "Example": scale 0x80 is 2, byte 0x9A is -1 then -0.5.
    packed = np.zeros((1, 16), dtype=np.uint8)
    packed[0, 0] = 0x9A
    row = decode_mxfp4(packed, np.array([[0x80]], dtype=np.uint8))[0]
    assert row[:3].tolist() == [-2.0, -1.0, 0.0]


def test_a_scale_belongs_to_32_columns() -> None:
    packed = np.full((1, 32), 0x22, dtype=np.uint8)
    row = decode_mxfp4(packed, np.array([[127, 128]], dtype=np.uint8))[0]
    assert row.tolist() == [1.0] * 32 + [2.0] * 32


def test_scale_byte_zero_is_plus_zero() -> None:
    row = decode_mxfp4(np.full((1, 16), 0xFF, np.uint8), np.zeros((1, 1), np.uint8))[0]
    assert not row.any()
    assert not np.signbit(row).any()
    tiny = decode_mxfp4(np.full((1, 16), 0x77, np.uint8), np.ones((1, 1), np.uint8))[0]
    assert set(tiny) == {6.0 * 2.0**-126}  # the control: scale byte 1 keeps its values


def test_a_scale_byte_above_the_limit_is_refused() -> None:
    packed = np.zeros((1, 16), np.uint8)
    decode_mxfp4(packed, np.array([[252]], np.uint8))
    with pytest.raises(ValueError, match="scale byte 253"):
        decode_mxfp4(packed, np.array([[253]], np.uint8))


def test_minus_zero_is_code_eight() -> None:
    assert np.signbit(FP4_VALUES[8])
    assert FP4_VALUES[8] == 0.0


def test_real_bytes() -> None:
    real = np.load(REAL)
    packed, scale, expected = real["packed"], real["scales"], real["expected"]
    np.testing.assert_array_equal(decode_mxfp4(packed, scale), expected)
    swapped = (packed >> 4) | (packed << 4)
    assert (decode_mxfp4(swapped, scale) != expected).any()
