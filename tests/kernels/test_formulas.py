"""The contract's formulas to the bit: each written again in NumPy, binary32 operation by operation.

The other tests allow a tolerance or compare a body with itself. Here a body that computes
x * (inv * w) for (x * inv) * w, folds the scale into a norm, or sums a page in another order fails.
exp and sigmoid come from the compiled mathematics, which test_math.py judges.
"""

from __future__ import annotations

import numpy as np
import pytest

from k3tool.isa.table import Op
from tests.kernels import rule3
from tests.kernels.op_cases import CASES, HEADS, LATENT, ROPE, TOP_K, D, T
from tests.kernels.test_ops import execute

F = np.float32


def fma(a, b, c):
    """binary32 fma of binary32 arrays."""
    with np.errstate(all="ignore"):
        wide = (np.asarray(v, np.float64) for v in np.broadcast_arrays(a, b, c))
        return rule3.fma(*wide).astype(np.float32)


def axis_dot(a, b):
    """Rule 6."""
    if a.shape[-1] <= 512:
        return rule3.dot(a, b)
    return rule3.tree(rule3.blocks(a, np.broadcast_to(b, a.shape), 8))


def inverse_rms(x, eps):
    return F(1) / np.sqrt(axis_dot(x, x) / F(x.shape[-1]) + F(eps))


def bf(words):
    return rule3.bf16(words).astype(np.float32)


@pytest.fixture
def run(bodies):
    """Return the words of a case as binary32, and the same of its state."""

    def words(op):
        got, state = execute(bodies, CASES[op])
        return got.view(np.float32), None if state is None else state.view(np.float32)

    return words


@pytest.fixture
def exp(leaf_library, bodies):
    return lambda x: leaf_library(bodies.isa).map("exp", x).reshape(np.shape(x))


@pytest.fixture
def sigmoid(leaf_library, bodies):
    return lambda x: leaf_library(bodies.isa).map("sigmoid", x).reshape(np.shape(x))


def same(got, want):
    return np.array_equal(np.asarray(got).view(np.uint32), np.asarray(want).view(np.uint32))


def test_rmsnorm(run):
    s = CASES[Op.RMSNORM].stored
    x, w, inv = s["x"], bf(s["norm"]), inverse_rms(s["x"], 1e-5)[:, None]
    got, _ = run(Op.RMSNORM)
    assert same(got, (x * inv) * w)
    assert not same(got, x * (inv * w))  # control


def test_heads(run, sigmoid):
    x = CASES[Op.L2NORM].stored["x"].reshape(T, HEADS, D)
    inv = F(1) / np.sqrt(rule3.dot(x, x) + F(1e-6))
    assert same(run(Op.L2NORM)[0], (x * inv[..., None]).reshape(T, -1))
    s = CASES[Op.KDA_GATED_NORM].stored
    o = s["o"].reshape(T, HEADS, D)
    normed = ((o * inverse_rms(o, 1e-5)[..., None]) * s["norm"]).reshape(T, -1)
    assert same(run(Op.KDA_GATED_NORM)[0], normed * sigmoid(s["gate"]))


def test_attention_residual(run, exp):
    case = CASES[Op.ATTN_RES]
    s, n = case.stored, int(case.params["n_blocks"])
    f = bf(s["res_norm"]) * bf(s["res_proj"])

    def score(v):
        return axis_dot(v, f) * inverse_rms(v, 1e-5)

    blocks, prefix = s["blocks"][:n], s["prefix"]
    scores = np.stack([score(v) for v in blocks])
    top = scores.max(axis=0)
    e = exp(scores - top)
    total, mixed = e[0], e[0][:, None] * blocks[0]
    for i in range(1, n):
        total, mixed = total + e[i], fma(e[i][:, None], blocks[i], mixed)
    own = score(prefix)
    M = np.maximum(top, own)
    a, b = exp(top - M), exp(own - M)
    r = F(1) / fma(a, total, b)
    want = fma(a[:, None], mixed, b[:, None] * prefix) * r[:, None]
    got, _ = run(Op.ATTN_RES)
    assert same(got, want)
    assert not same(got, fma(a[:, None], mixed, b[:, None] * prefix) / fma(a, total, b)[:, None])


def test_short_conv(run):
    s = CASES[Op.SHORT_CONV].stored
    x, w = s["x"], s["conv"]
    past = np.concatenate([np.zeros((3, x.shape[1]), np.float32), x])
    y = w[:, 0] * past[0:T]
    for tap in (1, 2, 3):
        y = fma(w[:, tap], past[tap : tap + T], y)
    got, taps = run(Op.SHORT_CONV)
    assert same(got, y)
    assert same(taps[1], x[-3:])


def decay(s, lower_bound, exp, sigmoid):
    A = np.repeat(exp(s["a_log"][:HEADS]), D)
    return exp(F(lower_bound) * sigmoid(A * (s["f"] + s["dt_bias"])))


def test_kda_decay(run, exp, sigmoid):
    assert same(run(Op.KDA_DECAY)[0], decay(CASES[Op.KDA_DECAY].stored, -5.0, exp, sigmoid))


def test_kda_core(run, exp, sigmoid):
    s = CASES[Op.KDA_CORE].stored
    q, k, v = (s[n].reshape(T, HEADS, D) for n in "qkv")
    q = (q * (F(1) / np.sqrt(rule3.dot(q, q) + F(1e-6)))[..., None]) * F(D**-0.5)
    k = k * (F(1) / np.sqrt(rule3.dot(k, k) + F(1e-6)))[..., None]
    a, beta = decay(s, -5.0, exp, sigmoid).reshape(T, HEADS, D), sigmoid(s["b"])
    S = np.zeros((HEADS, D, D), np.float32)
    want = np.empty((T, HEADS, D), np.float32)
    for t in range(T):
        S = a[t][:, :, None] * S
        u = v[t] - rule3.dot(S.transpose(0, 2, 1), k[t][:, None])
        S = fma(k[t][:, :, None], (beta[t][:, None] * u)[:, None], S)
        want[t] = rule3.dot(S.transpose(0, 2, 1), q[t][:, None])
    got, state = run(Op.KDA_CORE)
    assert same(got, want.reshape(T, -1))
    assert same(state[1], S)


def test_softmax_by_pages(run, exp):
    case = CASES[Op.MLA_ATTEND]
    rows, q = case.meaning["cache"], case.stored["q"].reshape(T, HEADS, LATENT + ROPE)
    scale, first = F(case.params["scale"]), case.tokens().first
    want = np.empty((T, HEADS, LATENT), np.float32)
    for t, h in ((0, 1), (T - 1, 2)):
        end = first + t + 1
        for start in range(0, end, 256):
            page = rows[start : min(start + 256, end)]
            scores = rule3.dot(page, q[t, h]) * scale
            m_p = scores.max()
            e = exp(scores - m_p)
            s_p, o_p = rule3.plain_sum(e), np.zeros(LATENT, np.float32)
            for weight, row in zip(e, page[:, :LATENT], strict=True):
                o_p = fma(weight, row, o_p)
            if start == 0:
                m, s, o = m_p, s_p, o_p
                continue
            M = max(m, m_p)
            a, b = exp(np.array([m - M, m_p - M], np.float32))
            s, o, m = fma(b, s_p, a * s), fma(b, o_p, a * o), M
        want[t, h] = o / s
    got = run(Op.MLA_ATTEND)[0].reshape(T, HEADS, LATENT)
    assert same(got[0, 1], want[0, 1])
    assert same(got[T - 1, 2], want[T - 1, 2])


def test_router_weights(run, sigmoid):
    s = CASES[Op.ROUTER_TOPK].stored
    score = sigmoid(s["logits"])
    order = np.argsort(-(score + s["bias"]), axis=1, kind="stable")
    ids = np.sort(order[:, :TOP_K], axis=1)
    picked = np.take_along_axis(score, ids, axis=1)
    total = rule3.plain_sum(picked) + F(1e-20)
    got, _ = run(Op.ROUTER_TOPK)
    assert np.array_equal(got[:, :TOP_K].view(np.uint32), ids)
    assert same(got[:, TOP_K:], (picked / total[:, None]) * F(1.5))
    assert ids.tolist() == [[2, 7, 9]] * T


def test_expert_combine(run):
    case = CASES[Op.MOE_DOWN_MXFP4]
    x = case.stored["x"].reshape(T, TOP_K, -1)
    route, w2 = case.stored["route"], case.meaning["w2"]
    weights = np.ascontiguousarray(route[:, TOP_K:]).view(np.float32)
    want, wrong = np.empty((2, T, 70), np.float32)
    for t in range(T):
        d = [rule3.blocks(w2[e], np.broadcast_to(x[t, s], w2[e].shape), 8)
             for s, e in enumerate(route[t, :TOP_K])]  # fmt: skip
        acc = weights[t, 0] * d[0]
        for s in range(1, TOP_K):
            acc = fma(weights[t, s], d[s], acc)
        want[t] = rule3.tree(acc)
        own = [rule3.tree(part) for part in d]
        wrong[t] = fma(weights[t, 2], own[2], fma(weights[t, 1], own[1], weights[t, 0] * own[0]))
    got, _ = run(Op.MOE_DOWN_MXFP4)
    assert same(got, want)
    assert not same(got, wrong)  # control: whole experts added, the tree inside
