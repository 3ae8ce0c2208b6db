"""Float64 meaning of products, norms, residual mixing, elementwise ops, collectives, argmax.

Shapes: T tokens, H hidden, K input width, R rows, W any width; an activation is (T, width), token
major. A "peer" operand is (ranks, T, width): what each rank has in its slot.
Source: modeling_kimi_linear.py@20a4fb101ce8, through k3_spec C.0-C.2 and C.5.
"""

import numpy as np

from k3tool.model.operators import PART_EXTRA
from k3tool.ref.formats import Array, Step, rounded

# -- products ----------------------------------------------------------------------------------


def embed_bf16(table: Array, *, step: Step) -> Array:
    """Pick rows. Shapes: table (V, H) -> (T, H). Source: k3_spec C.1."""
    return table[step.ids]


def gemv_bf16(x: Array, w: Array, *, round: int = 0) -> Array:
    """Multiply by a matrix stored [out, in]. Shapes: x (T, K), w (R, K) -> (T, R)."""
    return rounded(x @ w.T, round)


def gemv_bf16_blocks(x: Array, w: Array) -> Array:
    """Multiply by a row-parallel matrix: the blocks only fix an order of summation.

    Shapes: x (T, K), w (R, K) -> (T, R).
    """
    return x @ w.T


def norm_gemv_bf16(
    x: Array, norm: Array, w: Array, *, eps: float, norm_round: int = 0, round: int = 0
) -> Array:
    """Norm, then product. Shapes: x (T, K), norm (K,), w (R, K) -> (T, R)."""
    return gemv_bf16(rmsnorm(x, norm, eps=eps, round=norm_round), w, round=round)


def glu_bf16(
    x: Array, gate: Array, up: Array, *, beta: float, linear_beta: float, round: int = 0
) -> Array:
    """Gated unit. Shapes: x (T, K), gate and up (R, K) -> (T, R)."""
    g, u = (gemv_bf16(x, w, round=round) for w in (gate, up))
    return situ(g, u, beta=beta, linear_beta=linear_beta, round=round)


# -- norms -------------------------------------------------------------------------------------


def rmsnorm(x: Array, norm: Array, *, eps: float, round: int = 0) -> Array:
    """Divide by the root mean square. Wrong if eps is outside the root. Source: k3_spec C.0.

    Rounds twice: the value, and again after its weight (k3_spec C.6).
    """
    unit: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return rounded(rounded(unit, round) * norm, round)


def head_rmsnorm(x: Array, norm: Array, *, eps: float) -> Array:
    """Norm each head with one shared weight. Shapes: x (T, h*D), norm (D,). Source: C.3 step 7."""
    heads = x.reshape(len(x), -1, len(norm))
    return rmsnorm(heads, norm, eps=eps).reshape(x.shape)


def l2norm(x: Array, *, eps: float, unit_cols: int) -> Array:
    """Divide each head of unit_cols by its length.

    Wrong if eps is added to the mean: that is unit_cols times too large (k3_spec F3, C.3 step 5).
    """
    heads = x.reshape(len(x), -1, unit_cols)
    unit: Array = heads / np.sqrt(np.sum(heads * heads, axis=-1, keepdims=True) + eps)
    return unit.reshape(x.shape)


# -- attention residuals -----------------------------------------------------------------------


def attn_res(
    prefix: Array,
    blocks: Array,
    res_norm: Array,
    res_proj: Array,
    *,
    n_blocks: int,
    eps: float,
    round: int = 0,
) -> Array:
    """Mix the finished blocks and the running prefix by a softmax over sources.

    Shapes: prefix (T, H), blocks (>= n_blocks, T, H), res_norm and res_proj H values -> (T, H).
    The norm enters the score only: the raw sources are mixed. Source: k3_spec C.2.
    """
    sources = np.concatenate([blocks[:n_blocks], prefix[None]])
    score = rmsnorm(sources, res_norm, eps=eps) @ res_proj.reshape(-1)
    weight = np.exp(score - score.max(axis=0))
    weight /= weight.sum(axis=0)
    return rounded(np.einsum("st,sth->th", weight, sources), round)


def attn_res_norm(
    prefix: Array,
    blocks: Array,
    res_norm: Array,
    res_proj: Array,
    norm: Array,
    *,
    n_blocks: int,
    eps: float,
    norm_eps: float,
    round: int = 0,
) -> Array:
    """Mix, then norm. Shapes as in `attn_res`; norm (H,)."""
    mixed = attn_res(prefix, blocks, res_norm, res_proj, n_blocks=n_blocks, eps=eps, round=round)
    return rmsnorm(mixed, norm, eps=norm_eps, round=round)


def attn_part(
    blocks: Array, res_norm: Array, res_proj: Array, *, n_blocks: int, eps: float
) -> Array:
    """Mix the finished blocks alone, unnormalised: [o_B | m_B | s_B | zeros].

    Shapes: blocks (>= n_blocks, T, H) -> (T, H + 16). Source: k3_spec C.2, a softmax in two parts.
    """
    sources = blocks[:n_blocks]
    score = rmsnorm(sources, res_norm, eps=eps) @ res_proj.reshape(-1)
    top = score.max(axis=0)
    weight = np.exp(score - top)
    mixed = np.einsum("st,sth->th", weight, sources)
    rest = np.zeros((len(mixed), PART_EXTRA))
    rest[:, 0], rest[:, 1] = top, weight.sum(axis=0)
    return np.concatenate([mixed, rest], axis=-1)


def attn_parts_8(blocks: Array, *sites: Array, n_blocks: int, eps: float) -> tuple[Array, ...]:
    """Mix the finished blocks for eight sites: (res_norm, res_proj) of each in turn."""
    pairs = zip(sites[0::2], sites[1::2], strict=True)
    return tuple(attn_part(blocks, n, p, n_blocks=n_blocks, eps=eps) for n, p in pairs)


def mix_norm(
    prefix: Array,
    part: Array,
    res_norm: Array,
    res_proj: Array,
    norm: Array,
    *,
    eps: float,
    norm_eps: float,
    round: int = 0,
) -> Array:
    """Add the prefix to a block part, then norm. Shapes: prefix (T, H), part (T, H + 16)."""
    width = prefix.shape[1]
    own = rmsnorm(prefix, res_norm, eps=eps) @ res_proj.reshape(-1)
    top = np.maximum(part[:, width], own)
    a, b = np.exp(part[:, width] - top), np.exp(own - top)
    mixed = a[:, None] * part[:, :width] + b[:, None] * prefix
    mixed = rounded(mixed / (a * part[:, width + 1] + b)[:, None], round)
    return rmsnorm(mixed, norm, eps=norm_eps, round=round)


def mix_linears(
    prefix: Array,
    part: Array,
    res_norm: Array,
    res_proj: Array,
    norm: Array,
    *weights: Array,
    eps: float,
    norm_eps: float,
    round: int = 0,
) -> tuple[Array, ...]:
    """Multiply one normed mix by several matrices. Shapes: weights (R_i, H) -> each (T, R_i)."""
    return mix_linears_headed(
        prefix, part, res_norm, res_proj, norm, *weights,
        eps=eps, norm_eps=norm_eps, round=round, head_round=round,
    )  # fmt: skip


def mix_linears_headed(
    prefix: Array,
    part: Array,
    res_norm: Array,
    res_proj: Array,
    norm: Array,
    *weights: Array,
    eps: float,
    norm_eps: float,
    round: int = 0,
    head_round: int = 0,
) -> tuple[Array, ...]:
    """Do as `mix_linears`, but the first linear rounds as its own flag says: it is the router's.

    Shapes: prefix (T, H), part (T, H + 16), weights (R_i, H) -> each (T, R_i).
    """
    x = mix_norm(prefix, part, res_norm, res_proj, norm, eps=eps, norm_eps=norm_eps, round=round)
    flags = [head_round] + [round] * (len(weights) - 1)
    return tuple(gemv_bf16(x, w, round=flag) for w, flag in zip(weights, flags, strict=True))


def part(group: tuple[Array, ...], *, index: int) -> Array:
    """Pick one value of a group."""
    return group[index]


def situ_gemv_blocks(
    gate: Array, up: Array, w: Array, *, beta: float, linear_beta: float, round: int = 0
) -> Array:
    """Gate a unit, then multiply by a row-parallel matrix. Shapes: (T, K), w (R, K) -> (T, R)."""
    return situ(gate, up, beta=beta, linear_beta=linear_beta, round=round) @ w.T


def block_push(prefix: Array, blocks: Array | None, *, index: int) -> Array:
    """Add the raw layer input to the stack. Shapes: (T, H), (index, T, H) -> (index + 1, T, H)."""
    below = np.empty((0, *prefix.shape)) if blocks is None else blocks[:index]
    assert len(below) == index, (len(below), index)
    return np.concatenate([below, prefix[None]])


def embed_push(table: Array, blocks: Array | None, *, index: int, step: Step) -> Array:
    """Add the embedded rows to the stack. Shapes: (V, H), (index, T, H) -> (index + 1, T, H)."""
    return block_push(embed_bf16(table, step=step), blocks, index=index)


# -- elementwise -------------------------------------------------------------------------------


def add(a: Array, b: Array, *, round: int = 0) -> Array:
    """Add."""
    return rounded(a + b, round)


def mul(a: Array, b: Array, *, round: int = 0) -> Array:
    """Multiply."""
    return rounded(a * b, round)


def sigmoid(x: Array, *, round: int = 0) -> Array:
    """Return 1 / (1 + exp(-x)), without the overflow of exp for large negative x."""
    small = np.exp(-np.abs(x))
    result: Array = np.where(x >= 0, 1.0, small) / (1.0 + small)
    return rounded(result, round)


def silu(x: Array, *, round: int = 0) -> Array:
    """Return x * sigmoid(x)."""
    return rounded(x * sigmoid(x), round)


def softcap(x: Array, *, beta: float) -> Array:
    """Return beta * tanh(x / beta)."""
    result: Array = beta * np.tanh(x / beta)
    return result


def situ(gate: Array, up: Array, *, beta: float, linear_beta: float, round: int = 0) -> Array:
    """Gate a unit: the sigmoid sees the raw gate, linear_beta caps only up (k3_spec C.5)."""
    return rounded(softcap(gate, beta=beta) * sigmoid(gate) * softcap(up, beta=linear_beta), round)


def scale(x: Array, *, factor: float) -> Array:
    """Return x * factor."""
    return x * factor


# -- collectives and the choice of a token -----------------------------------------------------


def all_reduce(x: Array, *, round: int = 0) -> Array:
    """Add the ranks' partial sums. Shapes: (ranks, T, W) -> (T, W)."""
    return rounded(x.sum(axis=0), round)


def all_reduce_add(residual: Array, x: Array, *, round: int = 0) -> Array:
    """Return residual + all_reduce(x), both of which round."""
    return add(residual, all_reduce(x, round=round), round=round)


def all_gather(x: Array) -> Array:
    """Put the ranks' columns side by side. Shapes: (ranks, T, W) -> (T, ranks*W)."""
    return np.concatenate(list(x), axis=-1)


def reduce_gather(up: Array, x: Array, *, round: int = 0) -> Array:
    """Return all_gather(up) + all_reduce(x); reduction and sum round."""
    return add(all_gather(up), all_reduce(x, round=round), round=round)


def reduce_gather_add(residual: Array, up: Array, x: Array, *, round: int = 0) -> Array:
    """Return residual + (all_gather(up) + all_reduce(x)); reduction and both sums round."""
    return add(residual, reduce_gather(up, x, round=round), round=round)


def argmax(logits: Array, *, vocab_base: int) -> Array:
    """Pick per token (best, its lowest index, second best, 0). Shapes: (T, V) -> (T, 4)."""
    index = np.argmax(logits, axis=-1)
    rows = np.arange(len(logits))
    rest = logits.copy()
    rest[rows, index] = -np.inf
    best, second = logits[rows, index], rest.max(axis=-1)
    return np.stack([best, index + float(vocab_base), second, np.zeros(len(logits))], axis=-1)


def argmax_all(logits: Array) -> Array:
    """Pick per token among the whole vocabulary's logits. Shapes: (T, V) -> (T, 4)."""
    return argmax(logits, vocab_base=0)


def argmax_fold(x: Array) -> Array:
    """Fold the ranks' candidates; of equal bests the lower index wins. Shapes: (ranks, T, 4)."""
    folded: Array = np.empty(x.shape[1:])
    for token in range(x.shape[1]):
        ranked = sorted(x[:, token], key=lambda c: (-c[0], c[1]))
        second = max([ranked[0][2], *(c[0] for c in ranked[1:])])
        folded[token] = [ranked[0][0], ranked[0][1], second, 0.0]
    return folded


def nop() -> Array:
    """Return nothing of use."""
    return np.empty((0, 0))
