"""Each barrier of the flash builds' attention: a shape whose bits differ without it, in some order.

As tests/kernels/test_barriers.py does for bodies that all builds have; these stand only in the
builds with pages in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from tests.kernels.bodies import Bodies
from tests.kernels.conftest import ROOT
from tests.kernels.spared import in_a_child
from tests.kernels.test_simt_flash import FLASH, attend, run
from tests.kernels.test_simt_leaves import FORWARD, REVERSE, STRIDED

FILE = "simt_flash.h"
# A maximum of zeros of two signs, for which a lane walks over what others turn into exponentials.
ZEROS = (-1.0, -0.0, 0.0, *(-2.0,) * 17)
# Two tiles of heads over a page's end; two tiles of tokens, each over a page's end; walks of both.
SHAPES: tuple[Callable[[Bodies], np.ndarray], ...] = (
    lambda bodies: run(bodies, 257, 13, 80, 8, check_fault=False),
    lambda bodies: attend(bodies, range(250, 264), 2, 80, 8),
    lambda bodies: run(bodies, len(ZEROS), 2, 16, 8, dots=ZEROS, check_fault=False),
    lambda bodies: attend(bodies, range(17, 20), 2, 16, 8, dots=ZEROS),
)
# Which of them: why its bytes are touched again only behind another one. Each ends a part that
# other bodies may come to call with less between, and costs a barrier per tile.
SPARE = {
    4: "the next heads write queries first, which the mix does not read",
    11: "the next tokens write queries first, and the sums so far behind three more",
}


def sites() -> list[tuple[int, int]]:
    """(which barrier, line) of each in the file."""
    lines = (ROOT / "kernels_common" / FILE).read_text().split("\n")
    met = [n for n, line in enumerate(lines, 1) if "K3_SYNC(" in line.split("/*")[0]]
    return list(enumerate(met))


@pytest.fixture(scope="module")
def bodies(simt_bodies_of) -> Bodies:
    return simt_bodies_of("cuda", FLASH, "-DK3_HOST_SPARED")


@pytest.fixture(scope="module")
def wanted(bodies, body_library) -> list[np.ndarray]:
    """The control: with every barrier, whatever lanes run first, the scalar bits."""
    found = [shape(body_library("scalar")) for shape in SHAPES]
    for order in (FORWARD, REVERSE, STRIDED):
        bodies.lib.t_order(order)
        bodies.lib.t_spare(b"", 0)
        for shape, want in zip(SHAPES, found, strict=True):
            assert np.array_equal(shape(bodies), want)
    return found


def differs(bodies: Bodies, nth: int, line: int, want: np.ndarray) -> bool:
    """Whether without a barrier the bits are others in some order of lanes."""
    for order in (FORWARD, REVERSE, STRIDED):
        bodies.lib.t_order(order)
        bodies.lib.t_spare(FILE.encode(), line)
        if not np.array_equal(SHAPES[nth](bodies), want):
            return True
    return False


@pytest.mark.parametrize(("nth", "line"), sites())
def test_without_a_barrier_some_bits_differ(bodies, wanted, nth, line) -> None:
    needed = any(
        in_a_child(partial(differs, bodies, shape, line, want)) for shape, want in enumerate(wanted)
    )
    assert needed != (nth in SPARE), "needed, and in the table of those that are not"


def test_the_table_names_barriers_that_are_there() -> None:
    assert set(SPARE) <= {nth for nth, _ in sites()}
    assert len(sites()) >= 12
