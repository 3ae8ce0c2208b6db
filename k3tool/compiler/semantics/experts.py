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


def _moe_up(a: Algebra, z: Mat, route: Route, w: Stack, k: int, rd: int) -> Mat:
    return [[y for i, _ in rt for y in matvec(a, rd, w[i], r)] for r, rt in rows_of(z, route)]


def _moe_glu(a: Algebra, *x: Any) -> Mat:
    z, route, w1, w3, _, *numbers = x
    return [
        [y for i, _ in rt for y in glu(a, [r], w1[i], w3[i], *numbers)[0]]
        for r, rt in rows_of(z, route)
    ]


def _moe_down(a: Algebra, x: Mat, route: Route, w2: Stack, k: int, x_bf16: int) -> Stack:
    def row(r: int, xs: Vec, rt: list[tuple[int, Number]]) -> Vec:
        parts = [
            [weight * dot(share(a, r, wr), share(a, r, slot)) for wr in w2[i]]
            for slot, (i, weight) in zip(chunks(len(xs) // k, xs), rt, strict=True)
        ]
        return [total(list(ys)) for ys in zip(*parts, strict=True)]

    return [[row(r, xs, rt) for xs, rt in rows_of(x, route)] for r in range(a.ranks)]


def _moe_glu_topk(a: Algebra, *x: Any) -> Mat:
    z, scores, bias, w1, w3, k, *numbers = x
    route = [[(i, None) for i in a.choose(k, row, bias)] for row in scores]
    return _moe_glu(a, z, route, w1, w3, k, *numbers)


def _moe_down_topk(a: Algebra, *x: Any) -> Stack:
    xs, scores, bias, w2, k, scale, x_bf16 = x
    return _moe_down(a, xs, _route(a, scores, bias, k, scale), w2, k, x_bf16)


# -- collectives -----------------------------------------------------------------------------------


def _sum(a: Algebra, parts: Stack) -> Mat:
    out = parts[0]
    for part in parts[1:]:
        out = each(lambda x, y: x + y, out, part)
    return out


def _reduced(a: Algebra, parts: Stack, rd: int) -> Mat:
    return each(lambda x: a.rnd(rd, x), _sum(a, parts))


def _join(a: Algebra, parts: Stack) -> Mat:
    return [[y for row in rows for y in row] for rows in rows_of(*parts)]


def _reduce_gather(a: Algebra, up: Stack, parts: Stack, rd: int) -> Mat:
    return plus(a, rd, _join(a, up), _reduced(a, parts, rd))


MEANINGS: Mapping[Op, Callable[..., Any]] = {
    Op.ROUTER_TOPK: _route,
    Op.MOE_UP_MXFP4: _moe_up,
    Op.MOE_GLU_MXFP4: _moe_glu,
    Op.MOE_DOWN_MXFP4: _moe_down,
    Op.MOE_GLU_TOPK: _moe_glu_topk,
    Op.MOE_DOWN_TOPK: _moe_down_topk,
    Op.ALL_REDUCE: _reduced,
    Op.ALL_GATHER: _join,
    Op.ALL_REDUCE_ADD: lambda a, r, x, rd: plus(a, rd, r, _reduced(a, x, rd)),
    Op.REDUCE_GATHER: _reduce_gather,
    Op.REDUCE_GATHER_ADD: lambda a, r, up, x, rd: plus(a, rd, r, _reduce_gather(a, up, x, rd)),
}
