"""Each barrier of the op bodies: a case whose bits differ without it, or why another spares it.

One barrier at a time is left out, of all that stand in kernels_common/ops, on emulated lanes in
three orders. Bodies divide their loops among other lanes than leaves do: values that happen to stay
on one lane are no excuse. A body that goes astray without its barrier dies in a process of its own.
Kills: a barrier that nothing needs, and one whose need no case would show.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from k3tool.isa.table import SPECS, Op
from tests.kernels import test_ops_rounded
from tests.kernels.bodies import Bodies
from tests.kernels.conftest import ROOT
from tests.kernels.op_cases import CASES, Case, T
from tests.kernels.spared import in_a_child
from tests.kernels.test_ops import execute
from tests.kernels.test_simt_leaves import FORWARD, REVERSE, STRIDED
from tests.kernels.test_simt_ops import several_tiles_of_experts

ORDERS = (FORWARD, REVERSE, STRIDED)
FOLDERS = ("kernels_common", "kernels_common/ops")
# No bodies: the protocol's own; and those of the flash builds, in test_flash_barriers.py.
OTHERS = {"simt_interp.h", "k3.h", "leaves.h", "simt_leaves.h", "simt_flash.h"}
# (file, which of its barriers): why its bytes are touched again only behind another one, in the
# bodies as they are. These stay because they end a part that other bodies may come to call
# with less between; each costs a barrier per head, page or token, none one per row.
SPARE = {
    ("kda_core.h", 2): "kda_prepare waits before it writes work or a state",
    ("kda_heads.h", 2): "what the next head writes first was read before the gated norm's barrier",
    ("kda_step.h", 2): "a lane adds the updates that it has made: both loops are divided alike",
    ("mla_attend.h", 0): "only lane 0 uses what it has read of stat, and only it writes there",
    (
        "mla_attend.h",
        2,
    ): "page_weights waits behind e, and stat is read behind the mix's barrier",
    ("mla_attend.h", 4): "the next dots overwrite e, which nobody reads behind the mix's barrier",
    (
        "mla_heads.h",
        1,
    ): "the next queries overwrite ql, read before the context's barrier",
    ("mla_merge.h", 1): "uv_gate_head waits behind the product, the last that reads o",
    (
        "router_topk.h",
        3,
    ): "scores are read before the sum's barrier, routes behind the walk's",
    ("router_topk.h", 4): "scores are read before the sum's barrier",
}


@dataclass(frozen=True)
class Sample:
    """A case in a mode, and its bits."""

    case: Case
    flags: int
    slices: list[tuple[int, int]] | None
    want: tuple[np.ndarray | None, ...]
    met: frozenset[tuple[str, int]]


def cases() -> Iterator[tuple[Case, int]]:
    """Every op in both modes, and the shapes of which one tile overwrites another."""
    for op in sorted(CASES):
        yield CASES[op], 0
    for op in test_ops_rounded.OPS:
        yield test_ops_rounded.in_mode(op), SPECS[op].flag_mask
    glu, rows = CASES[Op.GLU_BF16], 600
    matrices = {name: np.resize(glu.stored[name], (rows, 528)) for name in ("gate", "up")}
    stored = {**glu.stored, **matrices}
    yield replace(glu, n_units=rows, width=rows, stored=stored, out_shape=(T, rows)), 0
    yield several_tiles_of_experts(), 0


def sites() -> list[tuple[str, int, int]]:
    """(file, which of its barriers, line) of every barrier of the bodies."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.h")):
            lines = path.read_text().split("\n") if path.name not in OTHERS else []
            met = [n for n, line in enumerate(lines, 1) if "K3_SYNC(" in line.split("/*")[0]]
            found += [(path.name, nth, line) for nth, line in enumerate(met)]
    return found


def met_by(bodies: Bodies) -> frozenset[tuple[str, int]]:
    found, name = set(), ctypes.c_char_p()
    while line := bodies.lib.t_met(len(found), ctypes.byref(name)):
        found.add(((name.value or b"").decode(), line))
    return frozenset(found)


@pytest.fixture(scope="module")
def bodies(simt_bodies_of) -> Bodies:
    return simt_bodies_of("cuda", "-DK3_HOST_SPARED")


@pytest.fixture(scope="module")
def samples(bodies, body_library) -> list[Sample]:
    """The control: with every barrier, whatever lanes run first, the scalar bits."""
    found = []
    wanted = [(case, flags, None) for case, flags in cases()]
    # One head a slice: the next thing that it does is the next token of the same state.
    heads = [(c, f) for c, f in cases() if SPECS[c.op].unit == "head"]
    wanted += [(c, f, [(u, u + 1) for u in range(c.n_units)]) for c, f in heads]
    for case, flags, slices in wanted:
        want = execute(body_library("scalar"), case, flags=flags)
        for order in ORDERS:
            bodies.lib.t_order(order)
            bodies.lib.t_spare(b"", 0)
            got = execute(bodies, case, slices=slices, flags=flags)
            assert same(got, want), case.op.name
        found.append(Sample(case, flags, slices, want, met_by(bodies)))
    return found


def same(got, want) -> bool:
    return all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


def differs(bodies: Bodies, sample: Sample, site: tuple[str, int]) -> bool:
    """Whether without a barrier the bits are others in some order of lanes."""
    for order in ORDERS:
        bodies.lib.t_order(order)
        bodies.lib.t_spare(site[0].encode(), site[1])
        got = execute(bodies, sample.case, sample.slices, flags=sample.flags, check_fault=False)
        if not same(got, sample.want):
            return True
    return False


@pytest.mark.parametrize(("file", "nth", "line"), sites(), ids=lambda value: str(value))
def test_without_a_barrier_some_bits_differ(bodies, samples, file, nth, line) -> None:
    mine = [sample for sample in samples if (file, line) in sample.met]
    assert mine, "no case meets it"
    needed = any(in_a_child(partial(differs, bodies, sample, (file, line))) for sample in mine)
    assert needed != ((file, nth) in SPARE), "needed, and in the table of those that are not"


def test_the_table_names_barriers_that_are_there() -> None:
    assert set(SPARE) <= {(file, nth) for file, nth, _ in sites()}
