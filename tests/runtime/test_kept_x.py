"""What a worker made of an instruction's x serves its other slices, and none but these.

The toy has one product of all tokens, whose x lies in the same place in every step: two steps of a
prompt are enough to bring back what an earlier one left.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.runtime.ranks import RankGroup
from tests.kernels.conftest import NEEDS, cpu_flags
from tests.runtime import toy
from tests.runtime.controls import controls_of

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
CHUNK = 4  # the least that is packed


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return controls_of(tmp_path_factory, "interp")


def logits(folder: Path, **options: object) -> np.ndarray:
    made = toy.images(toy.toy_isa(), folder, PROMPT, 2, chunk=CHUNK, all_logits=True)
    shape = (len(PROMPT) + 1, toy.VOCAB)
    with RankGroup(toy.launch(made, logits_shape=shape, **options)) as group:
        list(group.steps())
        return group.logits().view("u4")


def test_the_bits_are_those_of_leaves_that_keep_nothing(tmp_path: Path) -> None:
    assert np.array_equal(logits(tmp_path), logits(tmp_path, leaves="scalar"))


def test_x_of_an_earlier_step_is_noticed(tmp_path: Path, controls: Callable[..., Path]) -> None:
    """The control: all instructions of all steps go by one name, so the second step's are kept."""
    if not NEEDS["avx512"] <= cpu_flags():
        pytest.skip("NOT RUN: no avx512 on this CPU")
    found = logits(tmp_path, interpreter=controls("K3_CONTROL_ONE_SERIAL"))
    want = logits(tmp_path)
    assert np.array_equal(found[:CHUNK], want[:CHUNK])
    assert not np.array_equal(found[CHUNK : 2 * CHUNK], want[CHUNK : 2 * CHUNK])
