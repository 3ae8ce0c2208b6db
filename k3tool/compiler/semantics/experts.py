"""The router, its experts, and collectives."""

from collections.abc import Callable, Mapping
from typing import Any

from k3tool.compiler.semantics.algebra import (
    Algebra,
    Mat,
    Number,
    Stack,
    Vec,
    chunks,
    dot,
    each,
    glu,
    matvec,
    plus,
    rows_of,
    share,
    total,
)
from k3tool.isa.table import Op

Route = list[list[tuple[int, Number]]]


def _route(a: Algebra, scores: Mat, bias: Vec, k: int, scale: Number) -> Route:
    out = []
    for row in scores:
        ids = a.choose(k, row, bias)
        s = [a.sigmoid(row[i]) for i in ids]
        out.append([(i, w / (total(s) + a.tiny) * scale) for i, w in zip(ids, s, strict=True)])
    return out


def _moe_up(a: Algebra, z: Mat, route: Route, w: Stack, k: int) -> Mat:
    return [[y for i, _ in rt for y in matvec(w[i], r)] for r, rt in rows_of(z, route)]


def _moe_glu(a: Algebra, *x: Any) -> Mat:
    z, route, w1, w3, _, beta, linear = x
    return [
        [y for i, _ in rt for y in glu(a, [r], w1[i], w3[i], beta, linear)[0]]
        for r, rt in rows_of(z, route)
    ]


def _moe_down(a: Algebra, x: Mat, route: Route, w2: Stack, k: int) -> Stack:
    def row(r: int, xs: Vec, rt: list[tuple[int, Number]]) -> Vec:
        parts = [
            [weight * dot(share(a, r, wr), share(a, r, slot)) for wr in w2[i]]
            for slot, (i, weight) in zip(chunks(len(xs) // k, xs), rt, strict=True)
        ]
        return [total(list(ys)) for ys in zip(*parts, strict=True)]

    return [[row(r, xs, rt) for xs, rt in rows_of(x, route)] for r in range(a.ranks)]


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
        out = each(lambda x, y: x + y, out, part)
    return out


def _join(a: Algebra, parts: Stack) -> Mat:
    return [[y for row in rows for y in row] for rows in rows_of(*parts)]


MEANINGS: Mapping[Op, Callable[..., Any]] = {
    Op.ROUTER_TOPK: _route,
    Op.MOE_UP_MXFP4: _moe_up,
    Op.MOE_GLU_MXFP4: _moe_glu,
    Op.MOE_DOWN_MXFP4: _moe_down,
    Op.MOE_GLU_TOPK: _moe_glu_topk,
    Op.MOE_DOWN_TOPK: _moe_down_topk,
    Op.ALL_REDUCE: _sum,
    Op.ALL_GATHER: _join,
    Op.ALL_REDUCE_ADD: lambda a, r, x: each(plus, r, _sum(a, x)),
    Op.REDUCE_GATHER: lambda a, up, x: each(plus, _join(a, up), _sum(a, x)),
    Op.REDUCE_GATHER_ADD: lambda a, r, up, x: each(
        lambda v, p, q: v + (p + q), r, _join(a, up), _sum(a, x)
    ),
}
