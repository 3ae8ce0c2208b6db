"""Every single-mistake mutant of the reference is caught by the gate that engines must pass."""

from collections import ChainMap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.model.config import K3Config
from k3tool.model.graph import build_graph
from k3tool.ref.formats import decode_mxfp4
from k3tool.ref.forward import Sequence64, exact_constants
from k3tool.ref.ops import REFERENCE
from k3tool.ref.weights import Weights
from tests.oracle.gate import Distance, distance
from tests.oracle.mutants import MUTANTS, Mutant
from tests.oracle.rewrite import Copy, Node, rewrite

PROMPT = "p7"
N_STEPS = 6  # a second call, so that a state lost between calls shows

Gold = Callable[[str], dict[str, np.ndarray]]
Judge = Callable[[Mutant, str], Distance]


@pytest.fixture(scope="module")
def judge(
    oracle: Callable[[str], Path], gold: Gold, prompts: Callable[[str], dict[str, list[int]]]
) -> Judge:
    """Return a function that runs a mutant on an oracle and measures it against gold."""
    known: dict[str, tuple[Checkpoint, Weights]] = {}

    def run(mutant: Mutant, name: str) -> Distance:
        if name not in known:
            checkpoint = Checkpoint.open(oracle(name))
            known[name] = checkpoint, Weights(checkpoint)
        checkpoint, weights = known[name]
        config = checkpoint.config
        graph = build_graph(mutant.config(config) if mutant.config else config)
        graph = rewrite(graph, mutant.edit) if mutant.edit else graph
        if mutant.decode is not decode_mxfp4:
            weights = Weights(checkpoint, mutant.decode)
        leaves = ChainMap({leaf: weights[other] for leaf, other in mutant.leaves.items()}, weights)
        sequence = Sequence64(graph, leaves, {**REFERENCE, **mutant.ops}, exact_constants(config))
        expected, ids = gold(name), prompts(name)[PROMPT]
        prefill = sequence.logits(ids)
        later = sequence.logits([int(i) for i in expected[f"{PROMPT}.tokens"][: N_STEPS - 1]])
        steps = np.concatenate([prefill[-1:], later])
        return distance(expected, PROMPT, prefill, steps, steps.argmax(axis=1))

    return run


@pytest.mark.parametrize("name", ["tiny13", "tiny13_eps"])
def test_the_control_passes(judge: Judge, name: str) -> None:
    assert judge(Mutant("none"), name).passes


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_a_mutant_is_caught(judge: Judge, mutant: Mutant) -> None:
    with np.errstate(all="ignore"):  # a mutant may overflow; that too is caught
        found = judge(mutant, mutant.killed_by)
    assert not found.passes, found


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 36


def test_an_edit_that_meets_nothing_is_no_mutant(judge: Judge) -> None:
    def nothing(copy: Copy, node: Node, name: str, inputs: list[int]) -> int | None:
        return None

    with pytest.raises(AssertionError, match="met no node"):
        judge(Mutant("idle", edit=nothing), "tiny13")


# -- layer lists: a wrong reading asks for tensors that are not there ----------------------------


@pytest.mark.parametrize(
    "is_mla",
    [
        lambda c, layer: layer in c.linear_attn_config.full_attn_layers,
        lambda c, layer: layer % 4 == 3,
    ],
    ids=["zero-based-layer-list", "every-fourth-layer"],
)
def test_wrong_layer_kinds_are_caught(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, is_mla: Callable[[K3Config, int], bool]
) -> None:
    control = judge(Mutant("none"), "tiny13")
    monkeypatch.setattr(K3Config, "is_mla", is_mla)
    with pytest.raises(KeyError, match=r"layers\.\d+\.self_attn"):
        judge(Mutant("layer kinds"), "tiny13")
    assert control.passes
