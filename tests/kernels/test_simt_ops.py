"""Every op body on emulated GPU lanes: the scalar bits, whichever lanes run first.

The bodies are the text that nvcc and clang compile for GPUs (test_compile_gpu.py). Kills: a missing
K3_SYNC, a barrier or a leaf call in a branch that not all lanes take, a K3_LANE0 value that other
lanes use, a write in place before all have read. Not covered: memory models between blocks.
"""

from __future__ import annotations

import subprocess
from itertools import pairwise

import numpy as np
import pytest

from k3tool.isa.table import SPECS, Op
from tests.kernels import test_ops
from tests.kernels.bodies import Bodies
from tests.kernels.conftest import ROOT
from tests.kernels.op_cases import CASES
from tests.kernels.test_ops import execute, ids
from tests.kernels.test_simt_leaves import FLAGS, FOLDER, FORWARD, REVERSE, STRIDED, VENDOR_LANES


@pytest.fixture(scope="session")
def simt_bodies_of(tmp_path_factory):
    """Return ``load(vendor, *defines) -> Bodies`` compiled for that vendor's block."""
    folder, made = tmp_path_factory.mktemp("simt_ops"), {}

    def load(vendor, *defines):
        if (vendor, defines) not in made:
            include = folder / str(len(made))
            include.mkdir()
            names = [spec.name.lower() for spec in SPECS.values() if vendor in spec.targets]
            text = "".join(f'#include "ops/{name}.h"\n' for name in names)
            (include / "k3_ops.h").write_text(text)
            flags = [*FLAGS, *defines, f"-DK3_HOST_LANES={VENDOR_LANES[vendor]}",
                     f"-DK3_SIMT_OPS=K3_OPS_{vendor.upper()}_DECODE"]  # fmt: skip
            folders = [f"-I{f}" for f in (include, FOLDER, ROOT / "kernels_common")]
            source, path = FOLDER / "ops_simt.cpp", include / "ops.so"
            command = ["g++", *flags, *folders, str(source), "-o", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made[vendor, defines] = Bodies(vendor, path)
        return made[vendor, defines]

    return load


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


@pytest.mark.parametrize("op", [op for op in test_ops.SLICED if CASES[op].n_units > 2], ids=ids)
def test_slices_change_no_bit(body_library, simt_bodies, op):
    case = CASES[op]
    want = execute(body_library("scalar"), case)
    cuts = [0, 1, case.n_units // 2, case.n_units]
    slices = list(pairwise(cuts))
    got = execute(simt_bodies, case, slices=slices)
    assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


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
# here, and the barriers around its leaf calls are for leaves that divide columns otherwise.
HANDS_OVER = [
    Op.GLU_BF16, Op.NORM_GEMV_BF16, Op.ATTN_RES, Op.ATTN_RES_NORM, Op.KDA_CORE, Op.MLA_ATTEND,
    Op.MLA_UV_GATE, Op.ROUTER_TOPK, Op.MOE_GLU_MXFP4, Op.MOE_DOWN_MXFP4,
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
