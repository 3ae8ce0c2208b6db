"""The proof of budgets: its meters see what they are to see, and each limit can be missed."""

import mmap
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from k3tool.bench import budgets
from k3tool.bench.memory_watch import MemoryWatch, Sample, sample
from k3tool.errors import UsageError
from k3tool.page_cache import as_found, cached_bytes, evict

MEGABYTES = 10**6
ASKED = budgets.Asked(Path("ckpt"), (), 2, (1,), 2, 1, None, "f32")
RESIDENT = budgets.Found(None, 900 * MEGABYTES, "aa", 1.0, 0, 0, None)
GOOD = budgets.Found(300 * MEGABYTES, 290 * MEGABYTES, "aa", 4.0, 7 * 10**9, 10, 2e9)
HOLDER = "x = bytearray(60_000_000); x[::4096] = b'1' * len(x[::4096]); print(flush=True); input()"


def test_the_watch_counts_one_child() -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", '"$@"; exit', "sh", sys.executable, "-S", "-c", HOLDER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        watch = MemoryWatch(process.pid)
        watch.start()
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.1)
        watch.stop()
        process.communicate(b"\n")
    assert watch.peak.children >= 60 * MEGABYTES
    assert watch.peak.own < 60 * MEGABYTES
    assert sample(process.pid).total == 0, "nothing is left of a process that ended"


def test_cached_bytes_are_counted_and_dropped(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(64 * mmap.PAGESIZE))
    assert cached_bytes([file]) == 64 * mmap.PAGESIZE
    evict([file])
    if cached_bytes([file]):
        pytest.skip("NOT RUN: this file system keeps its pages")
    file.read_bytes()
    assert cached_bytes([file]) == 64 * mmap.PAGESIZE


@pytest.mark.parametrize("raises", [False, True])
def test_pages_that_were_not_there_are_gone_after(tmp_path: Path, raises: bool) -> None:
    """And those that were stay: whoever read them before may want them again."""
    page, files = mmap.PAGESIZE, [tmp_path / name for name in ("warm", "cold", "half", "gone")]
    for file in files:
        file.write_bytes(os.urandom(64 * page))
    evict(files)
    if cached_bytes(files):
        pytest.skip("NOT RUN: this file system keeps its pages")
    warm, cold, half, gone = files
    warm.read_bytes()
    with half.open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        opened.seek(10 * page)
        opened.read(3 * page)
    before = {file: cached_bytes([file]) for file in files[:3]}
    assert before == {warm: 64 * page, cold: 0, half: 3 * page}
    try:
        with as_found(files):
            for file in files:
                file.read_bytes()
            assert cached_bytes(files) == 4 * 64 * page
            gone.unlink()
            if raises:
                raise KeyError
    except KeyError:
        assert raises
    assert {file: cached_bytes([file]) for file in files[:3]} == before


@pytest.fixture
def made(tmp_path: Path) -> budgets.Asked:
    header = b"{}"  # which is no weight
    data = len(header).to_bytes(8, "little") + header + bytes(10**6)
    (tmp_path / "w.safetensors").write_bytes(data)
    return replace(ASKED, source=tmp_path)


def test_a_model_that_any_budget_holds_proves_nothing(
    made: budgets.Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before a run; a larger one is not."""

    class Begun(Exception):
        """The first run."""

    def run(*_: object, **__: object) -> None:
        raise Begun

    monkeypatch.setattr(budgets, "_run", run)
    monkeypatch.setattr(budgets, "model_of", lambda *_: (Config, 1))
    for least, error in ((10**6, UsageError), (10**6 - 1, Begun)):
        monkeypatch.setattr(budgets, "ends", lambda *_, n=least: (n, 2 * n))
        with pytest.raises(error):
            budgets.bench_budgets(made)


class Config:
    """As much of a config as is asked for."""

    vocab_size = 10


def test_only_the_last_children_say_what_was_beside_them() -> None:
    """A short-lived one (git, a compiler) ran beside what is given back since."""
    watch = MemoryWatch(os.getpid())
    for own, children in ((9, 0), (60, 5), (50, 0), (3, 7), (4, 40), (2, 9)):
        watch.note(Sample(own, children))
    assert watch.own_beside == 4
    assert watch.peak == Sample(60, 5)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, ""),
        ({"digest": "bb"}, "resident hash"),
        ({"peak_bytes": 401 * MEGABYTES}, "peak over its budget"),
        ({"cached_bytes": 10**6}, "page cache"),
        ({"step_seconds": 9.0}, "share of the device"),
    ],
)
def test_each_limit_can_be_missed(
    made: budgets.Asked, changes: dict[str, object], missed: str
) -> None:
    control = replace(RESIDENT, digest="cc")
    rows = [GOOD, replace(GOOD, **{"memory_bytes": 400 * MEGABYTES} | changes)]
    report = budgets.report(made, RESIDENT, control, rows)
    names = [limit.name for limit in report.limits if not limit.is_held]
    assert len(names) == bool(missed)
    assert missed in " ".join(names)


def test_the_share_is_a_median_of_a_budgets_runs(made: budgets.Asked) -> None:
    slow = replace(GOOD, step_seconds=9.0)
    control = replace(RESIDENT, digest="cc")
    for rows, is_held in (([GOOD, slow, GOOD], True), ([slow, GOOD, slow], False)):
        limits = budgets.report(made, RESIDENT, control, rows).limits
        found = [limit.is_held for limit in limits if "share of the device" in limit.name]
        assert found == [is_held]
    cold = replace(RESIDENT, step_seconds=90.0)
    names = [limit.name for limit in budgets.report(made, cold, control, [slow]).limits]
    assert any("share of the device" in name for name in names), "the warm run says what is bound"


def test_a_meter_that_sees_nothing_is_noticed(made: budgets.Asked) -> None:
    blind = replace(RESIDENT, peak_bytes=10)
    report = budgets.report(made, blind, RESIDENT, [GOOD])
    names = [limit.name for limit in report.limits if not limit.is_held]
    assert len(names) == 2
    assert all(name.startswith("control: ") for name in names)
