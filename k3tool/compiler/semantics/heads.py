"""Kimi delta attention: norms per head, convolutions, decay, the delta rule."""

from collections.abc import Callable, Mapping
from typing import Any

from k3tool.compiler.semantics.algebra import (
    Algebra,
    Mat,
    Number,
    Stack,
    Vec,
    chunks,
    matvec,
    mean_inv,
    mix,
    rms,
    rows_of,
    total,
)
from k3tool.isa.table import Op


def _l2(a: Algebra, eps: Number, x: Vec) -> Vec:
    inv = 1 / a.sqrt(total([v * v for v in x]) + eps)
    return [v * inv for v in x]


def _gated(a: Algebra, rd: int, o: Vec, norm: Vec, gate: Vec, eps: Number) -> Vec:
    inv = mean_inv(a, eps, o)
    return [a.rnd(rd, v * inv * w * a.sigmoid(g)) for v, w, g in zip(o, norm, gate, strict=True)]


def _gated_norm(a: Algebra, o: Mat, norm: Vec, gate: Mat, eps: Number, rd: int) -> Mat:
    out: Mat = []
    for r, g in rows_of(o, gate):
        heads = rows_of(chunks(len(norm), r), chunks(len(norm), g))
        out.append([y for oh, gh in heads for y in _gated(a, rd, oh, norm, gh, eps)])
    return out


def _decay(a: Algebra, lb: Number, al: Number, f: Number, dt: Number) -> Number:
    return a.exp(lb * a.sigmoid(a.exp(al) * (f + dt)))


def _kda_decay(a: Algebra, f: Mat, a_log: Vec, dt: Vec, lb: Number, d: int) -> Mat:
    return [
        [_decay(a, lb, a_log[i // d], x, y) for i, (x, y) in enumerate(zip(r, dt, strict=True))]
        for r in f
    ]


def _delta(
    a: Algebra, rd: int, state: Mat, q: Vec, k: Vec, v: Vec, kept: Vec, b: Number
) -> tuple[Mat, Vec]:
    decayed = [[x * y for y in row] for x, row in zip(kept, state, strict=True)]
    error = [b * (x - y) for x, y in zip(v, mix(len(v), k, decayed), strict=True)]
    state = [
        [ki * u + s for u, s in zip(error, row, strict=True)]
        for ki, row in zip(k, decayed, strict=True)
    ]
    return state, [a.rnd(rd, y) for y in mix(len(v), q, state)]


def _kda_step(
    a: Algebra, q: Mat, k: Mat, v: Mat, kept: Mat, b: Mat, s: Stack, rd: int, d: int
) -> tuple[Mat, Stack]:
    out: Mat = []
    for *token, bt in rows_of(q, k, v, kept, b):
        heads = [_delta(a, rd, *h) for h in rows_of(s, *(chunks(d, x) for x in token), bt)]
        s = [state for state, _ in heads]
        out.append([y for _, o in heads for y in o])
    return out, s


def _core(a: Algebra, *x: Any) -> tuple[Mat, Stack]:
    q, k, v, f, b, a_log, dt, s, eps, scale, lb, rd, d = x
    out: Mat = []
    for qt, kt, vt, ft, bt in rows_of(q, k, v, f, b):
        made = []
        for h, state in enumerate(s):
            qh, kh, vh, fh, dh = (chunks(d, row)[h] for row in (qt, kt, vt, ft, dt))
            kept = [_decay(a, lb, a_log[h], x, y) for x, y in zip(fh, dh, strict=True)]
            qn = [y * scale for y in _l2(a, eps, qh)]
            inputs = qn, _l2(a, eps, kh), vh, kept, a.sigmoid(bt[h])
            made.append(_delta(a, rd, state, *inputs))
        s = [state for state, _ in made]
        out.append([y for _, o in made for y in o])
    return out, s


def _conv(a: Algebra, x: Mat, kernel: Mat, taps: Mat) -> tuple[Mat, Mat]:
    out: Mat = []
    for row in x:
        past = [*taps, row]
        out.append(
            [
                w[0] * p + w[1] * q + w[2] * r + w[3] * s
                for w, p, q, r, s in zip(kernel, *past, strict=True)
            ]
        )
        taps = past[1:]
    return out, taps


def _conv_silu(a: Algebra, x: Mat, kernel: Mat, taps: Mat, rd: int) -> tuple[Mat, Mat]:
    y, taps = _conv(a, x, kernel, taps)
    return [[a.rnd(rd, v * a.sigmoid(v)) for v in row] for row in y], taps


def _kda_heads(a: Algebra, *x: Any) -> tuple[Any, ...]:
    q, k, v, f, b, gate, cq, ck, cv, f_b, a_log, dt, o_norm, tq, tk, tv, s, *numbers = x
    eps2, scale, lb, eps, rd, d = numbers
    out: Mat = []
    for t in range(len(q)):  # a token at a time through everything
        (yq,), tq = _conv_silu(a, [q[t]], cq, tq, rd)
        (yk,), tk = _conv_silu(a, [k[t]], ck, tk, rd)
        (yv,), tv = _conv_silu(a, [v[t]], cv, tv, rd)
        ft = [matvec(a, rd, f_b, f[t])]
        o, s = _core(a, [yq], [yk], [yv], ft, [b[t]], a_log, dt, s, eps2, scale, lb, rd, d)
        out += _gated_norm(a, o, o_norm, [gate[t]], eps, rd)
    return out, tq, tk, tv, s


MEANINGS: Mapping[Op, Callable[..., Any]] = {
    Op.L2NORM: lambda a, x, eps, d: [
        [y for head in chunks(d, r) for y in _l2(a, eps, head)] for r in x
    ],
    Op.HEAD_RMSNORM: lambda a, x, w, eps: [
        [y for head in chunks(len(w), r) for y in rms(a, 0, head, w, eps)] for r in x
    ],
    Op.SHORT_CONV: _conv,
    Op.CONV_SILU: _conv_silu,
    Op.KDA_DECAY: _kda_decay,
    Op.KDA_STEP: _kda_step,
    Op.KDA_CORE: _core,
    Op.KDA_GATED_NORM: _gated_norm,
    Op.KDA_HEADS: _kda_heads,
}
