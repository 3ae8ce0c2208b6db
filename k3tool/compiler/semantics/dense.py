"""Dense products, elementwise ops and the residual mix."""

from collections.abc import Callable, Mapping
from typing import Any

from k3tool.compiler.semantics.algebra import (
    Algebra,
    Mat,
    Number,
    Stack,
    Vec,
    dot,
    each,
    glu,
    largest_of,
    matvec,
    mean_inv,
    mix,
    plus,
    rms,
    rows_of,
    share,
    total,
)
from k3tool.isa.table import Op


def _linear(a: Algebra, x: Mat, w: Mat, head: int, rd: int) -> Mat:
    return [matvec(a, rd, w, r) if not head or t >= a.head_from else [] for t, r in enumerate(x)]


def _embed(a: Algebra, table: Mat) -> Mat:
    return [table[i] for i in a.token_ids]


def _push(a: Algebra, prefix: Mat, blocks: Stack, index: int) -> Stack:
    return [*blocks[:index], prefix, *blocks[index + 1 :]]


def _norm_linear(
    a: Algebra, x: Mat, norm: Vec, w: Mat, eps: Number, head: int, norm_rd: int, rd: int
) -> Mat:
    return _linear(a, [rms(a, norm_rd, r, norm, eps) for r in x], w, head, rd)


def _blocks(a: Algebra, x: Mat, w: Mat, x_bf16: int) -> Stack:
    return [
        [[dot(share(a, r, wr), share(a, r, row)) for wr in w] for row in x] for r in range(a.ranks)
    ]


def _situ(a: Algebra, g: Mat, u: Mat, beta: Number, linear: Number, rd: int) -> Mat:
    return each(lambda x, y: a.rnd(rd, a.situ(beta, linear, x, y)), g, u)


def _situ_blocks(
    a: Algebra, g: Mat, u: Mat, w: Mat, beta: Number, linear: Number, rd: int
) -> Stack:
    return _blocks(a, _situ(a, g, u, beta, linear, rd), w, rd)


# -- mixing ----------------------------------------------------------------------------------------


def _score(a: Algebra, rn: Vec, rp: Vec, eps: Number, v: Vec) -> Number:
    return dot(v, [x * y for x, y in zip(rn, rp, strict=True)]) * mean_inv(a, eps, v)


def _part(a: Algebra, rn: Vec, rp: Vec, eps: Number, rows: Mat) -> Vec:
    scores = [_score(a, rn, rp, eps, v) for v in rows]
    m = largest_of(a, scores)
    e = [a.exp(s - m) for s in scores]
    return [*mix(len(rn), e, rows), m, total(e), *[0] * 14]


def _merge(a: Algebra, part: Vec, sp: Number, v: Vec) -> Vec:
    n = len(v)
    big = a.largest(part[n], sp)
    x, y = a.exp(part[n] - big), a.exp(sp - big)
    r = 1 / (x * part[n + 1] + y)
    return [(x * o + y * p) * r for o, p in zip(part[:n], v, strict=True)]


def _attn_res(
    a: Algebra, prefix: Mat, blocks: Stack, rn: Vec, rp: Vec, n: int, eps: Number, rd: int
) -> Mat:
    out: Mat = []
    for t, v in enumerate(prefix):
        part = _part(a, rn, rp, eps, [b[t] for b in blocks[:n]])
        out.append([a.rnd(rd, y) for y in _merge(a, part, _score(a, rn, rp, eps, v), v)])
    return out


def _attn_res_norm(a: Algebra, *x: Any) -> Mat:
    prefix, blocks, rn, rp, norm, n, eps, norm_eps, rd = x
    mixed = _attn_res(a, prefix, blocks, rn, rp, n, eps, rd)
    return [rms(a, rd, y, norm, norm_eps) for y in mixed]


def _attn_part(a: Algebra, blocks: Stack, rn: Vec, rp: Vec, n: int, eps: Number) -> Mat:
    return [_part(a, rn, rp, eps, list(rows)) for rows in rows_of(*blocks[:n])]


def _mix_linears(a: Algebra, prefix: Mat, part: Mat, rn: Vec, rp: Vec, norm: Vec, *x: Any) -> Stack:
    *ws, eps, norm_eps, rd = x
    y = [_merge(a, p, _score(a, rn, rp, eps, v), v) for v, p in rows_of(prefix, part)]
    y = each(lambda v: a.rnd(rd, v), y)
    return [_norm_linear(a, y, norm, w, norm_eps, 0, rd, rd) for w in ws]


def _mix_linears_headed(a: Algebra, *x: Any) -> Stack:
    *rest, w0, w1, w2, w3, eps, norm_eps, rd, head_rd = x
    prefix, part, rn, rp, norm = rest
    y = [_merge(a, p, _score(a, rn, rp, eps, v), v) for v, p in rows_of(prefix, part)]
    y = each(lambda v: a.rnd(rd, v), y)
    rounds = ((w0, head_rd), (w1, rd), (w2, rd), (w3, rd))
    return [_norm_linear(a, y, norm, w, norm_eps, 0, rd, own) for w, own in rounds]


MEANINGS: Mapping[Op, Callable[..., Any]] = {
    Op.EMBED_BF16: _embed,
    Op.BLOCK_PUSH: _push,
    Op.EMBED_PUSH: lambda a, table, blocks, index: _push(a, _embed(a, table), blocks, index),
    Op.GEMV_BF16: _linear,
    Op.GEMV_BF16_BLOCKS: _blocks,
    Op.GEMV_REDUCED: lambda a, x, w, x_bf16, rd: _linear(a, x, w, 0, rd),
    Op.SITU_GEMV_BLOCKS: _situ_blocks,
    Op.NORM_GEMV_BF16: _norm_linear,
    Op.GLU_BF16: glu,
    Op.RMSNORM: lambda a, x, w, eps, rd: [rms(a, rd, r, w, eps) for r in x],
    Op.ATTN_RES: _attn_res,
    Op.ATTN_RES_NORM: _attn_res_norm,
    Op.ATTN_PART: _attn_part,
    Op.MIX_LINEARS_3: _mix_linears,
    Op.MIX_LINEARS_4: _mix_linears_headed,
    Op.MIX_LINEARS_6: _mix_linears,
    Op.PART: lambda a, group, index: group[index],
    Op.ADD: lambda a, x, y, rd: plus(a, rd, x, y),
    Op.MUL: lambda a, x, y, rd: each(lambda u, v: a.rnd(rd, u * v), x, y),
    Op.SIGMOID: lambda a, x, rd: each(lambda v: a.rnd(rd, a.sigmoid(v)), x),
    Op.SILU: lambda a, x, rd: each(lambda v: a.rnd(rd, v * a.sigmoid(v)), x),
    Op.SOFTCAP: lambda a, x, beta: each(lambda v: a.softcap(beta, v), x),
    Op.SITU: _situ,
    Op.SCALE: lambda a, x, factor: each(lambda v: v * factor, x),
}
