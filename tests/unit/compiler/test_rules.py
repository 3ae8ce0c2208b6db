"""Every rule: fires on its pattern, and not on what only looks like it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.compiler.compile import compile_plan
from k3tool.compiler.dag import PACKINGS
from k3tool.compiler.egraph import saturate
from k3tool.compiler.extract import extract
from k3tool.compiler.patterns import Term, make_rule, parse_term
from k3tool.compiler.rules import FUSIONS, RULE_NAMES, RULES, rules_without
from k3tool.errors import K3Error, UsageError
from k3tool.isa.table import SPECS, Op
from k3tool.model.config import K3Config
from k3tool.model.graph import build_graph
from k3tool.model.nodes import Graph
from tests.unit.compiler.kit import BETA, LINEAR_BETA, Kit, fired
from tests.unit.compiler.rule_cases import CASES, kda_gate, situ

# What is left where only what has to be is rewritten.
PRIMITIVE = set(Op).difference(
    PACKINGS, *(rule.made_ops() for rule in RULES if not rule.is_lowering)
)


# -- what a pattern is -----------------------------------------------------------------------------


def test_a_term_is_parsed_with_its_variables_in_order() -> None:
    term = parse_term("(MUL o@(HEAD_RMSNORM x norm :eps e) (SIGMOID gate))")
    assert term.op is Op.MUL
    assert isinstance(term.inputs[0], Term)
    assert term.inputs[0].name == "o"
    assert term.value_variables() == ["o", "x", "norm", "gate"]
    assert term.attr_variables() == ["e"]


@pytest.mark.parametrize(
    "text",
    [
        "(MUL a)",  # an operand short
        "(RMSNORM x norm)",  # an attribute short
        "(RMSNORM x norm :eps e :beta b)",  # one too many
        "(MUL a b) c",  # text behind
        "a",  # a variable alone
    ],
)
def test_a_malformed_pattern_is_our_bug(text: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        parse_term(text)


def test_an_unknown_rule_is_refused_by_name() -> None:
    assert [r.name for r in rules_without(("situ-fuse",))] == [
        name for name in RULE_NAMES if name != "situ-fuse"
    ]
    with pytest.raises(UsageError, match="no-such-rule, need one of embed-block-fuse, "):
        rules_without(("no-such-rule",))


LOWERINGS = (
    "dequant-up-fuse", "dequant-down-fuse", "expert-combine-fuse", "down-reduce-fuse",
    "argmax-fold-fuse",
)  # fmt: skip


@pytest.mark.parametrize("name", LOWERINGS)
def test_a_rule_that_no_plan_can_do_without_is_refused_by_name(name: str) -> None:
    assert set(RULE_NAMES) - set(FUSIONS) == set(LOWERINGS)
    with pytest.raises(UsageError, match=f"--without: got {name} .nothing else makes an instr"):
        rules_without((name,))


@pytest.mark.parametrize(
    ("name", "at"),
    [("dequant-up-fuse", "w1: got MOE_UP"),
     ("dequant-down-fuse", "moe.y: got MOE_DOWN"),
     ("expert-combine-fuse", "moe.y: got MOE_COMBINE"),
     ("down-reduce-fuse", "self_attn.out: got GEMV_REDUCED"),
     ("argmax-fold-fuse", "token: got ARGMAX_ALL")],
)  # fmt: skip
def test_a_graph_of_which_something_is_no_instruction_is_not_extracted(
    name: str, at: str, oracle: Callable[[str], Path]
) -> None:
    graph = build_graph(K3Config.load(oracle("tiny13") / "config.json"))
    rules = [rule for rule in RULES if rule.name != name]
    with pytest.raises(K3Error, match=f"{at}, which is no instruction"):
        extract(graph, saturate(graph, rules))
    assert extract(graph, saturate(graph, RULES)).graph.outputs, "the control"


# -- a pattern and its look-alikes -----------------------------------------------------------------

CHAIN_RULES = (
    "kda-heads-fuse", "mla-heads-fuse", "mla-pages-split", "situ-down-fuse", "topk-glu-fuse",
    "topk-down-fuse", "kda-in-fuse", "mla-in-fuse", "moe-in-fuse",
)  # fmt: skip


def test_every_rule_has_a_case() -> None:
    assert [name for name, _, _ in CASES] + list(CHAIN_RULES) == list(RULE_NAMES)


def _graph(make: Callable[[Kit], int]) -> Graph:
    kit = Kit()
    return kit.finish(make(kit))


@pytest.mark.parametrize(("name", "make"), [(n, make) for n, make, _ in CASES])
def test_a_rule_fires_once_on_its_pattern(name: str, make: Callable[[Kit], int]) -> None:
    assert fired(_graph(make))[name] == 1


@pytest.mark.parametrize(
    ("name", "make"), [(n, other) for n, _, others in CASES for other in others]
)
def test_a_rule_does_not_fire_on_a_look_alike(name: str, make: Callable[[Kit], int]) -> None:
    assert fired(_graph(make))[name] == 0


def test_a_rule_that_asks_for_less_would_take_the_wrong_gate() -> None:
    """The control of the KDA and MLA look-alikes: without its condition the MLA rule takes both."""
    rule = make_rule("loose", ("(MUL o (SIGMOID gate))", "(MLA_OUT_GATE o gate)"))
    assert fired(_graph(kda_gate), [rule])["loose"] == 1
    assert fired(_graph(situ), [rule])["loose"] == 1


def test_the_betas_of_situ_are_bound_to_their_side() -> None:
    (application,) = [
        a for a in saturate(_graph(situ), RULES).applications if a.rule.name == "situ-fuse"
    ]
    assert application.numbers == {"beta": BETA, "linear": LINEAR_BETA, "round": 0}
    assert application.made[0].form.attrs == (BETA, LINEAR_BETA, 0)


# -- on models -------------------------------------------------------------------------------------


def expected_counts(config: K3Config) -> dict[str, int]:
    """Return how often each rule must fire, from the model's layer counts alone."""
    layers = len(config.layers)
    mla = sum(config.is_mla(layer) for layer in config.layers)
    moe = sum(config.is_moe(layer) for layer in config.layers)
    kda, dense = layers - mla, layers - moe
    opens = sum(config.opens_block(layer) for layer in config.layers)
    # Linears behind a norm of the hidden axis: KDA q k v g f_a b, MLA q_a kv_a g, MLPs, lm_head;
    # behind norms of their own: q_b, routed_expert_up_proj.
    linears = 6 * kda + 3 * mla + 2 * dense + 4 * moe + 1 + mla + moe
    return {
        "dequant-up-fuse": 2 * moe,
        "dequant-down-fuse": moe,
        "expert-combine-fuse": moe,
        "down-reduce-fuse": layers + dense + moe,  # o_proj, the dense down, the shared experts'
        "argmax-fold-fuse": 1,
        "embed-block-fuse": 1,
        "norm-linear-fuse": linears,
        "attnres-norm-fuse": 2 * layers,  # none in layer 0's attention, one at the end
        "situ-fuse": dense + 2 * moe,
        "glu-situ-fuse": dense + moe,
        "moe-situ-fuse": moe,
        "conv-silu-fuse": 3 * kda,
        "kda-core-fuse": kda,
        "kda-gated-norm-fuse": kda,
        "mla-out-gate-fuse": mla,
        "mla-uv-gate-fuse": mla,
        # Attention outputs that do not open a block, dense outputs, shared experts onto the gather.
        "reduce-residual-fuse": layers - opens + dense + moe,
        "reduce-gather-fuse": moe,
        "gather-residual-fuse": moe,
        "kda-heads-fuse": kda,
        "mla-heads-fuse": mla,
        "mla-pages-split": mla,
        "situ-down-fuse": dense + moe,
        "topk-glu-fuse": moe,
        "topk-down-fuse": moe,
        "kda-in-fuse": kda - 1,  # layer 0 has no block to mix
        "mla-in-fuse": mla,
        "moe-in-fuse": moe,
    }


@pytest.mark.parametrize("name", ["tiny13", "tiny_tp8", "tiny_wide"])
def test_every_rule_fires_as_often_as_the_layers_say(
    name: str, oracle: Callable[[str], Path]
) -> None:
    config = K3Config.load(oracle(name) / "config.json")
    assert dict(fired(build_graph(config))) == expected_counts(config)


def test_without_rules_only_primitive_ops_are_left(oracle: Callable[[str], Path]) -> None:
    config = K3Config.load(oracle("tiny_tp8") / "config.json")
    options = {"target": "cpu", "workgroups": 8, "chunk": 16, "batch": 1, "ctx": 256, "tp": 8}
    plain = compile_plan(config, **options, without=FUSIONS)
    assert plain.params["rules"] == sorted(LOWERINGS)
    assert {row.rule for row in plain.fired} == set(LOWERINGS)
    for phase in plain.phases.values():
        assert {Op(op) for op in phase.packets["op"].tolist()} <= PRIMITIVE
    fused = compile_plan(config, **options)
    made = {p: {Op(op) for op in x.packets["op"].tolist()} for p, x in fused.phases.items()}
    assert Op.KDA_GATED_NORM in made["prefill"] - PRIMITIVE, "the control: rules make fused ops"
    assert Op.KDA_HEADS in made["decode"] - PRIMITIVE


def test_every_fused_packet_names_the_rules_that_made_it(oracle: Callable[[str], Path]) -> None:
    config = K3Config.load(oracle("tiny13") / "config.json")
    plan = compile_plan(config, tp=1, target="cpu", workgroups=8, chunk=4, batch=1, ctx=256)
    used = {(root, row.rule) for row in plan.fired if row.used for root in row.root.split()}
    made_by: dict[Op, set[str]] = {}
    for rule in RULES:
        for op in rule.made_ops():
            made_by.setdefault(op, set()).add(rule.name)
    made_by |= {packed: made_by[op] for packed, op in PACKINGS.items()}
    for phase in plan.phases.values():
        for packet in range(len(phase.packets)):
            rules = plan.rules_of(phase.name, packet)
            op = Op(int(phase.packets["op"][packet]))
            assert bool(rules) == (op in made_by), (op, rules)
            if not rules:
                continue
            makers = made_by[op] & set(rules)
            assert makers
            if op in (Op.ATTN_PART, Op.ARGMAX, Op.GEMV_BF16_BLOCKS, *PACKINGS):
                continue  # a value inside a right side: the rule's roots are others
            for out in SPECS[op].outputs:
                name = plan.operand(phase.name, packet, out.name).name
                root = name.removeprefix(f"{phase.name}/")
                assert any((root, maker) in used for maker in makers)
