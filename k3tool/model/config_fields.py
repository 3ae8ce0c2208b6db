"""Field-by-field reading and refusing for K3Config: types, supported values, relations, axes.

It builds no config and fills in nothing; every refusal names file and field.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from k3tool.errors import ArtifactError, quoted

if TYPE_CHECKING:
    from k3tool.model.config import K3Config

NEXT_STEP = "take the config.json that came with the weights"
MXFP4_GROUP = 32
ROW_PARALLEL_MULTIPLE = 16
BLOCKED_SUM_ABOVE = 512  # rule 6: longer norm-square axes are summed in eight blocks

# The one value of each that the arithmetic contract covers (numerics rule 9 and the spec, A.1).
TEXT_ONLY: tuple[tuple[str, object], ...] = (
    ("model_type", "kimi_linear"),
    ("hidden_act", "situ"),
    ("mla_use_nope", True),
    ("mla_use_output_gate", True),
    ("latent_moe_use_norm", True),
    ("moe_renormalize", True),
    ("moe_router_activation_func", "sigmoid"),
    ("num_expert_group", 1),
    ("topk_group", 1),
    ("topk_method", "noaux_tc"),
    ("use_grouped_topk", True),
    ("moe_layer_freq", 1),
    ("num_nextn_predict_layers", 0),
    ("tie_word_embeddings", False),
)
LINEAR_ONLY: tuple[tuple[str, object], ...] = (
    ("short_conv_kernel_size", 4),
    ("use_full_rank_gate", True),
)
# Beyond these no model of this shape is meant, and a table of its layers would not fit in memory.
_MOST_COUNT = 2**31 - 1
MOST_LAYERS, MOST_IDS = 1024, 65_536
MOST_ID = 2**32 - 1  # a token id is a word of the interpreters
_MOST_OF = {
    "num_hidden_layers": MOST_LAYERS, "num_experts": 65_536, "vt_num_hidden_layers": MOST_LAYERS,
}  # fmt: skip
SMALLEST_F32, _LARGEST_F32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers (rule 1)

_QUANT_ONLY: tuple[tuple[str, object], ...] = (
    ("num_bits", 4), ("type", "float"), ("strategy", "group"), ("group_size", MXFP4_GROUP),
    ("symmetric", True),
)  # fmt: skip


class Section:
    """Read fields of one JSON object, or refuse naming file and field."""

    def __init__(self, values: Mapping[str, Any], where: str, path: str = "") -> None:
        """Take the object, the file it came from and the path of field names to it."""
        self.values, self.where, self.path = values, where, path

    def refuse(
        self, name: str, got: object, need: object, hint: str | None = None
    ) -> ArtifactError:
        """Return the error to raise about one field."""
        place = f"{self.where}: {self.path}{name}"
        return ArtifactError(place, got=got, need=need, hint=hint or NEXT_STEP)

    def get(self, name: str, need: str) -> Any:
        """Return a field of any type."""
        if name not in self.values:
            raise self.refuse(name, "no such field", need)
        return self.values[name]

    def count(self, name: str, least: int = 1) -> int:
        """Return an integer field; true and 1.0 are not integers."""
        most = _MOST_OF.get(name, _MOST_COUNT)
        need = f"an integer from {least} to {most}"
        value = self.get(name, need)
        if type(value) is not int or not least <= value <= most:
            raise self.refuse(name, quoted(value), need)
        return value

    def number(self, name: str, sign: int = 1) -> float:
        """Return a number of the given sign that binary32 holds as a normal number (rule 1)."""
        need = f"a {'positive' if sign > 0 else 'negative'} number that binary32 holds"
        value = self.get(name, need)
        if type(value) not in (int, float) or not SMALLEST_F32 <= value * sign <= _LARGEST_F32:
            raise self.refuse(name, quoted(value), need)
        return float(value)

    def epsilon(self, name: str) -> float:
        """Return a number between 0 and 1."""
        value = self.number(name)
        if value >= 1:
            raise self.refuse(name, quoted(value), "a number between 0 and 1")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Return one token id or several as a tuple."""
        need = "a token id or a list of ids"
        value = self.get(name, need)
        values = value if isinstance(value, list) else [value]
        if not values or any(type(item) is not int or item < 0 for item in values):
            raise self.refuse(name, quoted(value), need)
        if len(values) > MOST_IDS:
            raise self.refuse(name, f"{len(values)} ids", f"at most {MOST_IDS}")
        return tuple(values)

    def section(self, name: str) -> "Section":
        """Return a field that is an object."""
        value = self.get(name, "an object")
        if not isinstance(value, dict):
            raise self.refuse(name, quoted(value), "an object")
        return Section(value, self.where, f"{self.path}{name}.")


def text_section(raw: Mapping[str, Any], where: str) -> tuple[Section, str]:
    """Return the text model's fields and the tensor-name prefix that goes with the layout.

    Raises: ArtifactError for another model_type, or fields of both layouts.
    Source: the released `config.json` (kimi_k3 around kimi_linear).
    """
    top = Section(raw, where)
    kind = top.get("model_type", '"kimi_k3" or "kimi_linear"')
    if kind == "kimi_k3":
        text = top.section("text_config")
        if "hidden_size" in raw:
            raise top.refuse(
                "hidden_size", "a text field beside text_config", "one of the two layouts"
            )
        _check_token_ids(top, text)
        if "tie_word_embeddings" in raw:
            refuse_unsupported(top, (("tie_word_embeddings", False),))
        return text, "language_model."
    if kind == "kimi_linear":
        if "text_config" in raw:
            raise top.refuse(
                "text_config", "present in a flat kimi_linear config", "one of the two layouts"
            )
        return top, ""
    raise top.refuse("model_type", quoted(kind), '"kimi_k3" or "kimi_linear"')


def _check_token_ids(top: Section, text: Section) -> None:
    """Refuse two answers to one question: generation reads eos from either level."""
    name = "eos_token_id"
    if name in top.values and name in text.values and top.values[name] != text.values[name]:
        got, need = quoted(top.values[name]), f"text_config's {quoted(text.values[name])}"
        raise top.refuse(name, got, need)


def refuse_unsupported(section: Section, only: tuple[tuple[str, object], ...]) -> None:
    """Refuse fields whose value is not the one this project computes."""
    for name, need in only:
        value = section.get(name, quoted(need))
        if type(value) is not type(need) or value != need:
            raise section.refuse(name, quoted(value), quoted(need))


def check_quantization(quant: Section) -> None:
    """Refuse anything but MXFP4 weights in groups of 32."""
    form = ("format", "mxfp4-pack-quantized")
    refuse_unsupported(quant, (("quant_method", "compressed-tensors"), form))
    groups = quant.section("config_groups")
    if len(groups.values) != 1:
        raise quant.refuse("config_groups", f"{len(groups.values)} groups", "one group")
    group = groups.section(next(iter(groups.values)))
    refuse_unsupported(group, (form, ("targets", ["Linear"])))
    refuse_unsupported(group.section("weights"), _QUANT_ONLY)


def layer_list(section: Section, name: str) -> tuple[int, ...]:
    """Return a list of 1-based layer numbers. Raises: ArtifactError for anything else."""
    need = "a list of 1-based layer numbers"
    value = section.get(name, need)
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise section.refuse(name, quoted(value), need)
    if len(value) > MOST_LAYERS:
        raise section.refuse(name, f"{len(value)} numbers", f"at most {MOST_LAYERS}")
    return tuple(value)


def first_partition_fault(both: list[int], n_layers: int) -> str:
    """Return in words why two layer lists do not partition 1..n_layers."""
    seen: set[int] = set()
    for layer in both:
        if not 1 <= layer <= n_layers:
            return f"layer {layer} of {n_layers}"
        if layer in seen:
            return f"layer {layer} twice"
        seen.add(layer)
    absent = next(layer for layer in range(1, n_layers + 1) if layer not in seen)
    return f"layer {absent} in neither"


def check_relations(config: "K3Config", text: Section) -> None:
    """Refuse fields that contradict each other."""
    heads = text.count("num_key_value_heads")
    if heads != config.num_attention_heads:
        raise text.refuse(
            "num_key_value_heads", heads, f"num_attention_heads = {config.num_attention_heads}"
        )
    if config.num_experts_per_token > config.num_experts:
        raise text.refuse(
            "num_experts_per_token",
            config.num_experts_per_token,
            f"at most num_experts = {config.num_experts}",
        )
    if config.first_k_dense_replace > config.num_hidden_layers:
        raise text.refuse(
            "first_k_dense_replace",
            config.first_k_dense_replace,
            f"at most num_hidden_layers = {config.num_hidden_layers}",
        )
    for token in config.eos_token_ids:
        if token >= config.vocab_size:
            raise text.refuse("eos_token_id", token, f"below vocab_size = {config.vocab_size}")


def check_axes(config: "K3Config", text: Section) -> None:
    """Refuse axes the summation rules cannot cut: numerics rules 4, 5 and 6."""
    linear = config.linear_attn_config
    row_parallel = (
        ("linear_attn_config.num_heads * head_dim (o_proj input)", linear.width),
        ("num_attention_heads * v_head_dim (o_proj input)", config.mla_out_width),
        ("intermediate_size", config.intermediate_size),
        ("num_shared_experts * moe_intermediate_size", config.shared_width),
        ("moe_intermediate_size", config.moe_intermediate_size),
    )
    norm_axes = (
        ("hidden_size", config.hidden_size),
        ("routed_expert_hidden_size", config.routed_expert_hidden_size),
        ("q_lora_rank", config.q_lora_rank),
        ("kv_lora_rank", config.kv_lora_rank),
        ("linear_attn_config.head_dim", linear.head_dim),
    )
    for name, size in row_parallel:
        _check_multiple(text, name, size, ROW_PARALLEL_MULTIPLE, "summed in eight blocks")
    for name, size in norm_axes:
        if size > BLOCKED_SUM_ABOVE:
            _check_multiple(text, name, size, ROW_PARALLEL_MULTIPLE, "above 512, in eight blocks")
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        _check_multiple(text, name, getattr(config, name), MXFP4_GROUP, "whole MXFP4 groups")


def _check_multiple(text: Section, name: str, size: int, multiple: int, why: str) -> None:
    if size % multiple:
        raise text.refuse(name, size, f"a multiple of {multiple} ({why})")
