"""Latent attention in its absorbed form."""

from collections.abc import Callable, Mapping
from typing import Any

from k3tool.compiler.semantics.algebra import (
    Algebra,
    Mat,
    Number,
    Vec,
    chunks,
    dot,
    each,
    largest_of,
    matvec,
    mix,
    rows_of,
    total,
)
from k3tool.isa.table import Op


def _query(a: Algebra, rd: int, nope: int, latent: int, q: Vec, w: Mat) -> Vec:
    return [*(a.rnd(rd, y) for y in mix(latent, q[:nope], w[:nope])), *q[nope:]]


def _qlat(a: Algebra, q: Mat, kv_b: Mat, nope: int, rope: int, latent: int, v: int, rd: int) -> Mat:
    out: Mat = []
    for r in q:
        heads = rows_of(chunks(nope + rope, r), chunks(nope + v, kv_b))
        out.append([y for h, w in heads for y in _query(a, rd, nope, latent, h, w)])
    return out


def _attend_head(a: Algebra, rd: int, latent: int, scale: Number, rows: Mat, q: Vec) -> Vec:
    scores = [dot(q, c) * scale for c in rows]
    m = largest_of(a, scores)
    e = [a.exp(s - m) for s in scores]
    s = total(e)
    return [a.rnd(rd, o / s) for o in mix(latent, e, [c[:latent] for c in rows])]


def _attend(a: Algebra, q: Mat, cache: Mat, latent: int, rope: int, scale: Number, rd: int) -> Mat:
    out: Mat = []
    for t, row in enumerate(q):
        seen = cache[: len(cache) - len(q) + t + 1]
        heads = [_attend_head(a, rd, latent, scale, seen, h) for h in chunks(latent + rope, row)]
        out.append([y for head in heads for y in head])
    return out


def _uv(a: Algebra, ctx: Mat, kv_b: Mat, nope: int, v: int, latent: int, rd: int) -> Mat:
    out: Mat = []
    for r in ctx:
        heads = rows_of(chunks(latent, r), chunks(nope + v, kv_b))
        out.append([y for c, w in heads for y in matvec(a, rd, w[nope:], c)])
    return out


def _out_gate(a: Algebra, o: Mat, gate: Mat, rd: int) -> Mat:
    return each(lambda x, g: a.rnd(rd, x * a.rnd(rd, a.sigmoid(g))), o, gate)


def _uv_gate(
    a: Algebra, ctx: Mat, kv_b: Mat, gate: Mat, nope: int, v: int, latent: int, rd: int
) -> Mat:
    return _out_gate(a, _uv(a, ctx, kv_b, nope, v, latent, rd), gate, rd)


def _mla_heads(a: Algebra, q: Mat, kv_b: Mat, cache: Mat, gate: Mat, *x: Any) -> Mat:
    nope, rope, latent, v, scale, rd = x
    y = _attend(a, _qlat(a, q, kv_b, nope, rope, latent, v, rd), cache, latent, rope, scale, rd)
    return _uv_gate(a, y, kv_b, gate, nope, v, latent, rd)


MEANINGS: Mapping[Op, Callable[..., Any]] = {
    Op.MLA_QLAT: _qlat,
    Op.MLA_ATTEND: _attend,
    Op.MLA_UV: _uv,
    Op.MLA_OUT_GATE: _out_gate,
    Op.MLA_UV_GATE: _uv_gate,
    Op.MLA_HEADS: _mla_heads,
}
