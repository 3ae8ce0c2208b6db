"""Drawing tokens: known answers, exact ties and cuts, and frequencies that a wrong draw fails."""

import math

import mpmath
import numpy as np
import pytest

from k3tool.errors import UsageError
from k3tool.runtime.sampling import (
    _POWERS,
    WEIGHT_BITS,
    Sampler,
    kept_weights,
    philox,
    weights_of,
)

LOGITS = np.array([1.5, -2.0, 0.25, 3.0, 3.0, -8.0, 2.25, 0.0], "<f4")
ONE = 1 << WEIGHT_BITS


# -- the generator -----------------------------------------------------------------------------


def words(*values: int) -> int:
    return sum(value << 32 * nth for nth, value in enumerate(values))


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        (0, 0, words(0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((1 << 128) - 1, (1 << 64) - 1, words(0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            words(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            words(0xA4093822, 0x299F31D0),
            words(0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: int, key: int, answer: int) -> None:
    assert philox(counter, key) == answer


# -- weights -----------------------------------------------------------------------------------


def test_the_polynomial_has_the_nearest_coefficients() -> None:
    with mpmath.workprec(200):
        exact = [(-mpmath.log(2)) ** k / mpmath.factorial(k) for k in range(len(_POWERS))]
        assert [float(value) for value in exact] == list(_POWERS)


def test_weights_are_those_of_the_exponential() -> None:
    logits = -np.linspace(0, 30, 2001).astype("<f4")
    found = weights_of(logits, 0.75)
    for weight, logit in zip(found[::7], logits[::7], strict=True):
        assert abs(int(weight) - mpmath.exp(mpmath.mpf(float(logit)) / 0.75) * ONE) <= 1
    assert found[0] == ONE
    assert weights_of(np.array([0, -1e30, -np.float32(3e38)], "<f4"), 1e-300).tolist() == [
        ONE,
        0,
        0,
    ]


def test_weights_of_these_logits_are_these_numbers() -> None:
    """Known answers: a change of any operation's order or rounding shows here."""
    assert weights_of(LOGITS, 0.8).tolist() == KNOWN_WEIGHTS
    sampler = Sampler(temperature=0.8, seed=2026)
    assert [sampler.choose(LOGITS, step) for step in range(24)] == KNOWN_IDS
    narrow = Sampler(temperature=1.5, top_k=5, top_p=0.9, seed=(1 << 64) - 1)
    assert [narrow.choose(LOGITS, step) for step in range(24)] == KNOWN_NARROW_IDS


KNOWN_WEIGHTS = [
    168615569223,
    2122556769,
    35343743360,
    1099511627776,
    1099511627776,
    1173952,
    430574940033,
    25858035027,
]
KNOWN_IDS = [3, 4, 6, 6, 3, 0, 3, 3, 4, 6, 3, 4, 0, 4, 3, 7, 6, 4, 3, 4, 3, 4, 3, 4]
KNOWN_NARROW_IDS = [3, 4, 4, 4, 3, 3, 4, 3, 0, 3, 6, 6, 4, 6, 4, 4, 6, 4, 4, 6, 4, 4, 4, 4]


# -- what is kept ------------------------------------------------------------------------------


def kept(logits: np.ndarray, **how: object) -> list[int]:
    return np.flatnonzero(kept_weights(logits, 1.0, **how)).tolist()


def test_top_k_keeps_the_best_and_of_equals_the_lower_id() -> None:
    assert kept(LOGITS, top_k=1) == [3]
    assert kept(LOGITS, top_k=2) == [3, 4]
    assert kept(LOGITS, top_k=3) == [3, 4, 6]
    assert kept(LOGITS, top_k=99) == list(range(8))


def test_top_p_keeps_the_fewest_that_are_enough() -> None:
    equal = np.zeros(10, "<f4")
    # Exactly enough is enough; in binary 0.1 is a little more than 1/10, which is not meant.
    for top_p, n_kept in ((1e-9, 1), (0.1, 1), (0.3, 3), (0.5, 5), (0.7, 7), (0.95, 10), (1, 10)):
        assert kept(equal, top_p=top_p) == list(range(n_kept)), top_p
    assert kept(LOGITS, top_p=0.01) == [3]


def test_top_p_is_of_what_top_k_left() -> None:
    equal = np.zeros(10, "<f4")
    assert kept(equal, top_k=4, top_p=0.5) == [0, 1]


def test_greedy_takes_the_lowest_of_the_best() -> None:
    assert Sampler().choose(LOGITS, 0) == 3
    assert Sampler(temperature=2.0, top_k=1).choose(LOGITS, 5) == 3
    assert Sampler(temperature=1e-9, seed=9, top_p=0.1).choose(LOGITS, 5) == 3


# -- frequencies -------------------------------------------------------------------------------


def _chi_square(ids: list[int], chances: np.ndarray) -> float:
    counts = np.bincount(ids, minlength=len(chances))
    assert counts[chances == 0].sum() == 0
    live = chances > 0
    expected = chances[live] * len(ids)
    return float(((counts[live] - expected) ** 2 / expected).sum())


def _chances(logits: np.ndarray, temperature: float) -> np.ndarray:
    values = np.exp((logits.astype(float) - 3.0) / temperature)
    return values / values.sum()


def _draw(n: int, logits: np.ndarray = LOGITS[[0, 2, 3, 4, 6, 7]], **how: float) -> list[int]:
    sampler = Sampler(**how)
    return [sampler.choose(logits, step) for step in range(n)]


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_frequencies_are_the_chances(seed: int) -> None:
    logits = LOGITS[[0, 2, 3, 4, 6, 7]]
    drawn = _draw(4000, temperature=1.25, seed=seed)
    limit = 25.7  # chi-square of 5 degrees: passed once in 10,000 by chance
    assert _chi_square(drawn, _chances(logits, 1.25)) < limit
    assert _chi_square(drawn, _chances(logits, 1.0)) > limit  # the control: another temperature


def test_first_tokens_of_many_seeds_are_as_good_as_many_tokens_of_one() -> None:
    logits = LOGITS[[0, 2, 3, 4, 6, 7]]
    drawn = [Sampler(temperature=1.25, seed=seed).choose(logits, 0) for seed in range(4000)]
    assert _chi_square(drawn, _chances(logits, 1.25)) < 25.7


def test_neighbours_in_a_sequence_are_independent() -> None:
    logits = np.zeros(4, "<f4")
    ids = _draw(8000, logits, temperature=1.0, seed=3)
    pairs = [4 * first + second for first, second in zip(ids[::2], ids[1::2], strict=True)]
    assert _chi_square(pairs, np.full(16, 1 / 16)) < 44.3  # of 15 degrees: once in 10,000
    stuck = [5 * first for first in ids[::2]]
    assert _chi_square(stuck, np.full(16, 1 / 16)) > 44.3  # the control


def test_a_large_vocabulary_stays_exact() -> None:
    """The sum of 163,840 full weights is below 2^63, and every id has its chance."""
    equal = np.zeros(163_840, "<f4")
    sampler = Sampler(temperature=1.0, seed=5)
    for step in range(5):
        r = philox(step, 5) * (len(equal) * ONE) >> 128
        assert sampler.choose(equal, step) == r // ONE
    assert math.log2(len(equal) * ONE) < 63


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "option"),
    [
        ({"temperature": -0.1}, "--temperature"), ({"temperature": math.nan}, "--temperature"),
        ({"temperature": math.inf}, "--temperature"), ({"top_p": 0}, "--top-p"),
        ({"top_p": 1.1}, "--top-p"), ({"top_p": math.nan}, "--top-p"), ({"top_k": 0}, "--top-k"),
        ({"seed": -1}, "--seed"), ({"seed": 1 << 64}, "--seed"),
    ],
)  # fmt: skip
def test_numbers_without_a_meaning_are_refused(how: dict[str, float], option: str) -> None:
    with pytest.raises(UsageError) as caught:
        Sampler(**how)
    assert caught.value.object == option
