"""The rewrite rules, as data: one row each, left side, right side, theorem.

Rules go one way, from primitive ops to fused ones, and are named after what they fuse. The egglog
rule is generated from the row, and so is the statement of the theorem that lets it fire
(`statements`), which is why patterns are terms (`patterns`, with their syntax) and not egglog text.

A row may rewrite several values at once (parallel linears become parts of one group).
"""

from k3tool.compiler.patterns import Rule, make_rule
from k3tool.errors import UsageError
from k3tool.isa.table import SPECS, Op


def _rule(name: str, left: str, right: str) -> Rule:
    return make_rule(name, (left, right))


def _mixed_linears(name: str, op: Op, values: str, *where: str) -> Rule:
    """Return a rule that makes linears of one normed mix values of a group.

    The finished blocks' part of the mix becomes a value of its own. All round at their points or
    none, but where the group says by itself what its head, the first member, does (the router never
    rounds). `where` are the readers of the linears, which tell them apart.
    """
    names = values.split()
    sites = "res_norm res_proj", ":eps eps"
    rounds = dict.fromkeys(names, "round")
    own = ":round round"
    if "head_round" in SPECS[op].flags:
        rounds[names[0]] = "head_round"
        own += " :head_round head_round"
    mix = (
        f"(ATTN_RES_NORM prefix blocks {sites[0]} norm"
        f" :n_blocks n {sites[1]} :norm_eps norm_eps :round round)"
    )
    part = f"(ATTN_PART blocks {sites[0]} :n_blocks n {sites[1]})"
    weights = " ".join(f"w_{value}" for value in names)
    numbers = f"{sites[1]} :norm_eps norm_eps {own}"
    group = f"({op.name} prefix {part} {sites[0]} norm {weights} {numbers})"
    return make_rule(
        name,
        *(
            (
                f"{value}@(GEMV_BF16 mix@{mix} w_{value} :head_only 0 :round {rounds[value]})",
                f"(PART {group} :index {i})",
            )
            for i, value in enumerate(names)
        ),
        where=where,
    )


RULES: tuple[Rule, ...] = (
    # Lowerings: only they make instructions of what the graph says of experts and of the token, and
    # of a product whose columns are divided over ranks.
    _rule(
        "dequant-up-fuse",
        "(MOE_UP z route (DEQUANT_MXFP4 w) :top_k k :round round)",
        "(MOE_UP_MXFP4 z route w :top_k k :round round)",
    ),
    _rule(
        "dequant-down-fuse",
        "(MOE_DOWN x route (DEQUANT_MXFP4 w2) :top_k k :x_bf16 x_bf16)",
        "(MOE_DOWN_MXFP4 x route w2 :top_k k :x_bf16 x_bf16)",
    ),
    # The weighted sum goes into the ranks' products, so that one sum over ranks is left, not top_k.
    _rule(
        "expert-combine-fuse",
        "(MOE_COMBINE (MOE_DOWN_EACH x route w2 :top_k k :x_bf16 x_bf16) route"
        " :top_k k :round round)",
        "(ALL_REDUCE (MOE_DOWN x route w2 :top_k k :x_bf16 x_bf16) :round round)",
    ),
    _rule(
        "down-reduce-fuse",
        "(GEMV_REDUCED x w :x_bf16 x_bf16 :round round)",
        "(ALL_REDUCE (GEMV_BF16_BLOCKS x w :x_bf16 x_bf16) :round round)",
    ),
    _rule(
        "argmax-fold-fuse",
        "(ARGMAX_ALL (ALL_GATHER logits))",
        "(ARGMAX_FOLD (ARGMAX logits))",
    ),
    _rule(
        "embed-block-fuse",
        "(BLOCK_PUSH (EMBED_BF16 table) blocks :index index)",
        "(EMBED_PUSH table blocks :index index)",
    ),
    _rule(
        "norm-linear-fuse",
        "(GEMV_BF16 (RMSNORM x norm :eps eps :round norm_round) w :head_only head :round round)",
        "(NORM_GEMV_BF16 x norm w :eps eps :head_only head :norm_round norm_round :round round)",
    ),
    _rule(
        "attnres-norm-fuse",
        "(RMSNORM (ATTN_RES prefix blocks res_norm res_proj :n_blocks n :eps eps :round round)"
        " norm :eps norm_eps :round round)",
        "(ATTN_RES_NORM prefix blocks res_norm res_proj norm"
        " :n_blocks n :eps eps :norm_eps norm_eps :round round)",
    ),
    _rule(
        "situ-fuse",
        "(MUL (MUL (SOFTCAP gate :beta beta) (SIGMOID gate :round 0) :round 0)"
        " (SOFTCAP up :beta linear) :round round)",
        "(SITU gate up :beta beta :linear_beta linear :round round)",
    ),
    _rule(
        "glu-situ-fuse",
        "(SITU (GEMV_BF16 x gate :head_only 0 :round round)"
        " (GEMV_BF16 x up :head_only 0 :round round)"
        " :beta beta :linear_beta linear :round round)",
        "(GLU_BF16 x gate up :beta beta :linear_beta linear :round round)",
    ),
    _rule(
        "moe-situ-fuse",
        "(SITU (MOE_UP_MXFP4 z route w1 :top_k k :round round)"
        " (MOE_UP_MXFP4 z route w3 :top_k k :round round)"
        " :beta beta :linear_beta linear :round round)",
        "(MOE_GLU_MXFP4 z route w1 w3 :top_k k :beta beta :linear_beta linear :round round)",
    ),
    _rule(
        "conv-silu-fuse",
        "(SILU (SHORT_CONV x kernel taps) :round round)",
        "(CONV_SILU x kernel taps :round round)",
    ),
    _rule(
        "kda-core-fuse",
        "(KDA_STEP (SCALE (L2NORM q :eps eps :head_dim d) :factor scale)"
        " (L2NORM k :eps eps :head_dim d) v"
        " (KDA_DECAY f a_log dt_bias :lower_bound bound :head_dim d) (SIGMOID b :round 0) s"
        " :round round :head_dim d)",
        "(KDA_CORE q k v f b a_log dt_bias s"
        " :l2_eps eps :q_scale scale :lower_bound bound :round round :head_dim d)",
    ),
    _rule(
        "kda-gated-norm-fuse",
        "(MUL (HEAD_RMSNORM o norm :eps eps) (SIGMOID gate :round 0) :round round)",
        "(KDA_GATED_NORM o norm gate :eps eps :round round)",
    ),
    # KDA gates what a norm made, MLA the bare value: the pattern asks for the value projection, or
    # the KDA gate and the SiTU gate, which are products with a sigmoid too, would match.
    _rule(
        "mla-out-gate-fuse",
        "(MUL o@(MLA_UV ctx kv_b :nope nope :v v :latent latent :round o_round)"
        " (SIGMOID gate :round round) :round round)",
        "(MLA_OUT_GATE o gate :round round)",
    ),
    _rule(
        "mla-uv-gate-fuse",
        "(MLA_OUT_GATE (MLA_UV ctx kv_b :nope nope :v v :latent latent :round round) gate"
        " :round round)",
        "(MLA_UV_GATE ctx kv_b gate :nope nope :v v :latent latent :round round)",
    ),
    _rule(
        "reduce-residual-fuse",
        "(ADD residual (ALL_REDUCE x :round round) :round round)",
        "(ALL_REDUCE_ADD residual x :round round)",
    ),
    _rule(
        "reduce-gather-fuse",
        "(ADD (ALL_GATHER up) (ALL_REDUCE x :round round) :round round)",
        "(REDUCE_GATHER up x :round round)",
    ),
    _rule(
        "gather-residual-fuse",
        "(ADD residual (REDUCE_GATHER up x :round round) :round round)",
        "(REDUCE_GATHER_ADD residual up x :round round)",
    ),
    _rule(
        "kda-heads-fuse",
        "(KDA_GATED_NORM (KDA_CORE (CONV_SILU q conv_q taps_q :round round)"
        " (CONV_SILU k conv_k taps_k :round round) (CONV_SILU v conv_v taps_v :round round)"
        " (GEMV_BF16 f f_b :head_only 0 :round round) b a_log dt_bias s"
        " :l2_eps l2_eps :q_scale scale :lower_bound bound :round round :head_dim d)"
        " o_norm gate :eps eps :round round)",
        "(KDA_HEADS q k v f b gate conv_q conv_k conv_v f_b a_log dt_bias o_norm"
        " taps_q taps_k taps_v s"
        " :l2_eps l2_eps :q_scale scale :lower_bound bound :eps eps :round round :head_dim d)",
    ),
    _rule(
        "mla-heads-fuse",
        "(MLA_UV_GATE (MLA_ATTEND"
        " (MLA_QLAT q kv_b :nope nope :rope rope :latent latent :v v :round round)"
        " cache :latent latent :rope rope :scale scale :pages pages :round round)"
        " kv_b gate :nope nope :v v :latent latent :round round)",
        "(MLA_HEADS q kv_b cache gate"
        " :nope nope :rope rope :latent latent :v v :scale scale :round round)",
    ),
    # A long context is divided by pages, not by heads: every page is read once, for all heads. With
    # the query by head in the packet before, that is one packet more a layer and not two: a packet
    # of its own for the query's linear would have more slices, but the chain has no room for it.
    _rule(
        "mla-pages-split",
        "(MLA_UV_GATE (MLA_ATTEND (MLA_QLAT"
        " (NORM_GEMV_BF16 x norm w :eps eps :head_only 0 :norm_round norm_round :round round)"
        " kv_b :nope nope :rope rope :latent latent :v v :round round)"
        " cache :latent latent :rope rope :scale scale :pages pages :round round)"
        " kv_b gate :nope nope :v v :latent latent :round round)",
        "(MLA_MERGE (MLA_PAGES (MLA_QUERY x norm w kv_b"
        " :eps eps :nope nope :rope rope :latent latent :v v :norm_round norm_round :round round)"
        " cache :latent latent :rope rope :scale scale :pages pages)"
        " kv_b gate :nope nope :v v :latent latent :pages pages :round round)",
    ),
    _rule(
        "situ-down-fuse",
        "(GEMV_BF16_BLOCKS (SITU gate up :beta beta :linear_beta linear :round round) w"
        " :x_bf16 round)",
        "(SITU_GEMV_BLOCKS gate up w :beta beta :linear_beta linear :round round)",
    ),
    # The choice of experts does not depend on the scale of their weights.
    _rule(
        "topk-glu-fuse",
        "(MOE_GLU_MXFP4 z (ROUTER_TOPK scores bias :top_k k :scale scale) w1 w3"
        " :top_k k :beta beta :linear_beta linear :round round)",
        "(MOE_GLU_TOPK z scores bias w1 w3 :top_k k :beta beta :linear_beta linear :round round)",
    ),
    _rule(
        "topk-down-fuse",
        "(MOE_DOWN_MXFP4 x (ROUTER_TOPK scores bias :top_k k :scale scale) w2 :top_k k"
        " :x_bf16 x_bf16)",
        "(MOE_DOWN_TOPK x scores bias w2 :top_k k :scale scale :x_bf16 x_bf16)",
    ),
    _mixed_linears(
        "kda-in-fuse",
        Op.MIX_LINEARS_6,
        "q k v f b gate",
        "(KDA_HEADS q k v f b gate conv_q conv_k conv_v f_b a_log dt_bias o_norm"
        " taps_q taps_k taps_v s"
        " :l2_eps l2_eps :q_scale scale :lower_bound bound :eps o_eps :round o_round :head_dim d)",
    ),
    _mixed_linears(
        "mla-in-fuse",
        Op.MIX_LINEARS_3,
        "q kv gate",
        "(RMSNORM q q_norm :eps q_eps :round q_round)",
        "(MLA_CACHE kv kv_norm cache :latent latent :rope rope :eps kv_eps :round kv_round)",
        "(MLA_OUT_GATE o gate :round o_round)",
    ),
    _mixed_linears(
        "moe-in-fuse",
        Op.MIX_LINEARS_4,
        "scores z gate up",
        "(MOE_GLU_MXFP4 z (ROUTER_TOPK scores bias :top_k k :scale scale) w1 w3"
        " :top_k k :beta beta :linear_beta linear :round e_round)",
        "(SITU gate up :beta s_beta :linear_beta s_linear :round s_round)",
    ),
)
RULE_NAMES = tuple(rule.name for rule in RULES)
assert len(set(RULE_NAMES)) == len(RULES), "two rules of one name"
# Rules that a plan can do without.
FUSIONS = tuple(rule.name for rule in RULES if not rule.is_lowering)


def rules_without(names: tuple[str, ...]) -> tuple[Rule, ...]:
    """Return the rules but those named. Raises: UsageError for one that is not in `FUSIONS`."""
    for name in names:
        if name not in FUSIONS:
            only = " (nothing else makes an instruction of its left side)"
            got = f"{name}{only if name in RULE_NAMES else ''}"
            raise UsageError("--without", got=got, need=f"one of {', '.join(FUSIONS)}")
    return tuple(rule for rule in RULES if rule.name not in names)
