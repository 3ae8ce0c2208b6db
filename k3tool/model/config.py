"""The model's config.json as a frozen value that refuses to guess.

Every field the model needs must be present, of its type, and one this project computes; nothing is
filled in, because the released configuration class fills absent fields with another model's values
(eps 1e-6, SiLU, AttnRes off) and such a model still writes fluent text.

Fields keep the checkpoint's spelling. Layer indices in code are 0-based; the two lists of
`linear_attn_config` are 1-based on disk. Source: released config.json and modeling_kimi_linear.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from k3tool.checkpoint.json_text import json_fault, json_kind, parse_json
from k3tool.checkpoint.regular_file import read_regular
from k3tool.errors import ArtifactError, UsageError, listed
from k3tool.model.config_fields import (
    LINEAR_ONLY,
    MXFP4_GROUP,
    NEXT_STEP,
    SMALLEST_F32,
    TEXT_ONLY,
    Section,
    check_axes,
    check_quantization,
    check_relations,
    first_partition_fault,
    layer_list,
    refuse_unsupported,
    text_section,
)

TP_DEGREES = (1, 2, 4, 8)  # rule 5 sums row-parallel axes in eight blocks; a rank owns 8/t of them
TP_HINT = "k3tool inspect CHECKPOINT says what a rank holds at each degree that works"

_COUNTS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size",
    "routed_expert_hidden_size", "attn_res_block_size", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_NUMBERS = (
    "activation_situ_beta", "activation_situ_linear_beta", "rms_norm_eps", "routed_scaling_factor",
)  # fmt: skip

# Epsilon per site. The released modelling file builds the two MLA norms without an eps argument, so
# they take its class default 1e-6 and not rms_norm_eps; the l2 norm's 1e-6 is the kernel's own.
_RELEASED_EPS = {"q_a_layernorm": 1e-6, "kv_a_layernorm": 1e-6, "l2norm": 1e-6}
_CONFIG_EPS_SITES = (
    "input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm",
    "output_attn_res_norm", "norm", "routed_expert_norm", "o_norm",
)  # fmt: skip


class TpRule(NamedTuple):
    """State one dimension that a tensor-parallel degree must divide into whole groups."""

    name: str
    size: int
    group: int

    def allows(self, tp: int) -> bool:
        """Return whether every rank of `tp` gets a whole number of groups."""
        return self.size % (tp * self.group) == 0


@dataclass(frozen=True, slots=True)
class LinearAttnConfig:
    """Hold the KDA fields; layer lists are 1-based as on disk."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    full_attn_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]
    # The first list again: every row of every layer asks, and a list is walked for each answer.
    full_attn: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive what is asked often."""
        object.__setattr__(self, "full_attn", frozenset(self.full_attn_layers))

    @property
    def width(self) -> int:
        """Return heads times head size: the rows of the KDA q, k, v and gate projections."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class K3Config:
    """Hold every field of the text model that changes a tensor, a shape or a number.

    `prefix` is what tensor names start with: `language_model.` in the release, empty in a flat
    text-only export. `eps` maps a norm site to its epsilon. `config_dict` is the file as read.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    attn_res_block_size: int
    vocab_size: int
    max_position_embeddings: int
    first_k_dense_replace: int
    activation_situ_beta: float
    activation_situ_linear_beta: float
    rms_norm_eps: float
    routed_scaling_factor: float
    eos_token_ids: tuple[int, ...]
    linear_attn_config: LinearAttnConfig
    prefix: str
    eps: Mapping[str, float] = field(hash=False)
    config_dict: Mapping[str, Any] = field(repr=False, compare=False, hash=False)

    # -- layers --------------------------------------------------------------------------------

    def is_mla(self, layer: int) -> bool:
        """Return whether a 0-based layer attends with MLA; wrong if computed as layer % 4 == 3."""
        return layer + 1 in self.linear_attn_config.full_attn

    def is_moe(self, layer: int) -> bool:
        """Return whether a 0-based layer has routed experts (else the dense MLP)."""
        return layer >= self.first_k_dense_replace

    def opens_block(self, layer: int) -> bool:
        """Return whether a 0-based layer pushes its raw input as a finished AttnRes block."""
        return layer % self.attn_res_block_size == 0

    @property
    def layers(self) -> range:
        """Return the 0-based layer indices."""
        return range(self.num_hidden_layers)

    @property
    def n_blocks(self) -> int:
        """Return how many AttnRes blocks exist after the last layer."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    # -- widths --------------------------------------------------------------------------------

    @property
    def qk_head_dim(self) -> int:
        """Return the MLA query width of a head: nope plus shared part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Return the values MLA caches per position: latent plus shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def mla_out_width(self) -> int:
        """Return heads times value size: the input axis of an MLA layer's o_proj."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def shared_width(self) -> int:
        """Return the width of the shared experts, which are stored as one MLP."""
        return self.num_shared_experts * self.moe_intermediate_size

    # -- tensor parallelism --------------------------------------------------------------------

    def tp_rules(self) -> list[TpRule]:
        """Return every dimension a TP degree has to divide, and into what groups."""
        rules = [TpRule("vocab_size", self.vocab_size, 1)]
        kinds = {self.is_mla(layer) for layer in self.layers}
        if True in kinds:
            rules.append(TpRule("num_attention_heads", self.num_attention_heads, 1))
        if False in kinds:
            heads = self.linear_attn_config.num_heads
            rules.append(TpRule("linear_attn_config.num_heads", heads, 1))
        if self.first_k_dense_replace > 0:
            rules.append(TpRule("intermediate_size", self.intermediate_size, 1))
        if self.first_k_dense_replace < self.num_hidden_layers:
            rules += [
                TpRule("hidden_size", self.hidden_size, 1),
                TpRule("moe_intermediate_size", self.moe_intermediate_size, MXFP4_GROUP),
                TpRule("num_shared_experts * moe_intermediate_size", self.shared_width, 1),
            ]
        return rules

    def legal_tp(self) -> list[int]:
        """Return the TP degrees this model can be split to."""
        rules = self.tp_rules()
        return [tp for tp in TP_DEGREES if all(rule.allows(tp) for rule in rules)]

    def check_tp(self, tp: int | None) -> None:
        """Check one degree; None is one that was left out, which the caller cannot do without.

        Raises: UsageError naming the first dimension that it does not divide, that of sums the
        blocks are too few for it, and the degrees that work.
        """
        need = f"one of {listed(self.legal_tp())}"
        if tp is None or tp < 1:
            raise UsageError("--tp", got="none" if tp is None else tp, need=need, hint=TP_HINT)
        faults = [
            f"{rule.name} = {rule.size}" + (f" in groups of {rule.group}" if rule.group > 1 else "")
            for rule in self.tp_rules()
            if not rule.allows(tp)
        ][:1]
        if tp not in TP_DEGREES:
            faults.append(f"the {TP_DEGREES[-1]} blocks of a row-parallel sum")
        if faults:
            got = f"{tp}, which does not divide {' nor '.join(faults)}"
            raise UsageError("--tp", got=got, need=need, hint=TP_HINT)

    # -- construction --------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path, eps_overrides: Mapping[str, float] | None = None) -> "K3Config":
        """Read a config.json. Raises: ArtifactError naming file and field."""
        path = Path(path)
        try:
            raw = parse_json(read_regular(path, "the checkpoint's config.json"))
        except ValueError as error:
            # Of another name it may be no config at all.
            hint = NEXT_STEP if path.name == "config.json" else "name a config.json, or its folder"
            raise ArtifactError(
                str(path), got=f"invalid JSON ({json_fault(error)})", need="JSON", hint=hint
            ) from None
        return cls.from_dict(raw, where=str(path), eps_overrides=eps_overrides)

    @classmethod
    def from_dict(
        cls,
        raw: object,
        where: str = "config.json",
        eps_overrides: Mapping[str, float] | None = None,
    ) -> "K3Config":
        """Build from the parsed file. Raises: ArtifactError naming the field; UsageError on eps."""
        if not isinstance(raw, dict):
            raise ArtifactError(where, got=json_kind(raw), need="a JSON object", hint=NEXT_STEP)
        text, prefix = text_section(raw, where)
        refuse_unsupported(text, TEXT_ONLY)
        check_quantization(text.section("quantization_config"))
        counts = {name: text.count(name) for name in _COUNTS}
        numbers = {name: text.number(name) for name in _NUMBERS}
        text.epsilon("rms_norm_eps")
        fields: dict[str, Any] = {**counts, **numbers}
        config = cls(
            **fields,
            first_k_dense_replace=text.count("first_k_dense_replace", least=0),
            eos_token_ids=text.ids("eos_token_id"),
            linear_attn_config=_linear_attn(
                text.section("linear_attn_config"), counts["num_hidden_layers"]
            ),
            prefix=prefix,
            eps=_eps_sites(numbers["rms_norm_eps"], eps_overrides or {}),
            config_dict=raw,
        )
        check_relations(config, text)
        check_axes(config, text)
        return config


def _linear_attn(section: Section, n_layers: int) -> LinearAttnConfig:
    refuse_unsupported(section, LINEAR_ONLY)
    lists = {name: layer_list(section, name) for name in ("full_attn_layers", "kda_layers")}
    both = sorted(lists["full_attn_layers"] + lists["kda_layers"])
    if both != list(range(1, n_layers + 1)):
        wrong = first_partition_fault(both, n_layers)
        raise section.refuse(
            "full_attn_layers + kda_layers",
            wrong,
            f"each of 1..{n_layers} exactly once",
            hint="the lists are 1-based",
        )
    return LinearAttnConfig(
        num_heads=section.count("num_heads"),
        head_dim=section.count("head_dim"),
        short_conv_kernel_size=section.count("short_conv_kernel_size"),
        gate_lower_bound=section.number("gate_lower_bound", sign=-1),
        full_attn_layers=lists["full_attn_layers"],
        kda_layers=lists["kda_layers"],
    )


def _eps_sites(rms_norm_eps: float, overrides: Mapping[str, float]) -> dict[str, float]:
    sites = dict.fromkeys(_CONFIG_EPS_SITES, rms_norm_eps) | _RELEASED_EPS
    for name, value in overrides.items():
        if name not in sites:
            raise UsageError(
                f"--eps {name}", got="no such site", need=f"one of {listed(sorted(sites))}"
            )
        if not SMALLEST_F32 <= value < 1.0:
            need = "a number between 0 and 1 that binary32 holds"
            raise UsageError(f"--eps {name}", got=value, need=need)
        sites[name] = float(value)
    return sites
