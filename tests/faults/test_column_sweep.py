"""Every column of a plan and of a stream, edited: refused, or in the table of what is free and why.

The columns are found by walking the program (`column_edits`), so one that is added later has to be
seen by a check, or be given a reason here. Seeded, one edit a column: a sample of what the tables
of mutations and random faults do at length.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.checks import check_plan, check_program, is_proved
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan, Tensor
from k3tool.compiler.residency import Residency, streamable, with_residency
from k3tool.compiler.ring import least_ring, ring_places
from k3tool.errors import K3Error
from k3tool.isa import wire
from k3tool.isa.columns import ENTRY_DTYPE, PACKET_DTYPE
from k3tool.isa.emit import emit
from k3tool.isa.stream import Isa
from k3tool.isa.table import MOST_IO_QUEUES, Op
from k3tool.model.config import K3Config
from tests.faults.column_edits import edits

SEED = 4
ANCESTRY = "what it came from: compared by run and verify, where those files are opened"
# Columns of which a value may be another, and nothing that a run computes changes.
FREE = {
    "digest": "of the file, made anew by whoever writes it",
    "inputs": ANCESTRY,
    "inputs.role": ANCESTRY,
    "inputs.kind": ANCESTRY,
    "inputs.name": ANCESTRY,
    "inputs.content_sha256": ANCESTRY,
    "params.checkpoint_identity": "compared with the weights that it is run on",
    "params.config": "a matter of the config's reader; what the model takes is compared",
    "params.config (keys)": "the same",
    "params.residency.slots": "free between what a step needs and all experts",
    "params.residency.load_queues": "more workers than a LOAD has blocks have nothing to do",
    "phases.*.made_by": "explains; a packet keeps an application that makes its op there",
    "fired.rule": "explains; those that packets rest on are looked at",
    "fired.root": "the same",
    "fired.binding": "the same",
    "fired.used": "the same",
    "tensors.name": "a label, swapped with another of its phase: programs go by handle",
    "tensors.logical": "of peer buffers and results for listings; of others what all hold",
    "tensors.offset": "another place that no live buffer has is a layout too",
}


@pytest.fixture(scope="module")
def config() -> K3Config:
    return K3Config.from_dict(preset_config(PRESETS["tiny"]))


@pytest.fixture(scope="module")
def plan(config: K3Config) -> Plan:
    whole = compile_plan(config, tp=2, target="cpu", workgroups=8, chunk=4, batch=1, ctx=512)
    names = streamable(whole)
    ring = least_ring(whole, names)
    while ring_places(whole, names, ring) is None:
        ring += 4096
    return with_residency(whole, Residency(names, ring, 12, 2, 3))


@pytest.fixture(scope="module")
def isa(config: K3Config) -> Isa:
    target = "hip:gfx950"
    made = compile_plan(
        config, tp=2, target=target, workgroups=16, chunk=4, batch=1, ctx=512, numerics="bf16"
    )
    return emit(made, target)


def plan_passes(plan: Plan) -> bool:
    for phase in plan.phases.values():
        if wire.first_fault(phase.packets, phase.waits) is not None:
            return False
    return is_proved(check_plan(plan))


def isa_passes(isa: Isa) -> bool:
    return is_proved(check_program(isa, "stream"))


def plan_text(plan: Plan) -> list[bytes]:
    """What is written of the packets: a list that lies elsewhere and holds the same is the same."""
    phases = plan.phases.values()
    return [wire.encode(p.packets, p.waits) for p in phases
            if wire.first_fault(p.packets, p.waits) is None]  # fmt: skip


def isa_lists(isa: Isa) -> list[Any]:
    found: list[Any] = []
    for stream in isa.streams.values():
        waits, entries = stream.queues.waits.tolist(), stream.queues.entries
        spans = zip(entries["wait_ofs"].tolist(), entries["n_waits"].tolist(), strict=True)
        found += [waits[a : a + n] for a, n in spans]
    return found


def passing(whole: Any, passes: Callable[[Any], bool], text: Callable[[Any], Any]) -> list[str]:
    """Return edits that pass, of columns that are not free; one edit a column."""
    dice, by_column = random.Random(SEED), {}
    for column, what, altered in edits(whole, dice):
        by_column.setdefault(column, []).append((what, altered))
    names = {f"packets.{name}" for name in PACKET_DTYPE.names} if isinstance(whole, Plan) else {
        f"entries.{name}" for name in ENTRY_DTYPE.names}  # fmt: skip
    names |= {f"tensors.{name}" for name in Tensor._fields}
    assert all(any(column.endswith(name) for column in by_column) for name in names)
    found = []
    for column, several in by_column.items():
        what, altered = dice.choice(several)
        if column in FREE:
            continue
        try:
            good = passes(altered)
        except K3Error:
            continue
        is_list = column.endswith(("wait_ofs", "n_waits"))
        if good and not (is_list and text(altered) == text(whole)):
            found.append(f"{column}: {what}")
    return found


def test_every_column_of_a_plan(plan: Plan) -> None:
    assert plan_passes(plan), "the control"
    assert passing(plan, plan_passes, plan_text) == []


def test_every_column_of_a_stream(isa: Isa) -> None:
    assert isa_passes(isa), "the control"
    assert passing(isa, isa_passes, isa_lists) == []


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_packet_of_every_op_as_one_that_does_nothing(plan: Plan, phase: str) -> None:
    """NOP has a result and no operand that says how wide: it is refused, and breaks no check."""
    packets = plan.phases[phase].packets
    for op in np.unique(packets["op"]).tolist():
        altered = packets.copy()
        index = int(np.flatnonzero(packets["op"] == op)[-1])
        altered["op"][index] = Op.NOP
        phases = {**plan.phases, phase: replace(plan.phases[phase], packets=altered)}
        checks = check_plan(replace(plan, phases=phases))
        said = " ".join(check.detail for check in checks)
        assert not is_proved(checks), Op(op).name
        assert f"packet {index} (NOP)" in said, f"{Op(op).name}: {said}"


@pytest.mark.parametrize("name", ["load_queues", "fetch_queues"])
@pytest.mark.parametrize("number", [0, MOST_IO_QUEUES + 1, 1 << 40])
def test_io_queues_that_no_interpreter_runs(plan: Plan, name: str, number: int) -> None:
    params = {**plan.params, "residency": {**plan.params["residency"], name: number}}
    said = " ".join(check.detail for check in check_plan(replace(plan, params=params)))
    assert f"{name} {number}" in said
    assert f"to {MOST_IO_QUEUES}" in said


def test_a_column_that_no_check_reads_would_be_found(plan: Plan) -> None:
    """The control of the sweep: were records not looked at, their columns would pass."""
    found = passing(plan, lambda altered: altered.fired == plan.fired, plan_text)
    assert any(edit.startswith("phases.*.packets.width") for edit in found)
