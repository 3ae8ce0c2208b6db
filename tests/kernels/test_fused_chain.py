"""The ops that shorten a token's chain have the bits of the parts they replace.

Kills: a prologue with arithmetic of its own, a block part that is mixed in another order, a group
that gives one linear's rows to another, a state that a head writes for its neighbour.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from k3tool.isa.table import SPECS, Op
from tests.kernels.op_cases import CASES, HEADS, LATENT, NOPE, RANK, ROPE, TOP_K, D, H, T, V
from tests.kernels.test_ops import FILL, execute, run_parts, state_parts


def words(bodies, op):
    return execute(bodies, CASES[op])[0]


@pytest.mark.parametrize("op", [Op.MIX_LINEARS_3, Op.MIX_LINEARS_4, Op.MIX_LINEARS_6])
def test_mix_linears_of_a_block_part_are_mix_norm_and_linears(bodies, op):
    case, part = CASES[op], CASES[Op.ATTN_PART]
    s = case.stored
    made = execute(bodies, part)[0].view(np.float32)
    fused, _ = execute(bodies, case, stored={**s, "part": made})
    site = {name: s[name] for name in ("prefix", "res_norm", "res_proj", "norm")}
    params = {"n_blocks": 2, "eps": 1e-5, "norm_eps": 1e-6}
    mix = {**site, "blocks": part.stored["blocks"]}
    x = run_parts(bodies, Op.ATTN_RES_NORM, mix, params, H, 0)
    gemv = {"K": H, "head_only": 0}
    parts = [
        run_parts(bodies, Op.GEMV_BF16, {"x": x, "w": s[f"w{i}"]}, gemv, rows)
        for i, rows in enumerate(case.widths)
    ]
    assert np.array_equal(fused.view(np.float32), np.concatenate(parts, axis=1))


def test_eight_block_parts_are_eight_times_one(bodies):
    case, width = CASES[Op.ATTN_PARTS_8], H + 16
    packed = words(bodies, Op.ATTN_PARTS_8)
    for i in range(8):
        site = {"res_norm": case.stored[f"res_norm{i}"], "res_proj": case.stored[f"res_proj{i}"]}
        inputs = {"blocks": case.stored["blocks"], **site}
        one = run_parts(bodies, Op.ATTN_PART, inputs, case.params, width, 0)
        assert np.array_equal(packed[:, i * width : (i + 1) * width], one.view(np.uint32))


def test_situ_down_is_situ_then_product(bodies):
    s = CASES[Op.SITU_GEMV_BLOCKS].stored
    caps = {"beta": 4.0, "linear_beta": 25.0}
    act = run_parts(bodies, Op.SITU, {"gate": s["gate"], "up": s["up"]}, caps, H)
    blocks = {"K": H, "n_blocks": 8}
    parts = run_parts(bodies, Op.GEMV_BF16_BLOCKS, {"x": act, "w": s["w"]}, blocks, 21)
    assert np.array_equal(words(bodies, Op.SITU_GEMV_BLOCKS), parts.view(np.uint32))


def test_kda_heads_are_their_parts(bodies):
    case, C = CASES[Op.KDA_HEADS], HEADS * D
    s, p, tokens = case.stored, case.params, case.tokens()
    states, normed = {}, {}
    for name in "qkv":
        states[f"taps_{name}"] = s[f"taps_{name}"].copy()
        inputs = {"x": s[name], "conv": s[f"conv_{name}"], "taps": states[f"taps_{name}"]}
        normed[name] = run_parts(bodies, Op.CONV_SILU, inputs, {}, C, tokens=tokens)
    gemv = {"K": RANK, "head_only": 0}
    f = run_parts(bodies, Op.GEMV_BF16, {"x": s["f"], "w": s["f_b"]}, gemv, C)
    states["s"] = s["s"].copy()
    core = {**normed, "f": f, "b": s["b"], "a_log": s["a_log"], "dt_bias": s["dt_bias"]}
    sizes = {name: p[name] for name in ("l2_eps", "q_scale", "lower_bound")}
    core_inputs = {**core, "s": states["s"]}
    o = run_parts(bodies, Op.KDA_CORE, core_inputs, sizes, C, D, tokens=tokens)
    gate = {"o": o, "norm": s["o_norm"], "gate": s["gate"]}
    parts = run_parts(bodies, Op.KDA_GATED_NORM, gate, {"eps": p["eps"]}, C, D)
    got, state = execute(bodies, case)
    assert np.array_equal(got, parts.view(np.uint32))
    for name, value in state_parts(case, state).items():
        assert np.array_equal(value.view(np.uint32), states[name].view(np.uint32)), name


def test_mla_heads_are_their_parts(bodies):
    case = CASES[Op.MLA_HEADS]
    s, p, tokens = case.stored, case.params, case.tokens()
    sizes = {"nope": NOPE, "rope": ROPE, "latent": LATENT, "v": V}
    head = LATENT + ROPE
    qlat_inputs = {"q": s["q"], "kv_b": s["kv_b"]}
    q = run_parts(bodies, Op.MLA_QLAT, qlat_inputs, sizes, HEADS * head, head)
    attend = {name: p[name] for name in ("latent", "rope", "scale", "page_tokens")} | {"pages": 3}
    ctx = run_parts(bodies, Op.MLA_ATTEND, {"q": q, "cache": s["cache"]}, attend, HEADS * LATENT,
                    LATENT, tokens=tokens)  # fmt: skip
    inputs = {"ctx": ctx, "kv_b": s["kv_b"], "gate": s["gate"]}
    uv = {"nope": NOPE, "v": V, "latent": LATENT}
    parts = run_parts(bodies, Op.MLA_UV_GATE, inputs, uv, HEADS * V)
    assert np.array_equal(words(bodies, Op.MLA_HEADS), parts.view(np.uint32))


def test_a_query_is_its_parts(bodies):
    case = CASES[Op.MLA_QUERY]
    s, p = case.stored, case.params
    linear = {name: s[name] for name in ("x", "norm", "w")}
    sizes = {"K": p["K"], "eps": p["eps"], "head_only": 0}
    q = run_parts(bodies, Op.NORM_GEMV_BF16, linear, sizes, HEADS * (NOPE + ROPE))
    qlat = {"nope": NOPE, "rope": ROPE, "latent": LATENT, "v": V}
    head = LATENT + ROPE
    parts = run_parts(bodies, Op.MLA_QLAT, {"q": q, "kv_b": s["kv_b"]}, qlat, HEADS * head, head)
    assert np.array_equal(words(bodies, Op.MLA_QUERY), parts.view(np.uint32))


def by_pages(bodies, first: int, order=(0, 1, 2)) -> tuple[np.ndarray, np.ndarray]:
    """Attention from position `first` on, by heads and by pages that merge in an order."""
    case, merge = CASES[Op.MLA_PAGES], CASES[Op.MLA_MERGE]
    s, tokens = case.stored, replace(case.tokens(), first=first)
    ctx = run_parts(bodies, Op.MLA_ATTEND, s, case.params, HEADS * LATENT, LATENT, tokens=tokens)
    uv = {"ctx": ctx, "kv_b": merge.stored["kv_b"], "gate": merge.stored["gate"]}
    numbers = {name: merge.params[name] for name in ("nope", "v", "latent")}
    want = run_parts(bodies, Op.MLA_UV_GATE, uv, numbers, HEADS * V)
    parts = np.full((T, case.width), np.nan, np.float32)  # a page nobody sees must not be read
    bodies.run(case.op, {**s, "y": parts}, n_units=3, width=case.width, unit_cols=case.unit_cols,
               params=case.params, tokens=tokens)  # fmt: skip
    pages = np.ascontiguousarray(parts.reshape(T, 3, -1)[:, list(order)].reshape(T, -1))
    got = run_parts(bodies, Op.MLA_MERGE, {**merge.stored, "parts": pages}, merge.params,
                    HEADS * V, V, tokens=tokens)  # fmt: skip
    return got, want


@pytest.mark.parametrize("first", [0, 100, 250, 254, 256, 509, 600])
def test_pages_merged_are_the_attention(bodies, first):
    got, want = by_pages(bodies, first)
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


def test_pages_merged_in_another_order_are_the_same_softmax_with_other_bits(bodies):
    got, want = by_pages(bodies, 600, order=(2, 1, 0))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    assert not np.array_equal(got.view(np.uint32), want.view(np.uint32))


def test_own_choice_of_experts_is_the_routers(bodies):
    s = CASES[Op.MOE_GLU_TOPK].stored
    router = {"logits": s["scores"], "bias": s["bias"]}
    params = CASES[Op.ROUTER_TOPK].params
    route = run_parts(bodies, Op.ROUTER_TOPK, router, params, 2 * TOP_K, 0)
    for fused, op in (
        (Op.MOE_GLU_TOPK, Op.MOE_GLU_MXFP4),
        (Op.MOE_DOWN_TOPK, Op.MOE_DOWN_MXFP4),
    ):
        case, parts = CASES[fused], CASES[op]
        inputs = {name: case.stored.get(name, route) for name in parts.stored}
        y = np.full((T, case.width), FILL)
        bodies.run(op, {**inputs, "y": y}, n_units=case.n_units, width=case.width,
                   params=parts.params, tokens=case.tokens())  # fmt: skip
        assert np.array_equal(words(bodies, fused), y.view(np.uint32)), SPECS[fused].name


def test_the_route_is_left_where_the_interpreter_looks(bodies):
    """At the start of scratch: ids ascending; an expert is admitted by them before publication."""
    want, _ = execute(bodies, CASES[Op.ROUTER_TOPK])
    for op in (Op.MOE_GLU_TOPK, Op.MOE_DOWN_TOPK):
        case = CASES[op]
        operands = {**case.stored, "y": np.full(case.out_shape, FILL)}
        bodies.run(op, operands, n_units=case.n_units, width=case.width, params=case.params,
                   tokens=case.tokens())  # fmt: skip
        ids = bodies.scratch[: 2 * TOP_K * T].view(np.uint32).reshape(T, 2 * TOP_K)[:, :TOP_K]
        assert np.array_equal(ids, want[:, :TOP_K])
