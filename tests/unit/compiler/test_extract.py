"""Choosing forms: shared values are paid for once, results do not depend on the process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.compiler.compile import compile_plan
from k3tool.compiler.egraph import Form, saturate
from k3tool.compiler.extract import Extracted, cost_of, extract
from k3tool.compiler.plan import save_plan
from k3tool.compiler.rules import RULES, make_rule
from k3tool.errors import K3Error
from k3tool.isa.table import Op
from k3tool.model.config import K3Config
from k3tool.model.graph import build_graph
from k3tool.model.nodes import Graph
from tests.unit.compiler.kit import EPS, Kit


def ops_of(graph: Graph) -> list[str]:
    return sorted(node.op.name for node in graph.nodes if isinstance(node.op, Op))


def chosen(graph: Graph, rules: tuple = RULES, tokens: int = 1) -> Extracted:
    return extract(graph, saturate(graph, rules), tokens)


def test_a_norm_of_one_reader_goes_into_it() -> None:
    kit = Kit()
    graph = kit.finish(kit.linear(kit.norm(kit.x()), "q"))
    assert ops_of(chosen(graph).graph) == ["EMBED_BF16", "NORM_GEMV_BF16"]


@pytest.mark.parametrize("readers", [2, 3])
def test_a_norm_of_several_readers_stays(readers: int) -> None:
    """The tempting cost, of trees, fuses it into each: there every fusion saves a packet."""
    kit = Kit()
    x = kit.norm(kit.x())
    graph = kit.finish(*(kit.linear(x, w) for w in ("q", "k", "b")[:readers]))
    assert ops_of(chosen(graph).graph) == ["EMBED_BF16", *["GEMV_BF16"] * readers, "RMSNORM"]


def test_a_norm_goes_into_the_mix_rather_than_into_its_reader() -> None:
    kit = Kit()
    weights = kit.w("res_norm"), kit.w("res_proj")
    mix = kit.add(Op.ATTN_RES, kit.x(), kit.blocks(), *weights, n_blocks=1, eps=EPS)
    graph = kit.finish(kit.linear(kit.norm(mix), "q"))
    assert ops_of(chosen(graph).graph) == ["ATTN_RES_NORM", "EMBED_BF16", "GEMV_BF16"]
    rules = tuple(rule for rule in RULES if rule.name != "attnres-norm-fuse")
    assert ops_of(chosen(graph, rules).graph) == ["ATTN_RES", "EMBED_BF16", "NORM_GEMV_BF16"]


def test_a_value_that_others_read_is_not_lost() -> None:
    kit = Kit()
    gate = kit.linear(kit.x(), "q")
    act = kit.situ(gate, kit.linear(kit.x(), "k"))
    graph = kit.finish(act, gate)
    assert ops_of(chosen(graph, tokens=64).graph) == ["EMBED_BF16", "GEMV_BF16", "GLU_BF16"]
    # A step of few tokens keeps linears apart, for they can share a packet.
    assert ops_of(chosen(graph).graph) == ["EMBED_BF16", "GEMV_BF16", "GEMV_BF16", "SITU"]


def test_the_longer_chain_of_fusions_wins() -> None:
    kit = Kit()
    x = kit.x()
    gathered = kit.add(Op.ALL_GATHER, kit.linear(x, "up"))
    total = kit.add(Op.ADD, gathered, kit.reduced(kit.linear(x, "q")))
    graph = kit.finish(kit.add(Op.ADD, x, total))
    extracted = chosen(graph)
    assert "REDUCE_GATHER_ADD" in ops_of(extracted.graph)
    assert "ALL_REDUCE_ADD" not in ops_of(extracted.graph)
    (made_by,) = extracted.made_by.values()
    names = {extracted.fired[row].rule for row in made_by}
    assert names == {"gather-residual-fuse", "reduce-gather-fuse"}


def test_applications_that_lost_are_recorded_as_unused() -> None:
    kit = Kit()
    x = kit.norm(kit.x())
    graph = kit.finish(kit.linear(x, "q"), kit.linear(x, "k"))
    assert [(row.rule, row.used) for row in chosen(graph).fired] == [
        ("norm-linear-fuse", False)
    ] * 2


def test_the_binding_of_an_application_names_values() -> None:
    kit = Kit()
    x = kit.add(Op.EMBED_BF16, kit.w("embed"), name="here")
    graph = kit.finish(kit.linear(kit.norm(x), "q"))
    (row,) = chosen(graph).fired
    assert row.used
    assert row.binding == f"x=here norm=norm w=q eps={EPS} head=0"


def test_extraction_never_costs_more_than_the_graph_as_built(
    oracle: Callable[[str], Path],
) -> None:
    graph = build_graph(K3Config.load(oracle("tiny13") / "config.json"))

    def cost(g: Graph) -> int:
        return sum(cost_of(Form(n.op, n.inputs, ())) for n in g.nodes)

    costs = [cost(chosen(graph, RULES[:n]).graph) for n in range(len(RULES) + 1)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == cost(graph)
    assert costs[-1] < costs[0] / 1.8


def test_a_rule_cannot_smuggle_in_a_partial_sum() -> None:
    """The chosen graph is built like the first one, so a fused op that does not fit is refused."""
    kit = Kit()
    part = kit.add(Op.GEMV_BF16_BLOCKS, kit.linear(kit.x(), "q"), kit.w("down"), name="part")
    total = kit.add(Op.ALL_REDUCE, part, name="sum")
    graph = kit.finish(kit.add(Op.SIGMOID, total, name="gate"))
    wrong = make_rule("unreduced", ("(SIGMOID (ALL_REDUCE x))", "(SIGMOID x)"))
    with pytest.raises(K3Error, match="gate: SIGMOID x: got partial"):
        chosen(graph, (wrong,))
    assert ops_of(chosen(graph).graph) == ops_of(graph), "the control"


# A toy group: the product of two activations stands for a packet that several values are part of.
GROUP = make_rule(
    "group",
    ("a@(SILU x)", "(SCALE (MUL x y) :factor 1)"),
    ("b@(SILU y)", "(SCALE (MUL x y) :factor 2)"),
    where=("(ADD a b)",),
)


def pair(kit: Kit, read_a: bool = True) -> Graph:
    x, y = kit.linear(kit.x(), "q"), kit.linear(kit.x(), "k")
    a, b = kit.add(Op.SILU, x, name="a"), kit.add(Op.SILU, y, name="b")
    return kit.finish(kit.add(Op.ADD, a, b), *([a] if read_a else []))


def test_values_are_rewritten_together_when_only_that_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = {Op.SCALE: 0, Op.SILU: 10, Op.MUL: 15}  # one value alone would pay 15 for 10
    monkeypatch.setattr("k3tool.compiler.extract._COSTS", costs)
    found = chosen(pair(Kit()), (GROUP,))
    assert ops_of(found.graph).count("MUL") == 1
    assert "SILU" not in ops_of(found.graph)
    assert "a.mul" in found.graph.names
    assert [(row.root, row.used) for row in found.fired] == [("a b", True)]
    assert set(found.made_by.values()) == {(0,)}
    assert len(found.made_by) == 3, "both parts and the group"
    costs[Op.MUL] = 21
    assert "MUL" not in ops_of(chosen(pair(Kit()), (GROUP,)).graph), "the control: it must pay"


def test_a_premise_that_is_not_rewritten_must_match() -> None:
    kit = Kit()
    x, y = kit.linear(kit.x(), "q"), kit.linear(kit.x(), "k")
    graph = kit.finish(kit.add(Op.SILU, x), kit.add(Op.SILU, y))
    assert not saturate(graph, (GROUP,)).applications
    assert len(saturate(pair(Kit()), (GROUP,)).applications) == 1


def test_new_values_are_numbered_behind_the_nodes_whatever_the_process() -> None:
    graph = pair(Kit())
    saturated = saturate(graph, (GROUP,))
    (application,) = saturated.applications
    ((cls, form),) = application.inner
    assert cls == len(graph.nodes)
    assert form.op is Op.MUL


PROGRAM = """
import sys
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import save_plan
from k3tool.model.config import K3Config
config = K3Config.load(sys.argv[1])
plan = compile_plan(config, tp=8, target="cpu", workgroups=8, chunk=4, batch=1, ctx=256)
print(save_plan(plan, sys.argv[2]).digest)
"""


def test_the_digest_is_the_same_in_every_process(
    oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    config = oracle("tiny_tp8") / "config.json"
    digests = []
    for seed in ("1", "2"):
        arguments = [sys.executable, "-c", PROGRAM, str(config), str(tmp_path / f"{seed}.h5")]
        environment = {"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin", "PYTHONPATH": "."}
        done = subprocess.run(
            arguments, capture_output=True, text=True, check=True, env=environment, timeout=60
        )
        digests.append(done.stdout.strip())
    assert digests[0] == digests[1]
    options = {"target": "cpu", "workgroups": 8, "chunk": 4, "batch": 1, "ctx": 256}
    other = compile_plan(K3Config.load(config), tp=4, **options)
    assert save_plan(other, tmp_path / "other.h5").digest != digests[0]
