"""The router, its experts, collectives, and the choice of a token."""

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
    numbers,
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
    z, route, w1, w3, _, *constants = x
    gates, ups = numbers(w1), numbers(w3)
    return [
        [y for i, _ in rt for y in glu(a, [r], gates[i], ups[i], *constants)[0]]
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


def _moe_down_each(a: Algebra, x: Mat, route: Route, w2: Stack, k: int, x_bf16: int) -> Stack:
    return [
        [
            [dot(wr, slot) for wr in w2[i]]
            for slot, (i, _) in zip(chunks(len(xs) // k, xs), rt, strict=True)
        ]
        for xs, rt in rows_of(x, route)
    ]


def _moe_combine(a: Algebra, y: Stack, route: Route, k: int, rd: int) -> Mat:
    def row(slots: Mat, rt: list[tuple[int, Number]]) -> Vec:
        parts = [[w * c for c in slot] for slot, (_, w) in zip(slots, rt, strict=True)]
        return [a.rnd(rd, total(list(ys))) for ys in zip(*parts, strict=True)]

    return [row(slots, rt) for slots, rt in rows_of(y, route)]


def _moe_glu_topk(a: Algebra, *x: Any) -> Mat:
    z, scores, bias, w1, w3, k, *constants = x
    route = [[(i, None) for i in a.choose(k, row, bias)] for row in scores]
    return _moe_glu(a, z, route, w1, w3, k, *constants)


def _moe_down_topk(a: Algebra, *x: Any) -> Stack:
    xs, scores, bias, w2, k, scale, x_bf16 = x
    return _moe_down(a, xs, _route(a, scores, bias, k, scale), numbers(w2), k, x_bf16)


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


# -- the choice of a token: [best, its index, second best, 0] --------------------------------------


def _candidate(a: Algebra, base: int, row: Vec) -> Vec:
    best, index, second = a.low, base, a.low
    for i, v in enumerate(row):
        second = a.above(v, best, best, a.above(v, second, v, second))
        index = a.above(v, best, base + i, index)
        best = a.above(v, best, v, best)
    return [best, index, second, 0]


def _argmax(a: Algebra, logits: Stack) -> Stack:
    return [[_candidate(a, r * len(row), row) for row in part] for r, part in enumerate(logits)]


def _folded(a: Algebra, one: Vec, other: Vec) -> Vec:
    win = [a.above(other[0], one[0], y, x) for x, y in zip(one, other, strict=True)]
    lose = [a.above(other[0], one[0], x, y) for x, y in zip(one, other, strict=True)]
    return [win[0], win[1], a.above(lose[0], win[2], lose[0], win[2]), 0]


def _argmax_fold(a: Algebra, x: Stack) -> Mat:
    out = x[0]
    for rank in x[1:]:
        out = [_folded(a, one, other) for one, other in rows_of(out, rank)]
    return out


MEANINGS: Mapping[Op, Callable[..., Any]] = {
    Op.ROUTER_TOPK: _route,
    Op.DEQUANT_MXFP4: lambda a, w: numbers(w),
    Op.MOE_UP: _moe_up,
    Op.MOE_UP_MXFP4: lambda a, z, rt, w, k, rd: _moe_up(a, z, rt, numbers(w), k, rd),
    Op.MOE_GLU_MXFP4: _moe_glu,
    Op.MOE_DOWN: _moe_down,
    Op.MOE_DOWN_EACH: _moe_down_each,
    Op.MOE_COMBINE: _moe_combine,
    Op.MOE_DOWN_MXFP4: lambda a, x, rt, w2, k, bf16: _moe_down(a, x, rt, numbers(w2), k, bf16),
    Op.MOE_GLU_TOPK: _moe_glu_topk,
    Op.MOE_DOWN_TOPK: _moe_down_topk,
    Op.ARGMAX_ALL: lambda a, logits: [_candidate(a, 0, row) for row in logits],
    Op.ARGMAX: _argmax,
    Op.ARGMAX_FOLD: _argmax_fold,
    Op.ALL_REDUCE: _reduced,
    Op.ALL_GATHER: _join,
    Op.ALL_REDUCE_ADD: lambda a, r, x, rd: plus(a, rd, r, _reduced(a, x, rd)),
    Op.REDUCE_GATHER: _reduce_gather,
    Op.REDUCE_GATHER_ADD: lambda a, r, up, x, rd: plus(a, rd, r, _reduce_gather(a, up, x, rd)),
}
