"""Damage to the meaning: a sound container whose tensors are not the model its config describes."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.damage.case import Case, legal, refused
from tests.faults.damage.edit import (
    CONFIG,
    LAYERS,
    Tensor,
    add,
    change,
    edit_json,
    load,
    poke,
    redtype,
    remove,
    rename,
    rename_one,
    reshape,
    shard_name,
    transpose,
)

PREFIX = "language_model."
KDA, MLA = LAYERS + "1.self_attn.", LAYERS + "3.self_attn."
MOE = LAYERS + "2.block_sparse_moe."
EXPERT = MOE + "experts.4."
SCALE = EXPERT + "w2.weight_scale"  # [64, 8]
A_LOG = KDA + "A_log"
PARTS = [f"{w}.{part}" for w in ("w1", "w2", "w3") for part in ("weight_packed", "weight_scale")]
FILE_2, FILE_3 = shard_name(2), shard_name(3)


def _text(**fields: object) -> Callable[[Path], None]:
    """Return damage that sets fields of text_config; `linear_` ones go to linear_attn_config."""

    def damage(folder: Path) -> None:
        with edit_json(folder / CONFIG) as config:
            text = config["text_config"]
            for key, value in fields.items():
                inner = key.removeprefix("linear_")
                section = text["linear_attn_config"] if inner != key else text
                section[inner] = value

    return damage


def _without(field: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with edit_json(folder / CONFIG) as config:
            del config["text_config"][field]

    return damage


def _quant(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with edit_json(folder / CONFIG) as config:
            edit(config["text_config"]["quantization_config"])

    return damage


def _config_text(old: str, new: str) -> Callable[[Path], None]:
    """Return damage to config.json's text, at the first place."""

    def damage(folder: Path) -> None:
        text = (folder / CONFIG).read_text()
        assert old in text
        (folder / CONFIG).write_text(text.replace(old, new, 1))

    return damage


def _vision(value: object) -> Callable[[Path], None]:
    """Return damage to vision_config: fields of it, none of them for {}, or a whole other value."""

    def damage(folder: Path) -> None:
        with edit_json(folder / CONFIG) as config:
            held = config["vision_config"]
            config["vision_config"] = held | value if isinstance(value, dict) and value else value

    return damage


def _top(**fields: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with edit_json(folder / CONFIG) as config:
            config.update(fields)

    return damage


def _layer_more(folder: Path) -> None:
    _text(num_hidden_layers=9, linear_kda_layers=[1, 2, 3, 5, 6, 9])(folder)


def _layer_less(folder: Path) -> None:
    _text(num_hidden_layers=7, linear_full_attn_layers=[4, 7])(folder)


def _remove_layer(folder: Path) -> None:
    remove(folder, *(name for name in load(folder / shard_name(8)) if name.startswith(LAYERS)))
    (folder / shard_name(8)).unlink()


def _map(full: list[object], kda: list[object]) -> Callable[[Path], None]:
    return _text(linear_full_attn_layers=full, linear_kda_layers=kda)


def _drop_prefix(folder: Path, *, only: str = "") -> None:
    rename(folder, lambda name: name.removeprefix(PREFIX) if only in name else name)


def _flat_config(folder: Path) -> None:
    with edit_json(folder / CONFIG) as config:
        text = config["text_config"]
        config.clear()
        config.update(text)


def _flat_export(folder: Path) -> None:
    """Make it a text-only export: flat config, no prefix, no image side."""
    _flat_config(folder)
    remove(folder, *load(folder / shard_name(11)))
    (folder / shard_name(11)).unlink()
    _drop_prefix(folder)


def _llama(folder: Path) -> None:
    (folder / CONFIG).write_text(
        '{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000}'
    )


def _narrow(folder: Path, name: str, axis: int) -> None:
    """Cut the last row (axis 0) or column (axis 1) off a byte matrix."""

    def make(tensor: Tensor) -> Tensor:
        rows, cols = tensor.shape
        if axis == 0:
            return Tensor(tensor.dtype, (rows - 1, cols), tensor.data[: (rows - 1) * cols])
        kept = [tensor.data[row * cols : row * cols + cols - 1] for row in range(rows)]
        return Tensor(tensor.dtype, (rows, cols - 1), b"".join(kept))

    change(folder, name, make)


def _widen(folder: Path, name: str, dtype: str, code: str) -> None:
    """Store each scale byte as a wider number."""
    change(folder, name, lambda t: Tensor(
        dtype, t.shape, b"".join(struct.pack(code, byte) for byte in t.data)))  # fmt: skip


def _all_scales(folder: Path, dtype: str) -> None:
    for expert in range(12):
        for part in PARTS[1::2]:
            redtype(folder, f"{MOE}experts.{expert}.{part}", dtype)


def _all_convs(folder: Path) -> None:
    for layer in (0, 1, 2, 4, 5):
        for part in "qkv":
            reshape(folder, f"{LAYERS}{layer}.self_attn.{part}_conv1d.weight", (128, 4))


def _a_log(n_values: int) -> Callable[[Path], None]:
    return lambda folder: reshape(folder, A_LOG, (n_values,))


def _copy_expert(folder: Path) -> None:
    """Add a thirteenth expert that the config does not know."""
    held = load(folder / FILE_3)
    for part in PARTS:
        add(folder, f"{MOE}experts.12.{part}", held[EXPERT + part], number=3)


SCALE_1 = EXPERT + "w1.weight_scale"
ONE = Tensor("BF16", (128,), bytes(256))
Q = KDA + "q_proj.weight"
MEANING: tuple[Case, ...] = (
    refused("other model", "llama config", _llama, CONFIG, "model_type", "llama", "kimi_k3"),
    refused("other model", "an older kimi", _top(model_type="kimi_k2"), CONFIG, "model_type",
            "kimi_k2"),
    refused("other model", "no config", lambda f: (f / CONFIG).unlink(), "no config.json"),
    refused("other model", "config is no JSON", lambda f: (f / CONFIG).write_text("{'a'}"), CONFIG,
            "JSON"),
    refused("other model", "config is a list", lambda f: (f / CONFIG).write_text("[]"), CONFIG,
            "JSON object"),
    refused("other model", "config has a key twice",
            _config_text('"hidden_size":', '"hidden_size": 320, "hidden_size":'), CONFIG,
            "hidden_size twice"),
    refused("other model", "config holds a number of 5000 digits",
            _config_text('"hidden_size":', '"x": %s, "hidden_size":' % ("9" * 5000)), CONFIG,
            "a number of 5000 digits"),
    refused("other model", "config holds 100,000 brackets",
            _config_text('"hidden_size":', '"x": %s, "hidden_size":' % ("[" * 100_000)), CONFIG,
            "JSON"),
    refused("other model", "config holds half of a surrogate pair",
            _config_text('"hidden_size":', '"x": "\\ud800", "hidden_size":'), CONFIG,
            "half of a surrogate pair"),
    refused("other model", "a million end ids", _text(eos_token_id=[1] * 1_000_000), CONFIG,
            "eos_token_id"),
    refused("other model", "end ids of text, a million", _text(eos_token_id=["x"] * 1_000_000),
            CONFIG, "eos_token_id", '"x", "...'),
    refused("other model", "65,536 experts", _text(num_experts=65_536), CONFIG,
            "num_experts 65536", "2752718 tensors", "the 712 tensors here"),
    refused("other model", "1025 layers", _text(num_hidden_layers=1025), CONFIG,
            "num_hidden_layers", "1025"),
    refused("layer map", "a million numbers", _map([4, 7, 8], [1, 2, 3, 5] + [6] * 1_000_000),
            CONFIG, "kda_layers", "1000004 numbers"),
    refused("other model", "an image side of text", _vision("many"), "vision_config",
            "an object"),
    refused("other model", "an image side of 10^9 blocks", _vision({"vt_num_hidden_layers": 10**9}),
            "vt_num_hidden_layers", "1000000000"),
    refused("other model", "an image side without a width", _vision({}),
            "vision_config", "no such field"),
    refused("other model", "another width", _text(hidden_size=192), shard_name(1), "layers.0.",
            "160", "192"),
    refused("other model", "another vocabulary", _text(vocab_size=1024),
            "embed_tokens.weight", "512", "1024"),
    refused("other model", "a field absent", _without("routed_scaling_factor"), CONFIG,
            "routed_scaling_factor"),
    refused("layers", "one more configured", _layer_more, "layers.8.", "absent"),
    refused("layers", "one fewer configured", _layer_less, shard_name(8), "layers.7.",
            "nothing reads"),
    refused("layers", "the last one's tensors gone", _remove_layer, "layers.7.", "absent"),
    refused("layer map", "zero-based", _map([3, 6, 7], [0, 1, 2, 4, 5]), CONFIG,
            "full_attn_layers", "1-based"),
    refused("layer map", "zero-based MLA layers alone", _map([3, 6, 7], [1, 2, 3, 5, 6]), CONFIG,
            "layer 3 twice"),
    refused("layer map", "a layer in both", _map([4, 7, 8], [1, 2, 3, 4, 5, 6]), CONFIG,
            "layer 4 twice"),
    refused("layer map", "a layer in neither", _map([4, 7, 8], [1, 2, 3, 5]), CONFIG,
            "layer 6 in neither"),
    refused("layer map", "beyond the last", _map([4, 7, 9], [1, 2, 3, 5, 6]), CONFIG, "layer 9"),
    refused("layer map", "text", _map(["4"], [1, 2, 3, 5, 6]), CONFIG, "full_attn_layers"),
    refused("layer map", "two layers exchanged", _map([3, 7, 8], [1, 2, 4, 5, 6]), "layers.2."),
    refused("prefix", "dropped on one tensor", lambda f: _drop_prefix(f, only="layers.4.mlp_res_n"),
            "model.layers.4.mlp_res_norm.weight", PREFIX),
    refused("prefix", "dropped on a layer", lambda f: _drop_prefix(f, only="layers.4."),
            "model.layers.4.", PREFIX),
    refused("prefix", "dropped on all, nested config", _drop_prefix, "nests text_config", PREFIX),
    refused("prefix", "kept, flat config", _flat_config, PREFIX, "flat"),
    legal("prefix", "dropped on all, flat config", _flat_export),
    refused("missing tensor", "expert", lambda f: remove(f, *(EXPERT + part for part in PARTS)),
            EXPERT + "w1.weight_packed", "absent", "U8 [256, 32]"),
    refused("missing tensor", "last expert of the last layer",
            lambda f: remove(f, *(f"{LAYERS}7.block_sparse_moe.experts.11.{p}" for p in PARTS)),
            "layers.7.block_sparse_moe.experts.11.w1", "absent"),
    refused("missing tensor", "scale", lambda f: remove(f, SCALE), SCALE, "absent", "U8 [64, 8]"),
    refused("missing tensor", "last scale of the last layer",
            lambda f: remove(f, f"{LAYERS}7.block_sparse_moe.experts.11.w3.weight_scale"),
            "layers.7.block_sparse_moe.experts.11.w3.weight_scale", "absent"),
    refused("missing tensor", "packed", lambda f: remove(f, EXPERT + "w3.weight_packed"),
            EXPERT + "w3.weight_packed", "absent"),
    refused("missing tensor", "norm", lambda f: remove(f, LAYERS + "3.input_layernorm.weight"),
            LAYERS + "3.input_layernorm.weight", "absent", "BF16 [160]"),
    refused("missing tensor", "last norm", lambda f: remove(f, PREFIX + "model.norm.weight"),
            PREFIX + "model.norm.weight", "absent", "BF16 [160]"),
    refused("missing tensor", "router bias",
            lambda f: remove(f, MOE + "gate.e_score_correction_bias"), "e_score_correction_bias",
            "absent", "F32 [12]"),
    refused("missing tensor", "lm_head", lambda f: remove(f, PREFIX + "lm_head.weight"),
            "lm_head.weight", "absent"),
    refused("missing tensor", "one that no formula reads",
            lambda f: remove(f, LAYERS + "0.self_attention_res_norm.weight"),
            "layers.0.self_attention_res_norm.weight", "absent"),
    refused("scale", "one column short", lambda f: _narrow(f, SCALE, 1), FILE_3, SCALE, "[64, 7]",
            "[64, 8]"),
    refused("scale", "one column short, the first matrix", lambda f: _narrow(f, SCALE_1, 1),
            FILE_3, SCALE_1, "[256, 1]", "[256, 2]"),
    refused("scale", "one row short", lambda f: _narrow(f, SCALE, 0), FILE_3, SCALE, "[63, 8]",
            "[64, 8]"),
    refused("scale", "as F32", lambda f: _widen(f, SCALE, "F32", "<f"), FILE_3, SCALE, "F32", "U8"),
    refused("scale", "as F32, the first matrix", lambda f: _widen(f, SCALE_1, "F32", "<f"),
            FILE_3, SCALE_1, "F32", "U8"),
    refused("scale", "as BF16", lambda f: _widen(f, SCALE, "BF16", "<H"), FILE_3, SCALE, "BF16",
            "U8"),
    refused("scale", "as I8", lambda f: redtype(f, SCALE, "I8"), FILE_3, SCALE, "I8", "U8"),
    legal("scale", "as F8_E8M0", lambda f: redtype(f, SCALE, "F8_E8M0")),
    legal("scale", "as F8_E8M0, a whole layer", lambda f: _all_scales(f, "F8_E8M0")),
    refused("dtype of equal size", "F16 for BF16", lambda f: redtype(f, Q, "F16"), FILE_2, Q,
            "F16", "BF16"),
    refused("dtype of equal size", "U16 for BF16", lambda f: redtype(f, Q, "U16"), FILE_2, Q,
            "U16", "BF16"),
    refused("dtype of equal size", "I32 for F32", lambda f: redtype(f, A_LOG, "I32"), FILE_2, A_LOG,
            "I32", "F32"),
    refused("dtype of equal size", "I8 for U8",
            lambda f: redtype(f, EXPERT + "w1.weight_packed", "I8"), FILE_3, "I8", "U8"),
    refused("dtype of equal size", "F8_E4M3 for U8",
            lambda f: redtype(f, EXPERT + "w1.weight_packed", "F8_E4M3"), FILE_3, "F8_E4M3", "U8"),
    refused("transposed", "q_proj", lambda f: transpose(f, Q), FILE_2, Q, "[160, 128]",
            "[128, 160]"),
    refused("transposed", "o_proj of MLA", lambda f: transpose(f, MLA + "o_proj.weight"),
            shard_name(4), "o_proj", "[128, 160]", "[160, 128]"),
    refused("transposed", "packed expert", lambda f: transpose(f, EXPERT + "w1.weight_packed"),
            FILE_3, EXPERT, "[32, 256]", "[256, 32]"),
    refused("transposed", "embedding",
            lambda f: transpose(f, PREFIX + "model.embed_tokens.weight"), shard_name(9),
            "[160, 512]", "[512, 160]"),
    legal("A_log", "short: the live heads alone", _a_log(8)),
    legal("A_log", "padded further", _a_log(32)),
    legal("A_log", "padded by one", _a_log(9)),
    refused("A_log", "shorter than the heads", _a_log(4), FILE_2, A_LOG, "[4]", "[8]"),
    refused("A_log", "a value in the padding",
            lambda f: poke(f, A_LOG, 13, struct.pack("<f", 0.5)), FILE_2, A_LOG, "element 13",
            "0.5", "zero padding behind 8 heads"),
    refused("A_log", "NaN in the padding",
            lambda f: poke(f, A_LOG, 8, struct.pack("<f", float("nan"))), FILE_2, A_LOG,
            "element 8", "nan", "zero padding behind 8 heads"),
    refused("A_log", "four axes", lambda f: reshape(f, A_LOG, (1, 1, 8, 1)), FILE_2, A_LOG,
            "[1, 1, 8, 1]"),
    legal("convolution", "one stored 2-D",
          lambda f: reshape(f, KDA + "q_conv1d.weight", (128, 4))),
    legal("convolution", "all stored 2-D", _all_convs),
    refused("convolution", "2-D, transposed",
            lambda f: reshape(f, KDA + "q_conv1d.weight", (4, 128)), FILE_2, "q_conv1d",
            "[4, 128]", "[128, 1, 4]"),
    refused("convolution", "axes exchanged",
            lambda f: reshape(f, KDA + "q_conv1d.weight", (128, 4, 1)), FILE_2, "q_conv1d",
            "[128, 4, 1]", "[128, 1, 4]"),
    refused("expert count", "config says more", _text(num_experts=14), "layers.1.", "experts.12."),
    refused("expert count", "config says fewer", _text(num_experts=10), "layers.1."),
    refused("expert count", "one layer has one more", _copy_expert, FILE_3, "experts.12.",
            "nothing reads"),
    refused("expert count", "more top-k than experts", _text(num_experts_per_token=13), CONFIG,
            "num_experts_per_token", "13", "12"),
    refused("expert count", "more top-k than experts, by far", _text(num_experts_per_token=896),
            CONFIG, "num_experts_per_token", "896", "12"),
    refused("unread tensor", "a bias", lambda f: add(f, KDA + "q_proj.bias", ONE), FILE_2,
            "q_proj.bias", "nothing reads"),
    refused("unread tensor", "rotary frequencies",
            lambda f: add(f, KDA + "rotary_emb.inv_freq", ONE), FILE_2, "inv_freq",
            "nothing reads"),
    refused("unread tensor", "a layer's number with a zero in front",
            lambda f: add(f, PREFIX + "model.layers.01.input_layernorm.weight", ONE), FILE_2,
            "layers.01.", "nothing reads"),
    refused("unread tensor", "an MLA tensor in a KDA layer",
            lambda f: rename_one(f, KDA + "o_norm.weight", KDA + "kv_a_layernorm.weight"),
            "layers.1.self_attn."),
    legal("quantisation ignore list", "empty", _quant(lambda q: q.update(ignore=[]))),
    legal("quantisation ignore list", "absent", _quant(lambda q: q.pop("ignore"))),
    legal("quantisation ignore list", "names what is packed",
          _quant(lambda q: q.update(ignore=["re:.*experts.*"]))),
    refused("quantisation", "groups of 16",
            _quant(lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=16)),
            CONFIG, "group_size", "16", "32"),
    refused("quantisation", "another format", _quant(lambda q: q.update(format="nvfp4-pack")),
            CONFIG, "nvfp4-pack", "mxfp4"),
    refused("quantisation", "eight bits",
            _quant(lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=8)),
            CONFIG, "num_bits", "8", "4"),
)  # fmt: skip
