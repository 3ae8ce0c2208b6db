"""The delta rule's leaf (kernels_cpu/leaves/tiles_delta.h) against the body's own text.

Bits of the results and of the state. Kills: a state that is decayed twice or not at all between the
walks, quads that meet in another order, absent rows that are left out of the tree, columns of a
neighbouring strip, and a state that is read at position 0. Of tokens behind each other also: a run
that goes on into another sequence or past a position 0, one that is longer than the work it has, a
last token whose state is decayed for a next one, and a prediction of the wrong token.
"""

from __future__ import annotations

import numpy as np
import pytest

from k3tool.isa.table import Op
from tests.kernels.bodies import Bodies, Tokens
from tests.kernels.test_leaves import KINDS, differing, f32_bits

HEADS, T = 2, 4
WIDTHS = (16, 32, 48, 64, 96, 128, 160)  # strips are of 16 and 32 columns; 160 is more than a chunk


def step(bodies: Bodies, D: int, inputs: dict[str, np.ndarray], first: int) -> list[np.ndarray]:
    """Return the words of results and states."""
    made = {name: array.copy() for name, array in inputs.items()}
    made["y"] = np.full((T, HEADS * D), np.float32(7e7))
    bodies.run(
        Op.KDA_STEP, made, n_units=HEADS, width=HEADS * D, unit_cols=D, params={},
        tokens=Tokens(T, first=first),
    )  # fmt: skip
    return [made["y"], made["s"]]


def inputs_of(kind: str, D: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([KINDS.index(kind), D])
    made = {name: f32_bits(rng, kind, (T, HEADS * D)) for name in ("q", "k", "v")}
    made["decay"] = rng.uniform(0, 1, (T, HEADS * D)).astype(np.float32)
    made["beta"] = rng.uniform(0, 1, (T, HEADS)).astype(np.float32)
    return made | {"s": f32_bits(rng, kind, (1, HEADS, D, D))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 9])
def test_equals_the_body(bodies, body_library, kind, first):
    for D in WIDTHS:
        inputs = inputs_of(kind, D)
        want = step(body_library("scalar"), D, inputs, first)
        for got, wanted in zip(step(bodies, D, inputs, first), want, strict=True):
            assert differing(got, wanted) == 0, D


def test_tiny_products_keep_their_sign(bodies, body_library):
    """A lane that underflows to -0 becomes +0 beside absent rows, and stays where none are."""
    for D in (32, 128):
        inputs = inputs_of("plain", D) | {"s": np.full((1, HEADS, D, D), np.float32(-(2.0**-80)))}
        inputs["q"][:] = inputs["k"][:] = np.float32(2.0**-80)
        inputs["beta"][:] = 0
        got, want = (step(b, D, inputs, 1)[0] for b in (bodies, body_library("scalar")))
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
        assert np.signbit(got).all() == (D == 128)


def test_control_another_order_is_seen(bodies):
    """Rows in another order change the sums: the inputs can tell."""
    inputs = inputs_of("plain", 128)
    turned = inputs | {"s": inputs["s"][:, :, ::-1].copy()}
    for name in ("q", "k", "decay"):
        turned[name] = inputs[name].reshape(T, HEADS, -1)[:, :, ::-1].reshape(T, -1).copy()
    got, other = step(bodies, 128, inputs, 1)[0], step(bodies, 128, turned, 1)[0]
    assert np.allclose(got, other, rtol=1e-2, atol=1e-2)
    assert differing(got, other) > 32


N_RUN, SLOTS = 75, 3  # longer than two runs; two of three sequences take part, one of them twice


def core(bodies: Bodies, D: int, inputs: dict[str, np.ndarray], round_: int) -> list[np.ndarray]:
    """Return the words of results and states of KDA_CORE over several sequences."""
    made = {name: array.copy() for name, array in inputs.items()}
    made["y"] = np.full((N_RUN, HEADS * D), np.float32(7e7))
    slot = np.repeat([2, 0, 2], [40, 2, 33])
    position = np.concatenate([7 + np.arange(40), np.arange(2), 47 + np.arange(20), np.arange(13)])
    bodies.run(
        Op.KDA_CORE, made, n_units=HEADS, width=HEADS * D, unit_cols=D, flags=round_,
        params={"l2_eps": 1e-6, "q_scale": 0.3, "lower_bound": -5.0},
        tokens=Tokens(N_RUN, slot=slot, position=position),
    )  # fmt: skip
    return [made["y"], made["s"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("round_", [0, 16])
def test_a_run_equals_its_tokens(bodies, body_library, kind, round_):
    for D in (16, 48, 96, 128, 160):
        rng = np.random.default_rng([KINDS.index(kind), D])
        inputs = {
            name: rng.normal(0, 1, shape).astype(np.float32)
            for name, shape in (
                ("q", (N_RUN, HEADS * D)), ("k", (N_RUN, HEADS * D)), ("f", (N_RUN, HEADS * D)),
                ("b", (N_RUN, HEADS)), ("a_log", (HEADS,)), ("dt_bias", (HEADS * D,)),
            )
        }  # fmt: skip
        inputs["v"] = f32_bits(rng, kind, (N_RUN, HEADS * D))
        inputs["s"] = f32_bits(rng, kind, (SLOTS, HEADS, D, D))
        want = core(body_library("scalar"), D, inputs, round_)
        for got, wanted in zip(core(bodies, D, inputs, round_), want, strict=True):
            assert differing(got, wanted) == 0, D
        assert np.array_equal(want[1][1].view(np.uint32), inputs["s"][1].view(np.uint32))
