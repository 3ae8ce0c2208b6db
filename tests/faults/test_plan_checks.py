"""Each check of a plan has a control that passes and mistakes that it, by name, catches."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from k3tool.artifact import Dataset, open_artifact, write_artifact
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.checks import (
    check_plan,
    check_program,
    is_proved,
    require_proved,
    verify_program,
)
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.hazards import check_ordered
from k3tool.compiler.order import Order
from k3tool.compiler.plan import PLAN_SCHEMA, Phase, Plan, save_plan
from k3tool.errors import UnsoundError
from k3tool.isa.columns import GATE, PACKET_REARM, WAIT_DTYPE
from k3tool.isa.emit import emit
from k3tool.isa.stream import save_isa
from k3tool.isa.table import Op, isa_hash
from k3tool.model.config import K3Config
from k3tool.verdict import Check, is_sound
from stages.cli import run_command
from tests.isa import plans

Mistake = Callable[[Plan], Plan]
PART = f"decode.{plans.PART}"


def with_phase(plan: Plan, **change: Any) -> Plan:
    phase = replace(plan.phases["decode"], **change)
    return replace(plan, phases={**plan.phases, "decode": phase})


def packet(index: int, **change: object) -> Mistake:
    """Alter fields of one decode packet."""

    def alter(plan: Plan) -> Plan:
        packets = plan.phases["decode"].packets.copy()
        for name, value in change.items():
            packets[name][index] = value
        return with_phase(plan, packets=packets)

    return alter


def handle(index: int, slot: int, name: str) -> Mistake:
    def alter(plan: Plan) -> Plan:
        packets = plan.phases["decode"].packets.copy()
        packets["handles"][index, slot] = plan.handles[name]
        return with_phase(plan, packets=packets)

    return alter


def wait(index: int, counter: int, threshold: int) -> Mistake:
    """Replace the only wait of one decode packet."""

    def alter(plan: Plan) -> Plan:
        waits = plan.phases["decode"].waits.copy()
        waits[plan.phases["decode"].packets["wait_ofs"][index]] = (counter, threshold)
        return with_phase(plan, waits=waits)

    return alter


def tensor(name: str, **change: Any) -> Mistake:
    def alter(plan: Plan) -> Plan:
        rows = list(plan.tensors)
        rows[plan.handles[name]] = rows[plan.handles[name]]._replace(**change)
        return replace(plan, tensors=tuple(rows))

    return alter


def failures(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.detail for check in checks if check.status == "FAIL"}


def test_the_plan_without_a_mistake_passes_every_check_that_runs() -> None:
    checks = check_plan(plans.plan())
    assert not failures(checks)
    assert is_sound(checks, strict=False)
    # It was written by hand, so there is no model whose meaning it could have.
    unmade = ["A meaning", "A weights", "A states"]
    assert [check.name for check in checks if check.status == "NOT RUN"] == unmade
    with pytest.raises(UnsoundError, match="NOT RUN A meaning"):
        require_proved(checks, "plan")


H = plans.H
MISTAKES: list[tuple[str, Mistake, str, str]] = [
    # what is wrong, how, the check that has to fail, the packet it has to name
    ("own threshold one more", packet(3, threshold=5), "D thresholds", "packet 3 (ALL_REDUCE_ADD)"),
    ("own threshold one less", packet(3, threshold=3), "D thresholds", "packet 3 (ALL_REDUCE_ADD)"),
    ("a gate's own count", packet(2, threshold=4), "D thresholds", "packet 2 (GEMV_BF16_BLOCKS)"),
    ("waits for one more", wait(4, 3, 5), "D thresholds", "packet 4 (RMSNORM)"),
    ("waits for one less", wait(4, 3, 3), "D thresholds", "packet 4 (RMSNORM)"),
    ("waits for one less", wait(4, 3, 3), "D ordered", "packet 4 (RMSNORM): read after write"),
    ("gate without its ranks", wait(3, GATE, 4), "D ordered", "packet 3 (ALL_REDUCE_ADD)"),
    ("no wait at all", packet(4, n_waits=0), "D ordered", "packet 4 (RMSNORM): read after write"),
    ("no wait at all", packet(7, n_waits=0), "D ordered", "packet 7 (ARGMAX_FOLD)"),
    ("waits for an older one", wait(5, 3, 4), "D ordered", "packet 5 (GEMV_BF16)"),
    ("waits for a later one", wait(3, 5, 4), "D acyclic", "packet 3 (ALL_REDUCE_ADD)"),
    ("waits for itself", wait(3, 3, 4), "D acyclic", "packet 3 (ALL_REDUCE_ADD)"),
    ("nobody signals", wait(3, GATE | 5, 8), "D acyclic", "waits for gate 5"),
    ("a local counter for a peer", packet(2, counter=2), "D thresholds", "packet 2"),
    ("rearms nowhere", packet(6, flags=0), "D thresholds", "packets [] clear"),
    ("rearms twice", packet(2, flags=PACKET_REARM), "D thresholds", "packets [2, 6] clear"),
    ("a result over its input", tensor("decode.y", offset=0), "D ordered",
     "packet 3 (ALL_REDUCE_ADD): write after read of decode.y not ordered after packet 3"),
    ("h over live x", tensor("decode.h", offset=128), "C memory",
     "packet 3 (ALL_REDUCE_ADD) reads decode.x, whose bytes decode.h overwrote in packet 1"),
    ("reads what nobody wrote", handle(1, 0, "decode.y"), "C memory", "packet 1 (RMSNORM)"),
    ("another phase's buffer", handle(1, 0, "prefill.x"), "C memory", "belongs to phase prefill"),
    ("beyond the arena", tensor("decode.y", offset=3 * 4 * H), "C memory", "packet 3"),
    ("beyond the peer segment", tensor(PART, offset=512), "C memory", "in the peer"),
    ("writes a weight", handle(1, 2, "norm"), "D ordered", "y (out) is norm (weight)"),
    ("a peer that is local", handle(3, 1, "decode.h"), "D ordered", "not a peer buffer"),
    ("half a row", packet(1, unit_cols=1), "B records", "packet 1 (RMSNORM)"),
    ("rows missing", packet(5, n_units=56), "B records", "packet 5 (GEMV_BF16)"),
    ("rows twice", packet(5, n_units=32), "B records", "packet 5 (GEMV_BF16)"),
    ("another result's size", handle(4, 2, "decode.token"), "B records", "packet 4 (RMSNORM)"),
    ("between alignments", tensor("decode.y", offset=516), "C tensors", "need a multiple of 256"),
    ("a weight beside its place", tensor("norm", offset=256), "C tensors", "a place of its own"),
    ("a weight of one phase", tensor("norm", phase="decode"), "C tensors", "outlives phases"),
    ("peers across phases", tensor(PART, offset=0), "D steps",
     f"decode packet 2 (GEMV_BF16_BLOCKS) may write {PART}"),
]  # fmt: skip


@pytest.mark.parametrize(("label", "mistake", "check", "words"), MISTAKES)
def test_each_mistake_is_caught_by_the_check_that_claims_to(
    label: str, mistake: Mistake, check: str, words: str
) -> None:
    found = failures(check_plan(mistake(plans.plan())))
    named = {name: detail for name, detail in found.items() if name.startswith(check)}
    assert named, (label, found)
    assert words in next(iter(named.values())), (label, named)


def test_a_reused_buffer_needs_the_order_that_reuse_takes() -> None:
    """r takes h's bytes: its writer has to come after h's reader."""
    plan = wait(4, 1, 1)(plans.plan())  # waits for the writer of h, not for its reader
    found = check_ordered(Order(plan, plan.phases["decode"]))[1]
    assert any("write after read of decode.r not ordered after packet 2" in text for text in found)


def test_a_peers_result_needs_a_gate_even_where_local_counts_are_right() -> None:
    plan = wait(3, 2, 4)(packet(2, counter=2, threshold=4)(plans.plan()))
    found = check_ordered(Order(plan, plan.phases["decode"]))[1]
    text = f"read after write of {PART} not ordered after packet 2 (GEMV_BF16_BLOCKS) on every"
    assert text in found[0]


# -- the file ------------------------------------------------------------------------------------


def rewrite(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Alter one dataset's bytes and give the file the digest that it then has."""
    with open_artifact(path) as file:
        datasets = {n: Dataset(file.read(n), ("x",) * file.read(n).ndim) for n in file.names()}
        attrs, params, target = file.attrs, file.params, file.target
    raw = change(np.asarray(datasets[name].data).tobytes())
    datasets[name] = Dataset(np.frombuffer(raw, np.uint8), ("x",))
    write_artifact(path, "plan", PLAN_SCHEMA, datasets, attrs, params=params, target=target,
                   isa_hash=isa_hash())  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_plan(plans.plan(), tmp_path / "plan.h5")
    return tmp_path / "plan.h5"


WIRE = "phases/decode/wire"


def test_the_file_as_saved_decodes_and_encodes_to_its_bytes(saved: Path) -> None:
    rewrite(saved, WIRE, lambda raw: raw)
    checks = verify_program(saved)
    assert not failures(checks)
    assert [check.status for check in checks if check.name.startswith("E")] == ["PASS", "PASS"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw[:-4], "length"),
        (lambda raw: raw + b"\0", "length"),
        (lambda raw: raw[:28] + b"\xfa\0" + raw[30:], "packet 0: opcode"),
        (lambda raw: raw[:16] + b"\x07" + raw[17:], "bytes after the last packet"),
    ],
)
def test_bytes_that_are_no_wire_form_fail_check_e_and_stop_the_rest(
    saved: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    rewrite(saved, WIRE, change)
    checks = verify_program(saved)
    assert words in failures(checks)["E wire decode"]
    assert all(check.status == "NOT RUN" for check in checks if not check.name.startswith("E"))


def phase_without_packets(phase: Phase) -> Phase:
    return replace(phase, packets=phase.packets[:0], waits=np.zeros(0, WAIT_DTYPE), made_by=())


def test_a_plan_that_does_nothing_is_no_pass() -> None:
    plan = plans.plan()
    phases = {name: phase_without_packets(phase) for name, phase in plan.phases.items()}
    checks = check_plan(replace(plan, phases=phases))
    assert not is_sound(checks, strict=False)
    assert not is_sound(check_plan(replace(plan, phases={})), strict=False)


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> Plan:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    return compile_plan(config, tp=2, target="cpu", workgroups=8, chunk=4, batch=1, ctx=512)


def test_the_command_exits_with_the_code_of_the_table(
    made: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, isa = tmp_path / "plan.h5", tmp_path / "isa.h5"
    save_isa(emit(save_plan(made, path), "cpu", path.name), isa)
    assert run_command(["verify", "plan", str(path)]) == 0
    assert run_command(["verify", "plan", str(path), str(isa)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS: ")
    save_plan(packet(3, threshold=5)(made), path)
    assert run_command(["verify", "plan", str(path)]) == 4
    assert "FAIL    D thresholds decode: packet 3" in capsys.readouterr().out
    assert run_command(["verify", "plan", str(path), str(isa)]) == 3  # emitted from another plan
    path.write_bytes(path.read_bytes()[:-100])
    assert run_command(["verify", "plan", str(path)]) == 3
    assert run_command(["verify", "plan", str(path.with_name("none.h5"))]) == 3
    assert run_command(["verify", "plan"]) == 2


def test_a_check_that_was_not_run_is_a_failure(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["verify", "plan", str(saved)]) == 4
    out = capsys.readouterr()
    assert "NOT RUN A meaning: no config is recorded to compare with" in out.out
    assert "FAIL: " in out.out.splitlines()[-1]
    assert "NOT RUN A meaning" in out.err


# -- programs in memory that no file could hold ----------------------------------------------------


def shortcomings(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.detail for check in checks if check.status == "FAIL"}


@pytest.mark.parametrize(
    "name", ["tp", "target", "workgroups", "chunk", "batch", "ctx", "pages_per_slot", "numerics",
             "eps", "rules", "rules_off", "theorems"],
)  # fmt: skip
def test_a_program_that_lacks_a_parameter_fails_by_name(made: Plan, name: str) -> None:
    params = {key: value for key, value in made.params.items() if key != name}
    isa = emit(made, "cpu")
    for letter, checks in (
        ("A", check_plan(replace(made, params=params))),
        ("F", check_program(replace(isa, params=params), "here")),
    ):
        found = shortcomings(checks)
        assert list(found) == [f"{letter} params"]
        assert found[f"{letter} params"].startswith(f"{name}: got ")
        assert not is_proved(checks)
    assert is_proved(check_plan(made)), "the control"
    assert is_proved(check_program(isa, "here"))


@pytest.mark.parametrize(
    ("op", "word"), [(250, "unknown"), (3, "ROUND_BF16"), (int(Op.MOE_UP), "MOE_UP"),
                     (int(Op.DEQUANT_MXFP4), "DEQUANT_MXFP4"), (int(Op.ARGMAX_ALL), "ARGMAX_ALL")],
)  # fmt: skip
def test_an_op_that_is_no_instruction_fails_by_name(made: Plan, op: int, word: str) -> None:
    checks = check_plan(packet(2, op=op)(made))
    assert shortcomings(checks) == {
        "B opcodes": f"decode packet 2: opcode {op} ({word}) is no instruction"
    }
    isa = emit(made, "cpu")
    records = [r.copy() for r in isa.streams["decode"].instructions]
    for rank in records:
        rank[2, 0] = op
    stream = replace(isa.streams["decode"], instructions=tuple(records))
    broken = replace(isa, streams={**isa.streams, "decode": stream})
    assert "instruction 2: opcode" in shortcomings(check_program(broken, "here"))["F tables"]


def test_json_holds_every_check(made: Plan, tmp_path: Path) -> None:
    from stages.verify import command

    save_plan(made, tmp_path / "plan.h5")
    done = CliRunner().invoke(command, ["plan", str(tmp_path / "plan.h5"), "--json"])
    assert done.exit_code == 0
    data = json.loads(done.stdout)
    assert data["sound"] is True
    assert {check["name"][0] for check in data["checks"]} == set("ABCDEFG")
