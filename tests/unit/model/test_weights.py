"""The weight table against the released index, the graph, and the split rules."""

import gzip
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.model.config import K3Config
from k3tool.model.graph import weight_leaves
from k3tool.model.vision import expected_vision, is_vision
from k3tool.model.weight_slices import n_bytes, rank_shape, rank_slice, shape_fault
from k3tool.model.weights import Split, expected_leaves, expected_tensors, find_spec, idle_leaves

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="module")
def released() -> K3Config:
    return K3Config.load(DATA / "kimi-k3-config.json")


@pytest.fixture(scope="module")
def index() -> dict:
    return json.loads(gzip.open(DATA / "kimi-k3-model.safetensors.index.json.gz").read())


def test_released_index_exactly(released: K3Config, index: dict) -> None:
    start = time.perf_counter()
    total, names = 0, set()
    for specs in (expected_tensors(released), expected_vision(released)):
        for spec in specs:
            total += n_bytes(spec.shape, spec.dtype)
            names.add(spec.name)
    assert time.perf_counter() - start < 10  # about 1 s; generous for a loaded machine
    assert len(names) == 497_220
    assert names == set(index["weight_map"])
    assert total == index["metadata"]["total_size"] == 1_560_860_324_864


def test_dtype_census(released: K3Config) -> None:
    census = Counter(spec.dtype for spec in expected_tensors(released))
    census.update(spec.dtype for spec in expected_vision(released))
    assert census == {"U8": 494_592, "BF16": 2_122, "F32": 506}


def test_leaves_are_what_the_graph_claims(released: K3Config) -> None:
    assert expected_leaves(released) == weight_leaves(released)
    assert idle_leaves(released) == {
        "layers.0.self_attention_res_norm.weight",
        "layers.0.self_attention_res_proj.weight",
    }


@pytest.mark.parametrize("name", ["tiny13", "tiny_tp8", "tiny_wide"])
def test_oracle_shapes_and_dtypes(oracle: Callable[[str], Path], name: str) -> None:
    with Checkpoint.open(oracle(name)) as checkpoint:
        specs = list(expected_tensors(checkpoint.config))
        for spec in specs:
            info = checkpoint.tensor_info(spec.name)
            assert (info.dtype, info.shape) == (spec.dtype, spec.shape), spec.name
            assert find_spec(checkpoint.config, spec.name) == spec
        rest = set(checkpoint.names()) - {spec.name for spec in specs}
        assert rest
        assert all(map(is_vision, rest))


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",  # without the prefix
        "language_model.model.layers.93.input_layernorm.weight",
        "language_model.model.layers.00.input_layernorm.weight",
        "language_model.model.layers.3.self_attn.A_log",  # an MLA layer
        "language_model.model.layers.0.self_attn.kv_b_proj.weight",  # a KDA layer
        "language_model.model.layers.1.mlp.up_proj.weight",  # a MoE layer
        "language_model.model.layers.1.block_sparse_moe.experts.896.w1.weight_packed",
        "language_model.model.layers.1.block_sparse_moe.experts.0.w4.weight_packed",
        "language_model.model.layers.1.self_attn.q_proj.bias",
        "language_model.model.layers.x.input_layernorm.weight",
        "",
    ],
)
def test_unknown_names(released: K3Config, name: str) -> None:
    assert find_spec(released, name) is None


def test_every_split_covers_the_tensor_once(released: K3Config) -> None:
    seen = set()
    for spec in expected_tensors(released):
        if spec.expert not in (None, 5) or spec.layer not in (None, 0, 1, 3):
            continue
        seen.add(spec.split)
        for tp in (1, 2, 4, 8):
            parts = [rank_slice(spec, tp, rank) for rank in range(tp)]
            if spec.split is Split.REPLICATE:
                assert {part.axis for part in parts} == {None}
                assert rank_shape(spec, tp) == spec.shape
                continue
            extent = spec.live if spec.split is Split.LIVE_ROWS else spec.shape[parts[0].axis or 0]
            edges = [parts[0].start, *(part.stop for part in parts)]
            assert edges == [extent * rank // tp for rank in range(tp + 1)], spec.name
            assert sum(part.stop - part.start for part in parts) == extent
    assert seen == {Split.REPLICATE, Split.ROWS, Split.COLS, Split.LIVE_ROWS}


def test_a_log_is_narrowed_to_the_live_heads_before_it_is_split(released: K3Config) -> None:
    spec = find_spec(released, "language_model.model.layers.0.self_attn.A_log")
    assert spec is not None
    assert spec.shape == (128,)
    assert rank_slice(spec, 8, 7) == (0, 84, 96)  # an even split of the 128 would give 112..128
    assert shape_fault(spec, (96,)) is None
    assert shape_fault(spec, (128,)) is None
    assert shape_fault(spec, (95,)) is not None
    assert shape_fault(spec, (96, 1)) is not None


def test_w2_splits_packed_and_scale_at_the_same_columns(released: K3Config) -> None:
    base = "language_model.model.layers.1.block_sparse_moe.experts.0.w2."
    packed, scale = (find_spec(released, base + f"weight_{kind}") for kind in ("packed", "scale"))
    assert packed is not None
    assert scale is not None
    for rank in range(8):
        a, b = rank_slice(packed, 8, rank), rank_slice(scale, 8, rank)
        assert (a.start * 2, a.stop * 2) == (b.start * 32, b.stop * 32)


def test_convolutions_may_be_two_dimensional(released: K3Config) -> None:
    spec = find_spec(released, "language_model.model.layers.0.self_attn.q_conv1d.weight")
    assert spec is not None
    assert shape_fault(spec, (12288, 1, 4)) is None
    assert shape_fault(spec, (12288, 4)) is None
    assert shape_fault(spec, (4, 12288)) is not None


def test_rank_bytes_of_the_release(released: K3Config) -> None:
    """Bytes per rank at TP 8, against sums published for another engine's split.

    That engine splits the embedding by vocabulary (we replicate it) and replicates the
    up-projections (we split them by rows); everything else is equal.
    """
    ours: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for spec in expected_tensors(released):
        kind = "other"
        if spec.leaf.endswith(("embed_tokens.weight", "routed_expert_up_proj.weight")):
            kind = spec.leaf.split(".")[-2]
        size = n_bytes(rank_shape(spec, 8), spec.dtype)
        ours[kind] += size
        ours["replicated"] += size if spec.split is Split.REPLICATE else 0
        whole[kind] += n_bytes(spec.shape, spec.dtype)
    embed, up = whole["embed_tokens"], whole["routed_expert_up_proj"]
    assert ours["replicated"] - embed + up == 11_498_150_400
    assert ours["other"] + embed // 8 + up == 205_056_581_360
    assert up - ours["routed_expert_up_proj"] == 4_136_108_032  # read less per rank and token
