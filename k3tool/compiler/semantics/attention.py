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
    rms,
    rows_of,
    total,
)
from k3tool.isa.table import Op
from k3tool.model.operators import PART_EXTRA


def _query(a: Algebra, rd: int, nope: int, latent: int, q: Vec, w: Mat) -> Vec:
    return [*(a.rnd(rd, y) for y in mix(latent, q[:nope], w[:nope])), *q[nope:]]


def _qlat(a: Algebra, q: Mat, kv_b: Mat, nope: int, rope: int, latent: int, v: int, rd: int) -> Mat:
    out: Mat = []
    for r in q:
        heads = rows_of(chunks(nope + rope, r), chunks(nope + v, kv_b))
        out.append([y for h, w in heads for y in _query(a, rd, nope, latent, h, w)])
    return out


def _page(a: Algebra, latent: int, scale: Number, rows: Mat, q: Vec) -> Vec:
    """Return what a page gives: [sums of latents | maximum | sum | 0 ...]."""
    scores = [dot(q, c) * scale for c in rows]
    m = largest_of(a, scores)
    e = [a.exp(s - m) for s in scores]
    return [*mix(latent, e, [c[:latent] for c in rows]), m, total(e), *[0] * (PART_EXTRA - 2)]


def _merge_page(a: Algebra, latent: int, x: Vec, y: Vec) -> Vec:
    """Return the pages so far and one more as one page, relative to the larger maximum."""
    m = a.largest(x[latent], y[latent])
    f, g = a.exp(x[latent] - m), a.exp(y[latent] - m)
    o = [f * u + g * v for u, v in zip(x[:latent], y[:latent], strict=True)]
    return [*o, m, f * x[latent + 1] + g * y[latent + 1]]


def _context(a: Algebra, rd: int, latent: int, parts: Mat) -> Vec:
    """Return a head's context from what each page gives, first page first."""
    out = parts[0]
    for part in parts[1:]:
        out = _merge_page(a, latent, out, part)
    return [a.rnd(rd, o / out[latent + 1]) for o in out[:latent]]


def _seen(a: Algebra, cache: Mat, n_tokens: int, t: int) -> list[Mat]:
    """Return the pages that token t sees, the last one up to the token's own position."""
    return chunks(a.page_tokens, cache[: len(cache) - n_tokens + t + 1])


def _attend(a: Algebra, q: Mat, cache: Mat, *x: Any) -> Mat:
    latent, rope, scale, _, rd = x
    out: Mat = []
    for t, row in enumerate(q):
        seen = _seen(a, cache, len(q), t)
        parts = [[_page(a, latent, scale, p, h) for p in seen] for h in chunks(latent + rope, row)]
        out.append([y for part in parts for y in _context(a, rd, latent, part)])
    return out


def _pages(a: Algebra, q: Mat, cache: Mat, *x: Any) -> Mat:
    latent, rope, scale, _ = x
    out: Mat = []
    for t, row in enumerate(q):
        heads, seen = chunks(latent + rope, row), _seen(a, cache, len(q), t)
        out.append([y for p in seen for h in heads for y in _page(a, latent, scale, p, h)])
    return out


def _merged(a: Algebra, parts: Mat, kv_b: Mat, gate: Mat, *x: Any) -> Mat:
    nope, v, latent, _, rd = x
    n_heads, out = len(kv_b) // (nope + v), []
    for row in parts:
        pages = chunks(n_heads, chunks(latent + PART_EXTRA, row))
        heads = [[page[h] for page in pages] for h in range(n_heads)]
        out.append([y for head in heads for y in _context(a, rd, latent, head)])
    return _uv_gate(a, out, kv_b, gate, nope, v, latent, rd)


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
    q = _qlat(a, q, kv_b, nope, rope, latent, v, rd)
    y = _attend(a, q, cache, latent, rope, scale, None, rd)
    return _uv_gate(a, y, kv_b, gate, nope, v, latent, rd)


def _mla_query(a: Algebra, x: Mat, norm: Vec, w: Mat, kv_b: Mat, *numbers: Any) -> Mat:
    eps, nope, rope, latent, v, norm_rd, rd = numbers
    q = [matvec(a, rd, w, rms(a, norm_rd, r, norm, eps)) for r in x]
    return _qlat(a, q, kv_b, nope, rope, latent, v, rd)


MEANINGS: Mapping[Op, Callable[..., Any]] = {
    Op.MLA_QLAT: _qlat,
    Op.MLA_ATTEND: _attend,
    Op.MLA_UV: _uv,
    Op.MLA_OUT_GATE: _out_gate,
    Op.MLA_UV_GATE: _uv_gate,
    Op.MLA_HEADS: _mla_heads,
    Op.MLA_QUERY: _mla_query,
    Op.MLA_PAGES: _pages,
    Op.MLA_MERGE: _merged,
}
