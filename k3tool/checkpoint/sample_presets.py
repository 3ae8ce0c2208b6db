"""Shapes of the synthetic checkpoints `k3tool sample` writes, and how their values are spread.

A preset is legal at every TP degree. Spreads keep activations near one through the layers, so that
logits vary, routing is not uniform and no gate saturates; they were fitted to small checkpoints
with known answers.
"""

from typing import Any, NamedTuple


class Preset(NamedTuple):
    """One shape. Layer lists are 1-based as in the config; names are the config's.

    `from_table`: too large for the exact values of the small ones (sample_table_values).
    """

    text: dict[str, int]
    full_attn_layers: tuple[int, ...]
    linear_heads: int
    linear_head_dim: int
    vision: dict[str, int]
    from_table: bool = False


_SMALL_VISION = {
    "vt_hidden_size": 32, "vt_num_hidden_layers": 1, "vt_num_attention_heads": 2,
    "qkv_hidden_size": 48, "vt_intermediate_size": 64, "mm_hidden_size": 32,
    "patch_size": 14, "init_pos_emb_height": 4, "init_pos_emb_width": 4,
    "init_pos_emb_time": 4,
}  # fmt: skip

_TINY = Preset(
    text={
        "hidden_size": 160, "intermediate_size": 256, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 8,
        "q_lora_rank": 48, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "num_experts": 12, "num_experts_per_token": 3, "num_shared_experts": 2,
        "moe_intermediate_size": 256, "routed_expert_hidden_size": 64,
        "attn_res_block_size": 3, "vocab_size": 512, "max_position_embeddings": 4096,
        "bos_token_id": 500, "eos_token_id": 502, "pad_token_id": 511,
    },
    full_attn_layers=(4, 7, 8),
    linear_heads=8,
    linear_head_dim=16,
    vision=_SMALL_VISION,
)  # fmt: skip

PRESETS: dict[str, Preset] = {
    "tiny": _TINY,
    # Every axis that a norm sums over is longer than 512: rule 6 of the arithmetic, sums in blocks.
    "wide": _TINY._replace(
        text={
            **_TINY.text,
            "hidden_size": 640, "num_hidden_layers": 4, "q_lora_rank": 544, "kv_lora_rank": 544,
            "num_experts": 6, "routed_expert_hidden_size": 576,
        },
        full_attn_layers=(2, 4),
    ),
    # 3.1 GB, of which a token touches half: what a whole token costs, on a machine of any size.
    "mid": Preset(
        text={
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 16,
            "q_lora_rank": 512, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "num_experts": 64, "num_experts_per_token": 8, "num_shared_experts": 2,
            "moe_intermediate_size": 1024, "routed_expert_hidden_size": 1024,
            "attn_res_block_size": 4, "vocab_size": 32768, "max_position_embeddings": 65536,
            "bos_token_id": 32760, "eos_token_id": 32762, "pad_token_id": 32767,
        },
        full_attn_layers=(4, 8, 12, 16),
        linear_heads=16,
        linear_head_dim=128,
        vision=_SMALL_VISION,
        from_table=True,
    ),
    # 8.3 GB: the release's widths in four layers, with fewer experts and a shorter vocabulary.
    "k3-slice": Preset(
        text={
            "hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": 4,
            "num_attention_heads": 96, "num_key_value_heads": 96,
            "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "num_experts": 32, "num_experts_per_token": 16, "num_shared_experts": 2,
            "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584,
            "attn_res_block_size": 2, "vocab_size": 32768, "max_position_embeddings": 65536,
            "bos_token_id": 32760, "eos_token_id": 32762, "pad_token_id": 32767,
        },
        full_attn_layers=(4,),
        linear_heads=96,
        linear_head_dim=128,
        vision=_SMALL_VISION,
        from_table=True,
    ),
}  # fmt: skip

_FIXED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}
_QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                "symmetric": True, "scale_dtype": "torch.uint8",
            },
        }
    },
}  # fmt: skip


def preset_config(preset: Preset) -> dict[str, Any]:
    """Return the config.json of a preset, nested as in the release."""
    layers = range(1, preset.text["num_hidden_layers"] + 1)
    ids = {name: preset.text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {
        **preset.text,
        **_FIXED,
        "linear_attn_config": {
            "num_heads": preset.linear_heads,
            "head_dim": preset.linear_head_dim,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": list(preset.full_attn_layers),
            "kda_layers": [layer for layer in layers if layer not in preset.full_attn_layers],
        },
        "quantization_config": _QUANTIZATION,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **ids,
        "text_config": text,
        "vision_config": {**preset.vision, "text_hidden_size": preset.text["hidden_size"]},
    }


class Spread(NamedTuple):
    """Values are mean + std * normal, std divided by sqrt(columns) where `by_columns`."""

    mean: float
    std: float
    by_columns: bool = False


_NORM = Spread(1.0, 0.2)
_UNIT = Spread(0.0, 1.0, by_columns=True)
# By the last words of a tensor's pattern; a pattern with no entry is a matrix of unit gain.
SPREADS: dict[str, Spread] = {
    "embed_tokens.weight": Spread(0.0, 1.0),
    "lm_head.weight": Spread(0.0, 3.0, True),
    "norm.weight": _NORM,
    "output_attn_res_norm.weight": _NORM,
    "self_attention_res_norm.weight": _NORM,
    "mlp_res_norm.weight": _NORM,
    "input_layernorm.weight": _NORM,
    "post_attention_layernorm.weight": _NORM,
    "self_attn.q_a_layernorm.weight": _NORM,
    "self_attn.kv_a_layernorm.weight": _NORM,
    "self_attn.o_norm.weight": _NORM,
    "block_sparse_moe.routed_expert_norm.weight": _NORM,
    "self_attn.A_log": Spread(0.4, 0.5),
    "self_attn.dt_bias": Spread(-1.5, 1.0),
    "self_attn.q_conv1d.weight": Spread(0.0, 0.6),
    "self_attn.k_conv1d.weight": Spread(0.0, 0.6),
    "self_attn.v_conv1d.weight": Spread(0.0, 0.6),
    "self_attn.g_proj.weight": Spread(0.0, 1.5, True),
    "self_attn.q_b_proj.weight": Spread(0.0, 1.5, True),
    "self_attn.kv_b_proj.weight": Spread(0.0, 1.5, True),
    "self_attn.kv_a_proj_with_mqa.weight": Spread(0.0, 0.5, True),
    "mlp.gate_proj.weight": Spread(0.0, 2.5, True),
    "mlp.up_proj.weight": Spread(0.0, 5.0, True),
    "mlp.down_proj.weight": Spread(0.0, 0.1, True),
    "block_sparse_moe.gate.weight": Spread(0.0, 1.5, True),
    "block_sparse_moe.gate.e_score_correction_bias": Spread(0.0, 0.2),
    "block_sparse_moe.routed_expert_up_proj.weight": Spread(0.0, 0.5, True),
    "block_sparse_moe.shared_experts.gate_proj.weight": Spread(0.0, 2.5, True),
    "block_sparse_moe.shared_experts.up_proj.weight": Spread(0.0, 5.0, True),
    "block_sparse_moe.shared_experts.down_proj.weight": Spread(0.0, 0.1, True),
    "block_sparse_moe.experts.{E}.w1": Spread(0.0, 2.5, True),
    "block_sparse_moe.experts.{E}.w3": Spread(0.0, 5.0, True),
    "block_sparse_moe.experts.{E}.w2": Spread(0.0, 0.5, True),
}


def spread_of(pattern: str) -> Spread:
    """Return the spread of a pattern of the weight table."""
    bare = pattern.removeprefix("model.").removeprefix("layers.{L}.")
    return SPREADS.get(bare.removesuffix(".weight_packed").removesuffix(".weight_scale"), _UNIT)
