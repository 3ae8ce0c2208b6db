"""Attention by pages: a plan that has it passes every check, and each single fault in it is seen.

The three packets only have a meaning together, so a fault in the query or the pages shows where
they are merged, and is told with the packets that made the parts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.checks import check_plan, check_program, require_proved
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.hazards import check_ordered
from k3tool.compiler.order import Order
from k3tool.compiler.plan import Phase, Plan
from k3tool.isa.emit import emit
from k3tool.isa.op_spec import WORD_PARAMS
from k3tool.isa.table import SPECS, Op
from k3tool.model.config import K3Config
from tests.faults.test_compiled_plan_checks import every_wait, without_wait

BY_PAGES = (Op.MLA_QUERY, Op.MLA_PAGES, Op.MLA_MERGE)


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    made = compile_plan(
        config, tp=2, target="cpu", workgroups=8, chunk=64, batch=1, ctx=4096, phases=("decode",)
    )
    found = {Op(int(op)) for op in made.phases["decode"].packets["op"]}
    assert found.issuperset(BY_PAGES)
    assert Op.MLA_HEADS not in found
    return made


def failed(plan: Plan, alter: Callable[[Any], None]) -> dict[str, str]:
    """Return the checks that fail, with what they say, after a change of the packets."""
    phase = plan.phases["decode"]
    packets = phase.packets.copy()
    alter(packets)
    altered = replace(plan, phases={"decode": replace(phase, packets=packets)})
    return {c.name: c.detail for c in check_plan(altered) if c.status == "FAIL"}


def first(packets: Any, op: Op, number: int = 0) -> int:
    return int((packets["op"] == int(op)).nonzero()[0][number])


def param(op: Op, name: str, by: int) -> Callable[[Any], None]:
    def alter(packets: Any) -> None:
        words, at = packets["params"][first(packets, op)], SPECS[op].word(name) - WORD_PARAMS
        words[at] = int(words[at]) + by

    return alter


def swapped(op: Op, operand: str) -> Callable[[Any], None]:
    """Take the operand of the next layer's packet."""

    def alter(packets: Any) -> None:
        slot = SPECS[op].slot(operand)
        here, there = first(packets, op), first(packets, op, 1)
        packets["handles"][here][slot] = packets["handles"][there][slot]

    return alter


def flagged(op: Op, name: str) -> Callable[[Any], None]:
    def alter(packets: Any) -> None:
        packets["flags"][first(packets, op)] |= SPECS[op].flag(name)

    return alter


FAULTS = [
    ("eps", param(Op.MLA_QUERY, "eps", 1), "A meaning decode"),
    ("scale", param(Op.MLA_PAGES, "scale", 1), "A meaning decode"),
    ("query's norm", swapped(Op.MLA_QUERY, "norm"), "A meaning decode"),
    ("query's linear", swapped(Op.MLA_QUERY, "w"), "A meaning decode"),
    ("query's key half", swapped(Op.MLA_QUERY, "kv_b"), "A meaning decode"),
    ("cache", swapped(Op.MLA_PAGES, "cache"), "A meaning decode"),
    ("value half", swapped(Op.MLA_MERGE, "kv_b"), "A meaning decode"),
    ("gate", swapped(Op.MLA_MERGE, "gate"), "A meaning decode"),
    ("query rounds", flagged(Op.MLA_QUERY, "round"), "A meaning decode"),
    ("norm rounds", flagged(Op.MLA_QUERY, "norm_round"), "A meaning decode"),
    ("values round", flagged(Op.MLA_MERGE, "round"), "A meaning decode"),
    ("a page less", param(Op.MLA_PAGES, "pages", -1), "B records decode"),
    ("a page less merged", param(Op.MLA_MERGE, "pages", -1), "B records decode"),
    ("pages of another length", param(Op.MLA_PAGES, "page_tokens", 1), "B records decode"),
]


@pytest.mark.parametrize(("alter", "check"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_fault_is_seen(plan: Plan, alter: Callable[[Any], None], check: str) -> None:
    assert check in failed(plan, alter)


def test_the_control_passes_every_check_and_so_does_its_stream(plan: Plan) -> None:
    assert failed(plan, lambda packets: None) == {}
    require_proved(check_plan(plan), "plan")
    require_proved(check_program(emit(plan, "cpu"), "emitted"), "stream")


def test_a_fault_in_a_part_is_told_with_all_packets_that_made_it(plan: Plan) -> None:
    packets = plan.phases["decode"].packets
    made = [first(packets, op) for op in BY_PAGES]
    said = failed(plan, param(Op.MLA_QUERY, "eps", 1))["A meaning decode"]
    assert all(f"packet {index} " in said for index in made), said


def test_each_wait_of_the_three_is_needed(plan: Plan) -> None:
    phase: Phase = plan.phases["decode"]
    wanted = {int(op) for op in BY_PAGES}
    waits = [(i, w) for i, w in every_wait(phase) if int(phase.packets["op"][i]) in wanted]
    assert waits
    for index, which in waits:
        faults = check_ordered(Order(plan, without_wait(phase, index, which)))[1]
        assert any(f"packet {index} " in fault for fault in faults), (index, which)
