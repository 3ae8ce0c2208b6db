"""The list of mutants: one mistake each, and the checkpoint that is known to notice it.

A mistake is a wrong meaning of one op (two where one mistake has two ends), a wrong wiring, a wrong
reading of the config, or a wrong decoding of stored bytes. Kinds and traps: k3_spec section F.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from k3tool.isa.table import Op
from k3tool.model.config import K3Config
from k3tool.model.operators import f32_bits
from k3tool.ref.formats import decode_mxfp4
from k3tool.ref.ops import Reference
from k3tool.ref.weights import ExpertDecoder
from tests.oracle import mutants_graph as wiring
from tests.oracle import mutants_ops as wrong
from tests.oracle.rewrite import Edit, attribute, other_leaf, skip


@dataclass(frozen=True)
class Mutant:
    """One mistake. ``killed_by`` is the oracle on which the gate must fail.

    ``leaves`` reads one weight for another where the graph itself would refuse the other.
    """

    name: str
    killed_by: str = "tiny13"
    ops: Mapping[Op, Reference] = field(default_factory=dict)
    edit: Edit | None = None
    config: Callable[[K3Config], K3Config] | None = None
    leaves: Mapping[str, str] = field(default_factory=dict)
    decode: ExpertDecoder = decode_mxfp4


def op(name: str, which: Op, reference: Reference, killed_by: str = "tiny13") -> Mutant:
    return Mutant(name, killed_by, ops={which: reference})


def edit(name: str, change: Edit, killed_by: str = "tiny13") -> Mutant:
    return Mutant(name, killed_by, edit=change)


def _times(op: Op, suffix: str, key: str, value: float) -> Edit:
    return attribute(op, suffix, lambda _: {key: f32_bits(value)})


NOPE_SCALE = 32**-0.5  # tiny13's nope part alone; the right scale counts the shared part too
EPS = "tiny13_eps"

KDA = (
    op("a_log per channel", Op.KDA_DECAY, wrong.decay_with(rate="channel")),
    op("softplus gate", Op.KDA_DECAY, wrong.decay_with(gate="softplus")),
    op("softplus gate clamped at the bound", Op.KDA_DECAY, wrong.decay_with(gate="clamp")),
    op("dt_bias outside the rate", Op.KDA_DECAY, wrong.decay_with(bias="outside")),
    op("dt_bias dropped", Op.KDA_DECAY, wrong.decay_with(bias="none")),
    op("delta before decay", Op.KDA_STEP, wrong.kda_with("delta_first")),
    op("decay after the update", Op.KDA_STEP, wrong.kda_with("decay_last")),
    op("output before the update", Op.KDA_STEP, wrong.kda_with("output_first")),
    op("output from the old state", Op.KDA_STEP, wrong.kda_with("output_old")),
    op("no delta: plain linear attention", Op.KDA_STEP, wrong.kda_with("no_delta")),
    op("state read transposed", Op.KDA_STEP, wrong.kda_with("transposed")),
    op("state lost between steps", Op.KDA_STEP, wrong.kda_with("forgets")),
    op("taps reversed", Op.SHORT_CONV, wrong.short_conv_reversed),
    op("taps one token late", Op.SHORT_CONV, wrong.short_conv_late),
    op("conv state lost between steps", Op.SHORT_CONV, wrong.short_conv_forgets),
    edit("conv without SiLU", skip(Op.SILU)),
    edit("beta without sigmoid", skip(Op.SIGMOID, ".beta")),
    edit("k not normed", skip(Op.L2NORM, ".k_unit")),
    op("l2 norm over all heads", Op.L2NORM, wrong.l2norm_whole_row),
    op("l2 eps on the mean", Op.L2NORM, wrong.l2norm_eps_on_mean, EPS),
    edit("l2 eps 1e-5", _times(Op.L2NORM, "", "eps", 1e-5), EPS),
    edit("no q scale", skip(Op.SCALE)),
    edit("q scaled before its norm", wiring.q_scaled_before_norm),
    edit("SiLU on the KDA gate", wiring.silu_on_kda_gate),
    edit("KDA gate before the norm", wiring.gate_before_norm),
    edit("KDA gate missing", wiring.kda_gate_missing),
    op("o_norm over all heads", Op.HEAD_RMSNORM, wrong.head_rmsnorm_whole_row),
    edit("SiLU between f_a and f_b", wiring.silu_inside_low_rank_gate),
    edit("q and k convolutions swapped", other_leaf({".q_conv1d.weight": ".k_conv1d.weight"})),
)

MLA = (
    edit("scale of the nope part only", _times(Op.MLA_ATTEND, "", "scale", NOPE_SCALE)),
    op("no softmax scale", Op.MLA_ATTEND, wrong.attend_without_softmax_scale),
    op("mask one position ahead", Op.MLA_ATTEND, wrong.attend_one_ahead),
    op("shared key dropped", Op.MLA_QLAT, wrong.qlat_drops_shared_key),
    op("shared key normed", Op.MLA_CACHE, wrong.cache_norms_shared_key),
    op("latent not normed", Op.MLA_CACHE, wrong.cache_latent_not_normed),
    op("cache lost between steps", Op.MLA_CACHE, wrong.cache_forgets),
    Mutant(
        "rotary embedding applied",
        ops={Op.MLA_QLAT: wrong.qlat_rotates, Op.MLA_CACHE: wrong.cache_rotates},
    ),
    Mutant(
        "kv_b with the value half first",
        ops={Op.MLA_QLAT: wrong.qlat_value_half_first, Op.MLA_UV: wrong.uv_value_half_first},
    ),
    Mutant(
        "kv_b with all keys before all values",
        ops={Op.MLA_QLAT: wrong.qlat_all_keys_first, Op.MLA_UV: wrong.uv_all_keys_first},
    ),
    op("q_b rows dim-major", Op.MLA_QLAT, wrong.qlat_dim_major),
    edit("MLA gate missing", wiring.mla_gate_missing),
    edit("SiLU on the MLA gate", wiring.silu_on_mla_gate),
    edit("q_a norm missing", skip(Op.RMSNORM, ".q_a_unit")),
    edit("q_a norm eps 1e-5", wiring.eps(".q_a_unit", 1e-5), EPS),
    edit("kv_a norm eps 1e-5", _times(Op.MLA_CACHE, "", "eps", 1e-5), EPS),
)

FEED_FORWARD = (
    op("biased router weights", Op.ROUTER_TOPK, wrong.router_with(weigh="biased")),
    # The norm of the latent sum hides a common factor of a token's weights, but for its eps.
    op("weights not renormalised", Op.ROUTER_TOPK, wrong.router_with(renormalise=False), EPS),
    op("top-k without the bias", Op.ROUTER_TOPK, wrong.router_with(choose="unbiased")),
    op("softmax router", Op.ROUTER_TOPK, wrong.router_with(weigh="softmax")),
    op("ids sorted, weights not", Op.ROUTER_TOPK, wrong.router_weights_in_choice_order),
    op("experts averaged", Op.MOE_COMBINE, wrong.combine_without_weights),
    edit("latent norm missing", skip(Op.RMSNORM, ".y_unit")),
    edit("latent norm eps 1e-6", wiring.eps(".y_unit", 1e-6), EPS),
    Mutant(
        "latent norm per expert",
        ops={
            Op.MOE_DOWN_EACH: wrong.down_norms_each_expert,
            Op.RMSNORM: wrong.rmsnorm_weight_only_at_eps_one,
        },
        edit=wiring.eps(".y_unit", 1.0),
    ),
    edit("sigmoid of the capped gate", wiring.capped_gate_in_sigmoid),
    edit("betas swapped", wiring.betas_swapped),
    edit("gate not capped", skip(Op.SOFTCAP, ".cap")),
    edit("up not capped", skip(Op.SOFTCAP, ".linear")),
    edit("shared expert dropped", skip(Op.ADD, ".block_sparse_moe.out")),
    edit("w1 and w3 swapped", other_leaf({"experts.w1": "experts.w3", "experts.w3": "experts.w1"})),
    Mutant("nibbles swapped", decode=wrong.decode_swapped_nibbles),
    Mutant("scale off by one exponent", decode=wrong.decode_halved_scale),
    Mutant("nibbles as half groups", decode=wrong.decode_halves_apart),
    Mutant("codes read as E3M0", decode=wrong.decode_e3m0),
)

RESIDUALS = (
    edit("attention-side mixes missing", skip(Op.ATTN_RES, ".attn_mix")),
    edit("MLP-side mixes missing", skip(Op.ATTN_RES, ".mlp_mix")),
    edit("output mix missing", skip(Op.ATTN_RES, "output_mix")),
    edit("no mixes at all", wiring.plain_residual),
    op("normed values mixed", Op.ATTN_RES, wrong.attn_res_with(mix_normed=True)),
    op("mix softmax with a temperature", Op.ATTN_RES, wrong.attn_res_with(temperature=True)),
    op("mix score without its norm weight", Op.ATTN_RES, wrong.attn_res_with(weight=False)),
    edit("prefix never restarts", wiring.prefix_never_restarts),
    edit("block opened after attention", wiring.block_opened_after_attention),
    edit("block pushed before mixing", wiring.block_pushed_before_mixing),
    edit("mixed input pushed as block", wiring.mix_pushed_as_block),
    edit("newest block unseen by the output mix", wiring.newest_block_unseen),
    edit("output mix after the final norm", wiring.output_mix_after_norm),
    edit("one query for both mixes of a layer", wiring.mixes_share_one_query),
    Mutant(
        "blocks one layer too long",
        config=lambda c: replace(c, attn_res_block_size=c.attn_res_block_size + 1),
    ),
)

HEAD_AND_NORMS = (
    edit("final norm missing", skip(Op.RMSNORM, "output_norm")),
    edit("attention input not normed", skip(Op.RMSNORM, ".attn_in")),
    op("norm weight plus one", Op.RMSNORM, wrong.rmsnorm_one_plus_weight),
    op("eps outside the root", Op.RMSNORM, wrong.rmsnorm_eps_outside, EPS),
    Mutant("head tied to the embedding", leaves={"lm_head.weight": "embed_tokens.weight"}),
)

MUTANTS = (*KDA, *MLA, *FEED_FORWARD, *RESIDUALS, *HEAD_AND_NORMS)
assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
