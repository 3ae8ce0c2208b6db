"""Disassembly and the manual: golden text, and a listing of every op the table has."""

import json
from pathlib import Path

import pytest

from k3tool.compiler.plan import save_plan
from k3tool.isa import table
from k3tool.isa.disasm import lines, of_plan, of_stream
from k3tool.isa.emit import emit
from k3tool.isa.stream import save_isa
from stages.cli import run_command
from tests.isa import plans

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plan = save_plan(plans.plan(), tmp_path / "plan.h5")
    save_isa(emit(plan, "cpu"), tmp_path / "isa.h5")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("plan", ["plan.h5"]),
        ("rank1", ["isa.h5", "--rank", "1"]),
        ("workgroup2", ["isa.h5", "--phase", "decode", "--workgroup", "2"]),
    ],
)
def test_text_is_as_last_reviewed(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    name: str,
    arguments: list[str],
) -> None:
    assert run_command(["disasm", str(folder / arguments[0]), *arguments[1:]]) == 0
    text = capsys.readouterr().out
    golden = GOLDEN / f"disasm_{name}.txt"
    if request.config.getoption("--update-golden", default=False):
        golden.write_text(text)
    assert golden.read_text() == text


def test_a_plan_and_its_stream_list_the_same_but_for_per_rank_parameters() -> None:
    plan = plans.plan()
    isa = emit(plan, "cpu")
    phase, stream = plan.phases["decode"], isa.streams["decode"]
    # A stream has no grain: its slices are cut. The hand-written plan's differs from its ops'.
    planned = [
        line.removesuffix(" grain=1") for line in lines(of_plan(phase, plan.tp), plan.tensors, 0, 8)
    ]
    assert list(lines(of_stream(stream, 1), isa.tensors, 0, 8)) == planned
    first = list(lines(of_stream(stream, 0), isa.tensors, 0, 8))
    assert [a == b for a, b in zip(first, planned, strict=True)] == [True] * 6 + [False, True]
    assert "vocab_base=0 " in first[6]


def test_every_entry_of_a_stream_is_in_exactly_one_queue_listing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for workgroup in range(plans.WORKGROUPS):
        arguments = ["disasm", str(folder / "isa.h5"), "--phase", "prefill"]
        assert run_command([*arguments, "--workgroup", str(workgroup)]) == 0
        text = capsys.readouterr().out.splitlines()[1:]
        indices = [int(line.split()[0]) for line in text]
        assert indices == sorted(set(indices))
        found += indices
    packets = plans.plan().phases["prefill"].packets
    assert sorted(found) == [i for i, p in enumerate(packets) for _ in range(p["n_slices"])]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan.h5", "--rank", "1"], 2, "a plan has neither ranks nor queues"),
        (["isa.h5", "--rank", "2"], 2, "--rank: got 2, need below 2"),
        (["isa.h5", "--workgroup", "4"], 2, "--workgroup: got 4, need below 4"),
        (["isa.h5", "--range", "9:"], 2, "--range"),
        (["isa.h5", "--range", "x:y"], 2, '--range: got "x:y", need A:B'),
        (["none.h5"], 3, "no such file"),
    ],
)
def test_a_bad_choice_is_one_line_and_its_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert run_command(["disasm", str(folder / arguments[0]), *arguments[1:]]) == code
    assert message in capsys.readouterr().err


def test_a_range_prints_those_instructions(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["disasm", str(folder / "isa.h5"), "--phase", "decode", "--range"]
    assert run_command([*arguments, "2:4"]) == 0
    starts = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert starts == [";", "0002", "0003"]
    assert run_command([*arguments, "5"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("0005 GEMV_BF16 ")


def test_the_manual_has_every_op_in_both_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["isa", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["isa_hash"] == table.isa_hash()
    emitted = [spec for _, spec in sorted(table.SPECS.items()) if spec.is_emitted]
    assert [op["opcode"] for op in data["ops"]] == [spec.op for spec in emitted]
    assert run_command(["isa"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == len(emitted) + 1
    for spec in emitted:
        assert any(f"| {int(spec.op)} | `{spec.name}` |" in row for row in rows)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--workgroup", "99"), ("--range", "3:999"), ("--range", "998:999"), ("--range", "2:2")],
)
def test_a_choice_past_the_end_is_refused_before_anything_is_printed(
    folder: Path, capfd: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert run_command(["disasm", str(folder / "isa.h5"), option, value]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert option in err
    assert run_command(["disasm", str(folder / "isa.h5"), "--range", "0:2"]) == 0  # the control
    assert len(capfd.readouterr().out.splitlines()) == 6
