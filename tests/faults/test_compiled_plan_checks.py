"""On plans the compiler makes: all checks pass, and no single wait, slot or count can be spared."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.checks import check_plan, require_proved
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.hazards import check_memory, check_ordered
from k3tool.compiler.order import Order
from k3tool.compiler.plan import Phase, Plan, Tensor
from k3tool.isa.columns import GATE
from k3tool.model.config import K3Config
from k3tool.verdict import count


def compiled(tp: int, workgroups: int, chunk: int) -> Plan:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    return compile_plan(
        config, tp=tp, target="cpu", workgroups=workgroups, chunk=chunk, batch=1, ctx=512
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compiled(2, 8, 4)


@pytest.mark.parametrize(
    ("tp", "workgroups", "chunk"), [(1, 8, 32), (2, 2, 3), (4, 256, 7), (8, 8, 1)]
)
def test_what_the_compiler_makes_passes(tp: int, workgroups: int, chunk: int) -> None:
    checks = check_plan(compiled(tp, workgroups, chunk))
    assert [c for c in checks if c.status == "FAIL"] == []
    require_proved(checks, "plan")
    assert count(checks, "PASS") == len(checks)


def without_wait(phase: Phase, index: int, which: int) -> Phase:
    """Leave out one wait of one packet: it goes to the list's front, which then starts later."""
    packets, waits = phase.packets.copy(), phase.waits.copy()
    first = int(packets["wait_ofs"][index])
    waits[first + which] = waits[first]
    packets["wait_ofs"][index] += 1
    packets["n_waits"][index] -= 1
    return replace(phase, packets=packets, waits=waits)


def every_wait(phase: Phase) -> Iterator[tuple[int, int]]:
    for index, packet in enumerate(phase.packets):
        for which in range(int(packet["n_waits"])):
            yield index, which


def test_each_wait_is_needed_and_its_absence_is_seen_at_its_packet(plan: Plan) -> None:
    phase = plan.phases["decode"]
    assert not check_ordered(Order(plan, phase))[1]
    unseen = []
    for index, which in every_wait(phase):
        altered = without_wait(phase, index, which)
        faults = check_ordered(Order(plan, altered))[1]
        if not any(f"packet {index} " in fault for fault in faults):
            unseen.append((index, which))
    assert unseen == []


@pytest.mark.parametrize("by", [1, -1])
def test_each_wait_one_off_is_seen_by_the_thresholds(plan: Plan, by: int) -> None:
    phase = plan.phases["decode"]
    for index in range(0, len(phase.waits), 5):
        waits = phase.waits.copy()
        waits["threshold"][index] = int(waits["threshold"][index]) + by
        altered = replace(plan, phases={"decode": replace(phase, waits=waits)})
        found = {c.name: c for c in check_plan(altered) if c.status == "FAIL"}
        assert "D thresholds decode" in found, index
        assert "D ordered decode" in found, index


def peer_pairs(plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
    """Neighbouring peer buffers of equal size, in the order in which they are written."""
    phase = plan.phases["decode"]
    written = []
    for index in range(len(phase.packets)):
        if int(phase.packets["counter"][index]) & GATE:
            handle = next(
                int(h) for h in phase.packets["handles"][index]
                if h < len(plan.tensors) and plan.tensors[h].role == "peer"
            )  # fmt: skip
            written.append(plan.tensors[handle])
    for first, second in itertools.pairwise(written):
        if first.n_bytes == second.n_bytes and first.offset != second.offset:
            yield first, second


def test_one_peer_slot_in_place_of_two_is_seen(plan: Plan) -> None:
    """The next use may be written while a slow rank still reads the one before."""
    pairs = list(peer_pairs(plan))
    assert pairs
    for first, second in pairs:
        rows = [
            t._replace(offset=first.offset) if t.name == second.name else t for t in plan.tensors
        ]
        altered = replace(plan, tensors=tuple(rows))
        faults = check_ordered(Order(altered, altered.phases["decode"]))[1]
        assert any("on every rank" in fault for fault in faults), (first.name, second.name)


def test_a_live_buffer_moved_onto_another_is_seen(plan: Plan) -> None:
    """Give buffers of the arena the place of another one that is alive, and count what is seen."""
    phase = plan.phases["decode"]
    arena = [t for t in plan.tensors if t.role == "arena" and t.phase == "decode"]
    random = np.random.default_rng(7)
    seen = 0
    for _ in range(40):
        first, second = random.choice(len(arena), 2, replace=False)
        moved = arena[first]._replace(offset=arena[second].offset)
        rows = tuple(moved if t.name == moved.name else t for t in plan.tensors)
        order = Order(replace(plan, tensors=rows), phase)
        seen += bool(check_memory(order)[1] or check_ordered(order)[1])
    # Some pairs are alive at different times, or already share a place, so not all are mistakes.
    assert seen > 20
