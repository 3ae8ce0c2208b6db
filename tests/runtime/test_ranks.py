"""Rank groups: whatever one rank does, all stop, the message names it, and nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3tool.errors import ArtifactError, UnsoundError
from k3tool.isa.table import PAGE_TOKENS
from k3tool.runtime import records
from k3tool.runtime.fault_words import fault_error
from k3tool.runtime.interpreter import load
from k3tool.runtime.ranks import FaultError, RankGroup
from tests.runtime import toy

LONG = 200_000
SECONDS = 5.0


def long_run(folder: Path, tp: int, **options: object) -> RankGroup:
    """A group that would take minutes."""
    isa = toy.toy_isa(tp, ctx=(LONG // PAGE_TOKENS + 2) * PAGE_TOKENS)
    return RankGroup(toy.launch(toy.images(isa, folder, n_gen=LONG), **options))


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie of another parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_killed_rank_stops_all_and_is_named(tmp_path: Path) -> None:
    shared, files = set(os.listdir("/dev/shm")), open_files()
    with long_run(tmp_path, 4) as group:
        steps = group.steps()
        for _ in range(20):
            next(steps)
        pids = group.pids
        os.kill(pids[2], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(UnsoundError, match=r"rank 2: got killed by SIGKILL"):
            list(steps)
    assert time.monotonic() - start < SECONDS
    assert not any(alive(pid) for pid in pids)
    assert set(os.listdir("/dev/shm")) == shared
    assert open_files() == files


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_stopped_rank_is_named_not_those_that_wait_for_it(tmp_path: Path, tp: int) -> None:
    """Alone it has nobody who waits for it: the driver has a deadline of its own."""
    with long_run(tmp_path, tp, deadline_seconds=0.5) as group:
        steps = group.steps()
        next(steps)
        os.kill(group.pids[tp - 1], signal.SIGSTOP)
        with pytest.raises(UnsoundError, match=rf"^rank {tp - 1}: got stopped by a signal"):
            list(steps)


def test_a_rank_stopped_before_it_is_ready_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two, whichever starts first, stops itself before it is an interpreter."""
    monkeypatch.setattr("k3tool.runtime.ranks.STARTUP_SECONDS", 0.1)
    script = tmp_path / "stops-once.sh"
    script.write_text(
        f'#!/bin/sh\nmkdir "$0.once" 2>/dev/null && kill -STOP $$\nexec "{load().path}" "$@"\n'
    )
    script.chmod(0o755)
    with (
        long_run(tmp_path, 2, deadline_seconds=0.5, interpreter=script) as group,
        pytest.raises(UnsoundError, match=r"^rank [01]: got stopped by a signal"),
    ):
        group.wait_ready()


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    files = open_files()
    pids = []

    def interrupted() -> None:
        with long_run(tmp_path, 3) as group:
            pids.extend(group.pids)
            next(group.steps())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)
    assert open_files() == files


def test_ranks_die_with_their_driver(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tests.runtime import test_ranks as t;"
        f"g = t.long_run(Path({str(tmp_path)!r}), 2).__enter__(); next(g.steps());"
        "print(*g.pids, flush=True); time.sleep(60)"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.kill()
    driver.wait()
    driver.stdout.close()
    end = time.monotonic() + SECONDS
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("name", ["norm", "table"])
def test_one_altered_replicated_weight_is_caught(tmp_path: Path, name: str) -> None:
    weights = toy.random_weights()
    weights[name][..., 3] += 0.5
    made = toy.images(toy.toy_isa(4), tmp_path, per_rank={2: weights})
    with pytest.raises(UnsoundError, match=r"rank 2: step 0.*digest.*3 of 4 ranks"):
        toy.run(toy.launch(made))


def test_the_same_weights_agree(tmp_path: Path) -> None:
    weights = toy.random_weights()
    made = toy.images(toy.toy_isa(4), tmp_path, per_rank={2: weights})
    assert len(toy.run(toy.launch(made))) == 6


def test_two_ranks_that_differ_are_told_against_rank_0(tmp_path: Path) -> None:
    weights = toy.random_weights()
    weights["norm"][0] += 1
    made = toy.images(toy.toy_isa(2), tmp_path, per_rank={1: weights})
    with pytest.raises(UnsoundError, match=r"rank 1: .*1 of 2 ranks"):
        toy.run(toy.launch(made))


def test_a_weight_file_replaced_by_a_shorter_one_is_refused(tmp_path: Path) -> None:
    made = toy.images(toy.toy_isa(2), tmp_path)
    (tmp_path / "rank1.bin").write_bytes(b"short")
    with pytest.raises(ArtifactError, match=r"rank 1: .*rank1.bin: got 5 bytes"):
        toy.run(toy.launch(made))


def test_a_refused_image_is_named_by_its_program(tmp_path: Path) -> None:
    made = toy.images(toy.toy_isa(2), tmp_path)
    broken = [made[0], made[1][:-8]]
    with pytest.raises(ArtifactError, match=r"rank 1: got the image of toy\.isa\.h5: ") as caught:
        toy.run(toy.launch(broken, program="toy.isa.h5"))
    assert "/proc/" not in str(caught.value)


def test_one_traps_and_its_fault_is_the_one_reported(tmp_path: Path) -> None:
    weights = toy.random_weights()
    weights["head"][12, 0] = float("nan")
    made = toy.images(toy.toy_isa(4), tmp_path, per_rank={1: weights})
    with pytest.raises(FaultError) as caught:
        toy.run(toy.launch(made))
    fault = caught.value.fault
    assert (fault.rank, fault.code, fault.inst) == (1, records.NONFINITE, toy.ARGMAX)


def test_peak_memory_is_reported(tmp_path: Path) -> None:
    with RankGroup(toy.launch(toy.images(toy.toy_isa(2), tmp_path))) as group:
        assert len(list(group.steps())) == 1 + 6
        assert group.peak_bytes > 1 << 20


def _fault_in_words(folder: Path, name: str, tp: int) -> str:
    """Return what a user reads of a NaN that one rank alone has in a weight."""
    weights = toy.random_weights()
    weights[name][...] = float("nan")
    isa = toy.toy_isa(tp)
    made = toy.images(isa, folder, per_rank={tp - 1: weights})
    with pytest.raises(FaultError) as caught:
        toy.run(toy.launch(made))
    return str(fault_error(isa, caught.value.fault, (), ()))


def test_a_value_that_all_ranks_hold_accuses_no_rank(tmp_path: Path) -> None:
    """A NaN of the last rank goes through a sum; whichever rank meets it first is innocent."""
    assert "every rank read this value" in _fault_in_words(tmp_path, "table", 2)
    for name, tp in (("table", 1), ("head", 2)):  # one rank; a value that is the rank's own
        words = _fault_in_words(tmp_path, name, tp)
        assert f"rank {tp - 1}: " in words
        assert "every rank read" not in words
