"""Pages in shared memory: the flash builds' attention on emulated lanes has the scalar bits.

Contexts around a page's end, K3's own widths, more heads than a tile, several sequences in a step,
zeros of two signs. Not covered: what shared memory costs, and any GPU.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from k3tool.isa.table import Op
from k3tool.model.operators import PART_EXTRA
from tests.kernels.bodies import Tokens
from tests.kernels.test_simt_leaves import FORWARD, REVERSE, STRIDED

PAGE = 256
FLASH = "-DK3_FLASH"


def run(bodies, context, heads, latent, rope, *, slots=1, dots=None, check_fault=True):
    """Return the parts of `slots` sequences of `context` positions each, one token of each."""
    generator = np.random.default_rng(context + heads)
    pages, width, part = -(-context // PAGE), latent + rope, latent + PART_EXTRA
    cache = generator.normal(0, 1, (slots * pages * PAGE, width)).astype(np.float32)
    q = generator.normal(0, 1, (slots, heads * width)).astype(np.float32)
    if dots is not None:
        cache[:, :], q[:, :] = 0.0, 0.0
        cache[: len(dots), 0], q[:, ::width] = dots, 1.0
    y = np.full((slots, pages * heads * part), np.float32(6e6))
    table = generator.permutation(slots * pages).astype(np.uint32).reshape(slots, pages)
    if dots is not None:
        table[:] = np.arange(slots * pages).reshape(table.shape)
    tokens = Tokens(slots, position=np.full(slots, context - 1), slot=np.arange(slots)[::-1],
                    page_table=table)  # fmt: skip
    params = {"latent": latent, "rope": rope, "scale": 0.0625, "page_tokens": PAGE, "pages": pages}
    bodies.run(
        Op.MLA_PAGES, {"q": q, "cache": cache, "y": y}, n_units=pages, width=pages * heads * part,
        unit_cols=heads * part, params=params, tokens=tokens, check_fault=check_fault,
    )  # fmt: skip
    return y.view(np.uint32)


@pytest.fixture(
    params=[*itertools.product(("cuda",), (FORWARD, STRIDED)), ("hip", REVERSE)],
    ids=lambda p: f"{p[0]}-order{p[1]}",
)
def flash(request, simt_bodies_of):
    """The bodies of one vendor's flash build, its lanes in one order."""
    vendor, order = request.param
    bodies = simt_bodies_of(vendor, FLASH)
    bodies.lib.t_order(order)
    return bodies


@pytest.mark.parametrize("context", [1, 255, 256, 257, 1000])
def test_bits_are_the_scalar_ones(body_library, flash, context):
    shape = (context, 3, 80, 8)
    assert np.array_equal(run(flash, *shape), run(body_library("scalar"), *shape))


@pytest.mark.parametrize(
    ("context", "heads", "latent", "rope"),
    [(257, 13, 512, 64), (9, 25, 34, 3), (130, 12, 528, 48), (3, 2, 512, 68)],
    ids=["K3's, two tiles", "no vectors", "columns beyond the lanes", "too wide for the tile"],
)
def test_shapes(body_library, flash, context, heads, latent, rope):
    shape = (context, heads, latent, rope)
    assert np.array_equal(run(flash, *shape), run(body_library("scalar"), *shape))


def test_sequences_of_a_step_keep_apart(body_library, flash):
    got, want = (run(b, 300, 4, 80, 8, slots=8) for b in (flash, body_library("scalar")))
    assert np.array_equal(got, want)
    assert len({row.tobytes() for row in got}) == 8


@pytest.mark.parametrize(
    "dots",
    [(-0.0, 0.0, -0.0), (0.0, -0.0), (-1.0, -0.0, 0.0, -2.0), (-5.0, np.nan, -3.0), (np.nan, 1.0)],
)
def test_a_maximum_that_depends_on_the_order(body_library, flash, dots):
    """Which zero it is, and what a NaN leaves of it. Negative zeros come from q = 1 times -0."""
    shape = (len(dots), 2, 16, 8)
    got, want = (run(b, *shape, dots=dots) for b in (flash, body_library("scalar")))
    same = (got == want) | (np.isnan(got.view("f4")) & np.isnan(want.view("f4")))
    assert same.all()


@pytest.mark.parametrize("order", [FORWARD, REVERSE])
def test_control_without_barriers_the_bits_differ(body_library, simt_bodies_of, order):
    bodies = simt_bodies_of("cuda", FLASH, "-DK3_HOST_NO_SYNC")
    bodies.lib.t_order(order)
    got = run(bodies, 257, 13, 512, 64, check_fault=False)
    assert not np.array_equal(got, run(body_library("scalar"), 257, 13, 512, 64))


# ---- a chunk of tokens, head by head ----


def attend(bodies, positions, heads, latent, rope, *, slots=None, slices=None, dots=None):
    """Return MLA_ATTEND of tokens at `positions` of sequences that reach the last of them."""
    n, generator = len(positions), np.random.default_rng(len(positions) + heads)
    slots = np.zeros(n, int) if slots is None else np.array(slots)
    n_slots, pages, width = slots.max() + 1, max(positions) // PAGE + 1, latent + rope
    cache = generator.normal(0, 1, (n_slots * pages * PAGE, width)).astype(np.float32)
    q = generator.normal(0, 2, (n, heads * width)).astype(np.float32)
    y = np.full((n, heads * latent), np.float32(6e6))
    table = generator.permutation(n_slots * pages).astype(np.uint32).reshape(n_slots, pages)
    if dots is not None:
        cache[:, :], q[:, :] = 0.0, 0.0
        cache[: len(dots), 0], q[:, ::width] = dots, 1.0
        cache[: len(dots), 1] = range(len(dots))  # or whatever their weights are, the sum is 0
        table[:] = np.arange(n_slots * pages).reshape(table.shape)
    tokens = Tokens(n, position=np.array(positions), slot=slots, page_table=table)
    params = {"latent": latent, "rope": rope, "scale": 0.0625, "page_tokens": PAGE, "pages": pages}
    bodies.run(
        Op.MLA_ATTEND, {"q": q, "cache": cache, "y": y}, n_units=heads, width=heads * latent,
        unit_cols=latent, params=params, tokens=tokens, slices=slices,
    )  # fmt: skip
    return y.view(np.uint32)


@pytest.mark.parametrize(
    ("first", "n", "latent", "rope"),
    [(0, 5, 80, 8), (250, 14, 80, 8), (255, 3, 80, 8), (995, 12, 512, 64), (500, 13, 34, 3),
     (3, 2, 512, 68)],
    ids=["begin", "over a page", "one each side", "K3's", "no vectors", "too wide"],
)  # fmt: skip
def test_tokens_of_a_chunk_share_a_page(body_library, flash, first, n, latent, rope):
    shape = (range(first, first + n), 2, latent, rope)
    want = attend(body_library("scalar"), *shape)
    assert np.array_equal(attend(flash, *shape), want)
    assert np.array_equal(attend(flash, *shape, slices=[(0, 1), (1, 2)]), want)


def test_tokens_of_several_sequences_do_not(body_library, flash):
    positions, slots = [254, 255, 256, 257, 0, 1, 700, 256, 258, 300], [0] * 4 + [1, 1, 2, 3, 3, 0]
    got, want = (
        attend(b, positions, 2, 80, 8, slots=slots) for b in (flash, body_library("scalar"))
    )
    assert np.array_equal(got, want)


def test_control_without_barriers_a_chunk_differs(body_library, simt_bodies_of):
    """In this order alone: in others lanes would walk numbers of positions that are not there."""
    bodies = simt_bodies_of("cuda", FLASH, "-DK3_HOST_NO_SYNC")
    bodies.lib.t_order(FORWARD)
    shape = (range(250, 262), 2, 512, 64)
    assert not np.array_equal(attend(bodies, *shape), attend(body_library("scalar"), *shape))
