"""K3Config: reads the released config, refuses everything it would have to guess."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.errors import ArtifactError, UsageError
from k3tool.model.config import K3Config

DATA = Path(__file__).resolve().parents[2] / "data"


def released() -> dict[str, Any]:
    return json.loads((DATA / "kimi-k3-config.json").read_text())


def flat() -> dict[str, Any]:
    return released()["text_config"]


def test_released_config() -> None:
    config = K3Config.from_dict(released())
    assert config.prefix == "language_model."
    assert [layer for layer in config.layers if config.is_mla(layer)] == [*range(3, 92, 4), 92]
    assert not config.is_moe(0)
    assert config.is_moe(1)
    assert config.n_blocks == 8
    assert config.cache_width == 576
    assert config.shared_width == 6144
    assert config.legal_tp() == [1, 2, 4, 8]
    assert config.eos_token_ids == (163586,)


def test_eps_is_per_site() -> None:
    eps = K3Config.from_dict(released()).eps
    assert eps["q_a_layernorm"] == eps["kv_a_layernorm"] == eps["l2norm"] == 1e-6
    assert {value for site, value in eps.items() if not site.startswith(("q_a", "kv_a", "l2"))} == {
        1e-5
    }


def test_eps_override_changes_one_site() -> None:
    changed = K3Config.from_dict(released(), eps_overrides={"q_a_layernorm": 1e-5}).eps
    plain = K3Config.from_dict(released()).eps
    assert {site for site in plain if plain[site] != changed[site]} == {"q_a_layernorm"}
    for bad in ({"q_norm": 1e-5}, {"norm": 0.0}, {"norm": float("nan")}):
        with pytest.raises(UsageError):
            K3Config.from_dict(released(), eps_overrides=bad)


def test_flat_export_is_read() -> None:
    config = K3Config.from_dict(flat())
    assert config.prefix == ""
    assert config.hidden_size == 7168


@pytest.mark.parametrize(
    ("name", "legal"), [("tiny13", [1]), ("tiny_tp8", [1, 2, 4, 8]), ("tiny_wide", [1, 2, 4, 8])]
)
def test_legal_tp_of_oracles(oracle: Callable[[str], Path], name: str, legal: list[int]) -> None:
    assert K3Config.load(oracle(name) / "config.json").legal_tp() == legal


def test_illegal_tp_names_dimension_size_group_and_what_works(oracle: Callable) -> None:
    config = K3Config.load(oracle("tiny13") / "config.json")
    config.check_tp(1)
    with pytest.raises(UsageError) as caught:
        config.check_tp(2)
    text = str(caught.value)
    assert "moe_intermediate_size = 96 in groups of 32" in text
    assert "need one of 1" in text
    with pytest.raises(UsageError, match="got 0, need one of 1"):
        config.check_tp(0)


@pytest.mark.parametrize(
    ("tp", "got"),
    [
        (3, "3, which does not divide vocab_size = 163840 nor the 8 blocks of a row-parallel sum"),
        (5, "5, which does not divide num_attention_heads = 96 nor the 8 blocks"),
        (16, "16, which does not divide the 8 blocks of a row-parallel sum"),
    ],
)
def test_a_degree_that_is_no_power_of_two_up_to_8_says_why(tp: int, got: str) -> None:
    with pytest.raises(UsageError) as caught:
        K3Config.from_dict(flat()).check_tp(tp)
    assert f"got {got}" in str(caught.value)
    assert "need one of 1, 2, 4, 8" in str(caught.value)


def _required_fields() -> list[str]:
    text = flat()
    names = [
        name for name in text
        if name in set(K3Config.__dataclass_fields__) - {"prefix"} | {
            "num_key_value_heads", "hidden_act", "mla_use_nope", "mla_use_output_gate",
            "latent_moe_use_norm", "moe_renormalize", "moe_router_activation_func",
            "num_expert_group", "topk_group", "moe_layer_freq", "num_nextn_predict_layers",
            "tie_word_embeddings", "quantization_config", "eos_token_id", "model_type",
        }
    ]  # fmt: skip
    assert len(names) > 30
    return names


@pytest.mark.parametrize("name", _required_fields())
def test_missing_field_is_named(name: str) -> None:
    raw = released()
    del raw["text_config"][name]
    with pytest.raises(ArtifactError) as caught:
        K3Config.from_dict(raw)
    assert f"text_config.{name}" in caught.value.object or name == "model_type"


@pytest.mark.parametrize("name", list(flat()["linear_attn_config"]))
def test_missing_linear_field_is_named(name: str) -> None:
    raw = released()
    del raw["text_config"]["linear_attn_config"][name]
    with pytest.raises(ArtifactError, match=name):
        K3Config.from_dict(raw)


@pytest.mark.parametrize("value", [None, "7168", 7168.0, True, -1, 0, [7168]])
def test_wrong_type_is_named(value: object) -> None:
    raw = released()
    raw["text_config"]["hidden_size"] = value
    with pytest.raises(ArtifactError, match=r"text_config\.hidden_size: got"):
        K3Config.from_dict(raw)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("moe_renormalize", False),
        ("num_expert_group", 8),
        ("topk_group", 2),
        ("moe_router_activation_func", "softmax"),
        ("hidden_act", "silu"),
        ("activation_situ_beta", None),
        ("activation_situ_linear_beta", None),
        ("mla_use_nope", False),
        ("mla_use_output_gate", False),
        ("latent_moe_use_norm", False),
        ("moe_layer_freq", 2),
        ("tie_word_embeddings", True),
        ("num_nextn_predict_layers", 1),
        ("num_key_value_heads", 8),
        ("num_experts_per_token", 897),
        ("first_k_dense_replace", 94),
        ("eos_token_id", 163840),
        ("model_type", "kimi_k2"),
        ("linear_attn_config.short_conv_kernel_size", 3),
        ("linear_attn_config.use_full_rank_gate", False),
        ("linear_attn_config.gate_lower_bound", None),
        ("linear_attn_config.gate_lower_bound", 5.0),
        ("quantization_config.format", "nvfp4-pack-quantized"),
        ("quantization_config.config_groups.group_0.weights.group_size", 16),
        ("quantization_config.config_groups.group_0.weights.num_bits", 8),
        ("quantization_config.config_groups", {}),
        ("quantization_config.quant_method", None),
        ("quantization_config.config_groups.group_0.format", "float-quantized"),
        ("quantization_config.config_groups.group_0.targets", ["Embedding"]),
        ("topk_method", "greedy"),
        ("use_grouped_topk", False),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 10**30),
        ("num_experts", 10**30),
        ("hidden_size", 10**30),
        ("activation_situ_beta", 1e300),
        ("activation_situ_linear_beta", 1e-320),
        ("routed_scaling_factor", 10**400),
        ("rms_norm_eps", 1e300),
        ("rms_norm_eps", 1.0),
        ("rms_norm_eps", 1e-60),
    ],
)
def test_unsupported_value_is_refused_by_name(path: str, value: object) -> None:
    raw = released()
    node = raw["text_config"]
    *parents, leaf = path.split(".")
    for parent in parents:
        node = node[parent]
    assert leaf in node
    node[leaf] = value
    with pytest.raises(ArtifactError) as caught:
        K3Config.from_dict(raw)
    assert leaf in caught.value.object


def test_tied_embeddings_at_the_top_are_refused() -> None:
    raw = released()
    assert raw["tie_word_embeddings"] is False
    raw["tie_word_embeddings"] = True
    with pytest.raises(ArtifactError, match="tie_word_embeddings: got true"):
        K3Config.from_dict(raw)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda kda, mla: (kda, [layer - 1 for layer in mla]), "twice"),
        (lambda kda, mla: (kda[1:], mla), "layer 1 in neither"),
        (lambda kda, mla: (kda, [*mla, 94]), "layer 94 of 93"),
        (lambda kda, mla: (kda, [*mla, 1]), "layer 1 twice"),
        (lambda kda, mla: ([0, *kda[1:]], mla), "layer 0 of 93"),
    ],
)
def test_layer_lists_must_partition(change: Callable, wrong: str) -> None:
    raw = released()
    linear = raw["text_config"]["linear_attn_config"]
    linear["kda_layers"], linear["full_attn_layers"] = change(
        linear["kda_layers"], linear["full_attn_layers"]
    )
    with pytest.raises(ArtifactError, match="1-based") as caught:
        K3Config.from_dict(raw)
    assert wrong in str(caught.value.got)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("intermediate_size", 33800),  # row-parallel: a multiple of 16
        ("v_head_dim", 1),
        ("hidden_size", 7176),  # above 512: eight blocks
        ("q_lora_rank", 1540),
        ("moe_intermediate_size", 3088),  # whole scale groups
        ("routed_expert_hidden_size", 3600),
    ],
)
def test_axis_rules(name: str, value: int) -> None:
    raw = released()
    if name == "v_head_dim":
        raw["text_config"]["num_attention_heads"] = raw["text_config"]["num_key_value_heads"] = 8
    raw["text_config"][name] = value
    with pytest.raises(ArtifactError, match=r"need a multiple of (16|32)"):
        K3Config.from_dict(raw)


def test_short_axis_needs_no_multiple() -> None:
    raw = released()
    raw["text_config"]["q_lora_rank"] = 90
    assert K3Config.from_dict(raw).q_lora_rank == 90


def test_another_model_is_refused_by_its_type() -> None:
    with pytest.raises(ArtifactError, match="deepseek_v3"):
        K3Config.from_dict({"model_type": "deepseek_v3", "hidden_size": 7168})


def test_mixed_layouts_are_refused() -> None:
    both = copy.deepcopy(released())
    both["hidden_size"] = 7168
    with pytest.raises(ArtifactError, match="hidden_size"):
        K3Config.from_dict(both)
    inside = flat()
    inside["text_config"] = flat()
    with pytest.raises(ArtifactError, match="text_config"):
        K3Config.from_dict(inside)
    two_ends = released()
    two_ends["eos_token_id"] = 1
    with pytest.raises(ArtifactError, match="eos_token_id"):
        K3Config.from_dict(two_ends)


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", '"kimi_k3"', "{}"])
def test_no_config_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match=r"config\.json"):
        K3Config.load(path)
    with pytest.raises(ArtifactError):
        K3Config.load(tmp_path / "absent.json")
