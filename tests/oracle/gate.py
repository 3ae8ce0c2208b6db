"""The gate that every implementation passes: how far logits may be from the released code's."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]

# What a correct binary32 implementation reaches, of logits with a standard deviation of about 3.
MAX_DIFFERENCE = 2e-4
MAX_RMS = 1e-5  # of the gold logits' standard deviation
# The float64 reference sums in other orders than the released code, nothing more.
MAX_DIFFERENCE_FLOAT64 = 1e-9


class Distance(NamedTuple):
    """How far logits are from gold: largest difference, rms over gold's deviation, same choices."""

    worst: float
    rms: float
    wrong_tokens: int

    @property
    def passes(self) -> bool:
        return self.worst <= MAX_DIFFERENCE and self.rms <= MAX_RMS and self.wrong_tokens == 0


def distance(
    gold: dict[str, Array], prompt: str, prefill: Array, steps: Array, tokens: npt.ArrayLike
) -> Distance:
    """Compare one prompt's logits and tokens with gold; fewer steps than gold's are allowed.

    Shapes: prefill (T, V), steps (N, V), tokens (N,). What is not finite is infinitely far.
    """
    expected = np.concatenate([gold[f"{prompt}.prefill"], gold[f"{prompt}.steps"][: len(steps)]])
    got = np.concatenate([prefill, steps])
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert len(steps) > 0, "nothing to compare"
    difference = np.where(np.isfinite(got), np.abs(got - expected), np.inf)
    rms = float(np.sqrt(np.mean(difference**2)) / expected.std())
    wrong = int(np.sum(np.asarray(tokens) != gold[f"{prompt}.tokens"][: len(steps)]))
    return Distance(float(difference.max()), rms, wrong)
