"""The interpreter's build and its loader: stale, foreign or absent ones are refused by name."""

import json
import shutil
from pathlib import Path

import pytest

from k3tool.errors import TargetError, UsageError
from k3tool.isa.table import SPECS, isa_hash
from k3tool.runtime import build as building
from k3tool.runtime.interpreter import handlers, load


def stand_in(folder: Path, **identity: object) -> Path:
    """Write a program that answers --identity with other hashes."""
    real = load()
    said = {"isa_hash": real.isa_hash, "source_hash": real.source_hash, "leaves": ["scalar"]}
    path = folder / "k3-cpu"
    path.write_text(f"#!/bin/sh\necho '{json.dumps(said | identity)}'\n")
    path.chmod(0o755)
    return path


def test_the_built_one_is_current() -> None:
    found = load()
    assert found.isa_hash == isa_hash()
    assert found.source_hash == building.source_hash()


def test_a_true_stand_in_passes(tmp_path: Path) -> None:
    assert load(stand_in(tmp_path)).leaves == ("scalar",)


@pytest.mark.parametrize("field", ["isa_hash", "source_hash"])
def test_a_stale_binary_is_refused_with_both_values(tmp_path: Path, field: str) -> None:
    path = stand_in(tmp_path, **{field: "0123456789abcdef" * 4})
    with pytest.raises(TargetError) as caught:
        load(path)
    text = str(caught.value)
    assert field in text
    assert "0123456789ab" in text
    assert getattr(load(), field)[:12] in text
    assert "make build" in text


def test_an_edited_source_changes_the_hash(tmp_path: Path) -> None:
    for folder in building.SOURCE_FOLDERS:
        shutil.copytree(
            building.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("build")
        )
    before = building.source_hash(tmp_path)
    assert before == building.source_hash()
    with (tmp_path / "kernels_cpu" / "interp.c").open("a") as file:
        file.write("\n")
    assert building.source_hash(tmp_path) != before


def test_an_absent_interpreter_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="make build"):
        load(tmp_path / "k3-cpu")


def test_a_file_that_is_no_interpreter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "k3-cpu"
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    with pytest.raises(TargetError, match="no answer"):
        load(path)


def test_no_compiler_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(TargetError, match="apt-get install gcc"):
        building.build(tmp_path / "k3-cpu")


def test_every_op_of_the_table_has_a_handler_in_its_phases() -> None:
    found = handlers("cpu")
    for phase in ("decode", "prefill"):
        wanted = {int(op) for op, s in SPECS.items() if "cpu" in s.targets and phase in s.phases}
        assert found[phase] == wanted


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UsageError, match="tpu"):
        handlers("tpu")
