"""Packets of a phase: sizes of one rank, slices, waits, gates, flags, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.compiler import schedule
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.dag import packet_dag
from k3tool.compiler.handles import Handles, weight_bytes
from k3tool.compiler.plan import (
    Phase,
    Plan,
    n_slices,
    slice_bounds,
)
from k3tool.compiler.rules import FUSIONS
from k3tool.compiler.schedule import Layout, build_phase
from k3tool.errors import K3Error, UsageError
from k3tool.isa.columns import GATE, PACKET_DIGEST, PACKET_REARM
from k3tool.isa.table import SPECS, Op
from k3tool.model.config import K3Config
from k3tool.model.nodes import Graph
from tests.unit.compiler.kit import DIM, HEADS, HIDDEN, VOCAB, Kit


def plan_of(oracle: Callable[[str], Path], name: str, tp: int, **options: object) -> Plan:
    config = K3Config.load(oracle(name) / "config.json")
    settings = {"target": "cpu", "workgroups": 8, "chunk": 5, "batch": 2, "ctx": 300}
    return compile_plan(config, tp=tp, **(settings | options))


def token(kit: Kit, x: int) -> int:
    """Return the choice of a token from x; every phase ends with one."""
    best = kit.add(Op.ARGMAX, kit.linear(x, "head", head_only=1), name="best")
    return kit.add(Op.ARGMAX_FOLD, best, name="token")


def phase_of(graph: Graph, tp: int = 1, workgroups: int = 4, tokens: int = 1) -> Phase:
    handles = Handles([graph], tp, slots=1, pages=1)
    layout = Layout(tp, workgroups, tokens)
    return build_phase("decode", graph, packet_dag(graph), layout, handles, {}, 0)


def ops(phase: Phase) -> list[Op]:
    return [Op(op) for op in phase.packets["op"].tolist()]


# -- order and waits -------------------------------------------------------------------------------


def test_packets_come_by_level_and_wait_for_direct_producers_only() -> None:
    kit = Kit()
    x = kit.x()
    h = kit.norm(x)
    gate = kit.add(Op.SIGMOID, kit.linear(h, "same"))
    y = kit.add(Op.MUL, kit.add(Op.SILU, gate), x)  # x is an ancestor of gate: no wait of its own
    phase = phase_of(kit.finish(token(kit, y)))
    assert ops(phase)[:6] == [Op.EMBED_BF16, Op.RMSNORM, Op.GEMV_BF16, Op.SIGMOID, Op.SILU, Op.MUL]
    waits = [phase.waits_of(i)["counter"].tolist() for i in range(6)]
    assert waits == [[], [0], [1], [2], [3], [4]]
    assert phase.packet_path == len(phase.packets) == 9


def test_a_wait_is_for_all_slices_of_the_producer() -> None:
    kit = Kit()
    phase = phase_of(kit.finish(token(kit, kit.norm(kit.x()))), workgroups=3)
    assert phase.packets["n_slices"][0] == 3  # 64 columns, four tiles of 16, three workgroups
    assert phase.waits_of(1).tolist() == [(0, 3)]
    assert phase.packets["threshold"][0] == 3


def test_what_nothing_needs_is_no_packet() -> None:
    kit = Kit()
    x = kit.x()
    kit.linear(x, "q")
    phase = phase_of(kit.finish(token(kit, x)))
    assert Op.GEMV_BF16 in ops(phase)
    assert len(phase.packets) == 4


def test_a_packet_beside_the_chain_is_refused() -> None:
    """It could still run when the step ends, when counters are re-armed and peers move on."""
    kit = Kit()
    x = kit.x()
    graph = kit.finish(token(kit, x), kit.add(Op.SILU, x, name="beside"))
    with pytest.raises(AssertionError, match="beside may still run"):
        phase_of(graph)


def test_a_state_is_updated_once() -> None:
    kit = Kit()
    x = kit.linear(kit.x(), "q")
    taps = kit.state("taps", 3, HEADS * DIM)
    first = kit.add(Op.SHORT_CONV, x, kit.w("conv"), taps)
    second = kit.add(Op.CONV_SILU, x, kit.w("conv"), taps)
    graph = kit.finish(token(kit, kit.reduced(kit.add(Op.ADD, first, second))))
    with pytest.raises(AssertionError, match="taps is updated twice"):
        phase_of(graph)


# -- collectives -----------------------------------------------------------------------------------


def test_a_collective_waits_for_all_ranks_at_a_gate() -> None:
    kit = Kit(tp=4)
    y = kit.reduced(kit.linear(kit.x(), "q"))
    phase = phase_of(kit.finish(token(kit, y)), tp=4)
    part = ops(phase).index(Op.GEMV_BF16_BLOCKS)
    slices = int(phase.packets["n_slices"][part])
    assert phase.packets["counter"][part] == GATE | 0
    assert phase.packets["threshold"][part] == 4 * slices
    assert phase.waits_of(ops(phase).index(Op.ALL_REDUCE)).tolist() == [(GATE | 0, 4 * slices)]
    assert phase.n_gates == 2, "the sum and the argmax"


def test_a_partial_sum_has_one_reader() -> None:
    kit = Kit(tp=2)
    part = kit.add(Op.GEMV_BF16_BLOCKS, kit.linear(kit.x(), "q"), kit.w("down"), name="part")
    x = kit.x()
    both = kit.add(Op.ADD, kit.add(Op.ALL_REDUCE, part), kit.add(Op.ALL_REDUCE_ADD, x, part))
    with pytest.raises(AssertionError, match="part: two collectives"):
        phase_of(kit.finish(token(kit, both)), tp=2)


def test_flags_say_what_every_rank_must_agree_on(oracle: Callable[[str], Path]) -> None:
    plan = plan_of(oracle, "tiny_tp8", 8)
    phase = plan.phases["decode"]
    for index, op in enumerate(ops(phase)):
        flags = int(phase.packets["flags"][index])
        results = [plan.operand("decode", index, out.name) for out in SPECS[op].outputs]
        held = [t.role in ("arena", "output") and t.local == t.logical for t in results]
        assert bool(flags & PACKET_DIGEST) == any(held), (index, op, results)
        assert bool(flags & PACKET_REARM) == (op is Op.ARGMAX)


def test_phases_share_no_peer_bytes(oracle: Callable[[str], Path]) -> None:
    plan = plan_of(oracle, "tiny_tp8", 2)
    spans = {
        phase: [
            (t.offset, t.offset + t.n_bytes)
            for t in plan.tensors
            if t.role == "peer" and t.phase == phase
        ]
        for phase in ("decode", "prefill")
    }
    decode, prefill = plan.phases["decode"], plan.phases["prefill"]
    assert max(end for _, end in spans["decode"]) <= decode.peer_bytes
    assert min(start for start, _ in spans["prefill"]) >= decode.peer_bytes
    assert max(end for _, end in spans["prefill"]) <= prefill.peer_bytes


def test_a_broken_allocator_does_not_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    x = kit.norm(kit.x())
    y = kit.add(Op.MUL, kit.linear(x, "same"), kit.add(Op.SILU, x))
    graph = kit.finish(token(kit, y))
    assert len(phase_of(graph).packets) == 8, "the control"
    monkeypatch.setattr(schedule, "place_arena", lambda buffers, _: ([0] * len(buffers), 256))
    with pytest.raises(AssertionError, match="share bytes while both are in use"):
        phase_of(graph)


def test_broken_peer_slots_do_not_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(tp=2)
    y = kit.reduced(kit.linear(kit.reduced(kit.linear(kit.x(), "q")), "q"))
    graph = kit.finish(token(kit, y))
    assert phase_of(graph, tp=2).n_gates == 3, "the control"
    monkeypatch.setattr(schedule, "place_peers", lambda uses, *_: ([0] * len(uses), 256))
    with pytest.raises(AssertionError, match="share a peer slot before all ranks read it"):
        phase_of(graph, tp=2)


# -- sizes of one rank -----------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_sizes_are_of_one_rank(tp: int, oracle: Callable[[str], Path]) -> None:
    plan = plan_of(oracle, "tiny_tp8", tp)
    config = K3Config.load(oracle("tiny_tp8") / "config.json")
    phase = plan.phases["prefill"]

    def only(op: Op) -> dict[str, int]:
        index = ops(phase).index(op)
        row, spec = phase.packets[index], SPECS[op]
        fields = {name: int(row[name]) for name in ("n_units", "width", "unit_cols")}
        return fields | {p.name: int(row["params"][i]) for i, p in enumerate(spec.params)}

    heads = config.linear_attn_config.num_heads // tp
    dim = config.linear_attn_config.head_dim
    core = only(Op.KDA_CORE)
    assert (core["n_units"], core["width"], core["unit_cols"]) == (heads, heads * dim, dim)
    inner, top_k = config.moe_intermediate_size // tp, config.num_experts_per_token
    experts = only(Op.MOE_GLU_MXFP4)
    assert (experts["n_units"], experts["width"]) == (inner, top_k * inner)
    assert experts["K"] == config.routed_expert_hidden_size
    down = only(Op.MOE_DOWN_MXFP4)
    assert (down["K"], down["n_blocks"], down["top_k"]) == (inner, 8 // tp, top_k)
    out = only(Op.GEMV_BF16_BLOCKS)
    assert (out["K"], out["n_blocks"]) == (heads * dim, 8 // tp)
    best = only(Op.ARGMAX)
    assert best["vocab"] == best["vocab_base"] == config.vocab_size // tp
    assert only(Op.REDUCE_GATHER_ADD)["shard_cols"] == config.hidden_size // tp
    norm = only(Op.ATTN_RES_NORM)
    assert (norm["n_units"], norm["unit_cols"], norm["width"]) == (5, 0, config.hidden_size)
    attend = only(Op.MLA_ATTEND)
    assert attend["n_units"] == config.num_attention_heads // tp
    assert attend["width"] == attend["n_units"] * config.kv_lora_rank
    assert attend["page_tokens"] == 256


def test_states_hold_slots_pages_and_own_heads(oracle: Callable[[str], Path]) -> None:
    plan = plan_of(oracle, "tiny_tp8", 4)  # batch 2, ctx 300: two pages a sequence
    config = K3Config.load(oracle("tiny_tp8") / "config.json")
    linear, heads = config.linear_attn_config, config.linear_attn_config.num_heads
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    state = by_name["layers.0.self_attn.s"]
    assert state.local == (2, heads // 4, linear.head_dim, linear.head_dim)
    assert state.logical == (2, heads, linear.head_dim, linear.head_dim)
    taps = by_name["layers.0.self_attn.q_taps"]
    assert taps.local == (2, 3, linear.width // 4)
    cache = by_name["layers.3.self_attn.cache"]
    assert cache.local == cache.logical == (4, 256, config.cache_width)
    assert cache.n_bytes == 4 * 256 * config.cache_width * 4
    assert plan.params["ctx"] == 512


def test_weights_carry_what_a_runtime_needs_to_find_them(oracle: Callable[[str], Path]) -> None:
    plan = plan_of(oracle, "tiny_tp8", 2)
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    a_log = by_name["layers.0.self_attn.A_log"]
    assert (a_log.dtype, a_log.split) == ("f32", "live_rows")
    assert a_log.source == "language_model.model.layers.0.self_attn.A_log"
    w2 = by_name["layers.1.block_sparse_moe.experts.w2"]
    assert (w2.role, w2.dtype, w2.split) == ("experts", "mxfp4", "cols")
    assert w2.source.endswith(".experts.{E}.w2")
    experts, rows, columns = w2.logical
    assert w2.local == (experts, rows, columns // 2)
    assert w2.n_bytes == weight_bytes("mxfp4", w2.local)
    assert w2.n_bytes == experts * rows * (columns // 2) * 17 // 32


def test_one_handle_for_each_version_of_the_stack(oracle: Callable[[str], Path]) -> None:
    plan = plan_of(oracle, "tiny13", 1)
    phase = plan.phases["decode"]
    stacks = {
        int(phase.packets["handles"][i][SPECS[op].slot("blocks")])
        for i, op in enumerate(ops(phase))
        if op in (Op.BLOCK_PUSH, Op.ATTN_RES_NORM)
    }
    assert len(stacks) == 1
    assert plan.tensors[stacks.pop()].local[:2] == (4, 2), "four blocks, two tokens"


# -- slices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "grain", "workgroups", "bounds"),
    [
        (64, 16, 4, [0, 16, 32, 48, 64]),
        (60, 16, 4, [0, 16, 32, 48, 60]),
        (60, 16, 3, [0, 16, 32, 60]),
        (5, 8, 8, [0, 5]),
        (1, 1, 256, [0, 1]),
    ],
)
def test_slices_are_whole_tiles(units: int, grain: int, workgroups: int, bounds: list[int]) -> None:
    slices = n_slices(units, grain, workgroups)
    assert slice_bounds(units, grain, slices).tolist() == bounds


# -- refusals --------------------------------------------------------------------------------------


def test_a_norm_of_a_shard_is_refused_by_name() -> None:
    kit = Kit()
    shard = kit.linear(kit.x(), "up")
    with pytest.raises(K3Error, match="half: RMSNORM x: got sharded, need replicated"):
        kit.add(Op.RMSNORM, shard, kit.w("norm"), eps=0, name="half")
    assert kit.norm(kit.linear(kit.x(), "same")), "the control"


def test_arithmetic_on_an_unreduced_sum_is_refused_by_name() -> None:
    kit = Kit()
    part = kit.add(Op.GEMV_BF16_BLOCKS, kit.linear(kit.x(), "q"), kit.w("down"))
    with pytest.raises(K3Error, match="act: SILU x: got partial"):
        kit.add(Op.SILU, part, name="act")
    with pytest.raises(K3Error, match="got partial, need sharded"):
        kit.add(Op.ALL_GATHER, part, name="side")


def test_a_row_parallel_product_of_a_whole_vector_is_refused_by_name() -> None:
    kit = Kit()
    with pytest.raises(K3Error, match="y: GEMV_BF16_BLOCKS x: got replicated, need sharded"):
        kit.add(Op.GEMV_BF16_BLOCKS, kit.x(), kit.w("down"), name="y")
    with pytest.raises(K3Error, match="w: got split by rows, need cols"):
        kit.add(Op.GEMV_BF16_BLOCKS, kit.linear(kit.x(), "q"), kit.w("up"), name="y")


def test_a_weight_split_unlike_its_activation_is_refused() -> None:
    """The logical sizes fit; one rank's do not: the convolution would run on other channels."""
    kit = Kit(tp=2)
    weights = dict(kit.graph.weights)
    weights["conv"] = weights["conv"]._replace(local_shape=weights["conv"].shape)
    kit.graph.weights = weights
    taps = kit.state("taps", 3, HEADS * DIM)
    conv = kit.add(Op.SHORT_CONV, kit.linear(kit.x(), "q"), kit.w("conv"), taps, name="conv0")
    graph = kit.finish(token(kit, kit.reduced(conv)))
    with pytest.raises(K3Error, match=rf"conv0: SHORT_CONV conv: got {HEADS * DIM}, need C with"):
        phase_of(graph, tp=2)


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    kit = Kit()
    with pytest.raises(K3Error, match=f"out: GEMV_BF16 w: got {HIDDEN}, need K with K={VOCAB}"):
        kit.add(Op.GEMV_BF16, kit.linear(kit.x(), "head"), kit.w("same"), head_only=0, name="out")
    with pytest.raises(K3Error, match="shape"):
        kit.add(Op.RMSNORM, kit.x(), kit.w("q"), eps=0, name="out")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tp": 3}, "--tp"),
        ({"workgroups": 0}, "--workgroups"),
        ({"chunk": 0}, "--chunk"),
        ({"batch": 0}, "--batch"),
        ({"ctx": 0}, "--ctx"),
        ({"ctx": 1 << 30}, "max_position_embeddings"),
        ({"without": ("x",)}, "--without"),
    ],
)
def test_options_that_do_not_fit_are_usage_errors(
    change: dict[str, object], match: str, oracle: Callable[[str], Path]
) -> None:
    with pytest.raises(UsageError, match=match):
        plan_of(oracle, "tiny_tp8", **({"tp": 1} | change))


def test_ranks_change_sizes_and_nothing_else(oracle: Callable[[str], Path]) -> None:
    """The digest of a step mixes packet numbers, so they must not depend on the degree."""
    one, eight = (plan_of(oracle, "tiny_tp8", tp, without=FUSIONS) for tp in (1, 8))
    for name in ("decode", "prefill"):
        a, b = one.phases[name].packets, eight.phases[name].packets
        assert np.array_equal(a["op"], b["op"])
        assert np.array_equal(a["handles"], b["handles"])
        assert np.array_equal(a["flags"], b["flags"])
        assert not np.array_equal(a["width"], b["width"])
