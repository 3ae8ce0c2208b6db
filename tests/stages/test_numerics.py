"""--numerics: the mode is part of a program's identity, from the plan to the tokens."""

import json
import shutil
from pathlib import Path

import pytest

from k3tool.artifact import open_artifact
from stages.cli import run_command


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("numerics") / "ckpt"
    assert run_command(["sample", str(path)]) == 0
    return path


def test_a_plan_records_its_mode(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = {}
    for mode in ("f32", "bf16"):
        path = tmp_path / f"{mode}.h5"
        arguments = ["compile-plan", str(ckpt), "--tp", "1", "--numerics", mode, "-o", str(path)]
        capsys.readouterr()
        assert run_command([*arguments, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["params"]["numerics"] == {"mode": mode, "version": 1}
        digests[mode] = said["digest"]
        assert run_command(["verify", "plan", str(path)]) == 0
        isa = tmp_path / f"{mode}.isa.h5"
        assert run_command(["emit-isa", str(path), "-o", str(isa)]) == 0
        with open_artifact(isa, "isa") as file:
            assert file.params["numerics"]["mode"] == mode
    assert digests["f32"] != digests["bf16"]


def test_both_modes_cut_the_same_stream(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounding is a flag of a packet, never a packet of its own."""
    counts = []
    for mode in ("f32", "bf16"):
        arguments = ["compile-plan", str(ckpt), "--tp", "2", "--numerics", mode, "--json"]
        capsys.readouterr()
        assert run_command([*arguments, "-o", str(tmp_path / f"{mode}.h5")]) == 0
        counts.append(json.loads(capsys.readouterr().out)["phases"])
    assert counts[0] == counts[1]


def test_runs_of_two_modes_are_not_compared(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["run", str(ckpt), "--ids", "1,2,3", "--gen", "2", "--ignore-eos"]
    cache = ["--cache", str(tmp_path / "cache")]
    paths = []
    for mode in ("f32", "bf16"):
        paths.append(str(tmp_path / f"{mode}.tokens.h5"))
        assert run_command([*base, *cache, "--numerics", mode, "-o", paths[-1]]) == 0
    programs = list((tmp_path / "cache").glob("*.isa.h5"))
    assert len(programs) == 2, "each mode has a program of its own in the cache"
    capsys.readouterr()
    assert run_command(["verify", "ranks", *paths]) == 3
    assert "numerics: got" in capsys.readouterr().err
    shutil.copy(paths[1], tmp_path / "same.h5")  # a file is not compared with itself
    same = ["verify", "ranks", paths[1], str(tmp_path / "same.h5")]
    assert run_command(same) == 0, "the control"


def test_a_given_program_of_another_mode_is_refused(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.h5")
    arguments = ["compile-plan", str(ckpt), "--tp", "1", "--numerics", "bf16", "-o", plan]
    assert run_command(arguments) == 0
    base = ["run", str(ckpt), "--ids", "1", "--gen", "1", "--ignore-eos", "--plan", plan]
    capsys.readouterr()
    assert run_command([*base, "--numerics", "f32"]) in (2, 3)
    assert "numerics" in capsys.readouterr().err
    assert run_command([*base, "--numerics", "bf16"]) == 0
    assert run_command(base) == 0, "without the option the program's own mode holds"


def test_a_mode_that_is_none_is_refused(ckpt: Path, tmp_path: Path) -> None:
    base = ["compile-plan", str(ckpt), "--tp", "1", "-o", str(tmp_path / "plan.h5")]
    assert run_command([*base, "--numerics", "fp8"]) == 2
    assert not (tmp_path / "plan.h5").exists()
