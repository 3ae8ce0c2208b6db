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


def _query(nope: int, latent: int, q: Vec, w: Mat) -> Vec:
    return [*mix(latent, q[:nope], w[:nope]), *q[nope:]]


def _qlat(a: Algebra, q: Mat, kv_b: Mat, nope: int, rope: int, latent: int, v: int) -> Mat:
    heads = chunks(nope + v, kv_b)
    return [
        [y for h, w in rows_of(chunks(nope + rope, r), heads) for y in _query(nope, latent, h, w)]
        for r in q
    ]


def _attend_head(a: Algebra, latent: int, scale: Number, rows: Mat, q: Vec) -> Vec:
    scores = [dot(q, c) * scale for c in rows]
    m = largest_of(a, scores)
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
        [y for c, w in rows_of(chunks(latent, r), heads) for y in matvec(w[nope:], c)] for r in ctx
    ]


def _uv_gate(a: Algebra, ctx: Mat, kv_b: Mat, gate: Mat, nope: int, v: int, latent: int) -> Mat:
    o = _uv(a, ctx, kv_b, nope, v, latent)
    return each(lambda x, g: x * a.sigmoid(g), o, gate)


def _mla_heads(a: Algebra, q: Mat, kv_b: Mat, cache: Mat, gate: Mat, *x: Any) -> Mat:
    nope, rope, latent, v, scale = x
    y = _attend(a, _qlat(a, q, kv_b, nope, rope, latent, v), cache, latent, rope, scale)
    return _uv_gate(a, y, kv_b, gate, nope, v, latent)


MEANINGS: Mapping[Op, Callable[..., Any]] = {
    Op.MLA_QLAT: _qlat,
    Op.MLA_ATTEND: _attend,
    Op.MLA_UV: _uv,
    Op.MLA_OUT_GATE: lambda a, o, g: each(lambda x, y: x * a.sigmoid(y), o, g),
    Op.MLA_UV_GATE: _uv_gate,
    Op.MLA_HEADS: _mla_heads,
}
