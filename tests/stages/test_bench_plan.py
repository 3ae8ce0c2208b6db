"""bench chain and bench simulate: counts that can be checked by hand, keys, refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3tool.bench.chain import measure_chain
from k3tool.bench.simulate import Costs, Timeline, simulate
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan, save_plan
from k3tool.errors import UnsoundError
from k3tool.isa.emit import emit
from k3tool.isa.stream import save_isa
from k3tool.model.config import K3Config
from tests.isa import plans

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def made() -> Plan:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    return compile_plan(
        config, tp=2, target="hip:gfx950", workgroups=16, chunk=4, batch=1, ctx=512
    )


def test_the_hand_written_plan_has_the_chain_that_can_be_counted() -> None:
    """Eight packets in a row: seven waits, two gates of two ranks, 20 slices."""
    c = measure_chain(plans.plan(), "decode", 1e9)
    assert (c.packets, c.packet_path, c.critical_path, c.waits, c.gates) == (8, 8, 8, 7, 2)
    # x is read by the norm and again by the reduce, which the chain between them implies.
    assert (c.edges, c.transitive) == (8, 1)
    assert c.waits_per_packet == {0: 1, 1: 7}
    assert c.polls == 20 - 4  # every slice but the embedding's polls once
    assert c.bumps == 20 + 4 + 1  # a gate's slices arrive at both ranks
    assert c.mean_width == 1.0
    assert c.live_counters == 1
    assert sum(c.histogram.values()) == 8
    assert c.floor_ms["first"] == pytest.approx(8 * 13.2e-3)


def test_a_path_that_is_not_the_waits_is_refused() -> None:
    plan = plans.plan()
    phase = replace(plan.phases["decode"], critical_path=3)
    with pytest.raises(UnsoundError, match="longest path"):
        measure_chain(replace(plan, phases={"decode": phase}), "decode", 1e9)


def test_time_without_work_is_the_chain_times_the_hand_off(made: Plan) -> None:
    stream = emit(made, "hip:gfx950")
    timeline = Timeline(stream, stream.streams["decode"])
    path = made.phases["decode"].critical_path
    free = Costs(1.0, 1.0, 1e30, 1e30, 0.0, 0.0)
    once = simulate(timeline, free, 0)
    assert once.token_us == pytest.approx(path - 1)  # the first packet waits for nothing
    assert once.handoffs == path - 1
    assert 0 < once.gates < once.handoffs
    dear = simulate(timeline, replace(free, gate_us=2.0), 0)
    assert dear.token_us >= once.token_us + once.gates


def test_the_anatomy_adds_up_and_stalls_cost_time(made: Plan) -> None:
    stream = emit(made, "hip:gfx950")
    timeline = Timeline(stream, stream.streams["decode"])
    costs = Costs(3.0, 5.0, 1e9, 1e8, 0.0, 0.0)
    calm = simulate(timeline, costs, 0)
    for r in (calm, simulate(timeline, replace(costs, stall_rate=0.05, stall_us=10.0), 7)):
        parts = r.handoff_us + r.gate_us + r.work_us + r.stall_us
        assert parts == pytest.approx(r.token_us)
        assert sum(r.work_us_by_op.values()) == pytest.approx(r.work_us)
    assert r.token_us > calm.token_us
    assert r.stall_us > 0


def test_chain_prints_the_counts_beside_the_starting_systems(
    k3tool: Run, made: Plan, tmp_path: Path
) -> None:
    save_plan(made, tmp_path / "plan.h5")
    done = k3tool("bench", "chain", tmp_path / "plan.h5")
    assert done.code == 0, done.err
    assert "2459 first, 1981 later" in done.out
    data = json.loads(k3tool("bench", "chain", tmp_path / "plan.h5", "--json").out)
    phase = made.phases["decode"]
    assert data["packets"] == len(phase.packets)
    assert data["critical_path"] == phase.critical_path
    assert data["waits"] == len(phase.waits)
    assert data["prior"]["first"] == {"packets": 2459, "critical_path": 1739}
    assert sum(data["histogram"].values()) == data["packets"]
    assert sum(data["polls_by_width"].values()) == data["polls"]


def test_simulate_executes_every_seed_by_queues_and_by_windows(
    k3tool: Run, made: Plan, tmp_path: Path
) -> None:
    save_isa(emit(made, "hip:gfx950"), tmp_path / "isa.h5")
    done = k3tool("bench", "simulate", tmp_path / "isa.h5", "--seeds", 3)
    assert done.code == 0, done.err
    assert "no deadlock in 3 random orders by queues and by windows" in done.out
    data = json.loads(k3tool("bench", "simulate", tmp_path / "isa.h5", "--seeds", 2, "--json").out)
    assert data["deadlocks"] == 0
    assert [row["seed"] for row in data["seeds"]] == [0, 1]
    assert all("window_rounds" in row for row in data["executed"])


def test_simulate_refuses_a_plan(k3tool: Run, made: Plan, tmp_path: Path) -> None:
    save_plan(made, tmp_path / "plan.h5")
    assert k3tool("bench", "simulate", tmp_path / "plan.h5").code == 3
