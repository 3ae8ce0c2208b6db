"""A run under a memory budget that is interrupted or killed: code, words, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SECONDS = 10.0
ENDS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


def start(source: Path, cache: Path, tp: int, *before: str) -> subprocess.Popen[str]:
    """Start a run that would take long and return it at its first tokens; `before` starts it."""
    words = [
        "run", source, "--ids", "1", "--gen", "4000", "--tp", tp, "--ignore-eos", "--json",
        "--memory", "250MB", "--cache", cache, "--expert-trace", cache / "experts.trace",
    ]  # fmt: skip
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "stages.cli", *map(str, words)], cwd=REPO, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(4)]
    assert '"event":"token"' in lines[-1], process.communicate(timeout=30)
    return process


def ranks_of(process: subprocess.Popen[str], tp: int) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    ranks = [int(word) for word in text.split()]
    assert len(ranks) == tp
    return ranks


def wait_until_gone(pids: list[int]) -> None:
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
        except OSError:
            return False

    end = time.monotonic() + SECONDS
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(runs, pids))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("number", "code"), ENDS)
def test_an_interrupt_leaves_nothing(
    oracle: Callable[[str], Path], tmp_path: Path, number: signal.Signals, code: int, tp: int
) -> None:
    shared = set(os.listdir("/dev/shm"))
    with start(oracle("tiny_tp8"), tmp_path, tp) as process:
        ranks = ranks_of(process, tp)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "Traceback" not in err
    wait_until_gone(ranks)
    assert set(os.listdir("/dev/shm")) == shared
    assert not list(tmp_path.glob("*.trace*")), "a trace of a part of a run looks like a whole one"


def test_under_nohup_a_closed_terminal_ends_nothing(
    oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    with start(oracle("tiny_tp8"), tmp_path, 1, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        assert process.stdout is not None
        more = [process.stdout.readline() for _ in range(30)]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert '"event":"token"' in more[-1]
    assert process.returncode == 143


@pytest.mark.parametrize("tp", [1, 2])
def test_a_killed_driver_takes_its_ranks_along(
    oracle: Callable[[str], Path], tmp_path: Path, tp: int
) -> None:
    shared = set(os.listdir("/dev/shm"))
    with start(oracle("tiny_tp8"), tmp_path, tp) as process:
        ranks = ranks_of(process, tp)
        process.kill()
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    wait_until_gone(ranks)
    assert set(os.listdir("/dev/shm")) == shared


@pytest.mark.parametrize("tp", [1, 2])
def test_a_killed_rank_is_named(oracle: Callable[[str], Path], tmp_path: Path, tp: int) -> None:
    with start(oracle("tiny_tp8"), tmp_path, tp) as process:
        ranks = ranks_of(process, tp)
        os.kill(ranks[-1], signal.SIGKILL)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 4, err
    assert f"rank {tp - 1}: got killed by SIGKILL" in err
    assert '"event":"end"' not in out
    wait_until_gone(ranks)
