"""The operator graph of the K3 text model: every layer in primitive ops, collectives included.

Fused ops do not appear here; rewrite rules make them. Some forms are no instruction of any target
(expert matrices in numbers, each expert's output by itself, a row-parallel product as a whole, the
choice over the whole vocabulary): rules have to make instructions of them, and sums over ranks of
the products. Shards side by side are nodes at every TP degree, 1 included. The formulas are the
spec's sections C.1 to C.5; state is updated in place and is an input.
"""

from collections.abc import Mapping, Sequence

from k3tool.isa.table import PAGE_TOKENS, Op
from k3tool.model.config import K3Config
from k3tool.model.nodes import Graph, Leaf, StateLeaf, WeightLeaf
from k3tool.model.operators import f32_bits
from k3tool.model.weight_slices import rank_shape
from k3tool.model.weights import TABLE, TensorSpec, Where, find_spec

MODES = ("f32", "bf16")  # of the arithmetic contract: what activations are between ops
_LEAF_DTYPES = {"BF16": "bf16", "F32": "f32", "U8": "mxfp4"}


def weight_table(config: K3Config, tp: int = 1) -> dict[str, WeightLeaf]:
    """Return every weight leaf of a model, in table order, with its part on a rank of `tp`."""
    return _leaves(config, (None, *config.layers), tp)


def _leaves(
    config: K3Config, layers: Sequence[int | None], tp: int
) -> dict[str, WeightLeaf]:  # fmt: skip
    """Return the weight leaves of some layers; None stands for what belongs to no layer."""
    leaves: dict[str, WeightLeaf] = {}
    for layer in layers:
        for row in TABLE:
            if (row.where is Where.GLOBAL) != (layer is None):
                continue
            name = row.pattern.replace("{L}", str(layer)).replace("{E}", "0")
            spec = find_spec(config, config.prefix + name)
            if spec is not None and spec.row is row and spec.leaf not in leaves:
                leaves[spec.leaf] = _weight_leaf(config, spec, tp)
    return leaves


def _weight_leaf(config: K3Config, spec: TensorSpec, tp: int) -> WeightLeaf:
    dtype, split = _LEAF_DTYPES[spec.dtype], str(spec.split)
    shape, local = (spec.live, *spec.shape[1:]), rank_shape(spec, tp)
    if spec.expert is None:
        return WeightLeaf(spec.leaf, dtype, shape, local, split, spec.name)
    # `experts.0.w1.weight_packed` is [rows, columns / 2]: two values a byte.
    experts = config.num_experts
    source = spec.name.rsplit(".", 1)[0].replace("experts.0.", "experts.{E}.")
    full, part = ((experts, rows, columns * 2) for rows, columns in (shape, local))
    return WeightLeaf(spec.leaf, dtype, full, part, split, source)


def build_graph(config: K3Config, tp: int = 1, mode: str = "f32", pages: int = 1) -> Graph:
    """Return the graph of one step of the model; its sizes do not depend on `tp`.

    `tp` only sets the weights' local shapes. In `mode` bf16 an op's `round` flag is set where the
    arithmetic contract rounds ("Where bf16 rounds"; embedded rows are bf16 as they lie). `pages`
    is the latent cache that a sequence may fill: what attention by pages has room for.
    Raises: K3Error where the weight table and the ops disagree.
    """
    assert mode in MODES, mode
    return _Builder(config, weight_table(config, tp), int(mode == "bf16"), pages).build()


PROBE_PREFIX, PROBE_HEAD = "probe.prefix", "probe.head"  # leaves that no checkpoint has


def probe_block(index: int) -> str:
    """Return the leaf that gives a finished block of a layer alone."""
    return f"probe.block.{index}"


def build_layer_graph(
    config: K3Config, layer: int, rows: int, tp: int = 1, mode: str = "f32", pages: int = 1
) -> Graph:
    """Return the graph of one layer alone, for a comparison of its ops with their meaning.

    What comes into it are rows of tables that the caller makes, one for each token id below `rows`:
    the residual prefix, and every block that is finished by then. A head of `rows` rows makes what
    comes out a choice, because a program ends in one. Raises: as build_graph.
    """
    assert mode in MODES, mode
    tables = [PROBE_PREFIX, *map(probe_block, range(blocks_before(config, layer)))]
    shape = (rows, config.hidden_size)
    leaves = _leaves(config, (layer,), tp)
    for table in tables:
        leaves[table] = WeightLeaf(table, "bf16", shape, shape, "replicate", table)
    part = (rows // tp, config.hidden_size)
    head = f"{PROBE_HEAD}.weight"
    leaves[head] = WeightLeaf(head, "bf16", shape, part, "rows", head)
    return _Builder(config, leaves, int(mode == "bf16"), pages).build_layer(layer, tables)


def blocks_before(config: K3Config, layer: int) -> int:
    """Return how many AttnRes blocks are finished when a layer begins."""
    return sum(config.opens_block(before) for before in range(layer))


def weight_leaves(config: K3Config) -> set[str]:
    """Return the leaf names of all weights that the graph reads."""
    return build_graph(config).claimed_weights()


class _Builder:
    """Adds the model's nodes to a graph. Names of values: `layers.3.self_attn.q` and the like."""

    def __init__(
        self, config: K3Config, weights: Mapping[str, WeightLeaf], round: int, pages: int
    ) -> None:
        self.config = config
        self.round = round
        self.graph = Graph(weights)
        self.graph.n_blocks = config.n_blocks
        self.graph.pages = pages
        self.beta = f32_bits(config.activation_situ_beta)
        self.linear_beta = f32_bits(config.activation_situ_linear_beta)

    # -- small forms ---------------------------------------------------------------------------

    def eps(self, site: str) -> int:
        return f32_bits(self.config.eps[site])

    def weight(self, leaf: str) -> int:
        return self.graph.leaf(Leaf.WEIGHT, leaf)

    def experts(self, leaf: str) -> int:
        """Return one matrix of every expert in numbers; bf16 holds them all, so no mode rounds."""
        return self.graph.add(Op.DEQUANT_MXFP4, f"{leaf}.numbers", [self.weight(leaf)])

    def linear(self, x: int, leaf: str, name: str) -> int:
        weight = self.weight(f"{leaf}.weight")
        return self.graph.add(Op.GEMV_BF16, name, [x, weight], head_only=0, round=self.round)

    def exact_linear(self, x: int, leaf: str, name: str, head_only: int = 0) -> int:
        """Return a linear whose output is never rounded: exact ties would decide a choice."""
        weight = self.weight(f"{leaf}.weight")
        return self.graph.add(Op.GEMV_BF16, name, [x, weight], head_only=head_only, round=0)

    def norm(self, x: int, leaf: str, site: str, name: str) -> int:
        weight = self.weight(f"{leaf}.weight")
        return self.graph.add(Op.RMSNORM, name, [x, weight], eps=self.eps(site), round=self.round)

    def reduced(self, x: int, leaf: str, name: str) -> int:
        """Return a product whose columns are divided over ranks: the whole sum is what rounds."""
        weight = self.weight(f"{leaf}.weight")
        flags = {"x_bf16": self.round, "round": self.round}
        return self.graph.add(Op.GEMV_REDUCED, name, [x, weight], **flags)

    def plus(self, a: int, b: int, name: str) -> int:
        return self.graph.add(Op.ADD, name, [a, b], round=self.round)

    def situ(self, gate: int, up: int, name: str) -> int:
        """Return (beta tanh(g / beta) sigmoid(g)) (linear_beta tanh(u / linear_beta))."""
        add = self.graph.add
        cap = add(Op.SOFTCAP, f"{name}.cap", [gate], beta=self.beta)
        sigmoid = add(Op.SIGMOID, f"{name}.sigmoid", [gate], round=0)
        left = add(Op.MUL, f"{name}.gated", [cap, sigmoid], round=0)
        right = add(Op.SOFTCAP, f"{name}.linear", [up], beta=self.linear_beta)
        return add(Op.MUL, name, [left, right], round=self.round)

    def gated_mlp(self, x: int, leaf: str, name: str) -> int:
        """Return the reduced output of a SiTU MLP: the dense one or the shared experts."""
        gate = self.linear(x, f"{leaf}.gate_proj", f"{name}.gate")
        up = self.linear(x, f"{leaf}.up_proj", f"{name}.up")
        return self.reduced(self.situ(gate, up, f"{name}.act"), f"{leaf}.down_proj", f"{name}.down")

    def mix(self, prefix: int, blocks: int, n_blocks: int, leaf: str, site: str, name: str) -> int:
        """Return AttnRes over the finished blocks and the prefix; without blocks the prefix."""
        if n_blocks == 0:
            return prefix
        inputs = [
            prefix, blocks, self.weight(f"{leaf}_norm.weight"), self.weight(f"{leaf}_proj.weight"),
        ]  # fmt: skip
        eps = self.eps(site)
        return self.graph.add(
            Op.ATTN_RES, name, inputs, n_blocks=n_blocks, eps=eps, round=self.round
        )

    # -- the model -----------------------------------------------------------------------------

    def build(self) -> Graph:
        config, add = self.config, self.graph.add
        prefix = add(Op.EMBED_BF16, "embed", [self.weight("embed_tokens.weight")])
        blocks = self.graph.leaf(Leaf.BLOCKS, "blocks", config.hidden_size)
        n_blocks = 0
        for layer in config.layers:
            prefix, blocks, n_blocks = self.layer(layer, prefix, blocks, n_blocks)
        leaf = "output_attn_res"
        h = self.mix(prefix, blocks, n_blocks, leaf, f"{leaf}_norm", "output_mix")
        h = self.norm(h, "norm", "norm", "output_norm")
        logits = self.exact_linear(h, "lm_head", "logits", head_only=1)
        logits = add(Op.ALL_GATHER, "all_logits", [logits])
        self.graph.outputs = [add(Op.ARGMAX_ALL, "token", [logits])]
        return self.graph

    def build_layer(self, layer: int, tables: Sequence[str]) -> Graph:
        add = self.graph.add
        prefix, *finished = (add(Op.EMBED_BF16, f"{t}.rows", [self.weight(t)]) for t in tables)
        blocks = self.graph.leaf(Leaf.BLOCKS, "blocks", self.config.hidden_size)
        for index, value in enumerate(finished):
            blocks = add(Op.BLOCK_PUSH, f"blocks.{index}", [value, blocks], index=index)
        prefix, _, _ = self.layer(layer, prefix, blocks, len(finished))
        logits = self.exact_linear(prefix, PROBE_HEAD, "logits", head_only=1)
        logits = add(Op.ALL_GATHER, "all_logits", [logits])
        self.graph.outputs = [add(Op.ARGMAX_ALL, "token", [logits])]
        return self.graph

    def layer(self, layer: int, prefix: int, blocks: int, n_blocks: int) -> tuple[int, int, int]:
        """Add one layer; return (prefix, blocks, n_blocks) after it."""
        config, add, root = self.config, self.graph.add, f"layers.{layer}"
        site = "self_attention_res"
        h = self.mix(prefix, blocks, n_blocks, f"{root}.{site}", f"{site}_norm", f"{root}.attn_mix")
        opens = config.opens_block(layer)
        if opens:  # the raw layer input becomes a block, after it was mixed from: not the mix
            blocks = add(Op.BLOCK_PUSH, f"{root}.blocks", [prefix, blocks], index=n_blocks)
            n_blocks += 1
        name = f"{root}.input_layernorm"
        h = self.norm(h, name, "input_layernorm", f"{root}.attn_in")
        attention = self.mla if config.is_mla(layer) else self.kda
        out = attention(h, f"{root}.self_attn")
        prefix = out if opens else self.plus(prefix, out, f"{root}.attn_out")
        h = self.mix(prefix, blocks, n_blocks, f"{root}.mlp_res", "mlp_res_norm", f"{root}.mlp_mix")
        name = f"{root}.post_attention_layernorm"
        h = self.norm(h, name, "post_attention_layernorm", f"{root}.mlp_in")
        if config.is_moe(layer):
            out = self.moe(h, f"{root}.block_sparse_moe")
        else:
            out = self.gated_mlp(h, f"{root}.mlp", f"{root}.mlp")
        return self.plus(prefix, out, f"{root}.out"), blocks, n_blocks

    # -- Kimi delta attention --------------------------------------------------------------------

    def kda(self, h: int, root: str) -> int:
        linear, add = self.config.linear_attn_config, self.graph.add
        q, k, v = (self.conv(h, root, which) for which in "qkv")
        eps, dim = self.eps("l2norm"), linear.head_dim
        qn = add(Op.L2NORM, f"{root}.q_unit", [q], eps=eps, head_dim=dim)
        qn = add(Op.SCALE, f"{root}.q_scaled", [qn], factor=f32_bits(dim**-0.5))
        kn = add(Op.L2NORM, f"{root}.k_unit", [k], eps=eps, head_dim=dim)
        f = self.linear(h, f"{root}.f_a_proj", f"{root}.f_a")
        f = self.linear(f, f"{root}.f_b_proj", f"{root}.f")
        constants = [self.weight(f"{root}.A_log"), self.weight(f"{root}.dt_bias")]
        bound = f32_bits(linear.gate_lower_bound)
        decay = add(Op.KDA_DECAY, f"{root}.decay", [f, *constants], lower_bound=bound, head_dim=dim)
        b = self.linear(h, f"{root}.b_proj", f"{root}.b")
        beta = add(Op.SIGMOID, f"{root}.beta", [b], round=0)
        shape = (linear.num_heads, dim, dim)
        state = self.graph.state(StateLeaf(f"{root}.s", "slots", shape, 0))
        inputs = [qn, kn, v, decay, beta, state]
        o = add(Op.KDA_STEP, f"{root}.o", inputs, round=self.round, head_dim=dim)
        norm = self.weight(f"{root}.o_norm.weight")
        o = add(Op.HEAD_RMSNORM, f"{root}.o_unit", [o, norm], eps=self.eps("o_norm"))
        gate = self.linear(h, f"{root}.g_proj", f"{root}.g")
        gate = add(Op.SIGMOID, f"{root}.gate", [gate], round=0)  # the gated norm rounds once
        y = add(Op.MUL, f"{root}.gated", [o, gate], round=self.round)
        return self.reduced(y, f"{root}.o_proj", f"{root}.out")

    def conv(self, h: int, root: str, which: str) -> int:
        """Return one of q, k, v: linear, causal depthwise convolution of four taps, SiLU."""
        width, add = self.config.linear_attn_config.width, self.graph.add
        x = self.linear(h, f"{root}.{which}_proj", f"{root}.{which}_in")
        taps = self.graph.state(StateLeaf(f"{root}.{which}_taps", "slots", (3, width), 1))
        kernel = self.weight(f"{root}.{which}_conv1d.weight")
        x = add(Op.SHORT_CONV, f"{root}.{which}_conv", [x, kernel, taps])
        return add(Op.SILU, f"{root}.{which}", [x], round=self.round)

    # -- multi-head latent attention, absorbed form ------------------------------------------------

    def mla(self, h: int, root: str) -> int:
        c, add = self.config, self.graph.add
        sizes = {"latent": c.kv_lora_rank, "rope": c.qk_rope_head_dim}
        heads = {"nope": c.qk_nope_head_dim, "v": c.v_head_dim}
        q = self.linear(h, f"{root}.q_a_proj", f"{root}.q_a")
        q = self.norm(q, f"{root}.q_a_layernorm", "q_a_layernorm", f"{root}.q_a_unit")
        q = self.linear(q, f"{root}.q_b_proj", f"{root}.q")
        kv_b = self.weight(f"{root}.kv_b_proj.weight")
        q = add(Op.MLA_QLAT, f"{root}.q_latent", [q, kv_b], **heads, **sizes, round=self.round)
        kv = self.linear(h, f"{root}.kv_a_proj_with_mqa", f"{root}.kv_a")
        shape = (PAGE_TOKENS, c.cache_width)
        cache = self.graph.state(StateLeaf(f"{root}.cache", "pages", shape, None))
        norm = self.weight(f"{root}.kv_a_layernorm.weight")
        eps = self.eps("kv_a_layernorm")
        last: dict[str, int] = {"eps": eps, "round": self.round}
        cache = add(Op.MLA_CACHE, f"{root}.cached", [kv, norm, cache], **sizes, **last)
        last = {"scale": f32_bits(c.qk_head_dim**-0.5), "pages": self.graph.pages}
        last["round"] = self.round
        ctx = add(Op.MLA_ATTEND, f"{root}.context", [q, cache], **sizes, **last)
        last = {"latent": c.kv_lora_rank, "round": self.round}
        o = add(Op.MLA_UV, f"{root}.o", [ctx, kv_b], **heads, **last)
        gate = self.linear(h, f"{root}.g_proj", f"{root}.g")
        gate = add(Op.SIGMOID, f"{root}.gate", [gate], round=self.round)
        y = add(Op.MUL, f"{root}.gated", [o, gate], round=self.round)
        return self.reduced(y, f"{root}.o_proj", f"{root}.out")

    # -- mixture of experts ------------------------------------------------------------------------

    def moe(self, h: int, root: str) -> int:
        c, add = self.config, self.graph.add
        top_k = c.num_experts_per_token
        scores = self.exact_linear(h, f"{root}.gate", f"{root}.scores")
        bias = self.weight(f"{root}.gate.e_score_correction_bias")
        scale = f32_bits(c.routed_scaling_factor)
        route = add(Op.ROUTER_TOPK, f"{root}.route", [scores, bias], top_k=top_k, scale=scale)
        z = self.linear(h, f"{root}.routed_expert_down_proj", f"{root}.z")
        w1, w2, w3 = (self.experts(f"{root}.experts.w{i}") for i in (1, 2, 3))
        rounded = {"top_k": top_k, "round": self.round}
        gate = add(Op.MOE_UP, f"{root}.w1", [z, route, w1], **rounded)
        up = add(Op.MOE_UP, f"{root}.w3", [z, route, w3], **rounded)
        e = self.situ(gate, up, f"{root}.act")
        each = {"top_k": top_k, "x_bf16": self.round}
        y = add(Op.MOE_DOWN_EACH, f"{root}.w2", [e, route, w2], **each)
        # Added up before the norm, which is not linear.
        y = add(Op.MOE_COMBINE, f"{root}.y", [y, route], **rounded)
        site = "routed_expert_norm"
        y = self.norm(y, f"{root}.{site}", site, f"{root}.y_unit")
        shard = self.linear(y, f"{root}.routed_expert_up_proj", f"{root}.up.shard")
        y = add(Op.ALL_GATHER, f"{root}.up", [shard])
        shared = self.gated_mlp(h, f"{root}.shared_experts", f"{root}.shared_experts")
        return self.plus(y, shared, f"{root}.out")
