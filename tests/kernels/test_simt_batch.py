"""Eight sequences in one step on emulated lanes: the scalar bits, and those of each alone.

Sequences stand at positions of their own, some at their first token, around a page's end; slots and
pages are in no order. Kills: state of another slot, a page of another sequence, a length that is
the step's and not the token's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from k3tool.isa.table import Op
from tests.kernels.bodies import Tokens
from tests.kernels.op_cases import CASES
from tests.kernels.test_ops import execute, ids, role_of, state_parts, states_of
from tests.kernels.test_simt_leaves import FORWARD, REVERSE

N = 8
SLOTS = np.array([3, 0, 7, 5, 1, 6, 2, 4])
POSITIONS = np.array([0, 255, 256, 17, 0, 600, 511, 257])
STATEFUL = [Op.SHORT_CONV, Op.CONV_SILU, Op.KDA_STEP, Op.KDA_CORE, Op.KDA_HEADS]
PAGED = [Op.MLA_CACHE, Op.MLA_ATTEND, Op.MLA_HEADS, Op.MLA_PAGES, Op.MLA_MERGE]


@pytest.fixture(params=[("cuda", FORWARD), ("hip", REVERSE)], ids=["cuda", "hip"])
def flash_bodies(request, simt_bodies_of):
    """A flash build's bodies: what a program that holds several sequences decodes with."""
    vendor, order = request.param
    bodies = simt_bodies_of(vendor, "-DK3_FLASH")
    bodies.lib.t_order(order)
    return bodies


def eight(op):
    """A case of eight tokens, each another's sequence, and its operands."""
    case, rng = CASES[op], np.random.default_rng(int(op))
    stored = {}
    for name, a in case.stored.items():
        if name in states_of(case):
            stored[name] = rng.normal(0, 0.3, (N, *a.shape[1:])).astype(np.float32)
        elif name == "cache":
            stored[name] = rng.normal(0, 1, (3 * N, *a.shape[1:])).astype(np.float32)
        elif role_of(op, name) == "in" and len(a) == len(CASES[Op.ADD].stored["a"]):
            stored[name] = np.resize(a, (N, *a.shape[1:])) + rng.normal(0, 0.1, (N, 1)).astype("f4")
        else:
            stored[name] = a
    units = N if op == Op.MLA_CACHE else case.n_units
    shape = stored["cache"].shape if op == Op.MLA_CACHE else (N, *case.out_shape[1:])
    return replace(case, n_units=units, out_shape=shape, slots=N, stored=stored), stored


def tokens_of(rows):
    """The step's tokens: some of the eight."""
    pages = np.random.default_rng(1).permutation(3 * N).astype(np.uint32).reshape(N, 3)
    return Tokens(len(rows), position=POSITIONS[rows], slot=SLOTS[rows], page_table=pages)


@pytest.mark.parametrize("op", STATEFUL + PAGED, ids=ids)
def test_eight_sequences(body_library, flash_bodies, op):
    case, stored = eight(op)
    want, want_state = execute(
        body_library("scalar"), case, stored=stored, tokens=tokens_of(range(N))
    )
    got, state = execute(flash_bodies, case, stored=stored, tokens=tokens_of(range(N)))
    assert np.array_equal(got, want)
    assert (state is None) == (want_state is None)
    assert state is None or np.array_equal(state, want_state)
    for row in range(N):
        inputs = {n: a for n, a in stored.items() if len(a) == N and n not in states_of(case)}
        one = stored | {n: a[row : row + 1] for n, a in inputs.items()}
        units = 1 if op == Op.MLA_CACHE else case.n_units
        shape = case.out_shape if op == Op.MLA_CACHE else (1, *case.out_shape[1:])
        alone = replace(case, n_units=units, out_shape=shape)
        result, left = execute(flash_bodies, alone, stored=one, tokens=tokens_of([row]))
        if op == Op.MLA_CACHE:
            page = tokens_of(range(N)).page_table[SLOTS[row], POSITIONS[row] // 256]
            at = page, POSITIONS[row] % 256
            assert np.array_equal(got[at], result[at])
            continue
        assert np.array_equal(got[row], result[0])
        if state is not None:
            ours, theirs = (state_parts(case, s) for s in (state, left))
            slot = SLOTS[row]
            assert all(np.array_equal(ours[n][slot], theirs[n][slot]) for n in ours)


def test_control_another_slot_gives_other_bits(body_library):
    """Two sequences with each other's slots: the bits say so, else the test above says nothing."""
    for op in (Op.KDA_CORE, Op.MLA_PAGES):
        case, stored = eight(op)
        want, _ = execute(body_library("scalar"), case, stored=stored, tokens=tokens_of(range(N)))
        swapped = tokens_of(range(N))
        swapped.slot = SLOTS[[0, 1, 2, 5, 4, 3, 6, 7]]
        got, _ = execute(body_library("scalar"), case, stored=stored, tokens=swapped)
        assert not np.array_equal(got[3], want[3])
        assert np.array_equal(got[2], want[2])
