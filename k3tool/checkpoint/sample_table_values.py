"""Values of the large samples: drawn from a fixed table, two random bytes each.

The small samples' way (k3tool.checkpoint.sample_values) spends eight random bytes and a dozen
passes over float64 on a value, which at 3 GB is minutes. Here a value is one of 65,536 fixed ones,
already in the stored form; scale bytes of MXFP4 are drawn on their own, so no group has to be
looked at. A tensor comes from one stream keyed by its name, so piece size changes no byte.
"""

import functools
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.checkpoint.headers import DTYPES
from k3tool.checkpoint.sample_presets import Spread, spread_of
from k3tool.checkpoint.sample_values import bf16_bits, e2m1_codes, normal
from k3tool.model.config_fields import MXFP4_GROUP
from k3tool.model.weights import Split, TensorSpec

Array = npt.NDArray[Any]
PIECE_VALUES = 1 << 22  # stored values made at a time; the tables and a piece stay in cache
_TABLE = 1 << 16
_SCALE_STEPS = (-1,) * 64 + (0,) * 128 + (1,) * 64  # by a random byte: half of all groups at 0
_SCALE_RMS = 1.25  # root of the mean of 4^step


def table_pieces(spec: TensorSpec, seed: int) -> Iterator[Array]:
    """Yield a tensor's stored bits, flat: u2 for bf16, f4, or u1 for packed and scale bytes."""
    spread = spread_of(spec.row.pattern)
    count = math.prod(spec.shape)
    table = _table(spec, spread)
    draws = np.random.PCG64(list(np.frombuffer(_key(spec.name, seed), dtype="<u4")))
    live = spec.live * (count // spec.shape[0]) if spec.split is Split.LIVE_ROWS else count
    for start in range(0, count, PIECE_VALUES):
        n = min(PIECE_VALUES, count - start)
        per_word = 64 // (8 if len(table) == len(_SCALE_STEPS) else 16)
        raw = np.asarray(draws.random_raw(-(-n // per_word)), dtype="<u8")
        piece = table[raw.view("<u1" if len(table) == len(_SCALE_STEPS) else "<u2")[:n]]
        piece[max(0, live - start) :] = 0  # A_log is padded with zeros behind the live heads
        yield piece


def _key(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"table {seed} {name}".encode()).digest()


def _table(spec: TensorSpec, spread: Spread) -> Array:
    """Return what a tensor's values are drawn from: by two random bytes, or by one for scales."""
    if spec.dtype == "U8":
        return _mxfp4_table(spec, spread)
    std = spread.std / math.sqrt(spec.shape[-1]) if spread.by_columns else spread.std
    values = (spread.mean + std * _normals()).astype(DTYPES["F32"])
    return bf16_bits(values) if spec.dtype == "BF16" else values


@functools.cache
def _normals() -> Array:
    """Return the table's normal numbers in ascending order; the same on every machine."""
    return np.sort(normal("table", 0, _TABLE))


def _mxfp4_table(spec: TensorSpec, spread: Spread) -> Array:
    """Return a table of packed bytes, or of scale bytes, whose product has the spread's size."""
    part = spec.name.rsplit(".", 1)[1]
    cols = spec.shape[1] * (2 if part == "weight_packed" else MXFP4_GROUP)
    std = spread.std / math.sqrt(cols) / _SCALE_RMS
    mantissa, exponent = math.frexp(std)
    if part == "weight_scale":
        return np.array([exponent - 2 + 127 + step for step in _SCALE_STEPS], np.uint8)
    # Codes of size 2 to 4 times 2^(exponent - 2): few are zero and few hit the largest, 6.
    codes = e2m1_codes(4 * mantissa * _normals()[_TABLE // 512 :: _TABLE // 256])
    pair = np.arange(_TABLE)
    packed: Array = codes[pair & 255] | (codes[pair >> 8] << 4)
    return packed
