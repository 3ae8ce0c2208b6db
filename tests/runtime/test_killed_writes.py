"""A file that is written when its process is killed, or by two at once: whole or as it was."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.atomic import atomic_path, leftovers, temporary_of
from k3tool.runtime.state_file import read_state

REPO = Path(__file__).resolve().parents[2]
# Ends as SIGKILL does, at the first call of a function while the state is written.
KILLED = """
import os, signal, sys
import k3tool.atomic, k3tool.runtime.run as module
from stages.cli import run_command
write = module.write_state
def fall(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
def write_state(*arguments):
    setattr({where}, "{name}", fall)
    return write(*arguments)
module.write_state = write_state
run_command(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def common(oracle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cache = tmp_path_factory.mktemp("cache")
    return ["run", str(oracle("tiny_tp8")), "--cache", str(cache), "--ignore-eos", "--gen", "3"]


def start(program: list[str], *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)], cwd=REPO, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("where", "name", "is_made"),
    [("k3tool.atomic", "fsync", True), ("k3tool.atomic.os", "replace", True),
     ("k3tool.atomic", "temporary_of", False)],
)  # fmt: skip
def test_a_run_killed_while_it_writes_a_state_leaves_the_one_before(
    k3tool: Callable[..., Any], common: list[str], tmp_path: Path, where: str, name: str,
    is_made: bool,
) -> None:  # fmt: skip
    state = tmp_path / "state.h5"
    asked = (*common, "--ids", "5,9", "--save-state", state)
    assert k3tool(*asked).code == 0
    before = state.read_bytes()
    program = ["-c", KILLED.format(where=where, name=name)]
    killed = start(program, *common, "--ids", "7", "--save-state", state)
    assert killed.communicate(timeout=60)[0].strip()
    assert killed.returncode == -signal.SIGKILL
    assert state.read_bytes() == before
    left = leftovers(state)
    assert len(left) == is_made
    assert sorted(tmp_path.iterdir()) == sorted([state, *left])
    again = k3tool(*asked)
    assert again.code == 0
    assert [f"{path}: left by a process that was killed" in again.err for path in left] == (
        [True] * len(left)
    )
    for path in left:
        path.unlink()
    assert "left by" not in k3tool(*asked).err
    assert state.read_bytes() == before


def test_two_runs_that_write_one_state_leave_one_whole(
    k3tool: Callable[..., Any], common: list[str], tmp_path: Path
) -> None:
    whole = set()
    for ids in ("5,9", "7"):
        alone = tmp_path / "alone.h5"
        assert k3tool(*common, "--ids", ids, "--save-state", alone).code == 0
        whole.add(alone.read_bytes())
    state = tmp_path / "state.h5"
    both = [
        start(["-m", "stages.cli"], *common, "--ids", ids, "--save-state", state)
        for ids in ("5,9", "7")
    ]
    for process in both:
        assert process.communicate(timeout=60)[0].strip()
        assert process.returncode == 0
    assert read_state(state).ids
    assert state.read_bytes() in whole
    assert len(list(tmp_path.iterdir())) == 2


def test_two_writers_of_one_number_do_not_share_a_file(tmp_path: Path) -> None:
    """Threads stand for processes of one number in two containers that share a folder."""
    path, together = tmp_path / "file", threading.Barrier(2)

    def write(byte: bytes) -> None:
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            together.wait(10)
            for _ in range(64):
                file.write(byte * 4096)
                file.flush()
            together.wait(10)

    writers = [threading.Thread(target=write, args=(byte,)) for byte in (b"a", b"b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert path.read_bytes() in (b"a" * 64 * 4096, b"b" * 64 * 4096)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_still_written_is_no_leftover(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for path in (tmp_path / "state.h5", tmp_path / ("n" * 255)):
        own = temporary_of(path)
        own.touch()
        assert leftovers(path) == []
        dead = temporary_of(path)
        name = dead.name.replace(f".{os.getpid()}-", f".{ended.pid}-")
        if len(path.name) < 100 or len(name) == len(dead.name):  # long ones are cut by its digits
            dead.with_name(name).touch()
            assert leftovers(path) == [dead.with_name(name)]
            assert leftovers(path.with_name("other")) == []
    assert leftovers(tmp_path / "no" / "folder") == []
