"""Float64 meaning of gated multi-head latent attention in the absorbed form; no rotation anywhere.

Shapes: T tokens, P cached positions, h heads; a cache row is [latent | shared key]. kv_b holds per
head `nope` key rows then `v` value rows over the latent.
Source: modeling_kimi_linear.py@20a4fb101ce8 KimiMLAAttention; k3_spec C.4.
"""

import numpy as np

from k3tool.ref.dense import mul, rmsnorm, sigmoid
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
    """Carry the context to values, then gate."""
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
