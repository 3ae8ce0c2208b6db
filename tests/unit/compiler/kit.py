"""Small graphs by hand: leaves of every shape that a rule's pattern meets, and which rules fire."""

from collections import Counter
from collections.abc import Sequence

from k3tool.compiler.egraph import saturate
from k3tool.compiler.patterns import Rule
from k3tool.compiler.rules import RULES
from k3tool.isa.table import Op
from k3tool.model.nodes import Graph, Leaf, StateLeaf, WeightLeaf
from k3tool.model.operators import f32_bits

HIDDEN, HEADS, DIM, VOCAB, EXPERTS, TOP_K, INNER = 64, 4, 16, 128, 6, 2, 32
WIDE = HEADS * DIM
EPS, OTHER_EPS = f32_bits(1e-5), f32_bits(1e-6)
BETA, LINEAR_BETA = f32_bits(4.0), f32_bits(25.0)
LATENT, ROPE, NOPE, V = 32, 8, 16, 12
RULE = {rule.name: rule for rule in RULES}

_SHAPES: dict[str, tuple[str, tuple[int, ...], str]] = {
    "embed": ("bf16", (VOCAB, HIDDEN), "replicate"),
    "norm": ("bf16", (HIDDEN,), "replicate"),
    "res_norm": ("bf16", (HIDDEN,), "replicate"),
    "res_proj": ("bf16", (1, HIDDEN), "replicate"),
    "head": ("bf16", (VOCAB, HIDDEN), "rows"),
    "same": ("bf16", (HIDDEN, HIDDEN), "replicate"),
    "q": ("bf16", (WIDE, HIDDEN), "rows"),
    "k": ("bf16", (WIDE, HIDDEN), "rows"),
    "b": ("bf16", (HEADS, HIDDEN), "rows"),
    "down": ("bf16", (HIDDEN, WIDE), "cols"),
    "up": ("bf16", (HIDDEN, HIDDEN), "rows"),
    "conv": ("f32", (WIDE, 1, 4), "rows"),
    "o_norm": ("f32", (DIM,), "replicate"),
    "a_log": ("f32", (HEADS,), "live_rows"),
    "dt_bias": ("f32", (WIDE,), "rows"),
    "mq": ("bf16", (HEADS * (NOPE + ROPE), HIDDEN), "rows"),
    "mg": ("bf16", (HEADS * V, HIDDEN), "rows"),
    "kv_a": ("bf16", (LATENT + ROPE, HIDDEN), "replicate"),
    "kv_norm": ("bf16", (LATENT,), "replicate"),
    "kv_b": ("bf16", (HEADS * (NOPE + V), LATENT), "rows"),
    "scores": ("bf16", (EXPERTS, HIDDEN), "replicate"),
    "bias": ("f32", (EXPERTS,), "replicate"),
    "w1": ("mxfp4", (EXPERTS, INNER, HIDDEN), "rows"),
    "w2": ("mxfp4", (EXPERTS, HIDDEN, INNER), "cols"),
    "w3": ("mxfp4", (EXPERTS, INNER, HIDDEN), "rows"),
}


def _local(shape: tuple[int, ...], split: str, experts: bool, tp: int) -> tuple[int, ...]:
    first = 1 if experts else 0
    axis = {"rows": first, "live_rows": first, "cols": first + 1}.get(split)
    return tuple(size // tp if i == axis else size for i, size in enumerate(shape))


class Kit:
    """A graph under construction; methods return node ids."""

    def __init__(self, tp: int = 1) -> None:
        self.graph = Graph(
            {
                name: WeightLeaf(name, d, s, _local(s, split, d == "mxfp4", tp), split, f"x.{name}")
                for name, (d, s, split) in _SHAPES.items()
            },
            n_blocks=2,
        )

    def w(self, name: str) -> int:
        return self.graph.leaf(Leaf.WEIGHT, name)

    def add(self, op: Op, *inputs: int, name: str = "", **attrs: int) -> int:
        return self.graph.add(op, name or f"v{len(self.graph.nodes)}", inputs, **attrs)

    def state(self, name: str, *shape: int) -> int:
        return self.graph.state(StateLeaf(name, "slots", shape, 0))

    def x(self) -> int:
        return self.add(Op.EMBED_BF16, self.w("embed"))

    def blocks(self) -> int:
        return self.graph.leaf(Leaf.BLOCKS, "blocks", HIDDEN)

    def linear(self, x: int, weight: str, head_only: int = 0) -> int:
        return self.add(Op.GEMV_BF16, x, self.w(weight), head_only=head_only)

    def norm(self, x: int, eps: int = EPS) -> int:
        return self.add(Op.RMSNORM, x, self.w("norm"), eps=eps)

    def reduced(self, x: int) -> int:
        return self.add(Op.ALL_REDUCE, self.add(Op.GEMV_BF16_BLOCKS, x, self.w("down")))

    def row_parallel(self, x: int) -> int:
        return self.add(Op.GEMV_REDUCED, x, self.w("down"))

    def experts(self, name: str) -> int:
        return self.add(Op.DEQUANT_MXFP4, self.w(name))

    def situ(self, gate: int, up: int, sigmoid_of: int | None = None) -> int:
        cap = self.add(Op.SOFTCAP, gate, beta=BETA)
        left = self.add(
            Op.MUL, cap, self.add(Op.SIGMOID, gate if sigmoid_of is None else sigmoid_of)
        )
        return self.add(Op.MUL, left, self.add(Op.SOFTCAP, up, beta=LINEAR_BETA))

    def route(self, x: int) -> int:
        logits = self.linear(x, "scores")
        scale = f32_bits(1.0)
        return self.add(Op.ROUTER_TOPK, logits, self.w("bias"), top_k=TOP_K, scale=scale)

    def value_projection(self, x: int) -> int:
        """Return MLA_UV of an attention over x: [tokens, heads * V]."""
        sizes = {"latent": LATENT, "rope": ROPE}
        heads = {"nope": NOPE, "v": V}
        kv_b, scale = self.w("kv_b"), f32_bits(0.2)
        q = self.add(Op.MLA_QLAT, self.linear(x, "mq"), kv_b, **heads, **sizes)
        cache = self.graph.state(StateLeaf("cache", "pages", (256, LATENT + ROPE), None))
        kv = [self.linear(x, "kv_a"), self.w("kv_norm"), cache]
        cache = self.add(Op.MLA_CACHE, *kv, **sizes, eps=EPS)
        ctx = self.add(Op.MLA_ATTEND, q, cache, **sizes, scale=scale, pages=1)
        return self.add(Op.MLA_UV, ctx, kv_b, **heads, latent=LATENT)

    def kda_step(
        self, x: int, q_eps: int = EPS, k_eps: int = EPS, q_dim: int = DIM, k_dim: int = DIM
    ) -> int:
        """Return KDA_STEP on q and k of x, as the model's graph writes it."""
        q, k = self.linear(x, "q"), self.linear(x, "k")
        qn = self.add(Op.L2NORM, q, eps=q_eps, head_dim=q_dim)
        qn = self.add(Op.SCALE, qn, factor=f32_bits(DIM**-0.5))
        kn = self.add(Op.L2NORM, k, eps=k_eps, head_dim=k_dim)
        bound = f32_bits(-5.0)
        constants = [self.w("a_log"), self.w("dt_bias")]
        decay = self.add(Op.KDA_DECAY, k, *constants, lower_bound=bound, head_dim=DIM)
        beta = self.add(Op.SIGMOID, self.linear(x, "b"))
        state = self.state("s", HEADS, DIM, DIM)
        return self.add(Op.KDA_STEP, qn, kn, q, decay, beta, state, head_dim=DIM)

    def finish(self, *values: int) -> Graph:
        """Return the graph with every given value kept alive."""
        self.graph.outputs = list(values)
        return self.graph


def fired(graph: Graph, rules: Sequence[Rule] = RULES) -> Counter[str]:
    """Return how often each rule fires."""
    return Counter(a.rule.name for a in saturate(graph, rules).applications)
