"""Float64 meaning of Kimi delta attention: short convolution, decay, recurrence, output gate.

Shapes: T tokens, h heads of D channels, C = h*D channels, head-major (row h*D + d is head h).
Source: modeling_kimi_linear.py@20a4fb101ce8 KimiDeltaAttention, fla kda naive; k3_spec C.3.
"""

import numpy as np

from k3tool.ref.dense import gemv_bf16, head_rmsnorm, l2norm, mul, scale, sigmoid, silu
from k3tool.ref.formats import Array, Step, rounded

TAPS = 4


def short_conv(x: Array, conv: Array, taps: Array | None, *, step: Step) -> tuple[Array, Array]:
    """Convolve each channel with its four taps; tap 3 meets the current token.

    Shapes: x (T, C), conv C*4 values, taps (3, C) the last three inputs, oldest first
    -> y (T, C) and the new taps. Before the sequence x is zero.
    """
    old = np.zeros((TAPS - 1, x.shape[1])) if step.position == 0 or taps is None else taps
    history = np.concatenate([old, x])
    weight = conv.reshape(-1, TAPS)
    y = sum(history[j : j + len(x)] * weight[:, j] for j in range(TAPS))
    return np.asarray(y), history[len(x) :]


def conv_silu(
    x: Array, conv: Array, taps: Array | None, *, step: Step, round: int = 0
) -> tuple[Array, Array]:
    """Convolve, then SiLU. Shapes as in `short_conv`."""
    y, taps = short_conv(x, conv, taps, step=step)
    return silu(y, round=round), taps


def kda_decay(
    f: Array, a_log: Array, dt_bias: Array, *, lower_bound: float, unit_cols: int
) -> Array:
    """Return the factor that each channel of the state keeps, in (exp(lower_bound), 1).

    Shapes: f (T, C), a_log (h,) or longer (zero padding behind the live heads), dt_bias (C,).
    One a_log a head, not one a channel; a bounded sigmoid, no clamp on softplus (k3_spec F1, F2).
    """
    heads = f.shape[1] // unit_cols
    rate = np.repeat(np.exp(a_log[:heads]), unit_cols)
    kept: Array = np.exp(lower_bound * sigmoid(rate * (f + dt_bias)))
    return kept


def kda_step(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    s: Array | None,
    *,
    step: Step,
    round: int = 0,
) -> tuple[Array, Array]:
    """Run the delta rule in time order; the state decays before the prediction, o sees the update.

    Shapes: q, k, v, decay (T, C), beta (T, h), s (h, Dk, Dv) -> o (T, C) and the new state.
    """
    tokens, heads = beta.shape
    dim = q.shape[1] // heads
    q, k, v, decay = (x.reshape(tokens, heads, dim) for x in (q, k, v, decay))
    state = np.zeros((heads, dim, dim)) if step.position == 0 or s is None else s
    out = np.empty((tokens, heads, dim))
    for t in range(tokens):
        state = decay[t][:, :, None] * state
        error = v[t] - np.einsum("hk,hkv->hv", k[t], state)
        state = state + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        out[t] = np.einsum("hk,hkv->hv", q[t], state)
    return rounded(out.reshape(tokens, heads * dim), round), state


def kda_core(
    q: Array,
    k: Array,
    v: Array,
    f: Array,
    b: Array,
    a_log: Array,
    dt_bias: Array,
    s: Array | None,
    *,
    l2_eps: float,
    q_scale: float,
    lower_bound: float,
    unit_cols: int,
    step: Step,
    round: int = 0,
) -> tuple[Array, Array]:
    """Norm q and k, scale q after its norm, make decay and beta, run the delta rule.

    Shapes: q, k, v, f (T, C), b (T, h), s (h, Dk, Dv) -> o (T, C) and the new state.
    """
    return kda_step(
        scale(l2norm(q, eps=l2_eps, unit_cols=unit_cols), factor=q_scale),
        l2norm(k, eps=l2_eps, unit_cols=unit_cols),
        v,
        kda_decay(f, a_log, dt_bias, lower_bound=lower_bound, unit_cols=unit_cols),
        sigmoid(b),
        s,
        step=step,
        round=round,
    )


def kda_gated_norm(o: Array, norm: Array, gate: Array, *, eps: float, round: int = 0) -> Array:
    """Norm per head, then a plain sigmoid gate (not SiLU). Shapes: o, gate (T, C), norm (D,)."""
    return mul(head_rmsnorm(o, norm, eps=eps), sigmoid(gate), round=round)


def kda_heads(
    q: Array,
    k: Array,
    v: Array,
    f: Array,
    b: Array,
    gate: Array,
    conv_q: Array,
    conv_k: Array,
    conv_v: Array,
    f_b: Array,
    a_log: Array,
    dt_bias: Array,
    o_norm: Array,
    taps_q: Array | None,
    taps_k: Array | None,
    taps_v: Array | None,
    s: Array | None,
    *,
    l2_eps: float,
    q_scale: float,
    lower_bound: float,
    eps: float,
    unit_cols: int,
    step: Step,
    round: int = 0,
) -> tuple[Array, tuple[Array, ...]]:
    """Do everything between the projections of a layer: the four new states beside the result."""
    q, taps_q = conv_silu(q, conv_q, taps_q, step=step, round=round)
    k, taps_k = conv_silu(k, conv_k, taps_k, step=step, round=round)
    v, taps_v = conv_silu(v, conv_v, taps_v, step=step, round=round)
    f = gemv_bf16(f, f_b, round=round)
    sizes = {"l2_eps": l2_eps, "q_scale": q_scale, "lower_bound": lower_bound}
    o, s = kda_core(
        q, k, v, f, b, a_log, dt_bias, s, **sizes, unit_cols=unit_cols, step=step, round=round
    )
    return kda_gated_norm(o, o_norm, gate, eps=eps, round=round), (taps_q, taps_k, taps_v, s)
