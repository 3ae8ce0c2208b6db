"""Every body with its rounding points on (mode bf16): meaning, bits, slices, and that points act.

Kills: a point that a body, a slice or a leaf leaves out, one that a fused op has and its parts have
not, a leaf that packs what is no bf16, a result of some other width than bf16.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from k3tool.isa.table import SPECS, Op
from k3tool.ref.formats import rounded
from tests.kernels.op_cases import CASES, Case, T
from tests.kernels.test_ops import execute, meaning, states_of

OPS = [op for op in sorted(CASES) if SPECS[op].flags]
# A term of a sum is never rounded: the flag of these says what x is, for the leaf's sake.
TERMS = {Op.GEMV_BF16_BLOCKS, Op.SITU_GEMV_BLOCKS, Op.MOE_DOWN_MXFP4, Op.MOE_DOWN_TOPK}
ROUNDING = [op for op in OPS if "round" in SPECS[op].flags and op not in TERMS]
# What these write in place holds activations, which are bf16 values by themselves.
ACTIVATIONS = {Op.MLA_CACHE, Op.CONV_SILU}
# Of what these give part is moved (a shared key, the other part of a query) or exact (a sum).
PARTLY = {Op.MLA_CACHE, Op.MLA_QLAT, Op.ADD}
TOLERANCE_RMS = 4e-3  # of the result's rms: what numerics.md gives a block in mode bf16
# A value of float64 and one of binary32 may fall on two sides of a tie; half a percent do not.
TOLERANCE_CHANGED = 5e-3


def ids(op: Op) -> str:
    return op.name


def in_mode(op: Op) -> Case:
    """A case whose activations are bf16 values, as they are between ops in mode bf16."""
    case = CASES[op]
    stored, values = dict(case.stored), dict(case.meaning)
    for operand in SPECS[op].operands:
        name = operand.name
        if operand.role == "in" and name != "part" and stored[name].dtype == np.float32:
            assert np.array_equal(stored[name], values[name]), name
            stored[name] = rounded(stored[name].astype(np.float64), 1).astype(np.float32)
            values[name] = stored[name]
    return replace(case, stored=stored, meaning=values)


def is_bf16(words: np.ndarray) -> np.ndarray:
    return (words & 0xFFFF) == 0


def result_of(case: Case, words: np.ndarray) -> np.ndarray:
    """The rows that the case's tokens wrote: of a cache the last ones, by its page table."""
    if case.op != Op.MLA_CACHE:
        return words
    end = case.tokens().first + T
    return words[[5, 2, 7]].reshape(-1, words.shape[-1])[end - T : end]


@pytest.mark.parametrize("op", OPS, ids=ids)
def test_a_rounding_body_means_what_the_rounding_reference_says(bodies, op):
    case = in_mode(op)
    got, state = execute(bodies, case, flags=SPECS[op].flag_mask)
    want, want_state = meaning(case, rounded=True)
    got = result_of(case, got)
    values = got.view(np.float32).astype(np.float64)
    want = want[-T:] if op == Op.MLA_CACHE else np.asarray(want).reshape(values.shape)
    rms = np.sqrt(np.mean((values - want) ** 2) / np.mean(want**2))
    assert rms <= TOLERANCE_RMS, f"rms {rms:.3g}"
    if op in TERMS:
        assert not is_bf16(got).all()
        return
    assert is_bf16(got).all()
    assert np.mean(values != want) <= TOLERANCE_CHANGED
    if want_state is not None and op != Op.MLA_CACHE:
        kept = state[1].view(np.float32).astype(np.float64)
        np.testing.assert_allclose(kept, want_state.reshape(kept.shape), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("op", OPS, ids=ids)
def test_bits_are_equal_in_every_compilation_and_at_every_slicing(body_library, op):
    case = in_mode(op)
    want = execute(body_library("scalar"), case, flags=SPECS[op].flag_mask)
    for isa in ("scalar", "avx2", "avx512", "avx512_bf16"):
        cut = case.n_units // 2
        slices = [(cut, case.n_units), (0, cut)] if cut and SPECS[op].unit != "step" else None
        got = execute(body_library(isa), case, slices=slices, flags=SPECS[op].flag_mask)
        assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True)), isa


@pytest.mark.parametrize("op", ROUNDING, ids=ids)
def test_without_its_flag_a_body_rounds_nothing(bodies, op):
    """The control: the same case leaves values that are no bf16, and the flag changes most."""
    case = in_mode(op)
    plain = result_of(case, execute(bodies, case)[0])
    flagged = result_of(case, execute(bodies, case, flags=SPECS[op].flag_mask)[0])
    assert np.mean(is_bf16(plain)) < (0.7 if op in PARTLY else 0.1)
    assert np.mean(plain != flagged) > (0.3 if op in PARTLY else 0.9)


@pytest.mark.parametrize(
    "op", [op for op in OPS if states_of(CASES[op]) and op not in ACTIVATIONS], ids=ids
)
def test_states_stay_binary32(bodies, op):
    case = in_mode(op)
    _, state = execute(bodies, case, flags=SPECS[op].flag_mask)
    assert np.mean(is_bf16(state)) < 0.9


def test_each_flag_acts_on_its_own_point(bodies):
    """Of an op with two flags: the norm's leaves the result, the result's leaves the norm."""
    spec, case = SPECS[Op.NORM_GEMV_BF16], in_mode(Op.NORM_GEMV_BF16)
    by_flags = {
        flags: execute(bodies, case, flags=flags)[0]
        for flags in (0, spec.flag("norm_round"), spec.flag("round"), spec.flag_mask)
    }
    assert len({words.tobytes() for words in by_flags.values()}) == 4
    assert not is_bf16(by_flags[spec.flag("norm_round")]).all()
    assert is_bf16(by_flags[spec.flag("round")]).all()


def test_the_router_keeps_its_scores_in_a_rounding_group(bodies):
    spec, case = SPECS[Op.MIX_LINEARS_4], in_mode(Op.MIX_LINEARS_4)
    words, _ = execute(bodies, case, flags=spec.flag("round"))
    head = case.widths[0]
    assert np.mean(is_bf16(words[:, :head])) < 0.1
    assert is_bf16(words[:, head:]).all()
