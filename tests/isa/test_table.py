"""The op table is pinned: what a stored program means may only be added to."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from k3tool.isa import genheader, manual, table
from k3tool.isa.columns import GATE, PACKET_DIGEST, PACKET_REARM
from k3tool.isa.op_spec import OpSpec
from k3tool.isa.table import SPECS, Op
from stages.cli import run_command

REPO = Path(__file__).resolve().parents[2]
GOLDEN = REPO / "tests" / "golden" / "isa.json"


def pins(spec: OpSpec) -> dict[str, object]:
    return {
        "opcode": int(spec.op),
        "unit": spec.unit,
        "handles": [f"{'+' if o.run else ''}{o.role} {o.name}" for o in spec.operands],
        "words": {param.name: [spec.word(param.name), param.kind] for param in spec.params},
        "flags": {name: spec.flag(name) for name in spec.flags},
    }


def test_numbers_operands_and_words_are_as_last_reviewed(request: pytest.FixtureRequest) -> None:
    found = {
        "version": table.ISA_VERSION,
        "hash": table.isa_hash(),
        "reserved": {name: number for number, name in table.RESERVED.items()},
        "ops": {spec.name: pins(spec) for _, spec in sorted(SPECS.items())},
    }
    text = json.dumps(found, indent=1) + "\n"
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text


def test_the_generated_header_is_what_the_table_gives() -> None:
    assert genheader.HEADER_PATH.read_text() == genheader.render()


def test_the_manual_in_the_tree_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["isa"]) == 0
    assert manual.MANUAL_PATH.read_text() == capsys.readouterr().out
    readme = manual.README_PATH.read_text()
    assert manual.readme_text(readme) == readme
    assert "docs/isa.md" in readme
    listed = readme.split(manual.BEGIN)[1].split(manual.END)[0]
    assert all(f"`{spec.name}`" in listed for spec in SPECS.values() if spec.is_emitted)


def test_a_changed_row_shows_in_every_generated_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert genheader.main(["--check"]) == 0, "the control"
    monkeypatch.setitem(SPECS, Op.ADD, replace(SPECS[Op.ADD], doc="y = a - b"))
    assert genheader.main(["--check"]) == 1
    said = capsys.readouterr().err
    for name in ("k3_isa.h", "isa.md", "README.md"):
        assert f"{name} differs from the op table: run `make gen`" in said


@pytest.mark.parametrize(
    "text",
    ["", manual.BEGIN, f"{manual.END} {manual.BEGIN}", f"{manual.BEGIN * 2} {manual.END}"],
)
def test_a_readme_without_its_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"README\.md: need .* once each"):
        manual.readme_text(text)


def test_the_hash_follows_meaning_and_not_words(monkeypatch: pytest.MonkeyPatch) -> None:
    before = table.isa_hash()
    spec = SPECS[Op.ADD]
    changes = {
        "doc": ("another text", False),
        "grain": (32, False),
        "unit": ("row", True),
        "operands": (spec.operands[::-1], True),
    }
    for field, (value, matters) in changes.items():
        fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
        monkeypatch.setitem(SPECS, Op.ADD, OpSpec(**(fields | {field: value})))
        assert (table.isa_hash() != before) == matters, field


def test_flags_and_the_gate_bit_are_those_of_the_c_header() -> None:
    text = (REPO / "kernels_common" / "k3.h").read_text()
    defined = dict(re.findall(r"#define (K3_\w+) (0x[0-9a-f]+|\d+)u", text))
    assert int(defined["K3_ENTRY_DIGEST"], 0) == PACKET_DIGEST
    assert int(defined["K3_ENTRY_REARM"], 0) == PACKET_REARM
    assert int(defined["K3_SYSTEM"], 0) == GATE
