"""Single faults on plan and stream files: each is refused by the check that claims to see it.

Files are written by the library's own writer, so digests are right and only the fault remains. The
control is the unaltered pair, which passes everything.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.artifact import Dataset, InputRef, open_artifact, write_artifact
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.compiler.checks import is_proved, verify_program
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan, save_plan
from k3tool.isa.emit import emit
from k3tool.isa.stream import Isa, save_isa
from k3tool.isa.table import isa_hash
from k3tool.model.config import K3Config
from k3tool.verdict import Check
from stages.cli import run_command
from tests.faults import plan_mutations, stream_mutations
from tests.faults.both_mutations import BOTH
from tests.faults.end_mutations import PLAN_ENDS, STREAM_ENDS
from tests.faults.mutations import Mutation

PLAN = [*plan_mutations.PLAN, *PLAN_ENDS, *(Mutation(label, a, make) for label, a, _, make in BOTH)]
STREAM = [
    *stream_mutations.STREAM,
    *STREAM_ENDS,
    *(Mutation(label, f, make) for label, _, f, make in BOTH),
]


@pytest.fixture(scope="module")
def made() -> Plan:
    config = K3Config.from_dict(preset_config(PRESETS["tiny"]))
    return compile_plan(config, tp=2, target="hip:gfx950", workgroups=16, chunk=4, batch=1, ctx=512)


@pytest.fixture(scope="module")
def pair(made: Plan, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Isa, Path]:
    """Return the plan as saved, its stream, and the folder they lie in."""
    folder = tmp_path_factory.mktemp("whole")
    plan = save_plan(made, folder / "plan.h5")
    isa = emit(plan, "hip:gfx950")
    save_isa(isa, folder / "isa.h5")
    return plan, isa, folder


def failures(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.detail for check in checks if check.status == "FAIL"}


def test_the_suite_is_as_large_as_promised() -> None:
    assert len(PLAN) + len(STREAM) >= 60
    assert len({m.label for m in PLAN}) == len(PLAN)
    assert len({m.label for m in STREAM}) == len(STREAM)


def test_the_control_passes_every_check(pair: tuple[Plan, Isa, Path]) -> None:
    folder = pair[2]
    checks = verify_program(folder / "plan.h5", folder / "isa.h5")
    assert not failures(checks)
    assert is_proved(checks)
    assert {check.name[0] for check in checks if check.status == "PASS"} >= set("ABCDEFG")


def refused(mutation: Mutation, checks: list[Check], at: int | None, noun: str) -> None:
    found = failures(checks)
    assert mutation.check in found, (mutation.label, found)
    if at is not None:
        assert f"{noun} {at}" in found[mutation.check], (mutation.label, at, found[mutation.check])
    assert not is_proved(checks)


@pytest.mark.parametrize("mutation", PLAN, ids=[m.label for m in PLAN])
def test_each_fault_of_a_plan(
    mutation: Mutation, pair: tuple[Plan, Isa, Path], tmp_path: Path
) -> None:
    broken, at = mutation.make(pair[0])
    save_plan(broken, tmp_path / "plan.h5")
    refused(mutation, verify_program(tmp_path / "plan.h5"), at, "packet")


@pytest.mark.parametrize("mutation", STREAM, ids=[m.label for m in STREAM])
def test_each_fault_of_a_stream(
    mutation: Mutation, pair: tuple[Plan, Isa, Path], tmp_path: Path
) -> None:
    broken, at = mutation.make(pair[1])
    save_isa(broken, tmp_path / "isa.h5")
    checks = verify_program(pair[2] / "plan.h5", tmp_path / "isa.h5")
    refused(mutation, checks, at, "instruction")


# -- files ---------------------------------------------------------------------------------------


def copy(pair: tuple[Plan, Isa, Path], folder: Path) -> tuple[Path, Path]:
    for name in ("plan.h5", "isa.h5"):
        (folder / name).write_bytes((pair[2] / name).read_bytes())
    return folder / "plan.h5", folder / "isa.h5"


@pytest.mark.parametrize("name", ["plan.h5", "isa.h5"])
@pytest.mark.parametrize(
    ("label", "damage"),
    [
        ("cut", lambda raw: raw[:-64]),
        ("cut to its head", lambda raw: raw[:512]),
        ("extended", lambda raw: raw + bytes(64)),
        ("one bit flipped", lambda raw: raw[:9000] + bytes([raw[9000] ^ 1]) + raw[9001:]),
        ("empty", lambda raw: b""),
    ],
)
def test_a_damaged_file_exits_3(
    pair: tuple[Plan, Isa, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    name: str, label: str, damage: Callable[[bytes], bytes],
) -> None:  # fmt: skip
    plan, isa = copy(pair, tmp_path)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    assert run_command(["verify", "plan", str(plan), str(isa)]) == 3, label
    assert str(path) in capsys.readouterr().err


def rewrite(path: Path, **change: Any) -> None:
    """Write an artifact again with another kind, schema, ISA hash, attribute or dataset."""
    with open_artifact(path) as file:
        data = {name: file.read(name) for name in file.names()}
        kind, schema, attrs = file.kind, file.schema, dict(file.attrs)
        params, target, inputs = dict(file.params), file.target, tuple(file.inputs)
    data |= change.get("data", {})
    datasets = {
        name: Dataset(list(a) if a.dtype.kind == "O" else a, ("x",) * a.ndim)
        for name, a in data.items()
    }
    write_artifact(
        path, change.get("kind", kind), change.get("schema", schema), datasets, attrs,
        inputs=change.get("inputs", inputs), params=params, target=change.get("target", target),
        isa_hash=change.get("isa_hash", isa_hash()),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["plan.h5", "isa.h5"])
@pytest.mark.parametrize(
    "change", [{"isa_hash": "0" * 64}, {"schema": 99}, {"kind": "tokens"}], ids=str
)
def test_a_stale_file_exits_3(
    pair: tuple[Plan, Isa, Path], tmp_path: Path, name: str, change: dict[str, Any]
) -> None:
    plan, isa = copy(pair, tmp_path)
    assert run_command(["verify", "plan", str(plan), str(isa)]) == 0
    rewrite(tmp_path / name, **change)
    assert run_command(["verify", "plan", str(plan), str(isa)]) == 3


def test_a_stream_of_another_plan_or_target_exits_3(
    pair: tuple[Plan, Isa, Path], tmp_path: Path
) -> None:
    plan, isa = copy(pair, tmp_path)
    rewrite(isa, inputs=(InputRef("plan", "plan", "plan.h5", "a" * 64),))
    assert run_command(["verify", "plan", str(plan), str(isa)]) == 3
    plan, isa = copy(pair, tmp_path)
    rewrite(isa, target="abacus")
    assert run_command(["verify", "plan", str(plan), str(isa)]) == 3
    save_plan(replace(pair[0], params={**pair[0].params, "batch": 7}), plan)
    copy(pair, tmp_path)[1]
    save_plan(replace(pair[0], params={**pair[0].params, "batch": 7}), plan)
    assert run_command(["verify", "plan", str(plan), str(isa)]) == 3


WIRE = "phases/decode/wire"
HEADER_BYTES, HEAD_BYTES = 28, 12


@pytest.mark.parametrize(
    ("label", "damage", "words"),
    [
        ("unknown opcode", lambda raw: raw[:28] + b"\xfa\0" + raw[30:], "packet 0: opcode"),
        ("reserved opcode", lambda raw: raw[:28] + b"\x03\0" + raw[30:], "packet 0: opcode"),
        ("unknown flag", lambda raw: raw[:30] + b"\x40\0" + raw[32:], "packet 0: flags"),
        ("more operands than the op has", lambda raw: raw[:32] + b"\x09" + raw[33:], "packet 0"),
        ("a packet's length", lambda raw: raw[:36] + b"\xff" + raw[37:], "packet 0"),
        ("cut", lambda raw: raw[:-4], "length"),
        ("extended", lambda raw: raw + b"\0\0\0\0", "length"),
        ("one packet less in the header", lambda raw: _less(raw), "after the last packet"),
        ("another magic", lambda raw: b"K3PX" + raw[4:], "magic"),
        ("another version", lambda raw: raw[:4] + b"\x09" + raw[5:], "version"),
    ],
)
def test_each_fault_of_the_wire_form(
    pair: tuple[Plan, Isa, Path], tmp_path: Path, label: str,
    damage: Callable[[bytes], bytes], words: str,
) -> None:  # fmt: skip
    plan, _ = copy(pair, tmp_path)
    with open_artifact(plan) as file:
        raw = file.read(WIRE).tobytes()
    altered = damage(raw)
    assert altered != raw
    rewrite(plan, data={WIRE: np.frombuffer(altered, np.uint8)})
    checks = verify_program(plan)
    found = failures(checks)
    assert words in found["E wire decode"], (label, found)
    assert all(c.status != "PASS" for c in checks if c.name[0] in "BCDFG")
    assert not is_proved(checks)


def _less(raw: bytes) -> bytes:
    count = int.from_bytes(raw[16:20], "little") - 1
    return raw[:16] + count.to_bytes(4, "little") + raw[20:]
