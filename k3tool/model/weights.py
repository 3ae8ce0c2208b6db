"""THE weight table: tensor-name patterns, dtypes, shapes, the split by TP rank, the claiming op.

inspect, shard, the operator graph and coverage read this table; nothing else knows a tensor name.
It does not read files. Shapes are stored shapes: an MXFP4 matrix [R, K] is `weight_packed`
[R, K/2] (low nibble = even column) and `weight_scale` [R, K/32].

A *leaf* is what the operator graph names: a tensor name without the layout's prefixes, except that
all experts of one matrix in one layer are one leaf, `layers.3.block_sparse_moe.experts.w1`.
Source: released index and modeling_kimi_linear.py; split: architecture section 7.
"""

import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

from k3tool.model.config import K3Config
from k3tool.model.config_fields import MXFP4_GROUP

Shape = tuple[int, ...]


class Split(StrEnum):
    """Say how a stored tensor is divided over the ranks of a tensor-parallel group."""

    REPLICATE = "replicate"  # every rank has all of it
    ROWS = "rows"  # axis 0, by heads or by rows
    LIVE_ROWS = "live_rows"  # axis 0 after dropping the zero padding behind the live heads
    COLS = "cols"  # axis 1: a row-parallel matrix, its output is all-reduced
    DROP = "drop"  # known, and not part of the text model


class Where(StrEnum):
    """Say for which layers a row of the table stands."""

    GLOBAL = "global"
    LAYER = "layer"
    KDA = "kda"
    MLA = "mla"
    DENSE = "dense"
    MOE = "moe"
    EXPERT = "expert"
    VISION = "vision"


class TensorRow(NamedTuple):
    """One row of the table. `{L}` and `{E}` in `pattern` are layer and expert.

    `claimed_by` is the first op of the unfused graph that reads the tensor; layers before
    `read_from` store it and read nothing of it.
    """

    pattern: str
    dtype: str
    shape: Callable[[K3Config], Shape]
    split: Split
    claimed_by: str
    where: Where
    module: str
    read_from: int = 0


class TensorSpec(NamedTuple):
    """One expected tensor.

    `shape` is the released shape, `live` the extent of axis 0 that holds values (they differ only
    for the padded A_log). `layer` and `expert` are None where they mean nothing.
    """

    name: str
    dtype: str
    shape: Shape
    split: Split
    live: int
    row: TensorRow
    layer: int | None
    expert: int | None
    leaf: str


_R, _0, _1 = Split.REPLICATE, Split.ROWS, Split.COLS
_MODEL, _LAYER = "model.", "model.layers.{L}."
_ATTN, _MOE = _LAYER + "self_attn.", _LAYER + "block_sparse_moe."
_EXPERT = _MOE + "experts.{E}."


def _hidden(c: K3Config) -> Shape:
    return (c.hidden_size,)


def _to_one(c: K3Config) -> Shape:
    return (1, c.hidden_size)


def _vocab(c: K3Config) -> Shape:
    return (c.vocab_size, c.hidden_size)


def _kda_rows(c: K3Config) -> Shape:
    return (c.linear_attn_config.width, c.hidden_size)


def _kda_conv(c: K3Config) -> Shape:
    return (c.linear_attn_config.width, 1, c.linear_attn_config.short_conv_kernel_size)


def _kda_head(c: K3Config) -> Shape:
    return (c.linear_attn_config.head_dim,)


def _a_log(c: K3Config) -> Shape:
    # One value a HEAD, padded with zeros to head_dim in the release: not one value a channel.
    return (max(c.linear_attn_config.num_heads, c.linear_attn_config.head_dim),)


def _gate_up(c: K3Config) -> Shape:
    return (c.intermediate_size, c.hidden_size)


def _shared_gate_up(c: K3Config) -> Shape:
    return (c.shared_width, c.hidden_size)


def _packed(rows: str, cols: str) -> Callable[[K3Config], Shape]:
    return lambda c: (getattr(c, rows), getattr(c, cols) // 2)


def _scale(rows: str, cols: str) -> Callable[[K3Config], Shape]:
    return lambda c: (getattr(c, rows), getattr(c, cols) // MXFP4_GROUP)


_INTER, _LATENT = "moe_intermediate_size", "routed_expert_hidden_size"
_G, _L, _K, _M = Where.GLOBAL, Where.LAYER, Where.KDA, Where.MLA
_DN, _MO, _EX = Where.DENSE, Where.MOE, Where.EXPERT


# fmt: off
TABLE: tuple[TensorRow, ...] = (
    TensorRow(_MODEL + "embed_tokens.weight",              "BF16", _vocab,   _R, "EMBED_BF16",      _G, "embed"),
    TensorRow(_MODEL + "output_attn_res_norm.weight",      "BF16", _hidden,  _R, "ATTN_RES",   _G, "head"),
    TensorRow(_MODEL + "output_attn_res_proj.weight",      "BF16", _to_one,  _R, "ATTN_RES",   _G, "head"),
    TensorRow(_MODEL + "norm.weight",                      "BF16", _hidden,  _R, "RMSNORM",    _G, "head"),
    TensorRow("lm_head.weight",                            "BF16", _vocab,   _0, "GEMV_BF16",     _G, "head"),

    # Read from layer 1 on: before layer 0 there is no finished block, and its mix is a copy.
    TensorRow(_LAYER + "self_attention_res_norm.weight",   "BF16", _hidden,  _R, "ATTN_RES",   _L, "norms", 1),
    TensorRow(_LAYER + "self_attention_res_proj.weight",   "BF16", _to_one,  _R, "ATTN_RES",   _L, "norms", 1),
    TensorRow(_LAYER + "input_layernorm.weight",           "BF16", _hidden,  _R, "RMSNORM",    _L, "norms"),
    TensorRow(_LAYER + "mlp_res_norm.weight",              "BF16", _hidden,  _R, "ATTN_RES",   _L, "norms"),
    TensorRow(_LAYER + "mlp_res_proj.weight",              "BF16", _to_one,  _R, "ATTN_RES",   _L, "norms"),
    TensorRow(_LAYER + "post_attention_layernorm.weight",  "BF16", _hidden,  _R, "RMSNORM",    _L, "norms"),

    TensorRow(_ATTN + "q_proj.weight",   "BF16", _kda_rows,  _0, "GEMV_BF16",     _K, "kda"),
    TensorRow(_ATTN + "k_proj.weight",   "BF16", _kda_rows,  _0, "GEMV_BF16",     _K, "kda"),
    TensorRow(_ATTN + "v_proj.weight",   "BF16", _kda_rows,  _0, "GEMV_BF16",     _K, "kda"),
    TensorRow(_ATTN + "q_conv1d.weight", "F32",  _kda_conv,  _0, "SHORT_CONV", _K, "kda"),
    TensorRow(_ATTN + "k_conv1d.weight", "F32",  _kda_conv,  _0, "SHORT_CONV", _K, "kda"),
    TensorRow(_ATTN + "v_conv1d.weight", "F32",  _kda_conv,  _0, "SHORT_CONV", _K, "kda"),
    TensorRow(_ATTN + "f_a_proj.weight", "BF16",
         lambda c: (c.linear_attn_config.head_dim, c.hidden_size),             _R, "GEMV_BF16", _K, "kda"),
    TensorRow(_ATTN + "f_b_proj.weight", "BF16",
         lambda c: (c.linear_attn_config.width, c.linear_attn_config.head_dim), _0, "GEMV_BF16", _K, "kda"),
    TensorRow(_ATTN + "b_proj.weight",   "BF16",
         lambda c: (c.linear_attn_config.num_heads, c.hidden_size),            _0, "GEMV_BF16", _K, "kda"),
    TensorRow(_ATTN + "A_log",           "F32",  _a_log, Split.LIVE_ROWS, "KDA_DECAY", _K, "kda"),
    TensorRow(_ATTN + "dt_bias",         "F32",
         lambda c: (c.linear_attn_config.width,),                              _0, "KDA_DECAY", _K, "kda"),
    TensorRow(_ATTN + "g_proj.weight",   "BF16", _kda_rows,  _0, "GEMV_BF16",     _K, "kda"),
    TensorRow(_ATTN + "o_norm.weight",   "F32",  _kda_head,  _R, "HEAD_RMSNORM",    _K, "kda"),
    TensorRow(_ATTN + "o_proj.weight",   "BF16",
         lambda c: (c.hidden_size, c.linear_attn_config.width),                _1, "GEMV_BF16_BLOCKS", _K, "kda"),

    TensorRow(_ATTN + "q_a_proj.weight",           "BF16",
         lambda c: (c.q_lora_rank, c.hidden_size),                             _R, "GEMV_BF16", _M, "mla"),
    TensorRow(_ATTN + "q_a_layernorm.weight",      "BF16", lambda c: (c.q_lora_rank,),  _R, "RMSNORM", _M, "mla"),
    TensorRow(_ATTN + "q_b_proj.weight",           "BF16",
         lambda c: (c.num_attention_heads * c.qk_head_dim, c.q_lora_rank),     _0, "GEMV_BF16", _M, "mla"),
    TensorRow(_ATTN + "kv_a_proj_with_mqa.weight", "BF16",
         lambda c: (c.cache_width, c.hidden_size),                             _R, "GEMV_BF16", _M, "mla"),
    TensorRow(_ATTN + "kv_a_layernorm.weight",     "BF16", lambda c: (c.kv_lora_rank,), _R, "MLA_CACHE", _M, "mla"),
    TensorRow(_ATTN + "kv_b_proj.weight",          "BF16",
         lambda c: (c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
         _0, "MLA_QLAT", _M, "mla"),
    TensorRow(_ATTN + "g_proj.weight",             "BF16",
         lambda c: (c.mla_out_width, c.hidden_size),                           _0, "GEMV_BF16", _M, "mla"),
    TensorRow(_ATTN + "o_proj.weight",             "BF16",
         lambda c: (c.hidden_size, c.mla_out_width),                           _1, "GEMV_BF16_BLOCKS", _M, "mla"),

    TensorRow(_LAYER + "mlp.gate_proj.weight", "BF16", _gate_up,                    _0, "GEMV_BF16", _DN, "dense"),
    TensorRow(_LAYER + "mlp.up_proj.weight",   "BF16", _gate_up,                    _0, "GEMV_BF16", _DN, "dense"),
    TensorRow(_LAYER + "mlp.down_proj.weight", "BF16",
         lambda c: (c.hidden_size, c.intermediate_size),                       _1, "GEMV_BF16_BLOCKS", _DN, "dense"),

    TensorRow(_MOE + "gate.weight",                        "BF16",
         lambda c: (c.num_experts, c.hidden_size),                             _R, "GEMV_BF16", _MO, "router"),
    TensorRow(_MOE + "gate.e_score_correction_bias",       "F32", lambda c: (c.num_experts,),
         _R, "ROUTER_TOPK", _MO, "router"),
    TensorRow(_MOE + "routed_expert_down_proj.weight",     "BF16",
         lambda c: (c.routed_expert_hidden_size, c.hidden_size),               _R, "GEMV_BF16", _MO, "latent"),
    TensorRow(_MOE + "routed_expert_norm.weight",          "BF16",
         lambda c: (c.routed_expert_hidden_size,),                             _R, "RMSNORM", _MO, "latent"),
    TensorRow(_MOE + "routed_expert_up_proj.weight",       "BF16",
         lambda c: (c.hidden_size, c.routed_expert_hidden_size),               _0, "GEMV_BF16", _MO, "latent"),
    TensorRow(_MOE + "shared_experts.gate_proj.weight",    "BF16", _shared_gate_up, _0, "GEMV_BF16", _MO, "shared"),
    TensorRow(_MOE + "shared_experts.up_proj.weight",      "BF16", _shared_gate_up, _0, "GEMV_BF16", _MO, "shared"),
    TensorRow(_MOE + "shared_experts.down_proj.weight",    "BF16",
         lambda c: (c.hidden_size, c.shared_width),                            _1, "GEMV_BF16_BLOCKS", _MO, "shared"),

    # The order of these six is the order of an expert's bytes in our shards: one read fetches it.
    TensorRow(_EXPERT + "w1.weight_packed", "U8", _packed(_INTER, _LATENT), _0, "MOE_UP_MXFP4", _EX, "experts"),
    TensorRow(_EXPERT + "w1.weight_scale",  "U8", _scale(_INTER, _LATENT),  _0, "MOE_UP_MXFP4", _EX, "experts"),
    TensorRow(_EXPERT + "w2.weight_packed", "U8", _packed(_LATENT, _INTER), _1, "MOE_DOWN_MXFP4",    _EX, "experts"),
    TensorRow(_EXPERT + "w2.weight_scale",  "U8", _scale(_LATENT, _INTER),  _1, "MOE_DOWN_MXFP4",    _EX, "experts"),
    TensorRow(_EXPERT + "w3.weight_packed", "U8", _packed(_INTER, _LATENT), _0, "MOE_UP_MXFP4", _EX, "experts"),
    TensorRow(_EXPERT + "w3.weight_scale",  "U8", _scale(_INTER, _LATENT),  _0, "MOE_UP_MXFP4", _EX, "experts"),
)
# fmt: on


# -- expected tensors --------------------------------------------------------------------------


def _stands(row: TensorRow, config: K3Config, layer: int) -> bool:
    """Return whether a row of the table exists in a 0-based layer."""
    match row.where:
        case Where.LAYER:
            return True
        case Where.KDA:
            return not config.is_mla(layer)
        case Where.MLA:
            return config.is_mla(layer)
        case Where.DENSE:
            return not config.is_moe(layer)
        case Where.MOE | Where.EXPERT:
            return config.is_moe(layer)
        case _:
            return False


def leaf_of(pattern: str, layer: int | None) -> str:
    """Return the graph's name for the tensors of one row (and layer)."""
    leaf = pattern.removeprefix(_MODEL)
    if "{E}" in leaf:  # the experts of one matrix, packed and scale together
        leaf = leaf.replace(".{E}", "").rsplit(".", 1)[0]
    return leaf if layer is None else leaf.replace("{L}", str(layer))


def _spec(config: K3Config, row: TensorRow, layer: int | None) -> TensorSpec:
    """Return a row at one layer; for expert rows the name still holds `{E}`."""
    name = config.prefix + row.pattern
    if layer is not None:
        name = name.replace("{L}", str(layer))
    shape = row.shape(config)
    live = config.linear_attn_config.num_heads if row.split is Split.LIVE_ROWS else shape[0]
    leaf = leaf_of(row.pattern, layer)
    return TensorSpec(name, row.dtype, shape, row.split, live, row, layer, None, leaf)


def _expert_specs(config: K3Config, base: TensorSpec, experts: range) -> Iterator[TensorSpec]:
    head, tail = base.name.split("{E}")
    _, dtype, shape, split, live, row, layer, _, leaf = base
    for expert in experts:
        name = f"{head}{expert}{tail}"
        yield TensorSpec(name, dtype, shape, split, live, row, layer, expert, leaf)


def layer_tensors(config: K3Config, layer: int | None) -> Iterator[TensorSpec]:
    """Yield the tensors of one layer in table order, or those outside the layers for None."""
    if layer is None:
        yield from (_spec(config, row, None) for row in TABLE if row.where is Where.GLOBAL)
        return
    for row in TABLE:
        if _stands(row, config, layer):
            spec = _spec(config, row, layer)
            if row.where is Where.EXPERT:
                yield from _expert_specs(config, spec, range(config.num_experts))
            else:
                yield spec


def expected_tensors(config: K3Config) -> Iterator[TensorSpec]:
    """Yield every tensor the text model reads: global ones, then layer by layer in table order."""
    for layer in (None, *config.layers):
        yield from layer_tensors(config, layer)


def layer_rows(config: K3Config, layer: int | None) -> Iterator[tuple[TensorSpec, int]]:
    """Yield one spec for each row of the table that stands in a layer, and how many there are.

    All experts of a row share the spec of expert 0.
    """
    for row in TABLE:
        if layer is None and row.where is Where.GLOBAL:
            yield _spec(config, row, None), 1
        elif layer is not None and _stands(row, config, layer):
            spec = _spec(config, row, layer)
            if row.where is Where.EXPERT:
                yield next(_expert_specs(config, spec, range(1))), config.num_experts
            else:
                yield spec, 1


def padded_tensors(config: K3Config) -> Iterator[TensorSpec]:
    """Yield the tensors that are stored with zeros behind what is live, layer by layer."""
    for layer in config.layers:
        for row in TABLE:
            if row.split is Split.LIVE_ROWS and _stands(row, config, layer):
                yield _spec(config, row, layer)


def expected_leaves(config: K3Config) -> set[str]:
    """Return every leaf name the operator graph has to claim."""
    leaves = {leaf_of(row.pattern, None) for row in TABLE if row.where is Where.GLOBAL}
    for layer in config.layers:
        leaves |= {
            leaf_of(row.pattern, layer)
            for row in TABLE
            if _stands(row, config, layer) and layer >= row.read_from
        }
    return leaves


def idle_leaves(config: K3Config) -> set[str]:
    """Return leaves that are stored and never read: layer 0 mixes before any block is finished."""
    return {
        leaf_of(row.pattern, layer)
        for row in TABLE
        for layer in range(min(row.read_from, config.num_hidden_layers))
        if _stands(row, config, layer)
    }


_NUMBER = re.compile(r"((?<=layers\.)\d+|(?<=experts\.)\d+)")
_PLAIN_NUMBER = re.compile("0|[1-9][0-9]{0,8}")  # no layer and no expert has one of more digits
_BY_PATTERN: dict[str, list[TensorRow]] = {}
for _entry in TABLE:
    _key = _entry.pattern.replace("{L}", "#").replace("{E}", "#")
    _BY_PATTERN.setdefault(_key, []).append(_entry)


class SpecFinder:
    """Finds the specs of tensor names; what a row is in a layer is worked out once."""

    def __init__(self, config: K3Config) -> None:
        """Know nothing yet."""
        self._config = config
        self._known: dict[tuple[int | None, str], TensorSpec | None] = {}

    def find(self, name: str) -> TensorSpec | None:
        """Return the spec of one tensor name, or None if the text model has no such tensor."""
        config = self._config
        if not name.startswith(config.prefix):
            return None
        parts = _NUMBER.split(name[len(config.prefix) :])  # text, number, text ...
        numbers = parts[1::2]
        for number in numbers:
            if not _PLAIN_NUMBER.fullmatch(number):
                return None  # "layers.01" is another name
        layer = int(numbers[0]) if numbers else None
        key = layer, "#".join(parts[::2])
        if key not in self._known:
            self._known[key] = self._of_layer(*key)
        spec = self._known[key]
        if spec is None or len(numbers) < 2:
            return spec
        expert = int(numbers[1])
        if expert >= config.num_experts:
            return None
        return next(_expert_specs(config, spec, range(expert, expert + 1)))

    def _of_layer(self, layer: int | None, pattern: str) -> TensorSpec | None:
        for row in _BY_PATTERN.get(pattern, ()):
            if layer is None:
                return _spec(self._config, row, None)
            if layer in self._config.layers and _stands(row, self._config, layer):
                return _spec(self._config, row, layer)
        return None


def find_spec(config: K3Config, name: str) -> TensorSpec | None:
    """Return the spec of one tensor name, or None if the text model has no such tensor."""
    return SpecFinder(config).find(name)
