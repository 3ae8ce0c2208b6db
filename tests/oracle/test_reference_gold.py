"""The float64 reference, through the operator graph, against the released code's logits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.model.graph import build_graph
from k3tool.ref.forward import Sequence64, exact_constants, greedy
from k3tool.ref.weights import Weights
from tests.oracle.gate import MAX_DIFFERENCE_FLOAT64, distance

PROMPTS = [(o, p) for o in ("tiny13", "tiny13_eps", "tiny_tp8") for p in ("p1", "p7", "p40")]
PROMPTS += [("tiny_wide", p) for p in ("p7", "p40", "p300")]
N_TOKENS = 32

Gold = Callable[[str], dict[str, np.ndarray]]
Prompts = Callable[[str], dict[str, list[int]]]
Oracle = Callable[[str], Path]


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_reference(oracle: Oracle, gold: Gold, prompts: Prompts, name: str, prompt: str) -> None:
    with Checkpoint.open(oracle(name)) as checkpoint:
        config, expected, ids = checkpoint.config, gold(name), prompts(name)[prompt]
        sequence = Sequence64(
            build_graph(config), Weights(checkpoint), constants=exact_constants(config)
        )
        prefill = sequence.logits(ids)
        first = int(np.argmax(prefill[-1]))
        later, rows = greedy(sequence, [first], N_TOKENS - 1)
    steps = np.concatenate([prefill[-1:], rows])
    found = distance(expected, prompt, prefill, steps, [first, *later])
    assert found.wrong_tokens == 0
    assert found.worst <= MAX_DIFFERENCE_FLOAT64


def test_rounded_constants_pass_the_engine_gate(
    oracle: Oracle, gold: Gold, prompts: Prompts
) -> None:
    """The plan's binary32 constants are within the gate, and visibly not the float64 ones."""
    with Checkpoint.open(oracle("tiny13")) as checkpoint:
        sequence = Sequence64(build_graph(checkpoint.config), Weights(checkpoint))
        ids = prompts("tiny13")["p7"]
        prefill = sequence.logits(ids)
    tokens = [int(np.argmax(prefill[-1]))]
    found = distance(gold("tiny13"), "p7", prefill, prefill[-1:], tokens)
    assert found.passes
    assert found.worst > MAX_DIFFERENCE_FLOAT64


@pytest.mark.parametrize("cuts", [[1] * 7, [3, 3, 1], [7]])
def test_a_prompt_may_be_cut_anywhere(
    oracle: Oracle, gold: Gold, prompts: Prompts, cuts: list[int]
) -> None:
    with Checkpoint.open(oracle("tiny13")) as checkpoint:
        config, ids = checkpoint.config, prompts("tiny13")["p7"]
        sequence = Sequence64(
            build_graph(config), Weights(checkpoint), constants=exact_constants(config)
        )
        parts = [sequence.logits(ids[sum(cuts[:i]) : sum(cuts[: i + 1])]) for i in range(len(cuts))]
    worst = np.abs(np.concatenate(parts) - gold("tiny13")["p7.prefill"]).max()
    assert worst <= MAX_DIFFERENCE_FLOAT64
