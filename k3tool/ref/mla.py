"""Float64 meaning of gated multi-head latent attention in the absorbed form; no rotation anywhere.

Shapes: T tokens, P cached positions, h heads; a cache row is [latent | shared key]. kv_b holds per
head `nope` key rows then `v` value rows over the latent.
Source: modeling_kimi_linear.py@20a4fb101ce8 KimiMLAAttention; k3_spec C.4.
"""

import numpy as np

from k3tool.isa.table import PAGE_TOKENS
from k3tool.model.operators import PART_EXTRA
from k3tool.ref.dense import mul, norm_gemv_bf16, rmsnorm, sigmoid
from k3tool.ref.formats import Array, Step, rounded


def _kv_b_heads(kv_b: Array, nope: int, v: int) -> tuple[Array, Array]:
    """Split kv_b into its key and value halves: (h, nope, latent) and (h, v, latent)."""
    heads = kv_b.reshape(-1, nope + v, kv_b.shape[-1])
    return heads[:, :nope], heads[:, nope:]


def mla_qlat(q: Array, kv_b: Array, *, nope: int, rope: int, v: int, round: int = 0) -> Array:
    """Carry the query to the latent. Shapes: q (T, h*(nope+rope)) -> (T, h*(latent+rope))."""
    key, _ = _kv_b_heads(kv_b, nope, v)
    heads = q.reshape(len(q), -1, nope + rope)
    latent = rounded(np.einsum("thn,hnl->thl", heads[..., :nope], key), round)
    return np.concatenate([latent, heads[..., nope:]], axis=-1).reshape(len(q), -1)


def mla_cache(
    x: Array,
    norm: Array,
    cache: Array | None,
    *,
    latent: int,
    eps: float,
    step: Step,
    round: int = 0,
) -> Array:
    """Append the normed latent and the shared key, which is not normed.

    Shapes: x (T, latent+rope), cache (>= position, latent+rope) -> (position + T, latent+rope).
    """
    old = np.empty((0, x.shape[1])) if step.position == 0 or cache is None else cache
    assert len(old) >= step.position, (len(old), step.position)
    unit, key = rmsnorm(x[:, :latent], norm, eps=eps, round=round), rounded(x[:, latent:], round)
    row = np.concatenate([unit, key], axis=-1)
    return np.concatenate([old[: step.position], row])


def mla_attend(
    q: Array, cache: Array, *, latent: int, scale: float, step: Step, round: int = 0
) -> Array:
    """Attend to own and earlier positions. Shapes: q (T, h*(latent+rope)) -> (T, h*latent)."""
    heads = q.reshape(len(q), -1, cache.shape[1])
    score = np.einsum("thc,pc->thp", heads, cache) * scale
    own = step.position + np.arange(len(q))
    score = np.where(np.arange(len(cache)) <= own[:, None, None], score, -np.inf)
    weight = np.exp(score - score.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    context: Array = np.einsum("thp,pl->thl", weight, cache[:, :latent])
    return rounded(context.reshape(len(q), -1), round)


def mla_uv(ctx: Array, kv_b: Array, *, nope: int, v: int, latent: int, round: int = 0) -> Array:
    """Carry the context to values. Shapes: ctx (T, h*latent) -> (T, h*v)."""
    _, value = _kv_b_heads(kv_b, nope, v)
    heads = ctx.reshape(len(ctx), -1, latent)
    out: Array = np.einsum("thl,hvl->thv", heads, value)
    return rounded(out.reshape(len(ctx), -1), round)


def mla_out_gate(o: Array, gate: Array, *, round: int = 0) -> Array:
    """Gate without a norm: o * sigmoid(gate), both of which round."""
    return mul(o, sigmoid(gate, round=round), round=round)


def mla_uv_gate(
    ctx: Array, kv_b: Array, gate: Array, *, nope: int, v: int, latent: int, round: int = 0
) -> Array:
    """Carry the context to values, then gate. Shapes: ctx (T, h*latent) -> (T, h*v)."""
    o = mla_uv(ctx, kv_b, nope=nope, v=v, latent=latent, round=round)
    return mla_out_gate(o, gate, round=round)


def mla_heads(
    q: Array,
    kv_b: Array,
    cache: Array,
    gate: Array,
    *,
    nope: int,
    rope: int,
    latent: int,
    v: int,
    scale: float,
    step: Step,
    round: int = 0,
) -> Array:
    """Do everything between the query and the output projection. Shapes: -> (T, h*v)."""
    q = mla_qlat(q, kv_b, nope=nope, rope=rope, v=v, round=round)
    ctx = mla_attend(q, cache, latent=latent, scale=scale, step=step, round=round)
    return mla_uv_gate(ctx, kv_b, gate, nope=nope, v=v, latent=latent, round=round)


def mla_query(
    x: Array,
    norm: Array,
    w: Array,
    kv_b: Array,
    *,
    eps: float,
    nope: int,
    rope: int,
    v: int,
    norm_round: int = 0,
    round: int = 0,
) -> Array:
    """Make the query and carry it to the latent. Shapes: x (T, K) -> (T, h*(latent+rope))."""
    q = norm_gemv_bf16(x, norm, w, eps=eps, norm_round=norm_round, round=round)
    return mla_qlat(q, kv_b, nope=nope, rope=rope, v=v, round=round)


def mla_pages(
    q: Array, cache: Array, *, latent: int, scale: float, pages: int, step: Step
) -> Array:
    """Weigh the latents of each page by themselves; a page that a token does not see is zeros.

    Shapes: q (T, h*(latent+rope)) -> (T, pages*h*(latent+extra)), [sums | maximum | count | 0].
    """
    heads = q.reshape(len(q), -1, cache.shape[1])
    out = np.zeros((len(q), pages, heads.shape[1], latent + PART_EXTRA))
    for t, own in enumerate(step.position + np.arange(len(q))):
        for page, first in enumerate(range(0, int(own) + 1, PAGE_TOKENS)):
            rows = cache[first : min(first + PAGE_TOKENS, int(own) + 1)]
            score = heads[t] @ rows.T * scale
            largest = score.max(axis=-1)
            weight = np.exp(score - largest[:, None])
            out[t, page, :, :latent] = weight @ rows[:, :latent]
            out[t, page, :, latent], out[t, page, :, latent + 1] = largest, weight.sum(axis=-1)
    return out.reshape(len(q), -1)


def mla_merge(
    parts: Array,
    kv_b: Array,
    gate: Array,
    *,
    nope: int,
    v: int,
    latent: int,
    pages: int,
    step: Step,
    round: int = 0,
) -> Array:
    """Merge the pages a token sees, carry the context to values, gate. Shapes: -> (T, h*v)."""
    part = parts.reshape(len(parts), pages, -1, latent + PART_EXTRA)
    ctx = np.zeros((len(parts), part.shape[2], latent))
    for t, own in enumerate(step.position + np.arange(len(parts))):
        seen = part[t, : int(own) // PAGE_TOKENS + 1]
        factor = np.exp(seen[:, :, latent] - seen[:, :, latent].max(axis=0))[:, :, None]
        total = (factor * seen[:, :, latent + 1 : latent + 2]).sum(axis=0)
        ctx[t] = (factor * seen[:, :, :latent]).sum(axis=0) / total
    rows = rounded(ctx.reshape(len(parts), -1), round)
    return mla_uv_gate(rows, kv_b, gate, nope=nope, v=v, latent=latent, round=round)
