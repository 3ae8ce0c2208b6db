"""The order-free sum that images and results are compared by (kernels_common/protocol.h)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def digest_words(words: Array, key: int) -> int:
    """Return the sum over words (unsigned) of mix(word ^ mix(key + index)), modulo 2^64."""
    index = np.arange(len(words), dtype=np.uint64) + np.uint64(key)
    with np.errstate(over="ignore"):
        return int(np.sum(mix(words.astype(np.uint64) ^ mix(index)), dtype=np.uint64))


def mix(x: Array) -> Array:
    """Return k3_mix of each of some u8. Source: kernels_common/protocol.h."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed
