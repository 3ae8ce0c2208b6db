"""The rules and packings that shorten a token's chain: they fire on whole layers, no others.

Kills: a group whose linears have two inputs, a mix that somebody else reads too and is lost, block
parts of different stacks in one packet, prologues in programs of many tokens.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.compiler.compile import compile_plan
from k3tool.compiler.dag import Dag, packet_dag, runs_of
from k3tool.compiler.egraph import saturate
from k3tool.compiler.extract import extract
from k3tool.compiler.plan import Plan
from k3tool.compiler.prices import FEW_TOKENS
from k3tool.compiler.rules import RULES, rules_without
from k3tool.isa.table import SPECS, Op
from k3tool.model.config import K3Config
from k3tool.model.graph import build_graph
from k3tool.model.nodes import Graph
from tests.unit.compiler.test_rules import CHAIN_RULES

CONFIG = Path(__file__).parents[2] / "data" / "kimi-k3-config.json"
PROLOGUES = {op for rule in RULES if rule.name in CHAIN_RULES for op in rule.made_ops()}


@pytest.fixture(scope="module")
def config(oracle: Callable[[str], Path]) -> K3Config:
    return K3Config.load(oracle("tiny13") / "config.json")


def plan_of(config: K3Config, **more: object) -> Plan:
    options = {"tp": 1, "target": "cpu", "workgroups": 8, "chunk": 16, "batch": 1, "ctx": 256}
    return compile_plan(config, **(options | more))


def histogram(plan: Plan, phase: str = "decode") -> Counter:
    return Counter(Op(op) for op in plan.phases[phase].packets["op"].tolist())


def test_a_decode_layer_is_eleven_packets_of_kda_and_thirteen_of_mla(config: K3Config) -> None:
    layers = len(config.layers)
    mla = sum(map(config.is_mla, config.layers))
    moe = sum(map(config.is_moe, config.layers))
    found = histogram(plan_of(config))
    assert found[Op.KDA_HEADS] == layers - mla
    assert found[Op.MIX_LINEARS_6] == layers - mla - 1, "layer 0 has no block to mix"
    assert found[Op.MIX_LINEARS_3] == found[Op.MLA_HEADS] == mla
    assert found[Op.MIX_LINEARS_4] == found[Op.MOE_GLU_TOPK] == found[Op.MOE_DOWN_TOPK] == moe
    assert found[Op.SITU_GEMV_BLOCKS] == moe
    assert found[Op.GLU_BF16] == layers - moe, "no other linear shares its packet"
    assert not found[Op.ROUTER_TOPK]
    assert found[Op.ATTN_RES_NORM] == 2, "of the dense layer, and at the end"
    parts = found[Op.ATTN_PART] + 8 * found[Op.ATTN_PARTS_8]
    assert parts == layers - 1 + moe, "one for each site whose readers are a group"
    assert found[Op.ATTN_PARTS_8]


def test_programs_of_many_tokens_have_no_prologues(config: K3Config) -> None:
    assert not PROLOGUES & set(histogram(plan_of(config), "prefill"))
    few = plan_of(config, chunk=FEW_TOKENS, batch=FEW_TOKENS + 1)
    assert not PROLOGUES & set(histogram(few, "decode"))
    by_pages = {Op.MLA_QUERY, Op.MLA_PAGES, Op.MLA_MERGE}  # of a context longer than this one
    assert PROLOGUES - {Op.PART, Op.ATTN_PART} - by_pages <= set(histogram(few, "prefill"))
    long = plan_of(config, chunk=FEW_TOKENS, batch=FEW_TOKENS + 1, ctx=2048)
    assert by_pages <= set(histogram(long, "prefill"))
    assert not by_pages & set(histogram(long, "decode"))


def test_the_released_model_has_its_chain_and_repeats_nothing_dear() -> None:
    """At TP 8 on 256 units: prologues in decode, none of 64 tokens though its chain gets longer.

    At 32,768 positions attention goes by pages, a packet more a layer, since a slice of heads would
    read 75 MB; at few positions it does not.
    """
    released = K3Config.load(CONFIG)
    options = {"tp": 8, "target": "hip:gfx950", "workgroups": 256, "chunk": 64, "ctx": 32768}
    plan = plan_of(released, **options)
    decode = plan.phases["decode"]
    assert len(decode.packets) <= 1140
    assert decode.critical_path <= 981
    few, many = histogram(plan), histogram(plan, "prefill")
    assert few[Op.NORM_GEMV_BF16] >= 92
    assert not few[Op.RMSNORM]
    assert not many[Op.NORM_GEMV_BF16]
    assert many[Op.RMSNORM] >= 92
    assert few[Op.MLA_QUERY] == few[Op.MLA_PAGES] == few[Op.MLA_MERGE] == 24
    assert not few[Op.MLA_HEADS]
    short = plan_of(released, **(options | {"ctx": 256})).phases["decode"]
    assert len(short.packets) <= 1116
    assert short.critical_path <= 957
    graph = build_graph(released, 8)
    saturated = saturate(graph, RULES)
    # One token's scores are cheaper to read again than a packet; four tokens' are not.
    for tokens, op in ((1, Op.MOE_DOWN_TOPK), (4, Op.MOE_DOWN_MXFP4)):
        chosen = {node.op for node in extract(graph, saturated, tokens, 8).graph.nodes}
        assert {Op.MOE_DOWN_TOPK, Op.MOE_DOWN_MXFP4} & chosen == {op}


@pytest.mark.parametrize("rule", [rule for rule in CHAIN_RULES if rule != "mla-pages-split"])
def test_each_rule_alone_shortens_or_saves(config: K3Config, rule: str) -> None:
    """A rule that could be left out without a loss would not be worth its theorem."""
    with_all, without = plan_of(config), plan_of(config, without=(rule,))
    a, b = with_all.phases["decode"], without.phases["decode"]
    assert (a.critical_path, len(a.packets)) < (b.critical_path, len(b.packets))
    assert a.critical_path <= b.critical_path


def two_inputs(graph: Graph, layer: str) -> Graph:
    """Copy a graph; one linear of a layer's group reads the layer's un-normed mix."""
    copy, new = Graph(graph.weights, n_blocks=graph.n_blocks), {}
    for index, node in enumerate(graph.nodes):
        name = graph.names[index]
        inputs = [new[i] for i in node.inputs]
        if name == f"layers.{layer}.self_attn.b":
            normed = graph.nodes[node.inputs[0]]
            inputs[0] = new[normed.inputs[0]]
        if not isinstance(node.op, Op):
            new[index] = (
                copy.state(graph.states[name])
                if name in graph.states
                else copy.leaf(node.op, name, node.width)
            )
            continue
        attrs = {key: int(value) for key, value in node.attrs}
        new[index] = copy.add(node.op, name, inputs, **attrs)
    copy.outputs = [new[i] for i in graph.outputs]
    return copy


def test_a_linear_of_another_input_keeps_its_layer_from_the_group(config: K3Config) -> None:
    graph = build_graph(config)

    def groups(graph: Graph) -> int:
        chosen = extract(graph, saturate(graph, RULES)).graph
        return sum(node.op is Op.MIX_LINEARS_6 for node in chosen.nodes)

    assert groups(two_inputs(graph, "1")) == groups(graph) - 1


def test_eight_parts_of_one_stack_and_no_others_share_a_packet(config: K3Config) -> None:
    graph = build_graph(config)
    chosen = extract(graph, saturate(graph, RULES)).graph
    packed = [p for p in packet_dag(chosen).packets if p.op is Op.ATTN_PARTS_8]
    assert packed
    for packet in packed:
        assert len(set(packet.results)) == 8
        parts = [chosen.nodes[value] for value in packet.results]
        assert {node.inputs[0] for node in parts} == {packet.inputs[0]}
        assert [i for node in parts for i in node.inputs[1:]] == list(packet.inputs[1:])
        assert {node.attrs for node in parts} == {tuple(packet.attrs.items())}


def test_phases_pack_what_has_the_same_handles_in_both(config: K3Config) -> None:
    """A phase may have some of another's parts: sets that begin elsewhere would need them apart."""
    graph = build_graph(config)
    chosen = extract(graph, saturate(graph, RULES)).graph

    def runs(dag: Dag) -> list[tuple[str, ...]]:
        packed = (p for p in dag.packets if p.op is Op.ATTN_PARTS_8)
        return [tuple(chosen.names[v] for v in run) for p in packed for run in runs_of(p)
                if chosen.names[run[0]] in chosen.weights]  # fmt: skip

    alone = packet_dag(chosen)
    own = {leaf: run for run in runs(alone) for leaf in run}
    assert packet_dag(chosen, own) == alone
    first = runs(alone)[0]
    other = dict.fromkeys(first[2:], first[2:])  # as of a phase without the first part
    beside = packet_dag(chosen, other)
    assert not {leaf for run in runs(beside) for leaf in run} & set(other)
    assert len(beside.packets) > len(alone.packets)
    values = [sorted(value for p in dag.packets for value in p.results) for dag in (alone, beside)]
    assert values[0] == values[1], "a part that is not packed is a packet of its own"


def test_operands_of_one_slot_have_consecutive_handles(config: K3Config) -> None:
    for without in ((), ("kda-in-fuse",), ("kda-heads-fuse",)):
        plan = plan_of(config, without=without)
        phase = plan.phases["decode"]
        for index, packet in enumerate(phase.packets):
            spec = SPECS[Op(int(packet["op"]))]
            names = [plan.tensors[h].name for h in spec.handles(packet["handles"])]
            assert len(set(names)) == len(names), (index, spec.name)
            if spec.op is Op.KDA_HEADS:
                tails = [name.rsplit(".", 1)[-1] for name in names]
                assert tails[:6] == ["q_in", "k_in", "v_in", "f_a", "b", "g"]
                assert tails[-5:-1] == ["q_taps", "k_taps", "v_taps", "s"]


def test_rules_off_by_name_are_off(config: K3Config) -> None:
    assert not {r.name for r in rules_without(CHAIN_RULES)} & set(CHAIN_RULES)
    plain = histogram(plan_of(config, without=CHAIN_RULES))
    assert not PROLOGUES & set(plain)
