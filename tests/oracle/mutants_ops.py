"""Wrong meanings of single ops: each function is a mistake that somebody could make or has made.

Signatures are those of the meanings they replace (k3tool.ref.ops).
"""

import numpy as np

from k3tool.ref import dense, kda, mla, moe
from k3tool.ref.dense import rmsnorm, sigmoid
from k3tool.ref.formats import Array, Step, decode_mxfp4
from k3tool.ref.moe import Experts, split_route

# -- norms and mixing ----------------------------------------------------------------------------


def rmsnorm_eps_outside(x: Array, norm: Array, *, eps: float) -> Array:
    return x / (np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + eps) * norm


def rmsnorm_one_plus_weight(x: Array, norm: Array, *, eps: float) -> Array:
    return rmsnorm(x, 1.0 + norm, eps=eps)


def rmsnorm_weight_only_at_eps_one(x: Array, norm: Array, *, eps: float) -> Array:
    return x * norm if eps == 1.0 else rmsnorm(x, norm, eps=eps)


def attn_res_with(mix_normed: bool = False, temperature: bool = False, weight: bool = True):
    def attn_res(
        prefix: Array, blocks: Array, res_norm: Array, res_proj: Array, *, n_blocks: int, eps: float
    ) -> Array:
        sources = np.concatenate([blocks[:n_blocks], prefix[None]])
        normed = rmsnorm(sources, np.ones_like(res_norm), eps=eps)
        score = (normed * (res_norm if weight else 1.0)) @ res_proj.reshape(-1)
        score = score / np.sqrt(prefix.shape[1]) if temperature else score
        p = np.exp(score - score.max(axis=0))
        mixed = normed if mix_normed else sources
        return np.einsum("st,sth->th", p / p.sum(axis=0), mixed)

    return attn_res


# -- Kimi delta attention ------------------------------------------------------------------------


def l2norm_eps_on_mean(x: Array, *, eps: float, unit_cols: int) -> Array:
    return dense.l2norm(x, eps=eps * unit_cols, unit_cols=unit_cols)


def l2norm_whole_row(x: Array, *, eps: float) -> Array:
    return dense.l2norm(x, eps=eps, unit_cols=x.shape[1])


def head_rmsnorm_whole_row(x: Array, norm: Array, *, eps: float) -> Array:
    return rmsnorm(x, np.tile(norm, x.shape[1] // len(norm)), eps=eps)


def short_conv_reversed(
    x: Array, conv: Array, taps: Array | None, *, step: Step
) -> tuple[Array, Array]:
    return kda.short_conv(x, conv.reshape(-1, 4)[:, ::-1], taps, step=step)


def short_conv_forgets(
    x: Array, conv: Array, taps: Array | None, *, step: Step
) -> tuple[Array, Array]:
    return kda.short_conv(x, conv, None, step=step)


def short_conv_late(
    x: Array, conv: Array, taps: Array | None, *, step: Step
) -> tuple[Array, Array]:
    """See the current token with tap 2, as a cache of four inputs read from the wrong end would."""
    weight = np.roll(conv.reshape(-1, 4), -1, axis=1)
    weight[:, 3] = 0.0
    return kda.short_conv(x, weight, taps, step=step)


def decay_with(rate: str = "head", gate: str = "sigmoid", bias: str = "inside"):
    def decay(
        f: Array, a_log: Array, dt_bias: Array, *, lower_bound: float, unit_cols: int
    ) -> Array:
        heads = f.shape[1] // unit_cols
        a = np.repeat(np.exp(a_log[:heads]), unit_cols)
        if rate == "channel":
            a = np.tile(np.exp(a_log[:unit_cols]), heads)
        raw = {"inside": a * (f + dt_bias), "outside": a * f + dt_bias, "none": a * f}[bias]
        if gate == "sigmoid":
            return np.exp(lower_bound * sigmoid(raw))
        plus = -a * np.logaddexp(0.0, f + dt_bias)
        return np.exp(np.maximum(plus, lower_bound) if gate == "clamp" else plus)

    return decay


def kda_with(order: str):
    """Return the delta rule with its lines in another order or one of them wrong."""

    def kda_step(
        q: Array, k: Array, v: Array, decay: Array, beta: Array, s: Array | None, *, step: Step
    ) -> tuple[Array, Array]:
        tokens, heads = beta.shape
        dim = q.shape[1] // heads
        q, k, v, decay = (x.reshape(tokens, heads, dim) for x in (q, k, v, decay))
        fresh = step.position == 0 or s is None or order == "forgets"
        state = np.zeros((heads, dim, dim)) if fresh else s
        out = np.empty((tokens, heads, dim))
        for t in range(tokens):
            d = decay[t][:, :, None]
            held = state if order in ("delta_first", "decay_last") else d * state
            error = v[t] - np.einsum("hk,hkv->hv", k[t], held)
            error = v[t] if order == "no_delta" else error
            new = np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
            new = d * held + new if order == "delta_first" else held + new
            new = d * new if order == "decay_last" else new
            seen = {"output_first": held, "output_old": state}.get(order, new)
            state = new
            axes = "hv,hkv->hk" if order == "transposed" else "hk,hkv->hv"
            out[t] = np.einsum(axes, q[t], seen)
        return out.reshape(tokens, heads * dim), state

    return kda_step


# -- multi-head latent attention -----------------------------------------------------------------


def qlat_drops_shared_key(q: Array, kv_b: Array, *, nope: int, rope: int, v: int) -> Array:
    heads = q.reshape(len(q), -1, nope + rope).copy()
    heads[..., nope:] = 0.0
    return mla.mla_qlat(heads.reshape(q.shape), kv_b, nope=nope, rope=rope, v=v)


def _value_first(kv_b: Array, nope: int, v: int) -> Array:
    heads = kv_b.reshape(-1, nope + v, kv_b.shape[1])
    return np.concatenate([heads[:, v:], heads[:, :v]], axis=1).reshape(kv_b.shape)


def qlat_value_half_first(q: Array, kv_b: Array, *, nope: int, rope: int, v: int) -> Array:
    return mla.mla_qlat(q, _value_first(kv_b, nope, v), nope=nope, rope=rope, v=v)


def uv_value_half_first(ctx: Array, kv_b: Array, *, nope: int, v: int, latent: int) -> Array:
    return mla.mla_uv(ctx, _value_first(kv_b, nope, v), nope=nope, v=v, latent=latent)


def _all_keys_first(kv_b: Array, nope: int, v: int) -> Array:
    heads = kv_b.shape[0] // (nope + v)
    keys = kv_b[: heads * nope].reshape(heads, nope, -1)
    values = kv_b[heads * nope :].reshape(heads, v, -1)
    return np.concatenate([keys, values], axis=1).reshape(kv_b.shape)


def qlat_all_keys_first(q: Array, kv_b: Array, *, nope: int, rope: int, v: int) -> Array:
    return mla.mla_qlat(q, _all_keys_first(kv_b, nope, v), nope=nope, rope=rope, v=v)


def uv_all_keys_first(ctx: Array, kv_b: Array, *, nope: int, v: int, latent: int) -> Array:
    return mla.mla_uv(ctx, _all_keys_first(kv_b, nope, v), nope=nope, v=v, latent=latent)


def qlat_dim_major(q: Array, kv_b: Array, *, nope: int, rope: int, v: int) -> Array:
    heads = kv_b.shape[0] // (nope + v)
    swapped = q.reshape(len(q), nope + rope, heads).transpose(0, 2, 1).reshape(q.shape)
    return mla.mla_qlat(swapped, kv_b, nope=nope, rope=rope, v=v)


def cache_norms_shared_key(
    x: Array, norm: Array, cache: Array | None, *, latent: int, eps: float, step: Step
) -> Array:
    key = x[:, latent:]
    unit = rmsnorm(key, np.ones(key.shape[1]), eps=eps)
    whole = np.concatenate([x[:, :latent], unit], axis=1)
    return mla.mla_cache(whole, norm, cache, latent=latent, eps=eps, step=step)


def cache_latent_not_normed(
    x: Array, norm: Array, cache: Array | None, *, latent: int, eps: float, step: Step
) -> Array:
    good = mla.mla_cache(x, norm, cache, latent=latent, eps=eps, step=step)
    good[step.position :, :latent] = x[:, :latent]
    return good


def cache_forgets(
    x: Array, norm: Array, cache: Array | None, *, latent: int, eps: float, step: Step
) -> Array:
    good = mla.mla_cache(x, norm, cache, latent=latent, eps=eps, step=step)
    good[: step.position] = 0.0
    return good


def _rotate(x: Array, position: int) -> Array:
    """Rotate pairs of neighbours by their position: what mla_use_nope says not to do."""
    half = x.shape[-1] // 2
    angle = (position + np.arange(len(x)))[:, None] * 10000.0 ** (-np.arange(half) / half)
    angle = angle.reshape(len(x), *[1] * (x.ndim - 2), half)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (
        even * np.cos(angle) - odd * np.sin(angle),
        even * np.sin(angle) + odd * np.cos(angle),
    )
    return np.stack(turned, axis=-1).reshape(x.shape)


def qlat_rotates(q: Array, kv_b: Array, *, nope: int, rope: int, v: int, step: Step) -> Array:
    heads = q.reshape(len(q), -1, nope + rope).copy()
    heads[..., nope:] = _rotate(heads[..., nope:], step.position)
    return mla.mla_qlat(heads.reshape(q.shape), kv_b, nope=nope, rope=rope, v=v)


def cache_rotates(
    x: Array, norm: Array, cache: Array | None, *, latent: int, eps: float, step: Step
) -> Array:
    turned = np.concatenate([x[:, :latent], _rotate(x[:, latent:], step.position)], axis=1)
    return mla.mla_cache(turned, norm, cache, latent=latent, eps=eps, step=step)


def attend_one_ahead(q: Array, cache: Array, *, latent: int, scale: float, step: Step) -> Array:
    ahead = Step(step.ids, step.position + 1)
    return mla.mla_attend(q, cache, latent=latent, scale=scale, step=ahead)


def attend_without_softmax_scale(q: Array, cache: Array, *, latent: int, step: Step) -> Array:
    return mla.mla_attend(q, cache, latent=latent, scale=1.0, step=step)


# -- mixture of experts --------------------------------------------------------------------------


def router_with(choose: str = "biased", weigh: str = "sigmoid", renormalise: bool = True):
    def router(logits: Array, bias: Array, *, top_k: int, scale: float) -> Array:
        score = sigmoid(logits)
        if weigh == "softmax":
            score = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        choice = score if choose == "unbiased" else score + bias
        order = np.argsort(-choice, axis=-1, kind="stable")[:, :top_k]
        ids = np.sort(order, axis=-1)
        w = np.take_along_axis(choice if weigh == "biased" else score, ids, axis=-1)
        w = w / w.sum(axis=-1, keepdims=True) if renormalise else w
        return np.concatenate([ids, w * scale], axis=-1)

    return router


def router_weights_in_choice_order(
    logits: Array, bias: Array, *, top_k: int, scale: float
) -> Array:
    """Sort the ids but leave the weights in order of choice."""
    good = moe.router_topk(logits, bias, top_k=top_k, scale=scale)
    ids, w = split_route(good)
    choice = sigmoid(logits) + bias
    order = np.argsort(-np.take_along_axis(choice, ids, axis=-1), axis=-1)
    return np.concatenate([ids, np.take_along_axis(w, order, axis=-1)], axis=-1)


def down_norms_each_expert(x: Array, route: Array, w2: Experts) -> Array:
    """Norm before the weighted sum; the norm's weight comes after it, which is the same place."""
    ids, _ = split_route(route)
    rows = x.reshape(len(x), ids.shape[1], -1)
    y = np.stack(
        [
            [w2[int(e)] @ r for e, r in zip(*pair, strict=True)]
            for pair in zip(ids, rows, strict=True)
        ]
    )
    return rmsnorm(y, np.ones(y.shape[-1]), eps=1e-5).reshape(len(x), -1)


def combine_without_weights(y: Array, route: Array) -> Array:
    ids, weight = split_route(route)
    even = np.full_like(weight, 1.0 / weight.shape[1])
    return moe.moe_combine(y, np.concatenate([ids, even], axis=1))


# -- stored formats ------------------------------------------------------------------------------


def decode_swapped_nibbles(packed: np.ndarray, scale: np.ndarray) -> Array:
    return decode_mxfp4((packed >> 4) | (packed << 4), scale)


def decode_halved_scale(packed: np.ndarray, scale: np.ndarray) -> Array:
    return decode_mxfp4(packed, scale) / 2.0


def decode_halves_apart(packed: np.ndarray, scale: np.ndarray) -> Array:
    """Read low nibbles as a group's first half and high ones as its second: another format."""
    good = decode_mxfp4(packed, scale).reshape(len(packed), -1, 16, 2)
    return good.transpose(0, 1, 3, 2).reshape(len(packed), -1)


def decode_e3m0(packed: np.ndarray, scale: np.ndarray) -> Array:
    """Read 3 exponent bits and no mantissa."""
    good = decode_mxfp4(packed, scale)
    unit = np.repeat(np.ldexp(1.0, scale.astype(int) - 127), 32, axis=1)
    code = np.abs(good) / unit
    powers = {0.5: 0.25, 1.0: 0.5, 1.5: 1.0, 2.0: 2.0, 3.0: 4.0, 4.0: 8.0, 6.0: 16.0}
    changed = np.select([code == old for old in powers], list(powers.values()), 0.0)
    return np.sign(good) * changed * unit
