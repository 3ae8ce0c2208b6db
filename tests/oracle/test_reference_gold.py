"""The float64 reference, through the operator graph, against the released code's logits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.compiler.egraph import saturate
from k3tool.compiler.extract import extract
from k3tool.compiler.patterns import Rule
from k3tool.compiler.rules import FUSIONS, RULES
from k3tool.isa.table import Op
from k3tool.model.config import K3Config
from k3tool.model.graph import build_graph
from k3tool.model.nodes import Graph
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


# -- what the rewrite rules made means the same --------------------------------------------------


def fused(config: K3Config, rules: tuple[Rule, ...]) -> Graph:
    graph = build_graph(config)
    return extract(graph, saturate(graph, rules)).graph


def ops_of(graph: Graph) -> set[Op]:
    return {node.op for node in graph.nodes if isinstance(node.op, Op)}


@pytest.mark.parametrize("name", ["tiny13", "tiny13_eps", "tiny_tp8"])
def test_the_fused_graph(oracle: Oracle, gold: Gold, prompts: Prompts, name: str) -> None:
    with Checkpoint.open(oracle(name)) as checkpoint:
        config, ids = checkpoint.config, prompts(name)["p7"]
        graph = fused(config, RULES)
        assert ops_of(graph) - ops_of(build_graph(config)), "no rule fired"
        sequence = Sequence64(graph, Weights(checkpoint), constants=exact_constants(config))
        logits = np.concatenate([sequence.logits(ids[:4]), sequence.logits(ids[4:])])
    assert np.abs(logits - gold(name)["p7.prefill"]).max() <= MAX_DIFFERENCE_FLOAT64


def test_every_fused_op_is_evaluated(oracle: Oracle, gold: Gold, prompts: Prompts) -> None:
    """Ops that one rule makes and another uses up appear when the other is off."""
    seen: set[Op] = set()
    with Checkpoint.open(oracle("tiny13")) as checkpoint:
        config, weights, ids = checkpoint.config, Weights(checkpoint), prompts("tiny13")["p7"]
        # One rule uses up what another does too: attention by pages, and by heads.
        sets = [{name} for name in FUSIONS] + [{"mla-heads-fuse", "mla-pages-split"}]
        for off in sets:
            graph = fused(config, tuple(rule for rule in RULES if rule.name not in off))
            seen |= ops_of(graph)
            sequence = Sequence64(graph, weights, constants=exact_constants(config))
            worst = np.abs(sequence.logits(ids) - gold("tiny13")["p7.prefill"]).max()
            assert worst <= MAX_DIFFERENCE_FLOAT64, off
    made = {equation.right.op for rule in RULES for equation in rule.equations}
    assert made <= seen
