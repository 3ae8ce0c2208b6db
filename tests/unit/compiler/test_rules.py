"""Every rule: fires on its pattern, and not on what only looks like it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.compiler.compile import compile_plan
from k3tool.compiler.dag import PACKINGS
from k3tool.compiler.egraph import saturate
from k3tool.compiler.extract import extract
from k3tool.compiler.rules import (
    FUSIONS,
    RULE_NAMES,
    RULES,
    Term,
    make_rule,
    parse_term,
    rules_without,
)
from k3tool.errors import K3Error, UsageError
from k3tool.isa.table import SPECS, Op
from k3tool.model.config import K3Config
from k3tool.model.graph import build_graph
from k3tool.model.nodes import Graph
from tests.unit.compiler.kit import BETA, DIM, EPS, LINEAR_BETA, OTHER_EPS, TOP_K, Kit, fired

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


def norm_linear(kit: Kit) -> int:
    return kit.linear(kit.norm(kit.x()), "q")


def norm_row_parallel(kit: Kit) -> int:
    # A norm of a shard would be another function: the row-parallel product must not take it in.
    return kit.reduced(kit.add(Op.SILU, kit.linear(kit.norm(kit.x()), "q")))


def mix_norm(kit: Kit) -> int:
    weights = kit.w("res_norm"), kit.w("res_proj")
    mix = kit.add(Op.ATTN_RES, kit.x(), kit.blocks(), *weights, n_blocks=1, eps=EPS)
    return kit.norm(mix, OTHER_EPS)


def norm_mix(kit: Kit) -> int:
    weights = kit.w("res_norm"), kit.w("res_proj")
    x = kit.norm(kit.x())
    return kit.add(Op.ATTN_RES, x, kit.blocks(), *weights, n_blocks=1, eps=EPS)


def situ(kit: Kit) -> int:
    x = kit.x()
    return kit.situ(kit.linear(x, "q"), kit.linear(x, "k"))


def situ_of_other_sigmoid(kit: Kit) -> int:
    x = kit.x()
    gate, up = kit.linear(x, "q"), kit.linear(x, "k")
    return kit.situ(gate, up, sigmoid_of=up)


def situ_gating_the_capped(kit: Kit) -> int:
    gate = kit.linear(kit.x(), "q")
    capped = kit.add(Op.SOFTCAP, gate, beta=BETA)
    return kit.situ(gate, capped, sigmoid_of=capped)


def glu_of_two_inputs(kit: Kit) -> int:
    x = kit.x()
    return kit.situ(kit.linear(x, "q"), kit.linear(kit.norm(x), "k"))


def glu_on_the_head_only(kit: Kit) -> int:
    x = kit.x()
    return kit.situ(kit.linear(x, "q", head_only=1), kit.linear(x, "k", head_only=1))


def _experts(kit: Kit, z1: int, z3: int, route1: int, route3: int) -> int:
    w1 = kit.add(Op.MOE_UP_MXFP4, z1, route1, kit.w("w1"), top_k=TOP_K)
    w3 = kit.add(Op.MOE_UP_MXFP4, z3, route3, kit.w("w3"), top_k=TOP_K)
    return kit.situ(w1, w3)


def experts(kit: Kit) -> int:
    x = kit.x()
    return _experts(kit, x, x, kit.route(x), kit.route(x))


def experts_of_two_inputs(kit: Kit) -> int:
    x = kit.x()
    return _experts(kit, x, kit.norm(x), kit.route(x), kit.route(x))


def experts_of_two_routes(kit: Kit) -> int:
    x = kit.x()
    return _experts(kit, x, x, kit.route(x), kit.route(kit.norm(x)))


def conv_silu(kit: Kit) -> int:
    x = kit.linear(kit.x(), "q")
    conv = kit.add(Op.SHORT_CONV, x, kit.w("conv"), kit.state("taps", 3, 64))
    return kit.add(Op.SILU, conv)


def conv_sigmoid(kit: Kit) -> int:
    x = kit.linear(kit.x(), "q")
    conv = kit.add(Op.SHORT_CONV, x, kit.w("conv"), kit.state("taps", 3, 64))
    return kit.add(Op.SIGMOID, conv)


def kda(kit: Kit) -> int:
    return kit.kda_step(kit.x())


def kda_two_eps(kit: Kit) -> int:
    return kit.kda_step(kit.x(), k_eps=OTHER_EPS)


def kda_two_head_sizes(kit: Kit) -> int:
    return kit.kda_step(kit.x(), k_dim=2 * DIM)


def kda_heads_of_twice_the_state(kit: Kit) -> int:
    # H * D is the same, so sizes alone let this through: q and k normed over two heads at once.
    return kit.kda_step(kit.x(), q_dim=2 * DIM, k_dim=2 * DIM)


def kda_gate(kit: Kit) -> int:
    x = kit.x()
    o = kit.add(Op.HEAD_RMSNORM, kit.linear(x, "q"), kit.w("o_norm"), eps=EPS)
    return kit.add(Op.MUL, o, kit.add(Op.SIGMOID, kit.linear(x, "k")))


def kda_gate_before_norm(kit: Kit) -> int:
    x = kit.x()
    o = kit.add(Op.MUL, kit.linear(x, "q"), kit.add(Op.SIGMOID, kit.linear(x, "k")))
    return kit.add(Op.HEAD_RMSNORM, o, kit.w("o_norm"), eps=EPS)


def kda_norm_of_the_gate(kit: Kit) -> int:
    x = kit.x()
    gate = kit.add(Op.HEAD_RMSNORM, kit.linear(x, "q"), kit.w("o_norm"), eps=EPS)
    return kit.add(Op.MUL, kit.linear(x, "k"), kit.add(Op.SIGMOID, gate))


def mla_gate(kit: Kit) -> int:
    x = kit.x()
    o = kit.value_projection(x)
    return kit.add(Op.MUL, o, kit.add(Op.SIGMOID, kit.linear(x, "mg")))


def mla_gate_without_sigmoid(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MUL, kit.value_projection(x), kit.linear(x, "mg"))


def bare_gate(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MUL, kit.linear(x, "q"), kit.add(Op.SIGMOID, kit.linear(x, "k")))


def add_reduced(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.ADD, x, kit.reduced(kit.linear(x, "q")))


def add_plain(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.ADD, x, kit.norm(x))


def _gathered(kit: Kit, x: int) -> int:
    return kit.add(Op.ALL_GATHER, kit.linear(x, "up"))


def gather_reduced(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.ADD, _gathered(kit, x), kit.reduced(kit.linear(x, "q")))


def gather_gathered(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.ADD, _gathered(kit, x), _gathered(kit, kit.norm(x)))


def residual_gather_reduced(kit: Kit) -> int:
    return kit.add(Op.ADD, kit.x(), gather_reduced(kit))


def residual_after_the_sum(kit: Kit) -> int:
    # (gathered + reduced) + residual rounds like residual + (...), but the rule names operands.
    return kit.add(Op.ADD, gather_reduced(kit), kit.x())


def up_in_numbers(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MOE_UP, x, kit.route(x), kit.experts("w1"), top_k=TOP_K)


def up_as_stored(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MOE_UP_MXFP4, x, kit.route(x), kit.w("w1"), top_k=TOP_K)


def _e(kit: Kit, x: int) -> int:
    return kit.add(Op.SILU, kit.add(Op.MOE_UP_MXFP4, x, kit.route(x), kit.w("w1"), top_k=TOP_K))


def down_in_numbers(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MOE_DOWN, _e(kit, x), kit.route(x), kit.experts("w2"), top_k=TOP_K)


def down_as_stored(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MOE_DOWN_MXFP4, _e(kit, x), kit.route(x), kit.w("w2"), top_k=TOP_K)


def _each(kit: Kit, x: int, **attrs: int) -> int:
    inputs = _e(kit, x), kit.route(x), kit.experts("w2")
    return kit.add(Op.MOE_DOWN_EACH, *inputs, top_k=TOP_K, **attrs)


def combined(kit: Kit) -> int:
    x = kit.x()
    return kit.add(Op.MOE_COMBINE, _each(kit, x), kit.route(x), top_k=TOP_K)


def combined_by_another_route(kit: Kit) -> int:
    # The outputs of one choice of experts under the weights of another.
    x = kit.x()
    return kit.add(Op.MOE_COMBINE, _each(kit, x), kit.route(kit.norm(x)), top_k=TOP_K)


def combined_down(kit: Kit) -> int:
    return kit.add(Op.ALL_REDUCE, down_in_numbers(kit))


def row_parallel(kit: Kit) -> int:
    return kit.row_parallel(kit.linear(kit.x(), "q"))


def column_parallel(kit: Kit) -> int:
    # Every rank has whole rows: there is nothing to add up.
    return kit.linear(kit.x(), "q")


def gathered_rows(kit: Kit) -> int:
    return _gathered(kit, kit.x())


def token(kit: Kit) -> int:
    logits = kit.linear(kit.x(), "head", head_only=1)
    return kit.add(Op.ARGMAX_ALL, kit.add(Op.ALL_GATHER, logits))


def token_folded(kit: Kit) -> int:
    best = kit.add(Op.ARGMAX, kit.linear(kit.x(), "head", head_only=1))
    return kit.add(Op.ARGMAX_FOLD, best)


def token_of_a_whole(kit: Kit) -> int:
    # Logits that every rank has whole are not the ranks' shares side by side.
    return kit.add(Op.ARGMAX_ALL, kit.linear(kit.x(), "same"))


def first_block(kit: Kit) -> int:
    return kit.add(Op.BLOCK_PUSH, kit.x(), kit.blocks(), index=0)


def later_block(kit: Kit) -> int:
    return kit.add(Op.BLOCK_PUSH, kit.norm(kit.x()), kit.blocks(), index=1)


CASES: list[tuple[str, Callable[[Kit], int], tuple[Callable[[Kit], int], ...]]] = [
    ("dequant-up-fuse", up_in_numbers, (up_as_stored, down_in_numbers)),
    ("dequant-down-fuse", down_in_numbers, (down_as_stored, up_in_numbers)),
    ("expert-combine-fuse", combined, (combined_by_another_route, combined_down)),
    ("down-reduce-fuse", row_parallel, (column_parallel, gathered_rows, combined)),
    ("argmax-fold-fuse", token, (token_folded, token_of_a_whole)),
    ("embed-block-fuse", first_block, (later_block,)),
    ("norm-linear-fuse", norm_linear, (lambda k: k.linear(k.x(), "q"),)),
    ("attnres-norm-fuse", mix_norm, (norm_mix,)),
    ("situ-fuse", situ, (situ_of_other_sigmoid, situ_gating_the_capped, bare_gate)),
    ("glu-situ-fuse", situ, (glu_of_two_inputs, glu_on_the_head_only, experts)),
    ("moe-situ-fuse", experts, (experts_of_two_inputs, experts_of_two_routes, situ)),
    ("conv-silu-fuse", conv_silu, (conv_sigmoid,)),
    ("kda-core-fuse", kda, (kda_two_eps, kda_two_head_sizes, kda_heads_of_twice_the_state)),
    ("kda-gated-norm-fuse", kda_gate, (kda_gate_before_norm, kda_norm_of_the_gate, mla_gate)),
    ("mla-out-gate-fuse", mla_gate, (kda_gate, situ, bare_gate, mla_gate_without_sigmoid)),
    ("mla-uv-gate-fuse", mla_gate, (kda_gate, mla_gate_without_sigmoid)),
    ("reduce-residual-fuse", add_reduced, (add_plain, gather_gathered)),
    ("reduce-gather-fuse", gather_reduced, (gather_gathered, add_reduced)),
    ("gather-residual-fuse", residual_gather_reduced, (gather_reduced, residual_after_the_sum)),
]


# Rules over what the rules above make: their cases are whole layers (test_chain_rules).
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
