"""The meaning of ops over any algebra, on lists: what the falsifier puts symbols through.

The same definitions as `proofs/Semantics.v`, in Python: a value is a list of rows (tokens), a
stack a list of those; numbers are whatever the algebra's functions take. Run on floats they are
compared with the reference; run on symbols, the two sides of a rule become two expressions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3tool.isa.table import Op

Number = Any  # float, Fraction or a solver's term
Vec = list[Number]
Mat = list[Vec]
Stack = list[Mat]


@dataclass(frozen=True, slots=True)
class Algebra:
    """Functions that nothing is assumed about, and what a run decides.

    `choose(k, scores, bias)` returns the ids of experts, ascending. `ranks` share row-parallel
    products; head-only linears compute tokens from `head_from` on.
    """

    exp: Callable[[Number], Number]
    tanh: Callable[[Number], Number]
    sqrt: Callable[[Number], Number]
    largest: Callable[[Number, Number], Number]
    choose: Callable[[int, Vec, Vec], list[int]]
    tiny: Number
    ranks: int = 2
    head_from: int = 1

    def sigmoid(self, x: Number) -> Number:
        """Return 1 / (1 + exp(-x))."""
        return 1 / (1 + self.exp(-x))

    def softcap(self, beta: Number, x: Number) -> Number:
        """Return beta tanh(x / beta)."""
        return beta * self.tanh(x / beta)

    def situ(self, beta: Number, linear: Number, gate: Number, up: Number) -> Number:
        """Return the gated product of SiTU: the sigmoid takes the gate as it is, not capped."""
        return self.softcap(beta, gate) * self.sigmoid(gate) * self.softcap(linear, up)


def total(row: Vec) -> Number:
    """Return the sum of a row, from the right, as the proofs' fold does."""
    out: Number = 0
    for x in reversed(row):
        out = x + out
    return out


def dot(w: Vec, x: Vec) -> Number:
    """Return the product of two rows."""
    return total([a * b for a, b in zip(w, x, strict=True)])


def matvec(w: Mat, x: Vec) -> Vec:
    """Return a row's product with every row of a matrix."""
    return [dot(row, x) for row in w]


def mix(width: int, ks: Vec, rows: Mat) -> Vec:
    """Return the sum of k_i times row i."""
    return [
        total([k * row[i] for k, row in zip(ks, rows, strict=True)]) for i in range(width)
    ]


def chunks(d: int, row: list[Any]) -> list[Any]:
    """Return a row's runs of d."""
    return [row[i : i + d] for i in range(0, len(row), d)]


def share(a: Algebra, r: int, row: Vec) -> Vec:
    """Return one rank's part of a row."""
    found: Vec = chunks(len(row) // a.ranks, row)[r]
    return found


def _rows(*values: Mat) -> list[Any]:
    return list(zip(*values, strict=True))


def _each(f: Callable[..., Number], *values: Mat) -> Mat:
    return [[f(*xs) for xs in zip(*rows, strict=True)] for rows in _rows(*values)]


def _inv(a: Algebra, eps: Number, x: Vec) -> Number:
    return 1 / a.sqrt(total([v * v for v in x]) / len(x) + eps)


def _rms(a: Algebra, x: Vec, norm: Vec, eps: Number) -> Vec:
    inv = _inv(a, eps, x)
    return [v * inv * g for v, g in zip(x, norm, strict=True)]


def _linear(a: Algebra, x: Mat, w: Mat, head: int) -> Mat:
    return [matvec(w, r) if not head or t >= a.head_from else [] for t, r in enumerate(x)]


def _norm_linear(a: Algebra, x: Mat, norm: Vec, w: Mat, eps: Number, head: int) -> Mat:
    out: Mat = []
    for t, r in enumerate(x):
        inv = _inv(a, eps, r)
        row = [total([c * (v * inv * g) for c, v, g in zip(wr, r, norm, strict=True)]) for wr in w]
        out.append(row if not head or t >= a.head_from else [])
    return out


def _blocks(a: Algebra, x: Mat, w: Mat) -> Stack:
    return [
        [[dot(share(a, r, wr), share(a, r, row)) for wr in w] for row in x] for r in range(a.ranks)
    ]


def _situ_blocks(a: Algebra, g: Mat, u: Mat, w: Mat, beta: Number, linear: Number) -> Stack:
    return _blocks(a, _each(lambda x, y: a.situ(beta, linear, x, y), g, u), w)


def _glu(a: Algebra, x: Mat, gate: Mat, up: Mat, beta: Number, linear: Number) -> Mat:
    return [
        [a.situ(beta, linear, dot(g, r), dot(u, r)) for g, u in zip(gate, up, strict=True)]
        for r in x
    ]


# -- per head --------------------------------------------------------------------------------------


def _l2(a: Algebra, eps: Number, x: Vec) -> Vec:
    inv = 1 / a.sqrt(total([v * v for v in x]) + eps)
    return [v * inv for v in x]


def _gated(a: Algebra, o: Vec, norm: Vec, gate: Vec, eps: Number) -> Vec:
    inv = _inv(a, eps, o)
    return [v * inv * w * a.sigmoid(g) for v, w, g in zip(o, norm, gate, strict=True)]


def _gated_norm(a: Algebra, o: Mat, norm: Vec, gate: Mat, eps: Number) -> Mat:
    d = len(norm)
    return [
        [y for oh, gh in _rows(chunks(d, r), chunks(d, g)) for y in _gated(a, oh, norm, gh, eps)]
        for r, g in _rows(o, gate)
    ]


def _decay(a: Algebra, lb: Number, al: Number, f: Number, dt: Number) -> Number:
    return a.exp(lb * a.sigmoid(a.exp(al) * (f + dt)))


def _kda_decay(a: Algebra, f: Mat, a_log: Vec, dt: Vec, lb: Number, d: int) -> Mat:
    return [
        [_decay(a, lb, a_log[i // d], x, y) for i, (x, y) in enumerate(zip(r, dt, strict=True))]
        for r in f
    ]


def _delta(state: Mat, q: Vec, k: Vec, v: Vec, kept: Vec, b: Number) -> tuple[Mat, Vec]:
    decayed = [[x * y for y in row] for x, row in zip(kept, state, strict=True)]
    error = [b * (x - y) for x, y in zip(v, mix(len(v), k, decayed), strict=True)]
    state = [
        [ki * u + s for u, s in zip(error, row, strict=True)]
        for ki, row in zip(k, decayed, strict=True)
    ]
    return state, mix(len(v), q, state)


def _kda_step(
    a: Algebra, q: Mat, k: Mat, v: Mat, kept: Mat, b: Mat, s: Stack, d: int
) -> tuple[Mat, Stack]:
    out: Mat = []
    for *token, bt in _rows(q, k, v, kept, b):
        heads = [_delta(*h) for h in _rows(s, *(chunks(d, x) for x in token), bt)]
        s = [state for state, _ in heads]
        out.append([y for _, o in heads for y in o])
    return out, s


def _core(a: Algebra, *x: Any) -> tuple[Mat, Stack]:
    q, k, v, f, b, a_log, dt, s, eps, scale, lb, d = x
    out: Mat = []
    for qt, kt, vt, ft, bt in _rows(q, k, v, f, b):
        made = []
        for h, state in enumerate(s):
            qh, kh, vh, fh, dh = (chunks(d, row)[h] for row in (qt, kt, vt, ft, dt))
            kept = [_decay(a, lb, a_log[h], x, y) for x, y in zip(fh, dh, strict=True)]
            qn = [y * scale for y in _l2(a, eps, qh)]
            made.append(_delta(state, qn, _l2(a, eps, kh), vh, kept, a.sigmoid(bt[h])))
        s = [state for state, _ in made]
        out.append([y for _, o in made for y in o])
    return out, s


def _conv(a: Algebra, x: Mat, kernel: Mat, taps: Mat) -> tuple[Mat, Mat]:
    out: Mat = []
    for row in x:
        past = [*taps, row]
        out.append([
            w[0] * p + w[1] * q + w[2] * r + w[3] * s
            for w, p, q, r, s in zip(kernel, *past, strict=True)
        ])
        taps = past[1:]
    return out, taps


def _conv_silu(a: Algebra, x: Mat, kernel: Mat, taps: Mat) -> tuple[Mat, Mat]:
    y, taps = _conv(a, x, kernel, taps)
    return [[v * a.sigmoid(v) for v in row] for row in y], taps


def _kda_heads(a: Algebra, *x: Any) -> tuple[Any, ...]:
    q, k, v, f, b, gate, cq, ck, cv, f_b, a_log, dt, o_norm, tq, tk, tv, s, *numbers = x
    eps2, scale, lb, eps, d = numbers
    out: Mat = []
    for t in range(len(q)):  # a token at a time through everything
        (yq,), tq = _conv_silu(a, [q[t]], cq, tq)
        (yk,), tk = _conv_silu(a, [k[t]], ck, tk)
        (yv,), tv = _conv_silu(a, [v[t]], cv, tv)
        ft = [matvec(f_b, f[t])]
        o, s = _core(a, [yq], [yk], [yv], ft, [b[t]], a_log, dt, s, eps2, scale, lb, d)
        out += _gated_norm(a, o, o_norm, [gate[t]], eps)
    return out, tq, tk, tv, s


# -- mixing ----------------------------------------------------------------------------------------


def _score(a: Algebra, rn: Vec, rp: Vec, eps: Number, v: Vec) -> Number:
    return dot(v, [x * y for x, y in zip(rn, rp, strict=True)]) * _inv(a, eps, v)


def _largest(a: Algebra, row: Vec) -> Number:
    out = row[0]
    for x in row[1:]:
        out = a.largest(out, x)
    return out


def _part(a: Algebra, rn: Vec, rp: Vec, eps: Number, rows: Mat) -> Vec:
    scores = [_score(a, rn, rp, eps, v) for v in rows]
    m = _largest(a, scores)
    e = [a.exp(s - m) for s in scores]
    return [*mix(len(rn), e, rows), m, total(e), *[0] * 14]


def _merge(a: Algebra, part: Vec, sp: Number, v: Vec) -> Vec:
    n = len(v)
    big = a.largest(part[n], sp)
    x, y = a.exp(part[n] - big), a.exp(sp - big)
    r = 1 / (x * part[n + 1] + y)
    return [(x * o + y * p) * r for o, p in zip(part[:n], v, strict=True)]


def _attn_res(
    a: Algebra, prefix: Mat, blocks: Stack, rn: Vec, rp: Vec, n: int, eps: Number
) -> Mat:
    return [
        _merge(a, _part(a, rn, rp, eps, [b[t] for b in blocks[:n]]), _score(a, rn, rp, eps, v), v)
        for t, v in enumerate(prefix)
    ]


def _attn_res_norm(a: Algebra, *x: Any) -> Mat:
    prefix, blocks, rn, rp, norm, n, eps, norm_eps = x
    return [_rms(a, y, norm, norm_eps) for y in _attn_res(a, prefix, blocks, rn, rp, n, eps)]


def _attn_part(a: Algebra, blocks: Stack, rn: Vec, rp: Vec, n: int, eps: Number) -> Mat:
    return [_part(a, rn, rp, eps, list(rows)) for rows in _rows(*blocks[:n])]


def _mix_linears(a: Algebra, prefix: Mat, part: Mat, rn: Vec, rp: Vec, norm: Vec, *x: Any) -> Stack:
    *ws, eps, norm_eps = x
    y = [_merge(a, p, _score(a, rn, rp, eps, v), v) for v, p in _rows(prefix, part)]
    return [_norm_linear(a, y, norm, w, norm_eps, 0) for w in ws]


# -- latent attention ------------------------------------------------------------------------------


def _query(nope: int, latent: int, q: Vec, w: Mat) -> Vec:
    return [*mix(latent, q[:nope], w[:nope]), *q[nope:]]


def _qlat(a: Algebra, q: Mat, kv_b: Mat, nope: int, rope: int, latent: int, v: int) -> Mat:
    heads = chunks(nope + v, kv_b)
    return [
        [y for h, w in _rows(chunks(nope + rope, r), heads) for y in _query(nope, latent, h, w)]
        for r in q
    ]


def _attend_head(a: Algebra, latent: int, scale: Number, rows: Mat, q: Vec) -> Vec:
    scores = [dot(q, c) * scale for c in rows]
    m = _largest(a, scores)
    e = [a.exp(s - m) for s in scores]
    s = total(e)
    return [o / s for o in mix(latent, e, [c[:latent] for c in rows])]


def _attend(a: Algebra, q: Mat, cache: Mat, latent: int, rope: int, scale: Number) -> Mat:
    out: Mat = []
    for t, row in enumerate(q):
        seen = cache[: len(cache) - len(q) + t + 1]
        heads = [_attend_head(a, latent, scale, seen, h) for h in chunks(latent + rope, row)]
        out.append([y for head in heads for y in head])
    return out


def _uv(a: Algebra, ctx: Mat, kv_b: Mat, nope: int, v: int, latent: int) -> Mat:
    heads = chunks(nope + v, kv_b)
    return [
        [y for c, w in _rows(chunks(latent, r), heads) for y in matvec(w[nope:], c)] for r in ctx
    ]


def _uv_gate(a: Algebra, ctx: Mat, kv_b: Mat, gate: Mat, nope: int, v: int, latent: int) -> Mat:
    o = _uv(a, ctx, kv_b, nope, v, latent)
    return _each(lambda x, g: x * a.sigmoid(g), o, gate)


def _mla_heads(a: Algebra, q: Mat, kv_b: Mat, cache: Mat, gate: Mat, *x: Any) -> Mat:
    nope, rope, latent, v, scale = x
    y = _attend(a, _qlat(a, q, kv_b, nope, rope, latent, v), cache, latent, rope, scale)
    return _uv_gate(a, y, kv_b, gate, nope, v, latent)


# -- experts ---------------------------------------------------------------------------------------

Route = list[list[tuple[int, Number]]]


def _route(a: Algebra, scores: Mat, bias: Vec, k: int, scale: Number) -> Route:
    out = []
    for row in scores:
        ids = a.choose(k, row, bias)
        s = [a.sigmoid(row[i]) for i in ids]
        out.append([(i, w / (total(s) + a.tiny) * scale) for i, w in zip(ids, s, strict=True)])
    return out


def _moe_up(a: Algebra, z: Mat, route: Route, w: Stack, k: int) -> Mat:
    return [[y for i, _ in rt for y in matvec(w[i], r)] for r, rt in _rows(z, route)]


def _moe_glu(a: Algebra, *x: Any) -> Mat:
    z, route, w1, w3, _, beta, linear = x
    return [
        [y for i, _ in rt for y in _glu(a, [r], w1[i], w3[i], beta, linear)[0]]
        for r, rt in _rows(z, route)
    ]


def _moe_down(a: Algebra, x: Mat, route: Route, w2: Stack, k: int) -> Stack:
    def row(r: int, xs: Vec, rt: list[tuple[int, Number]]) -> Vec:
        parts = [
            [weight * dot(share(a, r, wr), share(a, r, slot)) for wr in w2[i]]
            for slot, (i, weight) in zip(chunks(len(xs) // k, xs), rt, strict=True)
        ]
        return [total(list(ys)) for ys in zip(*parts, strict=True)]

    return [[row(r, xs, rt) for xs, rt in _rows(x, route)] for r in range(a.ranks)]


def _moe_glu_topk(a: Algebra, *x: Any) -> Mat:
    z, scores, bias, w1, w3, k, beta, linear = x
    route = [[(i, None) for i in a.choose(k, row, bias)] for row in scores]
    return _moe_glu(a, z, route, w1, w3, k, beta, linear)


def _moe_down_topk(a: Algebra, *x: Any) -> Stack:
    xs, scores, bias, w2, k, scale = x
    return _moe_down(a, xs, _route(a, scores, bias, k, scale), w2, k)


# -- collectives -----------------------------------------------------------------------------------


def _sum(a: Algebra, parts: Stack) -> Mat:
    out = parts[0]
    for part in parts[1:]:
        out = _each(lambda x, y: x + y, out, part)
    return out


def _join(a: Algebra, parts: Stack) -> Mat:
    return [[y for row in rows for y in row] for rows in _rows(*parts)]


def _plus(x: Number, y: Number) -> Number:
    return x + y


# Each takes operands in the op table's order, then attributes, and gives the value; one that
# updates states gives the value and then the states, in the operands' order.
MEANINGS: Mapping[Op, Callable[..., Any]] = {
    Op.GEMV_BF16: _linear,
    Op.GEMV_BF16_BLOCKS: _blocks,
    Op.SITU_GEMV_BLOCKS: _situ_blocks,
    Op.NORM_GEMV_BF16: _norm_linear,
    Op.GLU_BF16: _glu,
    Op.RMSNORM: lambda a, x, w, eps: [_rms(a, r, w, eps) for r in x],
    Op.ATTN_RES: _attn_res,
    Op.ATTN_RES_NORM: _attn_res_norm,
    Op.ATTN_PART: _attn_part,
    Op.MIX_LINEARS_3: _mix_linears,
    Op.MIX_LINEARS_4: _mix_linears,
    Op.MIX_LINEARS_6: _mix_linears,
    Op.PART: lambda a, group, index: group[index],
    Op.ADD: lambda a, x, y: _each(_plus, x, y),
    Op.MUL: lambda a, x, y: _each(lambda u, v: u * v, x, y),
    Op.SIGMOID: lambda a, x: _each(a.sigmoid, x),
    Op.SILU: lambda a, x: _each(lambda v: v * a.sigmoid(v), x),
    Op.SOFTCAP: lambda a, x, beta: _each(lambda v: a.softcap(beta, v), x),
    Op.SITU: lambda a, g, u, beta, lin: _each(lambda x, y: a.situ(beta, lin, x, y), g, u),
    Op.SCALE: lambda a, x, factor: _each(lambda v: v * factor, x),
    Op.L2NORM: lambda a, x, eps, d: [
        [y for head in chunks(d, r) for y in _l2(a, eps, head)] for r in x
    ],
    Op.HEAD_RMSNORM: lambda a, x, w, eps: [
        [y for head in chunks(len(w), r) for y in _rms(a, head, w, eps)] for r in x
    ],
    Op.SHORT_CONV: _conv,
    Op.CONV_SILU: _conv_silu,
    Op.KDA_DECAY: _kda_decay,
    Op.KDA_STEP: _kda_step,
    Op.KDA_CORE: _core,
    Op.KDA_GATED_NORM: _gated_norm,
    Op.KDA_HEADS: _kda_heads,
    Op.MLA_QLAT: _qlat,
    Op.MLA_ATTEND: _attend,
    Op.MLA_UV: _uv,
    Op.MLA_OUT_GATE: lambda a, o, g: _each(lambda x, y: x * a.sigmoid(y), o, g),
    Op.MLA_UV_GATE: _uv_gate,
    Op.MLA_HEADS: _mla_heads,
    Op.ROUTER_TOPK: _route,
    Op.MOE_UP_MXFP4: _moe_up,
    Op.MOE_GLU_MXFP4: _moe_glu,
    Op.MOE_DOWN_MXFP4: _moe_down,
    Op.MOE_GLU_TOPK: _moe_glu_topk,
    Op.MOE_DOWN_TOPK: _moe_down_topk,
    Op.ALL_REDUCE: _sum,
    Op.ALL_GATHER: _join,
    Op.ALL_REDUCE_ADD: lambda a, r, x: _each(_plus, r, _sum(a, x)),
    Op.REDUCE_GATHER: lambda a, up, x: _each(_plus, _join(a, up), _sum(a, x)),
    Op.REDUCE_GATHER_ADD: lambda a, r, up, x: _each(
        lambda v, p, q: v + (p + q), r, _join(a, up), _sum(a, x)
    ),
}
# Ops whose second and further results are their states'.
UPDATES: Mapping[Op, int] = {
    Op.SHORT_CONV: 1, Op.CONV_SILU: 1, Op.KDA_STEP: 1, Op.KDA_CORE: 1, Op.KDA_HEADS: 4,
}  # fmt: skip
