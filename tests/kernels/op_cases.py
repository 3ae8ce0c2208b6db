"""One case per op of the table: operands as stored, the same as binary64 for the meaning, sizes.

The sizes are chosen to hurt: an axis above 512 that is not a multiple of 128 (rule 6, tails), heads
of 34, slices inside heads, MXFP4 blocks inside scale groups, contexts of more than one page.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3tool.isa.table import SPECS, Op
from k3tool.model.operators import PART_EXTRA
from tests.kernels import rule3
from tests.kernels.bodies import Tokens

T, H, HEADS, D = 5, 528, 3, 34  # tokens, hidden, heads, head width
NOPE, ROPE, LATENT, V = 24, 8, 80, 20
EXPERTS, TOP_K, INNER = 12, 3, 96
RANKS = 4


@dataclass
class Case:
    """One instruction: `stored` operands by name, `meaning` the same as numbers."""

    op: Op
    n_units: int
    width: int
    unit_cols: int
    params: dict[str, float]
    stored: dict[str, Any]
    meaning: dict[str, Any]
    out: str
    out_shape: tuple[int, ...]  # of several results: of all side by side
    state: str | tuple[str, ...] | None = None  # written in place besides out
    widths: tuple[int, ...] = ()  # of several results, each with a buffer of its own
    ranks: int = 1
    keep: list[object] = field(default_factory=list)
    tokens: Callable[[], Tokens] = lambda: Tokens(T)
    slots: int = 1


def rng(op: Op) -> np.random.Generator:
    return np.random.default_rng(int(op))


def bf16(values: np.ndarray) -> np.ndarray:
    """Truncate to bf16 words."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return words.astype(np.uint16).reshape(values.shape)


def dense(op: Op, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng(op).normal(0, scale, shape) + 0.01 * len(shape)).astype(np.float32)


def weight(seed: int, *shape: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 1 / np.sqrt(shape[-1]), shape)
    return bf16(values.astype(np.float32))


def norm_weight(seed: int, n: int) -> np.ndarray:
    return bf16((1 + 0.2 * np.random.default_rng(seed).normal(size=n)).astype(np.float32))


def experts(seed: int, rows: int, K: int) -> tuple[np.ndarray, list[Any], list[object]]:
    """A table of K3Expert, the decoded matrices, and what must stay alive."""
    generator = np.random.default_rng(seed)
    packed = generator.integers(0, 256, (EXPERTS, rows, K // 2)).astype(np.uint8)
    scales = generator.integers(121, 125, (EXPERTS, rows, K // 32)).astype(np.uint8)
    scales[:, 0, 0] = 0
    pointers = [(p.ctypes.data, s.ctypes.data) for p, s in zip(packed, scales, strict=True)]
    table = np.array(pointers, np.uint64)
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    decoded = [rule3.mxfp4(p, s) for p, s in zip(packed, scales, strict=True)]
    return table, decoded, [packed, scales]


def simple(op: Op, params: dict[str, float], width: int = 40, **inputs: np.ndarray) -> Case:
    """An elementwise op over columns."""
    return Case(op, width, width, 1, params, dict(inputs), dict(inputs), "y", (T, width))


def elementwise() -> list[Case]:
    x = {op: dense(op, T, 40, scale=6.0) for op in Op}
    u = {op: x[op][::-1].copy() for op in Op}
    caps = {"beta": 4.0, "linear_beta": 25.0}
    return [
        simple(Op.ADD, {}, a=x[Op.ADD], b=u[Op.ADD]),
        simple(Op.MUL, {}, a=x[Op.MUL], b=u[Op.MUL]),
        simple(Op.SIGMOID, {}, x=x[Op.SIGMOID]),
        simple(Op.SILU, {}, x=x[Op.SILU]),
        simple(Op.SOFTCAP, {"beta": 25.0}, x=x[Op.SOFTCAP]),
        simple(Op.SITU, caps, gate=x[Op.SITU], up=u[Op.SITU]),
        simple(Op.SCALE, {"factor": 34**-0.5}, x=x[Op.SCALE]),
        simple(Op.MLA_OUT_GATE, {}, o=x[Op.MLA_OUT_GATE], gate=u[Op.MLA_OUT_GATE]),
    ]


def products() -> list[Case]:
    x = dense(Op.GEMV_BF16, T, H)
    w, up, norm = weight(1, 21, H), weight(2, 21, H), norm_weight(3, H)
    W, UP, N = rule3.bf16(w), rule3.bf16(up), rule3.bf16(norm)
    caps = {"beta": 4.0, "linear_beta": 25.0}
    head = {"head_only": 0}
    table = weight(4, 30, 40)
    ids = np.array([3, 29, 0, 7, 7], np.uint32)
    return [
        Case(Op.GEMV_BF16, 21, 21, 1, {"K": H, **head}, {"x": x, "w": w}, {"x": x, "w": W},
             "y", (T, 21)),
        Case(Op.GEMV_BF16_BLOCKS, 21, 21, 1, {"K": H, "n_blocks": 8}, {"x": x, "w": w},
             {"x": x, "w": W}, "y", (T, 21)),
        Case(Op.NORM_GEMV_BF16, 21, 21, 1, {"K": H, "eps": 1e-5, **head},
             {"x": x, "norm": norm, "w": w}, {"x": x, "norm": N, "w": W}, "y", (T, 21)),
        Case(Op.GLU_BF16, 21, 21, 1, {"K": H, **caps}, {"x": x, "gate": w, "up": up},
             {"x": x, "gate": W, "up": UP}, "y", (T, 21)),
        Case(Op.EMBED_BF16, 40, 40, 1, {"vocab": 30}, {"table": table},
             {"table": rule3.bf16(table)}, "y", (T, 40), tokens=lambda: Tokens(T, ids=ids)),
        Case(Op.EMBED_PUSH, 40, 40, 1, {"vocab": 30, "index": 1},
             {"table": table, "blocks": np.zeros((3, T, 40), np.float32)},
             {"table": rule3.bf16(table), "blocks": np.zeros((1, T, 40), np.float32)},
             "blocks", (3, T, 40), tokens=lambda: Tokens(T, ids=ids)),
    ]  # fmt: skip


def norms() -> list[Case]:
    x, norm = dense(Op.RMSNORM, T, H), norm_weight(5, H)
    N, C = rule3.bf16(norm), HEADS * D
    h, gate = dense(Op.L2NORM, T, C), dense(Op.KDA_GATED_NORM, T, C)
    o_norm = (1 + 0.2 * rng(Op.HEAD_RMSNORM).normal(size=D)).astype(np.float32)
    blocks = dense(Op.ATTN_RES, 3, T, H)
    rn, rp = norm_weight(6, H), weight(7, H)
    mix = {"prefix": x, "blocks": blocks, "res_norm": rn, "res_proj": rp}
    mean = {"prefix": x, "blocks": blocks, "res_norm": rule3.bf16(rn), "res_proj": rule3.bf16(rp)}
    stack = np.zeros((3, T, H), np.float32)
    return [
        Case(Op.RMSNORM, T, H, 0, {"eps": 1e-5}, {"x": x, "norm": norm}, {"x": x, "norm": N},
             "y", (T, H)),
        Case(Op.ATTN_RES, T, H, 0, {"n_blocks": 2, "eps": 1e-5}, mix, mean, "y", (T, H)),
        Case(Op.ATTN_RES_NORM, T, H, 0, {"n_blocks": 3, "eps": 1e-5, "norm_eps": 1e-5},
             {**mix, "norm": norm}, {**mean, "norm": N}, "y", (T, H)),
        Case(Op.BLOCK_PUSH, H, H, 1, {"index": 1}, {"prefix": x, "blocks": stack},
             {"prefix": x, "blocks": stack[:1]}, "blocks", (3, T, H)),
        Case(Op.L2NORM, HEADS, C, D, {"eps": 1e-6}, {"x": h}, {"x": h}, "y", (T, C)),
        Case(Op.HEAD_RMSNORM, HEADS, C, D, {"eps": 1e-5}, {"x": h, "norm": o_norm},
             {"x": h, "norm": o_norm}, "y", (T, C)),
        Case(Op.KDA_GATED_NORM, HEADS, C, D, {"eps": 1e-5}, {"o": h, "norm": o_norm, "gate": gate},
             {"o": h, "norm": o_norm, "gate": gate}, "y", (T, C)),
    ]  # fmt: skip


def delta() -> list[Case]:
    C = HEADS * D
    q, k, v, f = (dense(op, T, C) for op in (Op.KDA_STEP, Op.KDA_CORE, Op.KDA_DECAY, Op.SHORT_CONV))
    b, conv = dense(Op.MUL, T, HEADS), dense(Op.CONV_SILU, C, 4)
    a_log = np.concatenate([rng(Op.KDA_DECAY).normal(0, 0.5, HEADS), np.zeros(9)]).astype(
        np.float32
    )
    dt = dense(Op.ADD, C)
    keep = np.exp(-np.abs(f)).astype(np.float32)
    beta = (1 / (1 + np.exp(-b))).astype(np.float32)
    unit = (k / np.linalg.norm(k.reshape(T, HEADS, D), axis=-1).repeat(D, -1)).astype(np.float32)
    bent = {"f": f, "a_log": a_log, "dt_bias": dt}
    core = {"q": q, "k": k, "v": v, "f": f, "b": b, "a_log": a_log, "dt_bias": dt}
    step = {"q": q, "k": unit, "v": v, "decay": keep, "beta": beta}
    dirty = np.full((2, 3, C), np.float32(9e9))
    states = np.full((2, HEADS, D, D), np.float32(np.nan))

    def two() -> Tokens:
        return Tokens(T, slot=np.ones(T))

    cases = [
        Case(Op.KDA_DECAY, HEADS, C, D, {"lower_bound": -5.0}, bent, bent, "y", (T, C)),
        Case(Op.KDA_STEP, HEADS, C, D, {}, {**step, "s": states}, {**step, "s": None},
             "y", (T, C), "s"),
        Case(Op.KDA_CORE, HEADS, C, D, {"l2_eps": 1e-6, "q_scale": D**-0.5, "lower_bound": -5.0},
             {**core, "s": states}, {**core, "s": None}, "y", (T, C), "s"),
    ]  # fmt: skip
    for op in (Op.SHORT_CONV, Op.CONV_SILU):
        stored = {"x": q, "conv": conv, "taps": dirty}
        cases.append(Case(op, C, C, 1, {}, stored, {**stored, "taps": None}, "y", (T, C), "taps"))
    for case in cases[1:]:
        case.tokens, case.slots = two, 2
    return cases


def latent_attention() -> list[Case]:
    n = NOPE + V
    kv_b, norm = weight(8, HEADS * n, LATENT), norm_weight(9, LATENT)
    KV, N = rule3.bf16(kv_b), rule3.bf16(norm)
    sizes = {"nope": NOPE, "v": V, "latent": LATENT}
    q = dense(Op.MLA_QLAT, T, HEADS * (NOPE + ROPE))
    x = dense(Op.MLA_CACHE, T, LATENT + ROPE)
    ctx, gate = dense(Op.MLA_UV, T, HEADS * LATENT), dense(Op.MLA_UV_GATE, T, HEADS * V)
    first = 600  # three pages; pages 5, 2, 7 of the cache hold them
    pages = np.array([[1, 1, 1], [5, 2, 7]], np.uint32)
    cache = dense(Op.MLA_ATTEND, 8, 256, LATENT + ROPE)
    rows = cache[[5, 2, 7]].reshape(-1, LATENT + ROPE)[: first + T]
    ql = dense(Op.MLA_ATTEND, T, HEADS * (LATENT + ROPE), scale=2.0)
    scale = (NOPE + ROPE) ** -0.5

    def where() -> Tokens:
        return Tokens(T, first, slot=np.ones(T), page_table=pages)

    return [
        Case(Op.MLA_QLAT, HEADS, HEADS * (LATENT + ROPE), LATENT + ROPE, {**sizes, "rope": ROPE},
             {"q": q, "kv_b": kv_b}, {"q": q, "kv_b": KV}, "y", (T, HEADS * (LATENT + ROPE))),
        Case(Op.MLA_CACHE, T, LATENT + ROPE, 0, {"latent": LATENT, "rope": ROPE, "eps": 1e-6},
             {"x": x, "norm": norm, "cache": cache.copy()},
             {"x": x, "norm": N, "cache": rows[:first]}, "cache", (8, 256, LATENT + ROPE),
             tokens=where),
        Case(Op.MLA_ATTEND, HEADS, HEADS * LATENT, LATENT,
             {"latent": LATENT, "rope": ROPE, "scale": scale, "page_tokens": 256, "pages": 3},
             {"q": ql, "cache": cache}, {"q": ql, "cache": rows}, "y", (T, HEADS * LATENT),
             tokens=where),
        Case(Op.MLA_UV, HEADS * V, HEADS * V, 1, sizes, {"ctx": ctx, "kv_b": kv_b},
             {"ctx": ctx, "kv_b": KV}, "y", (T, HEADS * V)),
        Case(Op.MLA_UV_GATE, HEADS * V, HEADS * V, 1, sizes,
             {"ctx": ctx, "kv_b": kv_b, "gate": gate}, {"ctx": ctx, "kv_b": KV, "gate": gate},
             "y", (T, HEADS * V)),
    ]  # fmt: skip


def route_words() -> tuple[np.ndarray, np.ndarray]:
    """A route as stored and as numbers."""
    generator = np.random.default_rng(10)
    ids = np.sort([generator.permutation(EXPERTS)[:TOP_K] for _ in range(T)], axis=-1)
    weights = generator.dirichlet(np.ones(TOP_K), T).astype(np.float32)
    stored = np.concatenate([ids.astype(np.uint32), weights.view(np.uint32)], axis=1)
    return np.ascontiguousarray(stored), np.concatenate([ids, weights.astype(np.float64)], axis=1)


def mixture() -> list[Case]:
    logits = dense(Op.ROUTER_TOPK, T, EXPERTS, scale=2.0)
    bias = dense(Op.MUL, EXPERTS, scale=0.3)
    bias[[7, 9]], bias[[2, 5]] = 4, 2
    logits[:, 5] = logits[:, 2]  # the third place is a tie: the lower id
    stored, numbers = route_words()
    z, e = dense(Op.MOE_UP_MXFP4, T, LATENT * 2), dense(Op.MOE_DOWN_MXFP4, T, TOP_K * INNER)
    w1, W1, k1 = experts(11, 21, LATENT * 2)
    w3, W3, k3 = experts(12, 21, LATENT * 2)
    w2, W2, k2 = experts(13, 70, INNER)  # blocks of 12 lie inside scale groups; 70 rows: two tiles
    caps = {"beta": 4.0, "linear_beta": 25.0}
    up, rows = {"K": LATENT * 2, "top_k": TOP_K}, (T, TOP_K * 21)
    zs, zn = {"z": z, "route": stored}, {"z": z, "route": numbers}
    return [
        Case(Op.ROUTER_TOPK, T, 2 * TOP_K, 0, {"n_experts": EXPERTS, "top_k": TOP_K, "scale": 1.5},
             {"logits": logits, "bias": bias}, {"logits": logits, "bias": bias},
             "y", (T, 2 * TOP_K)),
        Case(Op.MOE_UP_MXFP4, 21, TOP_K * 21, 1, up, {**zs, "w": w1}, {**zn, "w": W1}, "y", rows,
             keep=k1),
        Case(Op.MOE_GLU_MXFP4, 21, TOP_K * 21, 1, {**up, **caps}, {**zs, "w1": w1, "w3": w3},
             {**zn, "w1": W1, "w3": W3}, "y", rows, keep=k1 + k3),
        Case(Op.MOE_DOWN_MXFP4, 70, 70, 1, {"K": INNER, "top_k": TOP_K, "n_blocks": 8},
             {"x": e, "route": stored, "w2": w2}, {"x": e, "route": numbers, "w2": W2},
             "y", (T, 70), keep=k2),
    ]  # fmt: skip


def collectives() -> list[Case]:
    W, shard = 48, 12
    x, up = dense(Op.ALL_REDUCE, RANKS, T, W), dense(Op.ALL_GATHER, RANKS, T, shard)
    residual = dense(Op.ALL_REDUCE_ADD, T, W)
    cols = {"shard_cols": shard}
    rows = [
        (Op.ALL_REDUCE, {}, {"x": x}),
        (Op.ALL_REDUCE_ADD, {}, {"residual": residual, "x": x}),
        (Op.ALL_GATHER, cols, {"x": up}),
        (Op.REDUCE_GATHER, cols, {"up": up, "x": x}),
        (Op.REDUCE_GATHER_ADD, cols, {"residual": residual, "up": up, "x": x}),
    ]
    return [Case(op, W, W, 1, p, dict(i), dict(i), "y", (T, W), ranks=RANKS) for op, p, i in rows]


def mixes() -> list[Case]:
    """Linears of one normed mix, and the block parts that they start from."""
    x, blocks = dense(Op.MIX_LINEARS_6, T, H), dense(Op.ATTN_PART, 3, T, H)
    part = np.zeros((T, H + 16), np.float32)
    part[:, :H] = dense(Op.ATTN_PARTS_8, T, H)
    part[:, H] = [-0.3, 0.0, 0.4, 2.0, -3.0]  # above and below the prefix's own score
    part[:, H + 1] = [1.0, 1.5, 2.5, 1.25, 3.0]
    site = {"res_norm": norm_weight(6, H), "res_proj": weight(7, H)}
    mean_site = {name: rule3.bf16(value) for name, value in site.items()}
    norm = norm_weight(5, H)
    stored = {"prefix": x, "part": part, **site, "norm": norm}
    mean = {**stored, **mean_site, "norm": rule3.bf16(norm)}
    eps = {"eps": 1e-5, "norm_eps": 1e-6}
    cases = []
    for op, n in ((Op.MIX_LINEARS_3, 3), (Op.MIX_LINEARS_4, 4), (Op.MIX_LINEARS_6, 6)):
        rows = (9, 5, 16, 1, 12, 8)[:n]
        w = {f"w{i}": weight(20 + i, r, H) for i, r in enumerate(rows)}
        names = [p.name for p in SPECS[op].params if p.name.startswith("rows")]
        words = [rows[2 * i] + (rows[2 * i + 1 : 2 * i + 2] or (0,))[0] * 65536
                 for i in range(len(names))]  # fmt: skip
        numbers = {name: rule3.bf16(value) for name, value in w.items()}
        params = {"K": H, **eps, **dict(zip(names, words, strict=True))}
        cases.append(Case(op, sum(rows), sum(rows), 1, params, {**stored, **w}, {**mean, **numbers},
                          "y0", (T, sum(rows)), widths=rows))  # fmt: skip
    one = {"n_blocks": 2, "eps": 1e-5}
    sites = {}
    for i in range(8):
        sites |= {f"res_norm{i}": norm_weight(30 + i, H), f"res_proj{i}": weight(40 + i, H)}
    mean_sites = {name: rule3.bf16(value) for name, value in sites.items()}
    wide = H + 16
    cases += [
        Case(Op.ATTN_PART, T, wide, 0, one, {"blocks": blocks, **site},
             {"blocks": blocks, **mean_site}, "y", (T, wide)),
        Case(Op.ATTN_PARTS_8, 8, 8 * wide, wide, {"n_blocks": 3, "eps": 1e-5},
             {"blocks": blocks, **sites}, {"blocks": blocks, **mean_sites}, "y0", (T, 8 * wide),
             widths=(wide,) * 8),
    ]  # fmt: skip
    w = weight(1, 21, H)
    units = {"gate": dense(Op.SITU, T, H, scale=3.0), "up": dense(Op.SOFTCAP, T, H, scale=9.0)}
    params = {"K": H, "n_blocks": 8, "beta": 4.0, "linear_beta": 25.0}
    stored, mean = {**units, "w": w}, {**units, "w": rule3.bf16(w)}
    cases.append(Case(Op.SITU_GEMV_BLOCKS, 21, 21, 1, params, stored, mean, "y", (T, 21)))
    return cases


RANK = 24


def heads() -> list[Case]:
    """Everything a head does between its projections."""
    C, taps = HEADS * D, ("taps_q", "taps_k", "taps_v")
    q, k, v, gate = (dense(op, T, C) for op in (Op.KDA_HEADS, Op.KDA_CORE, Op.KDA_STEP, Op.MUL))
    f, b = dense(Op.KDA_DECAY, T, RANK), dense(Op.MUL, T, HEADS)
    stored = {"q": q, "k": k, "v": v, "f": f, "b": b, "gate": gate}
    for i, name in enumerate(("conv_q", "conv_k", "conv_v")):
        stored[name] = np.random.default_rng(50 + i).normal(0, 0.5, (C, 4)).astype(np.float32)
    f_b = weight(53, C, RANK)
    o_norm = 1 + 0.2 * rng(Op.KDA_HEADS).normal(size=D)
    stored |= {"a_log": np.linspace(-0.5, 0.5, HEADS + 9).astype(np.float32),
               "dt_bias": dense(Op.ADD, C), "o_norm": o_norm.astype(np.float32)}  # fmt: skip
    mean = {**stored, "f_b": rule3.bf16(f_b), "s": None, **dict.fromkeys(taps)}
    stored |= {"f_b": f_b, "s": np.full((2, HEADS, D, D), np.float32(np.nan))}
    stored |= {name: np.full((2, 3, C), np.float32(9e9)) for name in taps}
    params = {"l2_eps": 1e-6, "q_scale": D**-0.5, "lower_bound": -5.0, "eps": 1e-5, "rank": RANK}
    kda = Case(Op.KDA_HEADS, HEADS, C, D, params, stored, mean, "y", (T, C), (*taps, "s"),
               tokens=lambda: Tokens(T, slot=np.ones(T)), slots=2)  # fmt: skip
    attend = next(case for case in latent_attention() if case.op is Op.MLA_ATTEND)
    q = dense(Op.MLA_HEADS, T, HEADS * (NOPE + ROPE), scale=2.0)
    kv_b, gate = weight(8, HEADS * (NOPE + V), LATENT), dense(Op.MLA_UV_GATE, T, HEADS * V)
    own = {"q": q, "gate": gate}
    params = {name: value for name, value in attend.params.items() if name != "pages"}
    mla = Case(Op.MLA_HEADS, HEADS, HEADS * V, V, {**params, "nope": NOPE, "v": V},
               {**own, "kv_b": kv_b, "cache": attend.stored["cache"]},
               {**own, "kv_b": rule3.bf16(kv_b), "cache": attend.meaning["cache"]},
               "y", (T, HEADS * V), tokens=attend.tokens)  # fmt: skip
    return [kda, mla]


def pages() -> list[Case]:
    """Latent attention by pages: the query, what every page gives, and the pages merged."""
    by_op = {case.op: case for case in latent_attention()}
    attend, uv = by_op[Op.MLA_ATTEND], by_op[Op.MLA_UV_GATE]
    x, w = dense(Op.MLA_QUERY, T, H), weight(14, HEADS * (NOPE + ROPE), H)
    kv_b, norm = weight(8, HEADS * (NOPE + V), LATENT), norm_weight(15, H)
    own = {"nope": NOPE, "v": V, "latent": LATENT}
    width, part = HEADS * (LATENT + ROPE), HEADS * (LATENT + PART_EXTRA)
    parts = rng(Op.MLA_MERGE).normal(0, 1, (T, 3, HEADS, LATENT + PART_EXTRA)).astype(np.float32)
    parts[..., LATENT + 1] = 1 + np.abs(parts[..., LATENT + 1])  # sums of exponentials
    parts = parts.reshape(T, -1)
    gate = uv.stored["gate"]
    return [
        Case(Op.MLA_QUERY, HEADS, width, LATENT + ROPE, {"K": H, "eps": 1e-6, "rope": ROPE, **own},
             {"x": x, "norm": norm, "w": w, "kv_b": kv_b},
             {"x": x, "norm": rule3.bf16(norm), "w": rule3.bf16(w), "kv_b": rule3.bf16(kv_b)},
             "y", (T, width)),
        Case(Op.MLA_PAGES, 3, 3 * part, part, attend.params, attend.stored, attend.meaning, "y",
             (T, 3 * part), tokens=attend.tokens),
        Case(Op.MLA_MERGE, HEADS, HEADS * V, V, {**own, "page_tokens": 256, "pages": 3},
             {"parts": parts, "kv_b": kv_b, "gate": gate},
             {"parts": parts, "kv_b": rule3.bf16(kv_b), "gate": gate}, "y", (T, HEADS * V),
             tokens=attend.tokens),
    ]  # fmt: skip


def mixture_of_own_choice() -> list[Case]:
    """The expert products with the router's choice inside."""
    by_op = {case.op: case for case in mixture()}
    router = by_op[Op.ROUTER_TOPK]
    scores = {"scores": router.stored["logits"], "bias": router.stored["bias"]}
    cases = []
    for op, parts, more in (
        (Op.MOE_GLU_TOPK, Op.MOE_GLU_MXFP4, {}),
        (Op.MOE_DOWN_TOPK, Op.MOE_DOWN_MXFP4, {"scale": 1.5}),
    ):
        case = by_op[parts]
        stored, mean = ({**d, **scores} for d in (case.stored, case.meaning))
        del stored["route"], mean["route"]
        params = {**case.params, "n_experts": EXPERTS, **more}
        cases.append(Case(op, case.n_units, case.width, case.unit_cols, params, stored, mean, "y",
                          case.out_shape, keep=case.keep))  # fmt: skip
    return cases


FAMILIES = (
    elementwise, products, norms, delta, latent_attention, mixture, collectives, mixes, heads,
    pages, mixture_of_own_choice,
)  # fmt: skip
CASES = {case.op: case for family in FAMILIES for case in family()}
# No numbers, no instruction, or tests of their own.
WITHOUT_CASE = {op for op, spec in SPECS.items() if not spec.is_emitted}
WITHOUT_CASE |= {Op.NOP, Op.ARGMAX, Op.ARGMAX_FOLD}
LOADS = {op for op, spec in SPECS.items() if spec.is_load}  # no numbers: tests/runtime has them
assert set(CASES) | WITHOUT_CASE | LOADS == set(SPECS)
