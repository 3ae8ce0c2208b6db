"""Rules that somebody could write and that are wrong, each with what it gets wrong."""

from k3tool.compiler.patterns import Rule, make_rule

_SITU = ":beta beta :linear_beta linear"
_UP = "(SOFTCAP up :beta linear)"

WRONG_RULES: tuple[Rule, ...] = (
    make_rule(
        "drops-a-bias",
        ("(SIGMOID (ADD x bias))", "(SIGMOID x)"),
    ),
    make_rule(
        "drops-the-weight-of-a-norm",
        ("(GEMV_BF16 (RMSNORM x norm :eps eps) w :head_only 0)", "(GEMV_BF16 x w :head_only 0)"),
    ),
    make_rule(
        "takes-one-expert-matrix-twice",
        (
            f"(SITU (MOE_UP_MXFP4 z route w1 :top_k k) (MOE_UP_MXFP4 z route w3 :top_k k) {_SITU})",
            f"(MOE_GLU_MXFP4 z route w1 w1 :top_k k {_SITU})",
        ),
    ),
    make_rule(
        "swaps-gate-and-up",
        (
            f"(SITU (GEMV_BF16 x gate :head_only 0) (GEMV_BF16 x up :head_only 0) {_SITU})",
            f"(GLU_BF16 x up gate {_SITU})",
        ),
    ),
    make_rule(
        "swaps-the-betas",
        (
            f"(MUL (MUL (SOFTCAP gate :beta beta) (SIGMOID gate)) {_UP})",
            "(SITU gate up :beta linear :linear_beta beta)",
        ),
    ),
    make_rule(
        "gates-by-the-capped-gate",
        (
            f"(MUL (MUL cap@(SOFTCAP gate :beta beta) (SIGMOID cap)) {_UP})",
            f"(SITU gate up {_SITU})",
        ),
    ),
    make_rule(
        "moves-a-norm-across-a-sum",
        (
            "(RMSNORM (ADD a b) norm :eps eps)",
            "(ADD (RMSNORM a norm :eps eps) (RMSNORM b norm :eps eps))",
        ),
    ),
    make_rule(
        "moves-a-norm-across-the-expert-sum",
        (
            "(RMSNORM (ALL_REDUCE (MOE_DOWN_MXFP4 x route w2 :top_k k)) norm :eps eps)",
            "(ALL_REDUCE (MOE_DOWN_MXFP4 (RMSNORM x long :eps eps) route w2 :top_k k))",
        ),
        where=("(RMSNORM other long :eps eps)",),
    ),
    make_rule(
        "scales-before-the-norm",
        (
            "(SCALE (L2NORM q :eps eps :head_dim d) :factor scale)",
            "(L2NORM (SCALE q :factor scale) :eps eps :head_dim d)",
        ),
    ),
    make_rule(
        "silu-for-a-sigmoid",
        (
            "(MUL (HEAD_RMSNORM o norm :eps eps) (SILU gate))",
            "(KDA_GATED_NORM o norm gate :eps eps)",
        ),
    ),
    make_rule(
        "gates-before-the-norm",
        (
            "(HEAD_RMSNORM (MUL o (SIGMOID gate)) norm :eps eps)",
            "(KDA_GATED_NORM o norm gate :eps eps)",
        ),
    ),
    make_rule(
        "silu-without-its-value",
        ("(SIGMOID (SHORT_CONV x kernel taps))", "(CONV_SILU x kernel taps)"),
    ),
    make_rule(
        "norms-over-heads-of-another-size",
        (
            "(KDA_STEP (SCALE (L2NORM q :eps eps :head_dim e) :factor scale)"
            " (L2NORM k :eps eps :head_dim e) v"
            " (KDA_DECAY f a_log dt_bias :lower_bound bound :head_dim d) (SIGMOID b) s"
            " :head_dim d)",
            "(KDA_CORE q k v f b a_log dt_bias s"
            " :l2_eps eps :q_scale scale :lower_bound bound :head_dim d)",
        ),
    ),
    make_rule(
        "swaps-q-and-k",
        (
            "(KDA_STEP (SCALE (L2NORM q :eps eps :head_dim d) :factor scale)"
            " (L2NORM k :eps eps :head_dim d) v"
            " (KDA_DECAY f a_log dt_bias :lower_bound bound :head_dim d) (SIGMOID b) s"
            " :head_dim d)",
            "(KDA_CORE k q v f b a_log dt_bias s"
            " :l2_eps eps :q_scale scale :lower_bound bound :head_dim d)",
        ),
    ),
    make_rule(
        "swaps-the-norms-of-the-mix",
        (
            "(RMSNORM (ATTN_RES prefix blocks res_norm res_proj :n_blocks n :eps eps)"
            " norm :eps norm_eps)",
            "(ATTN_RES_NORM prefix blocks norm res_proj res_norm"
            " :n_blocks n :eps eps :norm_eps norm_eps)",
        ),
    ),
    make_rule(
        "takes-the-part-of-another-site",
        (
            "a@(GEMV_BF16 (ATTN_RES_NORM prefix blocks rn rp norm"
            " :n_blocks n :eps eps :norm_eps norm_eps) wa :head_only 0)",
            "(PART (MIX_LINEARS_3 prefix (ATTN_PART blocks norm rp :n_blocks n :eps eps)"
            " rn rp norm wa wb wc :eps eps :norm_eps norm_eps) :index 0)",
        ),
        where=("(GEMV_BF16 x wb :head_only 0)", "(GEMV_BF16 x wc :head_only 0)"),
    ),
    make_rule(
        "swaps-two-members-of-a-group",
        (
            "(GEMV_BF16 (ATTN_RES_NORM prefix blocks rn rp norm"
            " :n_blocks n :eps eps :norm_eps norm_eps) wa :head_only 0)",
            "(PART (MIX_LINEARS_3 prefix (ATTN_PART blocks rn rp :n_blocks n :eps eps)"
            " rn rp norm wa wb wb :eps eps :norm_eps norm_eps) :index 1)",
        ),
        where=("(GEMV_BF16 x wb :head_only 0)",),
    ),
    make_rule(
        "adds-the-residual-twice",
        ("(ADD residual (ALL_REDUCE_ADD residual x))", "(ALL_REDUCE_ADD residual x)"),
    ),
    make_rule(
        "chooses-experts-by-scores-alone",
        (
            "(MOE_GLU_MXFP4 z (ROUTER_TOPK scores bias :top_k k :scale scale) w1 w3"
            f" :top_k k {_SITU})",
            f"(MOE_GLU_TOPK z scores other w1 w3 :top_k k {_SITU})",
        ),
        where=("(ROUTER_TOPK scores other :top_k k :scale scale)",),
    ),
    make_rule(
        "forgets-the-scale-of-the-route",
        (
            "(MOE_DOWN_MXFP4 x (ROUTER_TOPK scores bias :top_k k :scale scale) w2 :top_k k)",
            "(MOE_DOWN_TOPK x scores bias w2 :top_k k :scale other)",
        ),
        where=("(SCALE y :factor other)",),
    ),
    make_rule(
        "multiplies-by-the-numbers-of-another-matrix",
        (
            "(MOE_UP z route (DEQUANT_MXFP4 w) :top_k k)",
            "(MOE_UP_MXFP4 z route other :top_k k)",
        ),
        where=("(DEQUANT_MXFP4 other)",),
    ),
    make_rule(
        "adds-experts-of-another-route",
        (
            "(MOE_DOWN x route (DEQUANT_MXFP4 w2) :top_k k)",
            "(MOE_DOWN_MXFP4 x other w2 :top_k k)",
        ),
        where=("(MOE_DOWN x other (DEQUANT_MXFP4 w2) :top_k k)",),
    ),
    make_rule(
        "combines-by-another-route",
        (
            "(MOE_COMBINE (MOE_DOWN_EACH x route w2 :top_k k) route :top_k k)",
            "(ALL_REDUCE (MOE_DOWN x other w2 :top_k k))",
        ),
        where=("(MOE_DOWN x other w2 :top_k k)",),
    ),
    make_rule(
        "combines-a-part-of-the-columns",
        (
            "(MOE_COMBINE (MOE_DOWN_EACH x route w2 :top_k k) route :top_k k)",
            "(ALL_GATHER (MOE_DOWN x route w2 :top_k k))",
        ),
    ),
    make_rule(
        "puts-terms-of-a-sum-side-by-side",
        ("(GEMV_REDUCED x w)", "(ALL_GATHER (GEMV_BF16_BLOCKS x w :x_bf16 0))"),
    ),
    make_rule(
        "reduces-the-product-of-another-weight",
        ("(GEMV_REDUCED x w)", "(ALL_REDUCE (GEMV_BF16_BLOCKS x other))"),
        where=("(GEMV_REDUCED x other)",),
    ),
    make_rule(
        "folds-the-choice-of-other-logits",
        ("(ARGMAX_ALL (ALL_GATHER logits))", "(ARGMAX_FOLD (ARGMAX other))"),
        where=("(ALL_GATHER other)",),
    ),
    make_rule(
        "folds-what-was-not-gathered",
        ("(ARGMAX_ALL (ALL_REDUCE logits))", "(ARGMAX_FOLD (ARGMAX logits))"),
    ),
    make_rule(
        "embeds-into-another-block",
        ("(BLOCK_PUSH (EMBED_BF16 table) blocks :index 1)", "(EMBED_PUSH table blocks :index 0)"),
    ),
    # Mode bf16: the points where values round may not move, come or go.
    make_rule(
        "adds-in-another-order-across-a-rounding-point",
        (
            "(ADD (ADD a b :round round) c :round round)",
            "(ADD a (ADD b c :round round) :round round)",
        ),
    ),
    make_rule(
        "forgets-that-a-reduction-rounds",
        (
            "(ADD residual (ALL_REDUCE x :round reduced) :round round)",
            "(ALL_REDUCE_ADD residual x :round round)",
        ),
        where=("(ALL_REDUCE y :round reduced)",),
    ),
    make_rule(
        "rounds-a-product-of-numbers",
        (
            "(MOE_UP z route (DEQUANT_MXFP4 w) :top_k k)",
            "(MOE_UP_MXFP4 z route w :top_k k :round 1)",
        ),
    ),
    make_rule(
        "rounds-where-nothing-did",
        ("(SILU (SHORT_CONV x kernel taps))", "(CONV_SILU x kernel taps :round 1)"),
    ),
    make_rule(
        "rounds-the-router-with-its-group",
        (
            "(GEMV_BF16 (ATTN_RES_NORM prefix blocks rn rp norm :n_blocks n :eps eps"
            " :norm_eps norm_eps :round round) wa :head_only 0)",
            "(PART (MIX_LINEARS_3 prefix (ATTN_PART blocks rn rp :n_blocks n :eps eps)"
            " rn rp norm wa wb wb :eps eps :norm_eps norm_eps :round round) :index 0)",
        ),
        where=("(GEMV_BF16 x wb :head_only 0)",),
    ),
    make_rule(
        "rounds-a-cap-inside-the-unit",
        (
            f"(MUL (MUL (SOFTCAP gate :beta beta) (SIGMOID gate) :round 1) {_UP} :round 1)",
            f"(SITU gate up {_SITU} :round 1)",
        ),
    ),
)
