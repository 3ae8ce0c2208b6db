"""Runs inside a control group: a budget fits a group of its size, and half of it does not do."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k3tool.memory import group_room

REPO = Path(__file__).resolve().parents[2]
ROOT = Path("/sys/fs/cgroup")
MEGABYTES = 10**6
BUDGET = 300 * MEGABYTES  # below the address space that a start takes
Group = Callable[[int], Path]


def own_group() -> tuple[Path, str]:
    """Return the folder of this process's memory group and the name of its limit's file."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            return ROOT / "memory" / name.strip("/"), "memory.limit_in_bytes"
        if number == "0" and (ROOT / name.strip("/") / "memory.max").exists():
            return ROOT / name.strip("/"), "memory.max"
    raise OSError("no memory group")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """A function that makes a group below this process's own with a limit."""
    made: list[Path] = []

    def make(limit: int) -> Path:
        try:
            parent, file = own_group()
            folder = parent / f"k3tool-test-{os.getpid()}"
            folder.mkdir()
            made.append(folder)
            (folder / file).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"NOT RUN: no control group can be written ({error})")
        return folder

    yield make
    for folder in made:
        with contextlib.suppress(OSError):
            folder.rmdir()


def inside(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a group: a shell enters it and becomes the command."""
    command = [sys.executable, "-m", "stages.cli", *map(str, words)]
    script = 'echo $$ > "$0" && exec "$@"'
    return subprocess.run(
        ["sh", "-c", script, str(folder / "cgroup.procs"), *command], cwd=REPO, text=True,
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip


def run_words(source: Path, cache: Path, *more: object) -> tuple[object, ...]:
    return ("run", source, "--ids", "5,9,2", "--gen", 5, "--tp", 2, "--ignore-eos", "--json",
            "--cache", cache, *more)  # fmt: skip


def test_a_budget_runs_in_a_group_of_its_size(
    oracle: Callable[[str], Path], tmp_path: Path, group: Group
) -> None:
    source = oracle("tiny_tp8")
    folder = group(BUDGET)
    done = inside(folder, *run_words(source, tmp_path, "--memory", BUDGET))
    assert done.returncode == 0, done.stderr
    free = subprocess.run(
        [sys.executable, "-m", "stages.cli", *map(str, run_words(source, tmp_path))], cwd=REPO,
        text=True, capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    ends = [json.loads(text.splitlines()[-1])["tokens"] for text in (done.stdout, free.stdout)]
    assert ends[0] == ends[1]


def test_auto_is_what_the_group_leaves(
    oracle: Callable[[str], Path], tmp_path: Path, group: Group
) -> None:
    rates = ("--plan-only", "--storage-rate", 1, "--memory-rate", 10)
    folder = group(BUDGET)
    words = ("run", oracle("tiny_tp8"), "--tp", 2, "--json", "--preset", "auto", *rates)
    done = inside(folder, *words)
    assert done.returncode == 0, done.stderr
    assert 0.3 * BUDGET < json.loads(done.stdout)["memory_bytes"] < BUDGET


def test_a_group_of_a_tenth_does_not_hold_it(
    oracle: Callable[[str], Path], tmp_path: Path, group: Group
) -> None:
    """The control: in a group too small the same run ends, and not with tokens."""
    folder = group(BUDGET // 10)
    done = inside(folder, *run_words(oracle("tiny_tp8"), tmp_path, "--memory", BUDGET))
    assert done.returncode != 0
    assert '"event":"end"' not in done.stdout


def test_a_group_holds_what_starts_in_it_and_refuses_the_rest(
    oracle: Callable[[str], Path], tmp_path: Path, group: Group
) -> None:
    """A start takes 400 MB of address space and a sixth of it in memory; compiling takes more."""
    folder, source = group(100 * MEGABYTES), oracle("tiny_tp8")
    words = ("run", source, "--ids", 1, "--gen", 1, "--cache", tmp_path)
    assert inside(folder, "isa").returncode == 0
    assert inside(folder, "inspect", source).returncode == 0
    for compiling in (words, ("compile-plan", source, "--tp", 1, "-o", tmp_path / "p.h5")):
        refused = inside(folder, *compiling)
        assert refused.returncode == 5, refused
        assert "for compiling" in refused.stderr
    made = subprocess.run(
        [sys.executable, "-m", "stages.cli", *map(str, words)], cwd=REPO, text=True,
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    done = inside(folder, *words)  # the program is there by now
    assert (done.returncode, done.stdout) == (0, made.stdout), done.stderr


def test_the_group_is_seen(tmp_path: Path) -> None:
    """A machine without one says None; a limit that is written is what `rooms` reports."""
    (tmp_path / "memory").mkdir()
    for name, value in (("limit_in_bytes", 5000), ("usage_in_bytes", 2000)):
        (tmp_path / "memory" / f"memory.{name}").write_text(str(value))
    member = tmp_path / "cgroup"
    member.write_text("4:memory:/\n")
    found = group_room(tmp_path, member)
    assert found is not None
    assert found.n_bytes == 3000
