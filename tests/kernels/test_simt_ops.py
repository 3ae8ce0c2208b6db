"""Every op body on emulated GPU lanes: the scalar bits, whichever lanes run first.

The bodies are the text that nvcc and clang compile for GPUs (test_compile_gpu.py). Kills: a missing
K3_SYNC, a barrier or a leaf call in a branch that not all lanes take, a K3_LANE0 value that other
lanes use, a write in place before all have read. Not covered: memory models between blocks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from k3tool.isa.table import SPECS, Op
from tests.kernels import test_ops, test_ops_rounded
from tests.kernels.conftest import ROOT
from tests.kernels.op_cases import CASES, TOP_K, T, experts
from tests.kernels.test_ops import execute, ids
from tests.kernels.test_simt_leaves import FORWARD, REVERSE, STRIDED, VENDOR_LANES


@pytest.fixture(
    params=[(v, o) for v in VENDOR_LANES for o in (FORWARD, REVERSE, STRIDED)],
    ids=lambda p: f"{p[0]}-order{p[1]}",
)
def simt_bodies(request, simt_bodies_of):
    """The op bodies on one vendor's block, its lanes in one order."""
    vendor, order = request.param
    bodies = simt_bodies_of(vendor)
    bodies.lib.t_order(order)
    return bodies


@pytest.mark.parametrize("op", sorted(CASES), ids=ids)
def test_bits_equal_scalar(body_library, simt_bodies, op):
    want = execute(body_library("scalar"), CASES[op])
    got = execute(simt_bodies, CASES[op])
    assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("op", test_ops_rounded.OPS, ids=ids)
def test_bits_equal_scalar_where_values_round(body_library, simt_bodies, op):
    case, flags = test_ops_rounded.in_mode(op), SPECS[op].flag_mask
    want = execute(body_library("scalar"), case, flags=flags)
    got = execute(simt_bodies, case, flags=flags)
    assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("op", [op for op in test_ops.SLICED if CASES[op].n_units > 2], ids=ids)
def test_slices_change_no_bit(body_library, simt_bodies, op):
    case = CASES[op]
    want = execute(body_library("scalar"), case)
    cuts = [0, 1, case.n_units // 2, case.n_units]
    slices = list(pairwise(cuts))
    got = execute(simt_bodies, case, slices=slices)
    assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


def test_several_tiles_equal_scalar(body_library, simt_bodies):
    """More rows than a body keeps in scratch at once, so that a tile overwrites the one before."""
    rows, case = 150, CASES[Op.GLU_BF16]
    matrices = {name: np.resize(case.stored[name], (rows, 528)) for name in ("gate", "up")}
    stored = {**case.stored, **matrices}
    case = replace(case, n_units=rows, width=rows, stored=stored, out_shape=(T, rows))
    want = execute(body_library("scalar"), case)
    got = execute(simt_bodies, case)
    assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_route_of_sixteen_equals_scalar(body_library, simt_bodies):
    """As many experts as the model takes: two lanes read what lane 0 has picked."""
    rng = np.random.default_rng(7)
    stored = {"logits": rng.normal(0, 2, (T, 40)), "bias": rng.normal(0, 0.3, 40)}
    stored = {name: a.astype(np.float32) for name, a in stored.items()}
    params = {"n_experts": 40, "top_k": 16, "scale": 1.5}
    case, shape = CASES[Op.ROUTER_TOPK], (T, 32)
    route = replace(case, params=params, stored=stored, width=32, out_shape=shape)
    want, _ = execute(body_library("scalar"), route)
    assert np.array_equal(execute(simt_bodies, route)[0], want)


def test_argmax_and_fold(simt_bodies):
    test_ops.test_argmax_takes_the_lowest_index_and_a_global_margin(simt_bodies)


def test_faults(simt_bodies):
    test_ops.test_not_finite_is_a_fault_that_names_the_token(simt_bodies)
    test_ops.test_out_of_range_is_a_fault(simt_bodies)
    test_ops.test_short_scratch_is_a_fault(simt_bodies)


def test_slots_and_head(simt_bodies):
    test_ops.test_slots_do_not_mix(simt_bodies)
    test_ops.test_head_only_leaves_earlier_tokens_alone(simt_bodies)


# Ops in which lanes hand values to each other. Not KDA_STEP: a lane keeps its column to the end
# here, and the barriers around its leaf calls are for leaves that divide columns otherwise. Nor the
# ops that choose experts or walk those chosen: half a route, or half a list of tokens, names what
# is not there.
HANDS_OVER = [
    Op.GLU_BF16, Op.NORM_GEMV_BF16, Op.ATTN_RES, Op.ATTN_RES_NORM, Op.KDA_CORE, Op.MLA_ATTEND,
    Op.MLA_UV_GATE, Op.ROUTER_TOPK, Op.ATTN_PART,
    Op.MIX_LINEARS_6, Op.SITU_GEMV_BLOCKS, Op.KDA_HEADS, Op.MLA_HEADS,
    Op.MLA_QUERY, Op.MLA_PAGES, Op.MLA_MERGE,
]  # fmt: skip


@pytest.mark.parametrize("op", HANDS_OVER, ids=ids)
def test_control_without_barriers_the_bits_differ(body_library, simt_bodies_of, op):
    bodies = simt_bodies_of("cuda", "-DK3_HOST_NO_SYNC")
    want = execute(body_library("scalar"), CASES[op])
    differs = []
    for order in (FORWARD, REVERSE, STRIDED):
        bodies.lib.t_order(order)
        got = execute(bodies, CASES[op], check_fault=False)
        differs.append(not all(np.array_equal(g, w) for g, w in zip(got, want, strict=True)))
    assert any(differs)


# Ops that walk the experts chosen: without any barrier they would walk what is not there, so
# barriers of their own are taken out alone: (op, which of its header's). test_barriers.py takes out
# every barrier of every body so.
OWN_BARRIERS = [(Op.MOE_GLU_MXFP4, 0), (Op.MOE_GLU_MXFP4, 1), (Op.MOE_DOWN_MXFP4, 0)]
IN_HEADER = {Op.MOE_GLU_MXFP4: 2, Op.MOE_DOWN_MXFP4: 1}


@pytest.mark.parametrize(("op", "nth"), OWN_BARRIERS, ids=lambda x: getattr(x, "name", str(x)))
def test_control_without_one_barrier_the_bits_differ(body_library, simt_bodies_of, op, nth):
    name = op.name.lower()
    parts = (ROOT / "kernels_common" / "ops" / f"{name}.h").read_text().split("K3_SYNC(c);")
    assert len(parts) == 1 + IN_HEADER[op], "a barrier came or went"
    without = f"{parts[nth]}(void)c;{parts[nth + 1]}"
    altered = "K3_SYNC(c);".join([*parts[:nth], without, *parts[nth + 2 :]])
    bodies = simt_bodies_of("cuda", **{name: altered})
    case = several_tiles_of_experts() if op == Op.MOE_GLU_MXFP4 else CASES[op]
    want = execute(body_library("scalar"), case)
    whole, differs = simt_bodies_of("cuda"), []
    for order in (FORWARD, REVERSE, STRIDED):
        whole.lib.t_order(order)
        assert np.array_equal(execute(whole, case)[0], want[0]), "the control"
        bodies.lib.t_order(order)
        got = execute(bodies, case, check_fault=False)
        differs.append(not all(np.array_equal(g, w) for g, w in zip(got, want, strict=True)))
    assert any(differs)


def several_tiles_of_experts():
    """MOE_GLU_MXFP4 with more rows than one tile holds: the next one overwrites both products."""
    case, rows = CASES[Op.MOE_GLU_MXFP4], 600
    (w1, _, k1), (w3, _, k3) = (experts(seed, rows, int(case.params["K"])) for seed in (21, 22))
    stored = {**case.stored, "w1": w1, "w3": w3}
    width = TOP_K * rows
    return replace(
        case, n_units=rows, width=width, stored=stored, out_shape=(T, width), keep=[*k1, *k3]
    )
