"""Single faults of a program under a memory budget: what is fetched for whom, and its parameters.

The control is the unaltered program, plan and stream, which passes everything.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.checks import check_plan, check_program, is_proved
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan
from k3tool.compiler.residency import Residency, streamable, with_residency
from k3tool.compiler.ring import least_ring, ring_places
from k3tool.isa.columns import PACKET_DIGEST, PACKET_REARM, Columns
from k3tool.isa.emit import emit
from k3tool.isa.op_spec import WORD_UNIT_COLS, WORD_WIDTH
from k3tool.isa.stream import Isa
from k3tool.isa.table import SPECS, Op
from k3tool.model.config import K3Config
from k3tool.verdict import Check

FETCH = SPECS[Op.EXPERT_FETCH]
SLOTS = 12


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    whole = compile_plan(config, tp=2, target="cpu", workgroups=8, chunk=4, batch=1, ctx=512)
    names = streamable(whole)
    ring = least_ring(whole, names)
    while ring_places(whole, names, ring) is None:
        ring += 4096
    return with_residency(whole, Residency(names, ring, SLOTS, 2, 3))


@pytest.fixture(scope="module")
def isa(plan: Plan) -> Isa:
    return emit(plan, "cpu")


def failures(checks: list[Check]) -> dict[str, str]:
    assert not is_proved(checks)
    return {check.name: check.detail for check in checks if check.status == "FAIL"}


def test_the_control_passes_every_check(plan: Plan, isa: Isa) -> None:
    assert is_proved(check_plan(plan))
    assert is_proved(check_program(isa, "here"))


# -- what a fetch chooses --------------------------------------------------------------------------


def fetches(packets: Columns) -> list[int]:
    return np.flatnonzero(packets["op"] == Op.EXPERT_FETCH).tolist()


def with_top_k(by: int) -> Callable[[Columns, list[int]], None]:
    def alter(packets: Columns, at: list[int]) -> None:
        packets["params"][at, [p.name for p in FETCH.params].index("top_k")] += np.uint32(by)

    return alter


def another_layers(name: str) -> Callable[[Columns, list[int]], None]:
    def alter(packets: Columns, at: list[int]) -> None:
        slot, other = FETCH.slot(name), fetches(packets)[-1]
        packets["handles"][at, slot] = packets["handles"][other, slot]

    return alter


def fewer_experts(packets: Columns, at: list[int]) -> None:
    packets["params"][at, [p.name for p in FETCH.params].index("n_experts")] -= np.uint32(1)


CHOICES: Mapping[str, Callable[[Columns, list[int]], None]] = {
    "an expert less": with_top_k(-1 & 0xFFFFFFFF),
    "an expert more": with_top_k(1),
    "another layer's bias": another_layers("bias"),
    "another layer's scores": another_layers("scores"),
    "of fewer experts": fewer_experts,
}


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("label", CHOICES)
def test_a_fetch_chooses_what_its_readers_choose(plan: Plan, label: str, phase: str) -> None:
    packets = plan.phases[phase].packets.copy()
    at = fetches(packets)[0]
    CHOICES[label](packets, [at])
    broken = replace(
        plan, phases={**plan.phases, phase: replace(plan.phases[phase], packets=packets)}
    )
    assert f"packet {at} " in failures(check_plan(broken))[f"B records {phase}"]
    stream = emit(broken, "cpu")
    assert f"instruction {at} " in failures(check_program(stream, "here"))[f"F records {phase}"]


def test_all_fetches_with_an_expert_less(plan: Plan) -> None:
    """Alike wrong everywhere: comparing them with each other would see nothing."""
    packets = plan.phases["decode"].packets.copy()
    with_top_k(-1 & 0xFFFFFFFF)(packets, fetches(packets))
    decode = replace(plan.phases["decode"], packets=packets)
    found = failures(check_plan(replace(plan, phases={**plan.phases, "decode": decode})))
    assert "EXPERT_FETCH" in found["B records decode"]


# -- parameters of the budget ----------------------------------------------------------------------

SIZES = [
    ("slots", 0), ("slots", 1), ("slots", SLOTS - 1), ("slots", 10**9), ("slots", 10**15),
    ("slot_bytes", 0), ("slot_bytes", 4096), ("slot_bytes", 2**60),
    ("ring_bytes", 0), ("ring_bytes", 2**62),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SIZES)
def test_a_budgets_parameters_are_its_programs(plan: Plan, isa: Isa, name: str, value: int) -> None:
    params = {**plan.params, "residency": {**plan.params["residency"], name: value}}
    assert name in failures(check_plan(replace(plan, params=params)))["A params"]
    assert name in failures(check_program(replace(isa, params=params), "here"))["F params"]


@pytest.mark.parametrize("name", ["ring_bytes", "slot_bytes"])
@pytest.mark.parametrize("by", [-1, 1])
def test_sizes_of_a_budget_are_exact(plan: Plan, isa: Isa, name: str, by: int) -> None:
    test_a_budgets_parameters_are_its_programs(plan, isa, name, plan.params["residency"][name] + by)


@pytest.mark.parametrize("n_queues", [2, 4])
def test_a_fetch_has_a_part_for_each_worker(plan: Plan, isa: Isa, n_queues: int) -> None:
    residency = {**plan.params["residency"], "fetch_queues": n_queues}
    params = {**plan.params, "residency": residency}
    assert "fetch_queues" in failures(check_plan(replace(plan, params=params)))["A params"]
    assert "F tables" in failures(check_program(replace(isa, params=params), "here"))


def test_a_program_without_its_budget(plan: Plan) -> None:
    params = {name: value for name, value in plan.params.items() if name != "residency"}
    assert "no residency" in failures(check_plan(replace(plan, params=params)))["A params"]


# -- words that nothing reads ----------------------------------------------------------------------


@pytest.mark.parametrize("bit", [3, 6, 15])
@pytest.mark.parametrize("op", [Op.LOAD, Op.EXPERT_FETCH, Op.EMBED_BF16])
def test_a_flag_that_the_op_has_not(isa: Isa, op: Op, bit: int) -> None:
    assert not SPECS[op].flag_mask >> bit & 1
    found = failures(check_program(with_word(isa, op, 0, lambda word: word | 1 << 16 + bit), "x"))
    assert f"flags {1 << bit:#x}" in found["F records decode"]


@pytest.mark.parametrize("op", [Op.LOAD, Op.EXPERT_FETCH])
@pytest.mark.parametrize("name", ["width", "unit_cols"])
def test_sizes_of_what_moves_weights(isa: Isa, op: Op, name: str) -> None:
    word = {"width": WORD_WIDTH, "unit_cols": WORD_UNIT_COLS}[name]
    found = failures(check_program(with_word(isa, op, word, lambda value: value + 1), "x"))
    assert name in found["F records decode"]


def with_word(isa: Isa, op: Op, word: int, change: Callable[[int], int]) -> Isa:
    """Alter a word of the first record of an op, on every rank."""
    stream = isa.streams["decode"]
    records = [rank.copy() for rank in stream.instructions]
    at = int(np.flatnonzero(records[0][:, 0] & 0xFFFF == op)[0])
    for rank in records:
        rank[at, word] = change(int(rank[at, word]))
    return replace(
        isa, streams={**isa.streams, "decode": replace(stream, instructions=tuple(records))}
    )


# -- whose queue an entry is in --------------------------------------------------------------------


def in_another_queue(isa: Isa, entry: int, queue: int) -> Isa:
    """Move an entry to its place by instruction in another queue."""
    stream = isa.streams["decode"]
    queues = stream.queues
    row, ofs = queues.entries[entry], queues.queue_ofs.copy()
    left = np.delete(queues.entries, entry)
    ofs[ofs > entry] -= 1
    low, high = int(ofs[queue]), int(ofs[queue + 1])
    place = low + int(np.searchsorted(left["inst"][low:high], row["inst"]))
    ofs[queue + 1 :] += 1
    queues = replace(queues, entries=np.insert(left, place, row), queue_ofs=ofs)
    return replace(isa, streams={**isa.streams, "decode": replace(stream, queues=queues)})


KINDS = {0: Op.EMBED_BF16, 1: Op.LOAD, 2: Op.EXPERT_FETCH}


@pytest.mark.parametrize(("kind", "to"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_an_entry_in_a_queue_of_another_kind(isa: Isa, kind: int, to: int) -> None:
    """A read would block a worker that computes; an I/O worker has no scratch to compute in."""
    stream = isa.streams["decode"]
    ops = stream.instructions[0][:, 0] & 0xFFFF
    entry = int(np.flatnonzero(ops[stream.queues.entries["inst"]] == KINDS[kind])[-1])
    at = int(stream.queues.entries["inst"][entry])
    broken = in_another_queue(isa, entry, isa.crew.first(to))
    assert f"instruction {at}: entry" in failures(check_program(broken, "here"))["F tables"]


def test_an_entry_in_another_queue_of_its_kind_is_no_fault(isa: Isa) -> None:
    """The control: any worker of a kind may have a slice, if its queue stays in order."""
    stream = isa.streams["decode"]
    ops = stream.instructions[0][:, 0] & 0xFFFF
    loads = np.flatnonzero(ops[stream.queues.entries["inst"]] == Op.LOAD)
    low, high = stream.queues.queue_ofs[isa.crew.first(1) :][:2].tolist()
    other = stream.queues.entries["inst"][high : int(stream.queues.queue_ofs[-1])]
    mine = [e for e in loads if low <= e < high and stream.queues.entries["inst"][e] not in other]
    broken = in_another_queue(isa, int(mine[0]), isa.crew.first(1) + 1)
    assert is_proved(check_program(broken, "here"))


@pytest.mark.parametrize("bit", [PACKET_DIGEST, PACKET_REARM])
@pytest.mark.parametrize("op", [Op.LOAD, Op.EXPERT_FETCH])
def test_what_moves_weights_has_no_result_and_ends_no_step(plan: Plan, op: Op, bit: int) -> None:
    packets = plan.phases["decode"].packets.copy()
    at = int(np.flatnonzero(packets["op"] == op)[0])
    packets["flags"][at] |= bit
    decode = replace(plan.phases["decode"], packets=packets)
    found = failures(check_plan(replace(plan, phases={**plan.phases, "decode": decode})))
    assert f"packet {at} " in found["B records decode"]


@pytest.mark.parametrize("role", ["slots", "experts"])
def test_a_tensor_that_is_none_of_experts(plan: Plan, role: str) -> None:
    """A role that the tensor's shape is not of: refused in words, whatever reads it."""
    tensor = next(t for t in plan.tensors if t.role == "ring" and len(t.local) == 1)
    wrong = tensor._replace(role=role, dtype="mxfp4", offset=0)
    rows = [wrong if t is tensor else t for t in plan.tensors]
    assert "axes" in failures(check_plan(replace(plan, tensors=tuple(rows))))["C tensors"]
