"""Weights that come and go: every ring is proved by the plan's own checks, spoilt ones are not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.compiler.checks import check_plan, check_program
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan
from k3tool.compiler.residency import Residency, streamable, with_residency
from k3tool.compiler.ring import least_ring, ring_places
from k3tool.compiler.rules import FUSIONS
from k3tool.isa.access import paged_bytes
from k3tool.isa.columns import Columns
from k3tool.isa.emit import emit
from k3tool.isa.table import Op

SLOTS = 12


def compiled(folder: Path, tp: int, **options: object) -> Plan:
    with Checkpoint.open(folder) as checkpoint:
        return compile_plan(
            checkpoint.config, tp=tp, target="cpu", workgroups=8, chunk=4, batch=1, ctx=256,
            **options,
        )  # fmt: skip


def streamed(plan: Plan, ring_bytes: int) -> Plan:
    names = streamable(plan)
    return with_residency(plan, Residency(names, ring_bytes, SLOTS, 2, 3))


def failing(plan: Plan) -> list[str]:
    checks = [*check_plan(plan), *check_program(emit(plan, "cpu"), "emitted")]
    assert checks
    return [check.name for check in checks if check.status != "PASS"]


@pytest.fixture(params=[1, 2, 8])
def plan(request: pytest.FixtureRequest, oracle: Callable[[str], Path]) -> Plan:
    return compiled(oracle("tiny_tp8"), request.param)


@pytest.fixture
def one(oracle: Callable[[str], Path]) -> Plan:
    return compiled(oracle("tiny_tp8"), 1)


@pytest.mark.parametrize("of_least", [1.0, 1.3, 2.0, 5.0, 1000.0])
def test_every_ring_proves_itself(plan: Plan, of_least: float) -> None:
    names = streamable(plan)
    first = int(least_ring(plan, names) * of_least) // 4096 * 4096
    # Not every size between has places: the next one that has, as fit looks for one.
    sizes = range(first, 2 * first, 4096)
    ring = next(n for n in sizes if ring_places(plan, names, n) is not None)
    made = streamed(plan, ring)
    loads = int((made.phases["decode"].packets["op"] == Op.LOAD).sum())
    total = sum(paged_bytes(t.n_bytes) for t in made.tensors if t.role == "ring")
    assert (loads == 0) == (total <= ring)
    assert failing(made) == []


def test_the_compute_part_is_the_plans(plan: Plan) -> None:
    made = streamed(plan, least_ring(plan, streamable(plan)))
    for name, phase in plan.phases.items():
        packets = made.phases[name].packets
        kept = packets[~np.isin(packets["op"], (Op.LOAD, Op.EXPERT_FETCH))]
        for field in ("op", "flags", "handles", "params", "n_units", "n_slices"):
            assert (kept[field] == phase.packets[field]).all(), field


def test_a_plan_of_one_phase_and_of_primitive_ops(oracle: Callable[[str], Path]) -> None:
    """Without fusing, experts are chosen by a router of its own and come in three products."""
    folder = oracle("tiny_tp8")
    fused = compiled(folder, 1)
    without = sorted({row.rule for row in fused.fired} & set(FUSIONS))
    for made in (compiled(folder, 1, phases=("decode",)), compiled(folder, 1, without=without)):
        assert failing(streamed(made, least_ring(made, streamable(made)))) == []


def test_a_ring_below_the_least_has_no_places(plan: Plan) -> None:
    largest = max(plan.tensors[plan.handles[name]].n_bytes for name in streamable(plan))
    assert ring_places(plan, streamable(plan), paged_bytes(largest) - 4096) is None


# -- controls: each spoils one thing, and a check must say so --------------------------------


def with_packets(plan: Plan, packets: Columns) -> Plan:
    decode = replace(plan.phases["decode"], packets=packets)
    return replace(plan, phases={**plan.phases, "decode": decode})


def test_each_wait_of_a_load_and_each_wait_for_one_is_needed(one: Plan) -> None:
    made = streamed(one, least_ring(one, streamable(one)))
    phase = made.phases["decode"]
    moved = np.isin(phase.packets["op"], (Op.LOAD, Op.EXPERT_FETCH))
    tried = 0
    for index in np.flatnonzero(moved)[::7]:
        packets, waits = phase.packets.copy(), phase.waits.copy()
        if packets["n_waits"][index] == 0:
            continue
        packets["n_waits"][index] -= 1  # the last one is forgotten
        decode = replace(phase, packets=packets, waits=waits)
        spoilt = replace(made, phases={**made.phases, "decode": decode})
        assert "D ordered decode" in [c.name for c in check_plan(spoilt) if c.status == "FAIL"]
        tried += 1
    assert tried > 5


def test_two_weights_in_one_place_are_noticed(one: Plan) -> None:
    made = streamed(one, 5 * least_ring(one, streamable(one)))
    ring = [h for h, t in enumerate(made.tensors) if t.role == "ring"]
    tensors = list(made.tensors)
    tensors[ring[3]] = tensors[ring[3]]._replace(offset=tensors[ring[4]].offset)
    assert failing(replace(made, tensors=tuple(tensors))) != []


def test_a_load_left_out_is_noticed(one: Plan) -> None:
    """Its packet becomes one that loads its neighbour's weight again."""
    made = streamed(one, least_ring(one, streamable(one)))
    packets = made.phases["decode"].packets.copy()
    loads = np.flatnonzero(packets["op"] == Op.LOAD)
    packets["handles"][loads[4]] = packets["handles"][loads[5]]
    assert "C memory decode" in failing(with_packets(made, packets))


def test_a_fetch_of_another_layers_experts_is_noticed(one: Plan) -> None:
    made = streamed(one, least_ring(one, streamable(one)))
    packets = made.phases["decode"].packets.copy()
    fetches = np.flatnonzero(packets["op"] == Op.EXPERT_FETCH)
    packets["handles"][fetches[1], 2:5] = packets["handles"][fetches[0], 2:5]
    assert "C memory decode" in failing(with_packets(made, packets))


def test_what_the_next_step_needs_must_be_back(one: Plan) -> None:
    """The last LOAD of a step serves the next one: without it nothing in this step is wrong."""
    made = streamed(one, least_ring(one, streamable(one)))
    packets = made.phases["decode"].packets.copy()
    loads = np.flatnonzero(packets["op"] == Op.LOAD)
    packets["handles"][loads[-1]] = packets["handles"][loads[-2]]
    assert failing(with_packets(made, packets)) != []
