"""Streams that take no words: what a command found out and did does not depend on them."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint.sample_writer import write_sample
from k3tool.runtime.tokens import read_tokens

REPO = Path(__file__).resolve().parents[2]
FULL = "/dev/full"  # every write to it fails as on a full disk
COMMAND = [sys.executable, "-m", "stages.cli"]
LONG = ("run", "ckpt", "--ids", "1,2", "--gen", "4000", "--ignore-eos", "--cache", "cache")
INTO_FILE = ("run", "ckpt", "--ids", "1,2", "--gen", "3", "--ignore-eos", "--cache", "cache",
             "-o", "tokens.h5")  # fmt: skip
# Checks that fail and refusals, each with its own exit code.
FAILING = {
    "verify ranks 1.txt 2.txt": 4,
    "verify ranks 1.txt 2.txt --json": 4,
    "verify logits 1.npz 2.npz": 4,
    "verify logits 1.npz 2.npz --json": 4,
    "inspect cut": 3,
    "inspect cut --json": 3,
    "inspect absent": 3,
    "run ckpt --ids 1,,2": 2,
}
SOUND = ("isa", "inspect ckpt", "verify ranks 1.txt 1b.txt", "--help")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint, one that is cut, and streams and logits that differ."""
    folder = tmp_path_factory.mktemp("streams")
    for name in ("ckpt", "cut"):
        write_sample(folder / name)
    last = max((folder / "cut").glob("*.safetensors"))
    os.truncate(last, last.stat().st_size - 8)
    for name, text in (("1", "1 2 3"), ("1b", "1 2 3"), ("2", "1 2 4")):
        (folder / f"{name}.txt").write_text(text)
    logits = np.arange(12, dtype=np.float32).reshape(3, 4)
    for number in (1, 2):
        np.savez(folder / f"{number}.npz", decode=logits * number, prefill=logits[:1] * number)
    return folder


@contextmanager
def _gone() -> Iterator[int]:
    """Yield a pipe that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)


@contextmanager
def _hung_up() -> Iterator[int]:
    """Yield a terminal that is gone, and was not this session's: no signal says so."""
    leader, follower = pty.openpty()
    os.close(leader)
    try:
        yield follower
    finally:
        os.close(follower)


@contextmanager
def _waiting() -> Iterator[int]:
    """Yield a full pipe that nobody waits for, which says that it would have to be waited for."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, bytes(4096))
    except BlockingIOError:
        pass
    try:
        yield write
    finally:
        os.close(read)
        os.close(write)


@contextmanager
def _full() -> Iterator[int]:
    if not Path(FULL).exists():
        pytest.skip(f"NOT RUN: no {FULL}")
    full = os.open(FULL, os.O_WRONLY)
    try:
        yield full
    finally:
        os.close(full)


DEAF = {"gone": _gone, "hung up": _hung_up, "would wait": _waiting, "full": _full}


def _code(
    folder: Path, *words: str, stdout: int = subprocess.DEVNULL, stderr: int = subprocess.DEVNULL,
    before: Callable[[], object] | None = None,
) -> int:  # fmt: skip
    """Return the exit code of a command in the folder."""
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=stdout,
        stderr=stderr, timeout=60, preexec_fn=before,
    ).returncode  # fmt: skip


# -- stdout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", FAILING)
def test_a_reader_that_has_gone_changes_no_verdict(folder: Path, line: str) -> None:
    with _gone() as stdout:
        assert _code(folder, *line.split(), stdout=stdout) == FAILING[line]


@pytest.mark.parametrize("line", SOUND)
def test_a_sound_result_that_nobody_reads_is_no_fault(folder: Path, line: str) -> None:
    with _gone() as stdout:
        assert _code(folder, *line.split(), stdout=stdout) == 0


@pytest.mark.parametrize("line", ["verify ranks 1.txt 2.txt", "verify ranks 1.txt 1b.txt"])
def test_a_terminal_that_is_gone_is_a_reader_that_has_gone(folder: Path, line: str) -> None:
    with _hung_up() as stdout:
        assert _code(folder, *line.split(), stdout=stdout) == FAILING.get(line, 0)


@pytest.mark.parametrize("line", ["verify ranks 1.txt 2.txt", "verify ranks 1.txt 1b.txt"])
def test_a_full_stdout_is_an_error_of_its_own(folder: Path, line: str) -> None:
    with _full() as stdout:
        assert _code(folder, *line.split(), stdout=stdout) == 1


@pytest.mark.parametrize("batch", [False, True])
def test_a_run_that_nobody_reads_stops_early(folder: Path, batch: bool) -> None:
    words: tuple[str, ...] = LONG
    if batch:
        text = "".join(f'{{"id": {i}, "ids": [1, 2], "gen": 2}}\n' for i in range(3000))
        (folder / "batch.jsonl").write_text(text)
        words = ("run", "ckpt", "--batch", "batch.jsonl", "--cache", "cache")
    whole = "3000 requests" if batch else "4000 tokens"
    with _gone() as stdout, (folder / "said").open("w+b") as said:
        assert _code(folder, *words, stdout=stdout, stderr=said.fileno()) == 0
        assert whole not in (folder / "said").read_text()


def _nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.parametrize(("before", "code"), [(None, 129), (_nohup, 0)])
def test_a_run_whose_terminal_is_gone_ends_as_its_signal_would_have_it(
    folder: Path, before: Callable[[], None] | None, code: int
) -> None:
    with _hung_up() as stdout:
        assert _code(folder, *LONG, stdout=stdout, stderr=stdout, before=before) == code


# -- stderr --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DEAF)
def test_a_stderr_that_takes_nothing_stops_no_work(folder: Path, kind: str) -> None:
    (folder / "tokens.h5").unlink(missing_ok=True)
    with DEAF[kind]() as stderr:
        assert _code(folder, *INTO_FILE, stderr=stderr) == 0
    assert read_tokens(folder / "tokens.h5").ranks[0]["step"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", DEAF)
@pytest.mark.parametrize("line", [line for line in FAILING if "--json" not in line])
def test_a_stderr_that_takes_nothing_changes_no_exit_code(
    folder: Path, kind: str, line: str
) -> None:
    with DEAF[kind]() as stderr:
        assert _code(folder, *line.split(), stderr=stderr) == FAILING[line]


def test_both_streams_gone_leave_the_verdict(folder: Path) -> None:
    with _gone() as pipe:
        assert _code(folder, "verify", "ranks", "1.txt", "2.txt", stdout=pipe, stderr=pipe) == 4


# -- a terminal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1])
def test_a_terminal_closed_during_a_run_ends_it_with_129(folder: Path, seconds: float) -> None:
    """The terminal's error may come before its signal, or behind it."""
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(COMMAND[0], [*COMMAND, *LONG], env)
    shown = b""
    while shown.count(b" ") < 12:  # past the line that says where the program came from
        shown += os.read(terminal, 4096)
    time.sleep(seconds)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
