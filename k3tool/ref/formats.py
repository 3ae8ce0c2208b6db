"""Stored weight formats as float64, and the step that an op may ask about. No files, no arithmetic.

Every value of BF16, F32 and MXFP4 is a float64, so decoding is exact.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3tool.model.config_fields import MXFP4_GROUP

Array = npt.NDArray[np.float64]

# E2M1: sign in bit 3, then two exponent bits and one mantissa bit. 0x8 is -0.
E2M1: Array = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4_VALUES: Array = np.concatenate([E2M1, -E2M1])
SCALE_BIAS = 127
SCALE_LIMIT = 253  # from here a weight may not fit binary32; 255 is NaN in OCP MX


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of one sequence that are computed together.

    Shapes: ids (T,) integers. ``position`` is the absolute position of ids[0]; at 0 an op takes its
    state as zero whatever it holds.
    """

    ids: npt.NDArray[np.int64]
    position: int


def decode_bf16(bits: npt.NDArray[np.uint16]) -> Array:
    """Widen BF16 bits: the high half of a binary32. Shapes: any u2 -> float64, the same; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(x: Array, flag: int) -> Array:
    """Return x behind a rounding point: to the nearest bf16, ties to even, if flagged.

    Wrong if a value goes through binary32 first: its own rounding may make a tie.
    """
    if not flag:
        return x
    _, exponent = np.frexp(x)
    finite = np.isfinite(x)
    # Eight significant bits, and no finer than bf16's smallest subnormal, which is flushed anyway.
    unit = np.ldexp(1.0, np.maximum(np.where(finite, exponent, 0) - 8, -133))
    result: Array = np.where(finite, np.round(x / unit) * unit, x)
    return result


def decode_mxfp4(packed: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8]) -> Array:
    """Decode one MXFP4 matrix.

    Shapes: packed (R, K/2), low nibble = even column; scale (R, K/32) -> (R, K).
    A scale byte of 0 makes its group +0 (numerics rule 4), where 2^-127 would be the plain reading.
    Raises: ValueError for a scale byte that numerics rule 4 refuses.
    Source: k3_spec D; compressed-tensors mxfp4-pack-quantized.
    """
    if int(scale.max(initial=0)) >= SCALE_LIMIT:
        raise ValueError(f"scale byte {int(scale.max())}, need less than {SCALE_LIMIT}")
    rows, half = packed.shape
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, 2 * half)
    factor = np.ldexp(1.0, scale.astype(np.int64) - SCALE_BIAS)
    groups = FP4_VALUES[nibbles].reshape(rows, -1, MXFP4_GROUP)
    values = np.where(scale[..., None] == 0, 0.0, groups * factor[..., None])
    return values.reshape(rows, 2 * half)
