"""Choose a token from logits: the greedy one, or one drawn so that the same seed draws the same.

The definition, in which every step has one answer on every machine (docs/text.md says it in words):

1. d_i = max(logits) - logits_i and y_i = d_i / temperature * log2(e), in binary64, each operation
   rounded once. n_i = floor(y_i), f_i = y_i - n_i.
2. w_i = floor(2^40 * P(f_i)) >> n_i, P a polynomial for 2^-f of multiplications and additions in
   a fixed order. libm's exp is the tempting wrong version: its last bit is the platform's own.
   From here on numbers are integers, so sums do not depend on an order; w_i = 0 below 2^-40.
3. Ids in order of falling logit, equals by id. `top_k` keeps the first k. `top_p` keeps, of those,
   the fewest first ones whose weights sum up to at least top_p, as its shortest decimal says it,
   of what all of those weigh.
4. r = floor(u * W / 2^128), W the sum of the kept weights, u the 128 bits of Philox-4x32-10 with
   the seed as key and the token's number in its sequence as counter. The id drawn is the first of
   the kept, in order of id, at which the running sum of weights passes r.

A token's chance is within V / 2^40 of the ideal one, V the number of ids.
Gated by tests/runtime/test_sampling.py.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.errors import UsageError
from k3tool.runtime.engine import Choice

Array = npt.NDArray[Any]
MOST_TEMPERATURE = 100.0
WEIGHT_BITS = 40
_LOG2_E = 1.4426950408889634
# (-ln 2)^k / k!, the binary64 numbers nearest to them: their sum is within 2^-47 of 2^-f on [0, 1].
_POWERS = (
    1.0, -0.6931471805599453, 0.24022650695910072, -0.05550410866482158, 0.009618129107628477,
    -0.0013333558146428443, 0.0001540353039338161, -1.5252733804059841e-05, 1.321548679014431e-06,
    -1.01780860092397e-07, 7.054911620801123e-09, -4.4455382718708116e-10, 2.5678435993488206e-11,
    -1.3691488853904128e-12, 6.778726354822545e-14,
)  # fmt: skip
_ROUNDS = 10
_WORD = (1 << 32) - 1


def philox(counter: int, key: int) -> int:
    """Return the 128 bits of Philox-4x32-10, word 0 lowest; counter of 128 bits, key of 64.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), with the constants
    and known answers of Random123.
    """
    x = [counter >> shift & _WORD for shift in (0, 32, 64, 96)]
    low, high = key & _WORD, key >> 32 & _WORD
    for _ in range(_ROUNDS):
        first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [
            second >> 32 ^ x[1] ^ low, second & _WORD, first >> 32 ^ x[3] ^ high, first & _WORD,
        ]  # fmt: skip
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    return x[0] | x[1] << 32 | x[2] << 64 | x[3] << 96


@dataclass(frozen=True, slots=True)
class Sampler:
    """How to choose. A temperature of 0 is greedy; `top_p` 1 and `top_k` None keep every token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what the definition has no answer for. Raises: UsageError naming the option."""
        if not 0 <= self.temperature <= MOST_TEMPERATURE:
            need = f"0 (greedy) to {MOST_TEMPERATURE:.0f}"
            raise UsageError("--temperature", got=self.temperature, need=need)
        if not 0 < self.top_p <= 1:
            raise UsageError("--top-p", got=self.top_p, need="above 0, at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError("--top-k", got=self.top_k, need="at least 1")
        if not 0 <= self.seed < 1 << 64:
            raise UsageError("--seed", got=self.seed, need="0 to 2^64 - 1")

    @property
    def is_greedy(self) -> bool:
        """Return whether the best token is always the one: no logits are then needed."""
        return self.temperature == 0 or self.top_k == 1

    def choose(self, logits: Array, step: int) -> int:
        """Return the id for the `step`-th token (0 for the first) of a sequence.

        Shapes: logits (V,) f32, finite, V at most 2^23.
        """
        if self.is_greedy:
            return int(np.argmax(logits))
        weights = kept_weights(logits, self.temperature, self.top_k, self.top_p)
        sums = np.cumsum(weights, dtype=np.uint64)
        drawn = philox(step, self.seed) * int(sums[-1]) >> 128
        return int(np.searchsorted(sums, np.uint64(drawn), side="right"))


GREEDY = Sampler()


def chooser(sampler: Sampler, first: int = 0) -> Callable[[Choice, Array | None], int] | None:
    """Return what draws a sequence's tokens one after another, from number `first` on.

    None where the best is taken: then no logits are needed.
    """
    if sampler.is_greedy:
        return None
    number = itertools.count(first)

    def choose(choice: Choice, logits: Array | None) -> int:
        assert logits is not None
        return sampler.choose(logits, next(number))

    return choose


def kept_weights(
    logits: Array, temperature: float, top_k: int | None = None, top_p: float = 1.0
) -> Array:
    """Return each id's weight, 0 for what is not kept: steps 1 to 3 of the definition. (V,) u64."""
    weights = weights_of(logits, temperature)
    if (top_k is None or top_k >= len(weights)) and top_p == 1:
        return weights
    order = np.argsort(-logits, kind="stable")
    ordered = weights[order]
    if top_k is not None:
        ordered = ordered[:top_k]
    sums = np.cumsum(ordered, dtype=np.uint64)
    enough = math.ceil(Fraction(str(top_p)) * int(sums[-1]))
    n_kept = int(np.searchsorted(sums, np.uint64(enough))) + 1
    kept = np.zeros_like(weights)
    kept[order[:n_kept]] = ordered[:n_kept]
    return kept


def weights_of(logits: Array, temperature: float) -> Array:
    """Return 2^40 * exp((logits - max) / temperature), rounded as the definition says. (V,) u64."""
    values = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # a quotient past all numbers is a weight of 0
        y = (values.max() - values) / temperature * _LOG2_E
    y = np.minimum(y, 63.0)
    n = np.floor(y)
    f = y - n
    power = np.full_like(f, _POWERS[-1])
    for coefficient in _POWERS[-2::-1]:
        power = power * f
        power = power + coefficient
    scaled = np.floor(power * float(1 << WEIGHT_BITS)).astype(np.uint64)
    weights: Array = scaled >> n.astype(np.uint64)
    return weights
