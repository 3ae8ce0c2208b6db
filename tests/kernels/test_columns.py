"""Columns of several tokens (kernels_cpu/leaves/tiles_columns_tokens.h), by the op that uses them.

Bits against the scalar bodies. Kills: quads that meet in another order, absent rows that are left
out of the tree, columns in the order of an unpacking, tokens past a tile that take x of the tile
before, columns behind the last whole tile, and packed x whose pair is turned round.
"""

from __future__ import annotations

import numpy as np
import pytest

from k3tool.isa.table import SPECS, Op
from tests.kernels.bodies import Bodies, Tokens
from tests.kernels.test_leaves import KINDS, bf16_words, differing, f32_bits

HEADS, ROPE, V = 2, 3, 5
SIZES = [(128, 96), (128, 39), (120, 64), (8, 32), (16, 8), (12, 33), (136, 32)]  # nope, latent


def queries(
    bodies: Bodies, n_tok: int, size: tuple[int, int], inputs: dict[str, np.ndarray], flags: int
) -> np.ndarray:
    """Return the words of the queries carried to the latent."""
    nope, latent = size
    made = inputs | {"y": np.full((n_tok, HEADS * (latent + ROPE)), np.float32(7e7))}
    bodies.run(
        Op.MLA_QLAT, made, n_units=HEADS, width=HEADS * (latent + ROPE), unit_cols=latent + ROPE,
        params={"nope": nope, "rope": ROPE, "latent": latent, "v": V}, flags=flags,
        tokens=Tokens(n_tok),
    )  # fmt: skip
    return made["y"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("round_", [0, 1])
def test_tokens_equal_one_by_one(bodies, body_library, kind, round_):
    flags = SPECS[Op.MLA_QLAT].flag_mask if round_ else 0
    for size in SIZES:
        nope, latent = size
        for n_tok in (1, 2, 17, 35):
            rng = np.random.default_rng([KINDS.index(kind), nope, latent, n_tok])
            q = f32_bits(rng, kind, (n_tok, HEADS * (nope + ROPE)))
            if round_:  # mode bf16: x is of bf16 values, and a leaf may pack it
                q = (q.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            inputs = {"q": q, "kv_b": bf16_words(rng, kind, (HEADS * (nope + V), latent))}
            want = queries(body_library("scalar"), n_tok, size, inputs, flags)
            assert differing(queries(bodies, n_tok, size, inputs, flags), want) == 0, (size, n_tok)
