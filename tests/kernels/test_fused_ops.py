"""A fused op gives the bits of the ops that its rule says it is: no arithmetic of its own."""

from __future__ import annotations

import numpy as np

from k3tool.isa.table import Op
from tests.kernels.op_cases import CASES, HEADS, TOP_K, D, H
from tests.kernels.test_ops import execute, run_parts


def fused_equals(bodies, op, parts):
    got, _ = execute(bodies, CASES[op])
    assert np.array_equal(got, parts.view(np.uint32))


def test_norm_gemv_is_norm_then_gemv(bodies):
    s, p = CASES[Op.NORM_GEMV_BF16].stored, {"eps": 1e-5}
    normed = run_parts(bodies, Op.RMSNORM, {"x": s["x"], "norm": s["norm"]}, p, H, 0)
    gemv = {"K": H, "head_only": 0}
    parts = run_parts(bodies, Op.GEMV_BF16, {"x": normed, "w": s["w"]}, gemv, 21)
    fused_equals(bodies, Op.NORM_GEMV_BF16, parts)


def test_glu_is_two_products_then_situ_in_its_primitive_form(bodies):
    s, gemv = CASES[Op.GLU_BF16].stored, {"K": H, "head_only": 0}
    g = run_parts(bodies, Op.GEMV_BF16, {"x": s["x"], "w": s["gate"]}, gemv, 21)
    u = run_parts(bodies, Op.GEMV_BF16, {"x": s["x"], "w": s["up"]}, gemv, 21)
    cap_g = run_parts(bodies, Op.SOFTCAP, {"x": g}, {"beta": 4.0}, 21)
    cap_u = run_parts(bodies, Op.SOFTCAP, {"x": u}, {"beta": 25.0}, 21)
    sig = run_parts(bodies, Op.SIGMOID, {"x": g}, {}, 21)
    gated = run_parts(bodies, Op.MUL, {"a": cap_g, "b": sig}, {}, 21)
    fused_equals(bodies, Op.GLU_BF16, run_parts(bodies, Op.MUL, {"a": gated, "b": cap_u}, {}, 21))


def test_expert_glu_is_two_products_then_situ(bodies):
    case = CASES[Op.MOE_GLU_MXFP4]
    s, width = case.stored, TOP_K * 21
    p = {"K": case.params["K"], "top_k": TOP_K}
    x = {"z": s["z"], "route": s["route"]}
    both = [
        run_parts(bodies, Op.MOE_UP_MXFP4, {**x, "w": s[w]}, p, width, n_units=21)
        for w in ("w1", "w3")
    ]
    caps = {"beta": 4.0, "linear_beta": 25.0}
    parts = run_parts(bodies, Op.SITU, {"gate": both[0], "up": both[1]}, caps, width)
    fused_equals(bodies, Op.MOE_GLU_MXFP4, parts)


def test_attn_res_norm_is_mix_then_norm(bodies):
    case = CASES[Op.ATTN_RES_NORM]
    s = {k: v for k, v in case.stored.items() if k != "norm"}
    mix = run_parts(bodies, Op.ATTN_RES, s, {"n_blocks": 3, "eps": 1e-5}, H, 0)
    norm = {"x": mix, "norm": case.stored["norm"]}
    fused_equals(bodies, Op.ATTN_RES_NORM, run_parts(bodies, Op.RMSNORM, norm, {"eps": 1e-5}, H, 0))


def test_kda_core_is_its_parts(bodies):
    case = CASES[Op.KDA_CORE]
    s, p, C = case.stored, case.params, HEADS * D
    q = run_parts(bodies, Op.L2NORM, {"x": s["q"]}, {"eps": p["l2_eps"]}, C, D)
    q = run_parts(bodies, Op.SCALE, {"x": q}, {"factor": p["q_scale"]}, C)
    k = run_parts(bodies, Op.L2NORM, {"x": s["k"]}, {"eps": p["l2_eps"]}, C, D)
    gate = {"f": s["f"], "a_log": s["a_log"], "dt_bias": s["dt_bias"]}
    decay = run_parts(bodies, Op.KDA_DECAY, gate, {"lower_bound": p["lower_bound"]}, C, D)
    beta = run_parts(bodies, Op.SIGMOID, {"x": s["b"]}, {}, HEADS)
    step = {"q": q, "k": k, "v": s["v"], "decay": decay, "beta": beta, "s": s["s"].copy()}
    fused_equals(
        bodies, Op.KDA_CORE, run_parts(bodies, Op.KDA_STEP, step, {}, C, D, tokens=case.tokens())
    )


def test_gates_are_their_parts(bodies):
    s, C = CASES[Op.KDA_GATED_NORM].stored, HEADS * D
    norm = {"x": s["o"], "norm": s["norm"]}
    normed = run_parts(bodies, Op.HEAD_RMSNORM, norm, {"eps": 1e-5}, C, D)
    sig = run_parts(bodies, Op.SIGMOID, {"x": s["gate"]}, {}, C)
    fused_equals(
        bodies, Op.KDA_GATED_NORM, run_parts(bodies, Op.MUL, {"a": normed, "b": sig}, {}, C)
    )
    case = CASES[Op.MLA_UV_GATE]
    uv = {"ctx": case.stored["ctx"], "kv_b": case.stored["kv_b"]}
    o = run_parts(bodies, Op.MLA_UV, uv, case.params, case.width)
    gated = {"o": o, "gate": case.stored["gate"]}
    fused_equals(bodies, Op.MLA_UV_GATE, run_parts(bodies, Op.MLA_OUT_GATE, gated, {}, case.width))


def test_conv_silu_is_conv_then_silu(bodies):
    conv, state = execute(bodies, CASES[Op.SHORT_CONV])
    silu, same = execute(bodies, CASES[Op.CONV_SILU])
    parts = run_parts(bodies, Op.SILU, {"x": conv.view(np.float32)}, {}, HEADS * D)
    assert np.array_equal(silu, parts.view(np.uint32))
    assert np.array_equal(state, same)


def test_fused_collectives_are_their_parts(bodies):
    def words(op):
        return execute(bodies, CASES[op])[0].view(np.float32)

    residual = CASES[Op.ALL_REDUCE_ADD].stored["residual"]
    reduced, gathered = words(Op.ALL_REDUCE), words(Op.ALL_GATHER)
    assert np.array_equal(words(Op.ALL_REDUCE_ADD), residual + reduced)
    assert np.array_equal(words(Op.REDUCE_GATHER), gathered + reduced)
    assert np.array_equal(words(Op.REDUCE_GATHER_ADD), residual + (gathered + reduced))
