"""Rounding points of a program are part of its meaning: one flag more or less is refused.

Every flag of every op that a small model's plans use, turned over in the plan and in the stream.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.checks import check_plan, check_program
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan
from k3tool.isa.columns import Columns, spec_of
from k3tool.isa.emit import emit
from k3tool.isa.stream import Isa
from k3tool.model.config import K3Config
from k3tool.verdict import Check

OPTIONS = {"tp": 2, "target": "cpu", "workgroups": 8, "chunk": 16, "batch": 1, "ctx": 512}
# An empty selection would pass: the fused programs of this size have so many ops with flags.
LEAST_CASES = 30


@pytest.fixture(scope="module", params=["bf16", "f32"])
def program(request: pytest.FixtureRequest) -> tuple[Plan, Isa]:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    plan = compile_plan(config, **OPTIONS, numerics=request.param)
    return plan, emit(plan, "cpu")


def flips(ops: Columns) -> Iterator[tuple[int, int, str]]:
    """Yield (row, bit, flag) for the first row of each op and each of its flags."""
    for op in np.unique(ops):
        spec, row = spec_of(int(op)), int(np.flatnonzero(ops == op)[0])
        assert spec is not None
        for name in spec.flags:
            yield row, spec.flag(name), f"{spec.name} {name}"


def failing(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.status == "FAIL"]


def test_the_controls_pass(program: tuple[Plan, Isa]) -> None:
    plan, isa = program
    assert not failing(check_plan(plan))
    assert not failing(check_program(isa, "isa"))


def test_a_flag_turned_over_in_a_plan_is_another_program(program: tuple[Plan, Isa]) -> None:
    plan, _ = program
    tried = 0
    for name, phase in plan.phases.items():
        for row, bit, label in flips(phase.packets["op"]):
            packets = phase.packets.copy()
            packets["flags"][row] ^= bit
            broken = replace(plan, phases={name: replace(phase, packets=packets)})
            assert f"A meaning {name}" in failing(check_plan(broken)), f"{name}: {label}"
            tried += 1
    assert tried >= LEAST_CASES


def test_a_flag_turned_over_in_a_stream_is_another_program(program: tuple[Plan, Isa]) -> None:
    _, isa = program
    tried = 0
    for name, stream in isa.streams.items():
        for row, bit, label in flips(stream.instructions[0][:, 0] & 0xFFFF):
            altered = tuple(words.copy() for words in stream.instructions)
            for words in altered:
                words[row, 0] ^= bit << 16
            entries = stream.queues.entries.copy()
            entries["flags"][entries["inst"] == row] ^= bit
            queues = replace(stream.queues, entries=entries)
            other = replace(stream, instructions=altered, queues=queues)
            broken = replace(isa, streams={name: other})
            assert f"F meaning {name}" in failing(check_program(broken, "isa")), f"{name}: {label}"
            tried += 1
    assert tried >= LEAST_CASES


def test_the_mode_that_a_plan_records_is_compared_with_what_it_does(
    program: tuple[Plan, Isa],
) -> None:
    plan, isa = program
    other = {"bf16": "f32", "f32": "bf16"}[plan.params["numerics"]["mode"]]
    params = {**plan.params, "numerics": {"mode": other, "version": 1}}
    assert "A meaning decode" in failing(check_plan(replace(plan, params=params)))
    assert "F meaning decode" in failing(check_program(replace(isa, params=params), "isa"))
    unknown = {**plan.params, "numerics": {"mode": "fp8", "version": 1}}
    assert "A meaning" in failing(check_plan(replace(plan, params=unknown)))
