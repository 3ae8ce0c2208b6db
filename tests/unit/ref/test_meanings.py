"""What each op means: fused ops equal their parts, states carry over, known values hold."""

from dataclasses import replace

import numpy as np
import pytest

from k3tool.isa.table import Op
from k3tool.ref.formats import Array, Step
from k3tool.ref.ops import REFERENCE, check

EPS = 1e-5
BETAS = {"beta": 4.0, "linear_beta": 25.0}
TOKENS, HEADS, DIM, HIDDEN = 5, 3, 8, 24


@pytest.fixture
def draw() -> np.random.Generator:
    return np.random.default_rng(2024)


def step(position: int = 0, tokens: int = TOKENS) -> Step:
    return Step(np.arange(tokens), position)


def ref(op: Op, *operands: object, **params: object) -> Array:
    return REFERENCE[op](*operands, **params)


def same(left: Array, right: Array) -> None:
    np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-13)


# -- the table -----------------------------------------------------------------------------------


def test_a_missing_meaning_is_noticed() -> None:
    with pytest.raises(AssertionError, match="one meaning"):
        check({op: f for op, f in REFERENCE.items() if op is not Op.ADD})


def test_a_meaning_that_reads_other_operands_is_noticed() -> None:
    with pytest.raises(AssertionError, match="ADD"):
        check(REFERENCE | {Op.ADD: REFERENCE[Op.RMSNORM]})


# -- fused ops are their rule's left side --------------------------------------------------------


def test_norm_gemv(draw: np.random.Generator) -> None:
    x, norm, w = draw.normal(size=(TOKENS, 16)), draw.normal(size=16), draw.normal(size=(9, 16))
    parts = ref(Op.GEMV_BF16, ref(Op.RMSNORM, x, norm, eps=EPS), w)
    same(ref(Op.NORM_GEMV_BF16, x, norm, w, eps=EPS), parts)


def test_attn_res_norm(draw: np.random.Generator) -> None:
    prefix, blocks = draw.normal(size=(TOKENS, HIDDEN)), draw.normal(size=(4, TOKENS, HIDDEN))
    n, w, norm = draw.normal(size=(3, HIDDEN))
    mix = ref(Op.ATTN_RES, prefix, blocks, n, w, n_blocks=3, eps=EPS)
    fused = ref(Op.ATTN_RES_NORM, prefix, blocks, n, w, norm, n_blocks=3, eps=EPS, norm_eps=1e-3)
    same(fused, ref(Op.RMSNORM, mix, norm, eps=1e-3))


def primitive_situ(gate: Array, up: Array) -> Array:
    capped = ref(Op.SOFTCAP, gate, beta=BETAS["beta"])
    gated = ref(Op.MUL, capped, ref(Op.SIGMOID, gate))
    return ref(Op.MUL, gated, ref(Op.SOFTCAP, up, beta=BETAS["linear_beta"]))


def test_situ_and_glu(draw: np.random.Generator) -> None:
    x, gate, up = (draw.normal(size=(n, 16)) * 3 for n in (TOKENS, 9, 9))
    g, u = ref(Op.GEMV_BF16, x, gate), ref(Op.GEMV_BF16, x, up)
    same(ref(Op.SITU, g, u, **BETAS), primitive_situ(g, u))
    same(ref(Op.GLU_BF16, x, gate, up, **BETAS), primitive_situ(g, u))


def test_moe_glu(draw: np.random.Generator) -> None:
    z, w1, w3 = draw.normal(size=(TOKENS, 16)), *draw.normal(size=(2, 6, 9, 16))
    route = ref(Op.ROUTER_TOPK, draw.normal(size=(TOKENS, 6)), np.zeros(6), top_k=2, scale=1.0)
    g, u = (ref(Op.MOE_UP_MXFP4, z, route, w) for w in (w1, w3))
    same(ref(Op.MOE_GLU_MXFP4, z, route, w1, w3, **BETAS), primitive_situ(g, u))


def test_conv_silu(draw: np.random.Generator) -> None:
    x, conv = draw.normal(size=(TOKENS, 6)), draw.normal(size=(6, 1, 4))
    y, taps = REFERENCE[Op.SHORT_CONV](x, conv, None, step=step())
    fused, fused_taps = REFERENCE[Op.CONV_SILU](x, conv, None, step=step())
    same(fused, ref(Op.SILU, y))
    same(fused_taps, taps)


def kda_inputs(draw: np.random.Generator) -> dict[str, Array]:
    width = HEADS * DIM
    q, k, v, f, gate = draw.normal(size=(5, TOKENS, width))
    shapes = {"b": (TOKENS, HEADS), "a_log": HEADS, "dt_bias": width, "norm": DIM}
    rest = {name: draw.normal(size=shape) for name, shape in shapes.items()}
    return {"q": q, "k": k, "v": v, "f": f, "gate": gate} | rest


KDA = {"l2_eps": 1e-6, "q_scale": DIM**-0.5, "lower_bound": -5.0, "unit_cols": DIM}


def test_kda_core(draw: np.random.Generator) -> None:
    x = kda_inputs(draw)
    head = {"unit_cols": DIM}
    qn = ref(Op.SCALE, ref(Op.L2NORM, x["q"], eps=1e-6, **head), factor=DIM**-0.5)
    kn = ref(Op.L2NORM, x["k"], eps=1e-6, **head)
    decay = ref(Op.KDA_DECAY, x["f"], x["a_log"], x["dt_bias"], lower_bound=-5.0, **head)
    beta = ref(Op.SIGMOID, x["b"])
    parts, state = REFERENCE[Op.KDA_STEP](qn, kn, x["v"], decay, beta, None, step=step())
    operands = [x[name] for name in ("q", "k", "v", "f", "b", "a_log", "dt_bias")]
    fused, fused_state = REFERENCE[Op.KDA_CORE](*operands, None, **KDA, step=step())
    same(fused, parts)
    same(fused_state, state)


def test_gates(draw: np.random.Generator) -> None:
    x = kda_inputs(draw)
    open_ = ref(Op.SIGMOID, x["gate"])
    parts = ref(Op.MUL, ref(Op.HEAD_RMSNORM, x["q"], x["norm"], eps=EPS), open_)
    same(ref(Op.KDA_GATED_NORM, x["q"], x["norm"], x["gate"], eps=EPS), parts)
    same(ref(Op.MLA_OUT_GATE, x["q"], x["gate"]), ref(Op.MUL, x["q"], open_))


MLA = {"nope": 6, "v": 5, "latent": 7}


def test_mla_uv_gate(draw: np.random.Generator) -> None:
    ctx, kv_b = draw.normal(size=(TOKENS, HEADS * 7)), draw.normal(size=(HEADS * 11, 7))
    gate = draw.normal(size=(TOKENS, HEADS * 5))
    parts = ref(Op.MLA_OUT_GATE, ref(Op.MLA_UV, ctx, kv_b, **MLA), gate)
    same(ref(Op.MLA_UV_GATE, ctx, kv_b, gate, **MLA), parts)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_collectives(draw: np.random.Generator, ranks: int) -> None:
    up, x = draw.normal(size=(2, ranks, TOKENS, 8))
    residual = draw.normal(size=(TOKENS, 8))
    total, side = ref(Op.ALL_REDUCE, x), ref(Op.ALL_GATHER, up[..., : 8 // ranks])
    same(total, sum(list(x)))
    same(ref(Op.ALL_REDUCE_ADD, residual, x), ref(Op.ADD, residual, total))
    both = ref(Op.REDUCE_GATHER, up[..., : 8 // ranks], x)
    same(both, ref(Op.ADD, side, total))
    fused = ref(Op.REDUCE_GATHER_ADD, residual, up[..., : 8 // ranks], x)
    same(fused, ref(Op.ADD, residual, both))


# -- independent forms of the same mathematics ---------------------------------------------------


def test_kda_step_equals_the_chunked_identity(draw: np.random.Generator) -> None:
    # k3_spec C.3, last paragraph: one triangular solve a chunk instead of a loop over time.
    q, k, v, decay = draw.normal(size=(4, TOKENS, DIM))
    decay, beta = 1 / (1 + np.exp(-decay)), draw.uniform(size=(TOKENS, 1))
    start = draw.normal(size=(1, DIM, DIM))
    log = np.cumsum(np.log(decay), axis=0)
    pair = np.exp(log[:, None] - log[None])  # (i, j, d): decay between token j and token i
    lower = np.tril(np.ones((TOKENS, TOKENS)), -1)
    solve = np.eye(TOKENS) + lower * beta * np.einsum("id,jd,ijd->ij", k, k, pair)
    new = np.linalg.solve(solve, beta * (v - (np.exp(log) * k) @ start[0]))
    seen = (lower + np.eye(TOKENS)) * np.einsum("id,jd,ijd->ij", q, k, pair)
    out = (q * np.exp(log)) @ start[0] + seen @ new
    got, state = REFERENCE[Op.KDA_STEP](q, k, v, decay, beta, start, step=step(position=9))
    same(got, out)
    same(state[0], np.exp(log[-1])[:, None] * start[0] + (k * pair[-1]).T @ new)


def test_absorbed_attention_equals_expanded(draw: np.random.Generator) -> None:
    nope, rope, v, latent = 6, 4, 5, 7
    q, x = draw.normal(size=(TOKENS, HEADS * 10)), draw.normal(size=(TOKENS, latent + rope))
    kv_b, norm = draw.normal(size=(HEADS * 11, latent)), draw.normal(size=latent)
    cache = ref(Op.MLA_CACHE, x, norm, None, latent=latent, eps=1e-6, step=step())
    ql = ref(Op.MLA_QLAT, q, kv_b, nope=nope, rope=rope, v=v)
    ctx = ref(Op.MLA_ATTEND, ql, cache, latent=latent, scale=0.3, step=step())
    got = ref(Op.MLA_UV, ctx, kv_b, **MLA).reshape(TOKENS, HEADS, v)
    kv = (cache[:, :latent] @ kv_b.T).reshape(TOKENS, HEADS, nope + v)
    for t in range(TOKENS):
        for h in range(HEADS):
            key = np.hstack([kv[: t + 1, h, :nope], cache[: t + 1, latent:]])
            p = np.exp(key @ q[t, h * 10 : (h + 1) * 10] * 0.3)
            same(got[t, h], p @ kv[: t + 1, h, nope:] / p.sum())


def test_router_scan(draw: np.random.Generator) -> None:
    logits, bias = draw.normal(size=(TOKENS, 9)), draw.normal(size=9)
    route = ref(Op.ROUTER_TOPK, logits, bias, top_k=3, scale=2.5)
    for t in range(TOKENS):
        score = 1 / (1 + np.exp(-logits[t]))
        ids = sorted(sorted(range(9), key=lambda e: (-(score[e] + bias[e]), e))[:3])
        assert list(route[t, :3]) == ids
        same(route[t, 3:], score[ids] / score[ids].sum() * 2.5)


def test_router_tie_takes_the_lower_id() -> None:
    route = ref(Op.ROUTER_TOPK, np.zeros((1, 6)), np.array([0, 1, 1, 1, 0, 1.0]), top_k=2, scale=1)
    assert list(route[0]) == [1, 2, 0.5, 0.5]


# -- state: any cut of a sequence gives the same -------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_state_carries_over_a_cut(draw: np.random.Generator, cut: int) -> None:
    x = kda_inputs(draw)
    conv = draw.normal(size=(HEADS * DIM, 4))
    rows = [x[name] for name in ("q", "k", "v", "f", "b")]
    fixed = [x["a_log"], x["dt_bias"]]
    cases = {
        Op.SHORT_CONV: lambda r, s, at: REFERENCE[Op.SHORT_CONV](r[0], conv, s, step=at),
        Op.KDA_CORE: lambda r, s, at: REFERENCE[Op.KDA_CORE](*r, *fixed, s, **KDA, step=at),
    }
    for run in cases.values():
        whole, end = run(rows, None, step())
        head, state = run([r[:cut] for r in rows], None, step(tokens=cut))
        tail, last = run([r[cut:] for r in rows], state, step(cut, TOKENS - cut))
        same(np.concatenate([head, tail]), whole)
        same(last, end)


def test_a_new_sequence_ignores_an_old_state(draw: np.random.Generator) -> None:
    x, conv = draw.normal(size=(TOKENS, 6)), draw.normal(size=(6, 4))
    junk = np.full((3, 6), 1e30)
    clean, _ = REFERENCE[Op.SHORT_CONV](x, conv, None, step=step())
    same(REFERENCE[Op.SHORT_CONV](x, conv, junk, step=step())[0], clean)
    later = REFERENCE[Op.SHORT_CONV](x, conv, junk, step=replace(step(), position=1))[0]
    assert not np.allclose(later, clean)  # the control: from position 1 on the state is read


def test_a_query_sees_its_own_position_and_no_later_one(draw: np.random.Generator) -> None:
    q, cache = draw.normal(size=(1, 11)), draw.normal(size=(6, 11))
    kwargs = {"latent": 7, "scale": 0.3}
    at = step(position=3, tokens=1)
    base = ref(Op.MLA_ATTEND, q, cache, **kwargs, step=at)
    changed = {}
    for position in range(6):
        other = cache.copy()
        other[position] += 1.0
        changed[position] = not np.allclose(base, ref(Op.MLA_ATTEND, q, other, **kwargs, step=at))
    assert changed == {p: p <= 3 for p in range(6)}


# -- known values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "up", "value"),
    [(1, 1, 0.715817828), (-1, 2, -0.525828896), (5, -30, -70.2442544), (100, 100, 99.93293)],
)
def test_situ_values(gate: float, up: float, value: float) -> None:
    # k3_spec C.5, "Check values".
    got = ref(Op.SITU, np.array([[gate]]), np.array([[up]]), **BETAS)
    np.testing.assert_allclose(got, value, rtol=1e-7)


def test_decay_stays_above_its_bound() -> None:
    f = np.array([[-1e3, 0.0, 1e3]])
    got = ref(Op.KDA_DECAY, f, np.zeros(1), np.zeros(3), lower_bound=-5.0, unit_cols=3)
    np.testing.assert_allclose(got[0], [1.0, np.exp(-2.5), np.exp(-5.0)])


def test_argmax_takes_the_lowest_index_and_the_fold_the_lowest_rank() -> None:
    left = ref(Op.ARGMAX, np.array([[1.0, 5.0, 5.0]]), vocab_base=0)
    right = ref(Op.ARGMAX, np.array([[5.0, 2.0, 4.0]]), vocab_base=3)
    assert left.tolist() == [[5.0, 1.0, 5.0, 0.0]]
    assert right.tolist() == [[5.0, 3.0, 4.0, 0.0]]
    assert ref(Op.ARGMAX_FOLD, np.stack([left, right])).tolist() == [[5.0, 1.0, 5.0, 0.0]]
    beaten = np.stack([np.array([[4.0, 0.0, 3.0, 0.0]]), right])
    assert ref(Op.ARGMAX_FOLD, beaten).tolist() == [[5.0, 3.0, 4.0, 0.0]]
