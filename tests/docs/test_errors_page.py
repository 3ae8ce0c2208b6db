"""Every refusal of docs/errors.md is provoked here; the page shows what was answered."""

import ctypes
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.artifact import Dataset, open_artifact, write_artifact
from k3tool.checkpoint.reader import Checkpoint
from k3tool.runtime import gpu_device
from tests.docs import errors_page as page
from tests.docs.error_rows import ARTIFACT, GROUPS, SETUP, STALE, Row
from tests.stages.test_options import parse

REPO = Path(__file__).resolve().parents[2]
Run = Callable[..., Any]
_OURS = re.compile(r"^k3tool( [a-z-]+)*: .+: got .+, need .+$", re.MULTILINE)
ANSWERS: dict[Row, page.Answer] = {}
# These print on stdout what they looked at, and what they found.
_REPORTS = ("k3tool verify", "k3tool shard --check")
ROWS = [(code, row) for code, rows in GROUPS.items() for row in rows]


def environment(folder: Path) -> dict[str, str]:
    """Return an environment with this checkout's k3tool on PATH and a cache below `folder`."""
    program = folder / "bin" / "k3tool"
    if not program.exists():
        program.parent.mkdir(parents=True)
        program.write_text(
            f'#!/bin/sh\nPYTHONPATH={REPO} exec {sys.executable} -m stages.cli "$@"\n'
        )
        program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of the page, by the page's own lines."""
    folder = tmp_path_factory.mktemp("errors")
    work = folder / "work"
    work.mkdir()
    first, *rest = SETUP.splitlines()
    bash(folder, first)
    with Checkpoint.open(work / "ckpt") as checkpoint:
        info = checkpoint.tensor_info("language_model.lm_head.weight")
        assert info.file == "model-00009-of-000011.safetensors"
    bash(folder, "\n".join(rest).replace("LM_HEAD", str(info.offset)))
    make_stale(work / "isa.h5", work / STALE)
    return folder


def bash(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", "-ec", script], cwd=folder / "work", env=environment(folder),
        capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def make_stale(path: Path, target: Path) -> None:
    """Write an artifact as a version with another op table would."""
    with open_artifact(path) as file:
        data = {name: file.read(name) for name in file.names()}
        datasets = {
            name: Dataset(list(a) if a.dtype.kind == "O" else a, ("x",) * a.ndim)
            for name, a in data.items()
        }
        write_artifact(
            target, file.kind, file.schema, datasets, file.attrs, file.inputs, file.params,
            target=file.target, isa_hash="0" * 64,
        )  # fmt: skip


def ask(row: Row, place: Path, k3tool: Run) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a row."""
    if row.shell:
        done = subprocess.run(
            ["bash", "-c", row.command], cwd=place / "work", env=environment(place),
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr
    program, *arguments = shlex.split(row.command)
    assert program == "k3tool"
    found = k3tool(*arguments)
    return found.code, found.out, found.err


require_device = gpu_device.require_device


def without_driver(target: str, *asked: object) -> None:
    """Refuse a device as a machine without a driver does: the page is of such a machine."""

    def absent(name: str) -> ctypes.CDLL:
        raise OSError(name)

    require_device(target, absent)


@pytest.mark.parametrize(("code", "row"), ROWS, ids=[row.wrong for _, row in ROWS])
def test_every_refusal(
    k3tool: Run, place: Path, monkeypatch: pytest.MonkeyPatch, code: int, row: Row
) -> None:
    monkeypatch.chdir(place / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setattr(gpu_device, "require_device", without_driver)
    before = sorted(os.listdir())
    got, out, err = ask(row, place, k3tool)
    assert got == code, f"{row.command}: {got}\n{out}{err}"
    assert "Traceback" not in err
    assert sorted(os.listdir()) == before, "something was left behind"
    assert len(_OURS.findall(err)) == 1, err
    last = err.rstrip().splitlines()[-1]
    assert code == 2 or last.startswith("  hint: "), f"no next step: {err}"
    if last.startswith("  hint: k3tool ") and " says " not in last:
        parse(shlex.split(last)[1:])  # a command, not words: it has to be one
    if not row.shell and not row.command.startswith(_REPORTS):
        assert out == ""
    ANSWERS[row] = page.answer_of(got, err)


def test_the_page_shows_what_was_answered(request: pytest.FixtureRequest) -> None:
    if set(ANSWERS) != {row for _, row in ROWS}:
        pytest.skip("NOT RUN: only a part of the refusals was provoked, or some of them failed")
    page.check(page.render(ANSWERS), request.config.getoption("--update-golden"))


def test_another_line_on_the_page_is_stale() -> None:
    text = page.PAGE.read_text()
    page.check(text, False)
    with pytest.raises(AssertionError, match="stale"):
        page.check(text.replace("no such folder", "a folder", 1), False)


def test_a_traceback_is_shown_where_it_is_asked_for(k3tool: Run, place: Path) -> None:
    words = ("run", place / "work" / "ckpt", "--ids", "1,,2")
    plain, traced = k3tool(*words), k3tool("--traceback", *words)
    assert traced.code == plain.code == 2
    assert traced.err.startswith(plain.err)
    assert "Traceback" in traced.err
    assert "Traceback" not in plain.err


def test_the_controls_pass(k3tool: Run, place: Path) -> None:
    """What the rows damage is healthy before: no refusal comes from the folder itself."""
    work = place / "work"
    assert k3tool("inspect", work / "ckpt").code == 0
    assert k3tool("emit-isa", work / "plan.h5", "-o", place / "again.h5").code == 0
    assert k3tool("disasm", work / "isa.h5").code == 0
    assert k3tool("verify", "ranks", work / "tokens.h5").code == 0
    assert ARTIFACT
