"""Values of the small samples: normal numbers by exact steps, MXFP4 by quantising them.

Same name and seed, same bits, on every machine and NumPy version: values come from a counter hash
and integer or exact float64 steps, not from a library's distributions.
"""

import hashlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.checkpoint.headers import DTYPES
from k3tool.checkpoint.sample_presets import Spread, spread_of
from k3tool.model.config_fields import MXFP4_GROUP
from k3tool.model.weights import Split, TensorSpec
from k3tool.ref.formats import E2M1

Array = npt.NDArray[Any]
_E2M1_MIDDLES = (E2M1[1:] + E2M1[:-1]) / 2
_E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2^2


def tensor_values(spec: TensorSpec, seed: int) -> Array:
    """Return a tensor's stored bits: u2 for bf16, f4, or u1 for packed and scale bytes."""
    spread = spread_of(spec.row.pattern)
    if spec.dtype == "U8":
        return _mxfp4_part(spec, seed, spread)
    std = spread.std / math.sqrt(spec.shape[-1]) if spread.by_columns else spread.std
    values = spread.mean + std * normal(spec.name, seed, math.prod(spec.shape))
    if spec.split is Split.LIVE_ROWS:
        values[spec.live :] = 0.0  # A_log is padded with zeros behind the live heads
    narrow = values.reshape(spec.shape).astype(DTYPES["F32"])
    return bf16_bits(narrow) if spec.dtype == "BF16" else narrow


def normal(name: str, seed: int, count: int) -> Array:
    """Return about normal numbers: four 16-bit uniforms added, which is exact and bounded by 3.5.

    The stream is keyed by the tensor's name, so that a tensor does not depend on its neighbours.
    """
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    raw = np.random.PCG64(list(np.frombuffer(key, dtype="<u4"))).random_raw(count)
    words = np.asarray(raw, dtype="<u8").view("<u2").reshape(count, 4)
    total = words.astype(np.int64).sum(axis=1)
    normal: Array = (total - 2 * 65535) / (65536 * math.sqrt(4 / 12))
    return normal


def bf16_bits(values: Array) -> Array:
    """Round to nearest even on the bits; the values are finite. Shapes: any f4 -> u2, the same."""
    bits = values.view("<u4")
    rounded: Array = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2")


def _mxfp4_part(spec: TensorSpec, seed: int, spread: Spread) -> Array:
    """Return packed or scale bytes of the matrix both belong to: it is made once for each."""
    base, part = spec.name.rsplit(".", 1)
    per_byte = 2 if part == "weight_packed" else MXFP4_GROUP
    rows, cols = spec.shape[0], spec.shape[1] * per_byte
    values = spread.std / math.sqrt(cols) * normal(base, seed, rows * cols)
    groups = values.reshape(rows, cols // MXFP4_GROUP, MXFP4_GROUP)
    exponent = np.frexp(np.abs(groups).max(axis=2))[1] - 1 - _E2M1_MAX_EXPONENT
    if part == "weight_scale":
        scales: Array = exponent + 127
        return scales.astype(np.uint8)
    scaled = np.ldexp(groups, -exponent[:, :, None])
    flat = e2m1_codes(scaled).reshape(rows, cols)
    packed: Array = flat[:, 0::2] | (flat[:, 1::2] << 4)  # low nibble = even column
    return packed


def e2m1_codes(values: Array) -> Array:
    """Return the codes nearest to some numbers; beyond 6 the largest.

    Shapes: any -> u1, the same, a code a byte.
    """
    code = np.searchsorted(_E2M1_MIDDLES, np.abs(values)).astype(np.uint8)
    signed: Array = code | np.where(values < 0, 8, 0).astype(np.uint8)
    return signed
