"""The operator graph: what the spec says of layers, blocks and collectives, and its sizes table."""

import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.errors import K3Error
from k3tool.isa.table import SPECS, Op
from k3tool.model.config import K3Config
from k3tool.model.graph import build_graph, weight_leaves, weight_table
from k3tool.model.nodes import Graph, Leaf
from k3tool.model.operators import attr_names, f32_bits, solve_sizes
from k3tool.model.weights import expected_leaves

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="module")
def released() -> K3Config:
    return K3Config.load(DATA / "kimi-k3-config.json")


@pytest.fixture(scope="module")
def graph(released: K3Config) -> Graph:
    return build_graph(released)


def by_name(graph: Graph, name: str) -> int:
    return graph.names.index(name)


def readers(graph: Graph, node: int) -> set[str]:
    return {graph.names[i] for i, other in enumerate(graph.nodes) if node in other.inputs}


def attr(graph: Graph, name: str, key: str) -> int:
    return int(dict(graph.nodes[by_name(graph, name)].attrs)[key])


def test_the_graph_reads_every_leaf_and_no_other(released: K3Config) -> None:
    assert weight_leaves(released) == expected_leaves(released)
    assert set(weight_table(released)) >= weight_leaves(released)


def test_counts_of_the_released_model(graph: Graph) -> None:
    counts = Counter(node.op for node in graph.nodes)
    assert counts[Op.ATTN_RES] == 186  # spec, C.2: 92 before attention, 93 before the MLP, 1 last
    assert counts[Op.BLOCK_PUSH] == 8
    assert counts[Op.KDA_STEP] == 69
    assert counts[Op.MLA_ATTEND] == 24
    assert counts[Op.ROUTER_TOPK] == 92
    # o_proj; dense down; shared experts, beside a MoE layer's latent sum.
    assert counts[Op.GEMV_REDUCED] == 93 + 1 + 92
    assert counts[Op.MOE_DOWN_EACH] == counts[Op.MOE_COMBINE] == 92
    assert not counts[Op.ALL_REDUCE], "rules make the sums over ranks"
    assert counts[Op.ALL_GATHER] == 92 + 1, "routed_expert_up_proj, and the logits"
    assert counts[Op.DEQUANT_MXFP4] == 3 * 92
    assert counts[Leaf.STATE] == 69 * 4 + 24


def test_the_last_two_layers_are_mla(graph: Graph) -> None:
    for layer in (91, 92):
        assert f"layers.{layer}.self_attn.context" in graph.names
    assert "layers.90.self_attn.o" in graph.names


def test_a_block_is_the_raw_layer_input_and_the_prefix_starts_again(graph: Graph) -> None:
    push = graph.nodes[by_name(graph, "layers.12.blocks")]
    assert push.inputs[0] == by_name(graph, "layers.11.out"), "not the mix"
    mix = graph.nodes[by_name(graph, "layers.12.attn_mix")]
    assert mix.inputs[1] == by_name(graph, "layers.0.blocks"), "mixed before the push"
    assert attr(graph, "layers.12.attn_mix", "n_blocks") == 1
    assert attr(graph, "layers.12.mlp_mix", "n_blocks") == 2
    assert "layers.12.attn_out" not in graph.names, "no residual is added where a block opens"
    out = graph.nodes[by_name(graph, "layers.12.out")]
    assert out.inputs[0] == by_name(graph, "layers.12.self_attn.out")
    assert "layers.11.attn_out" in graph.names


def test_layer_0_has_no_mix_before_attention(graph: Graph) -> None:
    norm = graph.nodes[by_name(graph, "layers.0.attn_in")]
    assert norm.inputs[0] == by_name(graph, "embed")
    assert attr(graph, "layers.0.mlp_mix", "n_blocks") == 1
    assert attr(graph, "output_mix", "n_blocks") == 8


def test_the_routed_norm_comes_after_the_sum_over_ranks(graph: Graph) -> None:
    norm = graph.nodes[by_name(graph, "layers.5.block_sparse_moe.y_unit")]
    assert graph.nodes[norm.inputs[0]].op is Op.MOE_COMBINE
    route = graph.nodes[by_name(graph, "layers.5.block_sparse_moe.scores")]
    assert route.inputs[0] == by_name(graph, "layers.5.mlp_in"), "the router reads x, not z"


def test_epsilons_are_per_site() -> None:
    config = K3Config.load(DATA / "kimi-k3-config.json", {"kv_a_layernorm": 3e-6})
    graph = build_graph(config)
    root = "layers.3.self_attn"
    assert attr(graph, f"{root}.q_a_unit", "eps") == f32_bits(1e-6)
    assert attr(graph, f"{root}.cached", "eps") == f32_bits(3e-6)
    assert attr(graph, "layers.0.self_attn.q_unit", "eps") == f32_bits(1e-6)
    assert attr(graph, "layers.0.self_attn.o_unit", "eps") == f32_bits(1e-5)
    assert attr(graph, "output_norm", "eps") == f32_bits(1e-5)


def test_constants_are_binary64_rounded_once(graph: Graph) -> None:
    def value(bits: int) -> float:
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])

    assert value(attr(graph, "layers.3.self_attn.context", "scale")) == pytest.approx(192**-0.5)
    assert f32_bits(192**-0.5) == attr(graph, "layers.3.self_attn.context", "scale")
    assert value(attr(graph, "layers.0.self_attn.q_scaled", "factor")) == pytest.approx(128**-0.5)
    assert f32_bits(1.0) == 0x3F800000
    assert f32_bits(0.1) == 0x3DCCCCCD, "to nearest, not cut off"


def test_places_follow_the_split(graph: Graph) -> None:
    def place(name: str) -> str:
        return graph.nodes[by_name(graph, name)].placement

    assert place("layers.0.self_attn.f_a") == "replicated"
    assert place("layers.0.self_attn.f") == "sharded"
    assert place("layers.0.self_attn.gated") == "sharded"
    assert place("layers.0.self_attn.out") == "replicated"
    assert place("layers.1.block_sparse_moe.up.shard") == "sharded"
    assert place("logits") == "sharded"
    assert place("token") == "replicated"


def test_equal_values_are_one_node(graph: Graph) -> None:
    assert len({(n.op, n.inputs, n.attrs) for n in graph.nodes}) == len(graph.nodes)
    assert len(readers(graph, by_name(graph, "layers.0.attn_in"))) == 6


def test_every_input_comes_before_its_reader(graph: Graph) -> None:
    assert all(i < index for index, node in enumerate(graph.nodes) for i in node.inputs)


def test_a_leaf_that_is_in_no_table_is_refused(released: K3Config) -> None:
    with pytest.raises(K3Error, match=r"layers\.0\.mlp\.bias"):
        build_graph(released).leaf(Leaf.WEIGHT, "layers.0.mlp.bias")


def test_attributes_are_the_parameters_that_sizes_do_not_give() -> None:
    assert attr_names(Op.GEMV_BF16) == ("head_only", "round")
    assert attr_names(Op.GEMV_BF16_BLOCKS) == ("x_bf16",)
    assert attr_names(Op.ATTN_RES) == ("n_blocks", "eps", "round")
    assert attr_names(Op.L2NORM) == ("eps", "head_dim")
    assert attr_names(Op.ARGMAX) == ()
    assert attr_names(Op.KDA_STEP) == ("round", "head_dim")
    named = {name for op in Op for name in attr_names(op)} - {"head_dim"}
    words = {param.name for spec in SPECS.values() for param in spec.params}
    assert named <= words | {name for spec in SPECS.values() for name in spec.flags}


def test_sizes_are_solved_for_a_rank_and_checked() -> None:
    shapes = {"up": (20,), "x": (160,)}
    width, sizes = solve_sizes(Op.REDUCE_GATHER, "n", shapes, {}, tp=8)
    assert (width, sizes["S"]) == (160, 20)
    with pytest.raises(K3Error, match=r"n: REDUCE_GATHER x: got 150, need tp\*S with S=20, tp=8"):
        solve_sizes(Op.REDUCE_GATHER, "n", shapes | {"x": (150,)}, {}, tp=8)
    with pytest.raises(K3Error, match=r"n: L2NORM x: got 33, need H\*head_dim"):
        solve_sizes(Op.L2NORM, "n", {"x": (33,)}, {"head_dim": 16}, tp=1)


def test_local_shapes_are_those_of_the_weight_table(oracle: Callable[[str], Path]) -> None:
    config = K3Config.load(oracle("tiny_tp8") / "config.json")
    table = weight_table(config, 4)
    whole = weight_table(config, 1)
    for leaf, weight in table.items():
        ratio = {"replicate": 1}.get(weight.split, 4)
        count, full = 1, 1
        for size, logical in zip(weight.local_shape, weight.shape, strict=True):
            count, full = count * size, full * logical
        assert count * ratio == full, leaf
        assert whole[leaf].local_shape == whole[leaf].shape or weight.split == "live_rows"


# Where mode bf16 rounds (the arithmetic contract's list), by the value's name with its layer and
# module taken off. `embed` and `up` (a gathered linear) hold bf16 values without a point of theirs.
ROUNDED = {
    "attn_mix", "mlp_mix", "output_mix", "attn_in", "mlp_in", "output_norm", "attn_out", "out",
    "q_in", "k_in", "v_in", "q", "k", "v", "f_a", "f", "b", "g", "o", "gated", "q_a", "q_a_unit",
    "q_latent", "kv_a", "cached", "context", "gate", "z", "w1", "w3", "act", "y", "y_unit",
    "up.shard", "up", "down",
}  # fmt: skip
EXACT = {
    "q_unit", "q_scaled", "k_unit", "decay", "beta", "o_unit", "q_conv", "k_conv", "v_conv",
    "scores", "route", "logits", "all_logits", "numbers", "token", "embed", "blocks",
    "cap", "sigmoid", "linear", "w2",
}  # fmt: skip


def test_mode_bf16_rounds_where_the_contract_says() -> None:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    graph, plain = build_graph(config, mode="bf16"), build_graph(config)
    assert graph.names == plain.names
    rounded, exact = set(), set()
    for name, node in zip(graph.names, graph.nodes, strict=True):
        if isinstance(node.op, Op):
            last = "up.shard" if name.endswith(".up.shard") else name.rsplit(".", 1)[-1]
            (rounded if dict(node.attrs).get("round") else exact).add((last, node.op))
    assert {name for name, _ in rounded} == ROUNDED
    # A gate and a product inside a unit, and KDA's gate in its norm, are exact beside rounded ones.
    inside = {("gate", Op.SIGMOID), ("gated", Op.MUL), ("up", Op.ALL_GATHER)}
    assert {name for name, _ in exact - inside} <= EXACT
    assert not any(dict(node.attrs).get("round") for node in plain.nodes)
