"""Choosing forms: the chain is short, what slices repeat is paid for, no process decides.

Kills: a price of packets instead of hand-offs, a prologue whatever it repeats, a group of which a
part is missing, a tree's price for a value that several read.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from k3tool.compiler.choose import Choice, choose
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.dag import packet_dag
from k3tool.compiler.egraph import Form, saturate
from k3tool.compiler.extract import DEFAULT_COSTS, Extracted, extract
from k3tool.compiler.patterns import Rule, make_rule
from k3tool.compiler.plan import save_plan
from k3tool.compiler.prices import FREE, Price, Prices
from k3tool.compiler.rules import FUSIONS, RULES
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
def test_a_norm_is_repeated_where_that_is_cheaper_than_a_hand_off(readers: int) -> None:
    kit = Kit()
    x = kit.norm(kit.x())
    graph = kit.finish(*(kit.linear(x, w) for w in ("q", "k", "b")[:readers]))
    few = ops_of(chosen(graph).graph)
    assert few == ["EMBED_BF16", *["NORM_GEMV_BF16"] * readers]
    # Every slice of every linear would repeat the norm of every token.
    many = ops_of(chosen(graph, tokens=4096).graph)
    assert many == ["EMBED_BF16", *["GEMV_BF16"] * readers, "RMSNORM"]


def test_what_is_repeated_is_priced_by_its_bytes() -> None:
    """The step at which a prologue stops paying is where its bytes take a hand-off's time."""
    kit = Kit()
    graph = kit.finish(kit.linear(kit.norm(kit.x()), "q"))
    dear = [t for t in range(1, 2000) if "RMSNORM" in ops_of(chosen(graph, tokens=t).graph)]
    handoff_bytes = DEFAULT_COSTS.handoff_ps * DEFAULT_COSTS.unit_bytes_per_s // 10**12
    row = 4 * graph.nodes[graph.outputs[0]].width
    assert dear == list(range(dear[0], 2000))
    # Less than that, as a norm of its own takes time too; a token is a slice there.
    assert handoff_bytes // row < dear[0] < 1.2 * handoff_bytes // row


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
    for tokens in (1, 64):
        found = ops_of(chosen(graph, tokens=tokens).graph)
        assert found == ["EMBED_BF16", "GEMV_BF16", "GLU_BF16"]


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
    for tokens, used in ((1, True), (4096, False)):
        fired = chosen(graph, tokens=tokens).fired
        assert [(row.rule, row.used) for row in fired] == [("norm-linear-fuse", used)] * 2


def test_the_binding_of_an_application_names_values() -> None:
    kit = Kit()
    x = kit.add(Op.EMBED_BF16, kit.w("embed"), name="here")
    graph = kit.finish(kit.linear(kit.norm(x), "q"))
    (row,) = chosen(graph).fired
    assert row.used
    assert row.binding == f"x=here norm=norm w=q eps={EPS} norm_round=0 head=0 round=0"


@pytest.mark.parametrize(("tokens", "saves"), [(1, 2.5), (16, 1.6), (512, 1.15)])
def test_more_rules_never_cost_more(
    oracle: Callable[[str], Path], tokens: int, saves: float
) -> None:
    """Of many tokens most of the price is that attention reads its cache, which no rule changes."""
    graph = build_graph(K3Config.load(oracle("tiny13") / "config.json"))

    def cost(n: int) -> int:
        saturated = saturate(graph, RULES[:n])
        found = choose(graph, saturated, Prices(graph, saturated, DEFAULT_COSTS, tokens, 1))
        return found.chain_ps + found.work_ps

    least = len(RULES) - len(FUSIONS)  # lowerings, which come first: no plan is without them
    costs = [cost(n) for n in range(least, len(RULES) + 1)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0] / saves


# Rules with more packets on the right, and fewer of them in a row.
LONG = "(SILU (SIGMOID (SILU (SIGMOID x))))"
RIGHT = "(ADD (MUL (SOFTCAP {} :beta 1) (SCALE x :factor 1)) (L2NORM x :eps 1 :head_dim 16))"
SHORTER = make_rule("shorter", (LONG, RIGHT.format("x")))
NO_SHORTER = make_rule("no-shorter", (LONG, RIGHT.format("(SILU x)")))


@pytest.mark.parametrize(("rule", "packets", "depth"), [(SHORTER, 7, 5), (NO_SHORTER, 6, 6)])
def test_a_shorter_chain_of_more_packets_wins(rule: Rule, packets: int, depth: int) -> None:
    kit = Kit()
    value = kit.linear(kit.x(), "q")
    for op in (Op.SIGMOID, Op.SILU, Op.SIGMOID, Op.SILU):
        value = kit.add(op, value)
    dag = packet_dag(chosen(kit.finish(value), (rule,)).graph)
    assert (len(dag.packets), max(dag.depth)) == (packets, depth)


def test_off_the_chain_packets_count() -> None:
    """The same rule where nobody waits for its result: the chain is another, so four beat five."""
    kit = Kit()
    value = kit.linear(kit.x(), "q")
    longer = value
    for op in (Op.SIGMOID, Op.SILU, Op.SIGMOID, Op.SILU):
        value = kit.add(op, value)
    for _ in range(4):
        longer = kit.add(Op.SILU, kit.add(Op.SILU, longer))
    found = ops_of(chosen(kit.finish(value, longer), (SHORTER,)).graph)
    assert "ADD" not in found
    assert found.count("SIGMOID") == 2


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
    work = {Op.SCALE: 0, Op.SILU: 10, Op.MUL: 15}  # one value alone would pay 15 for 10

    def of(_: Prices, form: Form) -> Price:
        return Price(0, work.get(form.op, 0)) if isinstance(form.op, Op) else FREE

    monkeypatch.setattr("k3tool.compiler.prices.Prices.of", of)
    # No chain to shorten here, so the forms as built are taken first.
    monkeypatch.setattr("k3tool.compiler.choose.Choice._pick", as_built)
    found = chosen(pair(Kit()), (GROUP,))
    assert ops_of(found.graph).count("MUL") == 1
    assert "SILU" not in ops_of(found.graph)
    assert "a.mul" in found.graph.names
    assert [(row.root, row.used) for row in found.fired] == [("a b", True)]
    assert set(found.made_by.values()) == {(0,)}
    assert len(found.made_by) == 3, "both parts and the group"
    work[Op.MUL] = 21
    assert "MUL" not in ops_of(chosen(pair(Kit()), (GROUP,)).graph), "the control: it must pay"


def as_built(choice: Choice, order: Iterable[int]) -> None:
    """Take SILU where a value has the choice."""
    for cls in order:
        forms = choice.forms[cls]
        choice.form[cls] = next((f for f in forms if f.op is Op.SILU), forms[0])
        choice.arrival[cls] = 0


@pytest.mark.parametrize("kept", [Op.MIX_LINEARS_3, None])
def test_a_group_that_is_not_whole_is_taken_apart(
    monkeypatch: pytest.MonkeyPatch, oracle: Callable[[str], Path], kept: Op | None
) -> None:
    """A member that is cheaper made alone leaves the others no packet to be parts of."""
    graph = build_graph(K3Config.load(oracle("tiny13") / "config.json"))
    gates = {i for i, name in enumerate(graph.names) if name.endswith("self_attn.g")}
    weights = {graph.nodes[i].inputs[1] for i in gates}
    priced = Prices.of

    def of(prices: Prices, form: Form) -> Price | None:
        alone = form.op is Op.GEMV_BF16 and form.inputs[1] in weights
        return Price(-DEFAULT_COSTS.handoff_ps, 0) if alone and not kept else priced(prices, form)

    monkeypatch.setattr(Prices, "of", of)
    found = ops_of(chosen(graph).graph)
    assert ("MIX_LINEARS_3" in found) == (kept is not None)
    assert ("MIX_LINEARS_6" in found) == (kept is not None)
    assert "MIX_LINEARS_4" in found, "the control: groups without such a member"


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
