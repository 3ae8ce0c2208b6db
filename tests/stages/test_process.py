"""A command as a process among others: what it does when streams, names and signals are unkind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.runtime.tokens import read_tokens

REPO = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")  # every write to it fails as on a full disk


def k3(*arguments: object, shell: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command line; `shell` is put behind it (a redirection)."""
    words = [sys.executable, "-m", "stages.cli", *map(os.fspath, map(str, arguments))]
    command = " ".join(f"'{word}'" for word in words) + " " + shell
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=REPO, timeout=60, **options
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the refusal: at most a message and a hint, no traceback."""
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("program ")]
    assert len(lines) <= 2, done.stderr
    return lines[0] if lines else ""


@pytest.mark.parametrize("command", ["inspect", "run"])
def test_what_is_printed_to_a_closed_stdout_is_an_error(
    oracle: Callable[[str], Path], tmp_path: Path, command: str
) -> None:
    extra = ("--ids", 1, "--gen", 2, "--cache", tmp_path) if command == "run" else ()
    done = k3(command, oracle("tiny_tp8"), *extra, shell=">&-")
    assert done.returncode == 1
    assert one_line(done).startswith(f"k3tool {command}: stdout: got bad file descriptor")


def test_a_run_into_a_file_needs_no_stdout(oracle: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "tokens.h5"
    asked = ("--ids", 1, "--gen", 2, "--ignore-eos", "--cache", tmp_path / "cache", "-o", out)
    done = k3("run", oracle("tiny_tp8"), *asked, shell=">&-")
    assert done.returncode == 0, done.stderr
    assert "2 tokens" in done.stderr
    assert read_tokens(out).ranks[0]["step"].tolist() == [0, 1]


@pytest.mark.skipif(not FULL.exists(), reason="NOT RUN: no /dev/full")
@pytest.mark.parametrize("command", [("isa",), ("inspect", "CKPT"), ("--help",)])
def test_a_full_stdout_is_one_line_and_exit_1(
    oracle: Callable[[str], Path], command: tuple[str, ...]
) -> None:
    words = [oracle("tiny_tp8") if word == "CKPT" else word for word in command]
    done = k3(*words, shell="> /dev/full")
    assert done.returncode == 1
    assert "no space left" in one_line(done)


def test_a_folder_name_that_is_no_utf8(writable: Callable[[str], Path], tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/ck\xff"
    os.rename(writable("tiny_tp8"), folder)
    for tp in (1, 2):
        done = subprocess.run(
            [sys.executable, "-m", "stages.cli", "run", folder, "--ids", "1", "--gen", "2",
             "--json", "--tp", str(tp), "--cache", tmp_path / "cache"],
            cwd=REPO, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_an_id_of_thousands_of_digits(oracle: Callable[[str], Path]) -> None:
    done = k3("run", oracle("tiny_tp8"), "--ids", "9" * 5000, "--gen", 1)
    assert done.returncode == 2
    assert len(one_line(done)) < 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay", [0.03, 0.06, 0.12, 0.25])
def test_a_signal_at_any_moment_of_the_start(
    oracle: Callable[[str], Path], tmp_path: Path, number: signal.Signals, delay: float
) -> None:
    """Before Python runs our first line the signal's own way is the only one: then it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.cli", "run", oracle("tiny_tp8"), "--ids", "1",
         "--gen", "4000", "--ignore-eos", "--cache", tmp_path],
        cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(delay)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    if err.startswith("Fatal Python error: init"):
        return  # it was still making itself ready, and none of our lines had run
    if number == signal.SIGINT and err.startswith("Exception ignored in"):
        # Python dropped it before our first line; later ones come again (test_signals), in silence.
        assert "KeyboardInterrupt" in err.split("  program", 1)[0], err
        return
    ours = 130 if number == signal.SIGINT else 143
    assert process.returncode in (ours, -number), err
    if process.returncode == ours:
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("limit", "code", "says"),
    [
        ("-S -s 1024", 0, "2 tokens"),
        ("-S -s 1024; ulimit -H -s 1024", 5, "the stack limit is below 8 MiB"),
    ],
)
def test_leaves_have_the_stack_they_need_or_are_not_run(
    oracle: Callable[[str], Path], tmp_path: Path, limit: str, code: int, says: str
) -> None:
    """A leaf keeps packed x on the stack; the default of a thread follows the limit."""
    words = [sys.executable, "-m", "stages.cli", "run", oracle("tiny_tp8")]
    words += ["--ids", ",".join(map(str, range(1, 40))), "--gen", "2", "--cache", tmp_path]
    words += ["--ignore-eos", "--threads", "2"]
    command = f"ulimit {limit}; exec " + " ".join(f"'{word}'" for word in words)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=REPO, timeout=60)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
