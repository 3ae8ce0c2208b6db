"""Files that a run was asked to keep: one that cannot be written takes none of the others along,
and room for them is asked for, and held, before any weight is read."""

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.errors import K3Error
from k3tool.runtime.expert_trace import read_expert_trace
from k3tool.runtime.options import RunOptions, parse_size
from k3tool.runtime.outputs import Outputs
from k3tool.runtime.run import Event, run_model
from k3tool.runtime.state_file import read_state
from k3tool.runtime.tokens import read_tokens
from k3tool.trace.file import TraceFile

REPO = Path(__file__).resolve().parents[2]
PROMPT, GEN = (5, 9, 2), 4


def read_hashes(path: Path) -> None:
    with TraceFile(path) as trace:
        assert trace.is_whole


# Each output, in a folder of its own, and what shows that its file is whole.
FILES: dict[str, Callable[[Path], Any]] = {
    "output": read_tokens,
    "logits_output": np.load,
    "save_state": read_state,
    "expert_trace": read_expert_trace,
    "trace_hashes": read_hashes,
}


@pytest.fixture(scope="module")
def asked(oracle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> RunOptions:
    return RunOptions(
        oracle("tiny_tp8"), PROMPT, GEN, threads=1, ignore_eos=True, logits=True,
        cache=tmp_path_factory.mktemp("cache"), memory_bytes=185_000_000,
    )  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name / f"{name}.file" for name in FILES}
    for path in found.values():
        path.parent.mkdir()
    return found


def run_without(options: RunOptions, places: dict[str, Path], *lost: str) -> list[Event]:
    """Run with all outputs; their folders in `lost` vanish with the first token."""
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if event["event"] == "token" and event["step"] == 0:
            for name in lost:
                shutil.rmtree(places[name].parent)

    try:
        run_model(replace(options, **places), on_event)
    finally:
        for name, path in places.items():
            if name not in lost:
                FILES[name](path)
    return events


def test_all_are_written_where_nothing_is_in_the_way(
    asked: RunOptions, places: dict[str, Path]
) -> None:
    events = run_without(asked, places)
    assert events[-1]["event"] == "end"
    assert events[-1]["tokens_digest"] is not None
    assert all(path.exists() for path in places.values())


@pytest.mark.parametrize("lost", FILES)
def test_one_that_fails_loses_no_other(
    asked: RunOptions, places: dict[str, Path], lost: str
) -> None:
    with pytest.raises(K3Error, match=rf"{lost}\.file: got No such file or directory") as caught:
        run_without(asked, places, lost)
    assert caught.value.exit_code == 1
    for name, path in places.items():
        assert (str(path) in (caught.value.hint or "")) == (name != lost)
    assert "; written: " in (caught.value.hint or "") or lost in ("expert_trace", "trace_hashes")
    assert "not written" not in (caught.value.hint or "")


def test_two_that_fail_are_both_named(asked: RunOptions, places: dict[str, Path]) -> None:
    with pytest.raises(K3Error, match=r"output\.file: got No such file") as caught:
        run_without(asked, places, "output", "save_state")
    _, _, missed = (caught.value.hint or "").partition("not written: ")
    assert missed == str(places["save_state"])


# -- room --------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_limit(n_bytes: int) -> Iterator[None]:
    """A limit on a file's size stands for a full disk: both refuse room before it is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_room_that_is_not_there_is_said_before_weights_are_read(
    asked: RunOptions, tmp_path: Path
) -> None:
    state, events = tmp_path / "state.h5", []
    keeps = replace(asked, save_state=state, memory_bytes=None, logits=False)
    run_model(keeps)  # the control, which also compiles what the next run takes
    n_bytes = state.stat().st_size
    state.unlink()
    refusal = r"state\.h5: got File too large, need [\d.]+ KB, what it may take"
    with file_limit(n_bytes // 2), pytest.raises(K3Error, match=refusal) as said:
        run_model(keeps, events.append)
    assert events == []
    assert list(tmp_path.iterdir()) == []
    need = re.findall(r"need ([\d.]+ KB)", said.value.text())[0]
    assert n_bytes <= parse_size(need) <= 4 * n_bytes


def test_room_is_held_while_the_run_goes_on(asked: RunOptions, tmp_path: Path) -> None:
    held: list[int] = []

    def on_event(event: Event) -> None:
        if event["event"] == "start":
            assert not list(tmp_path.glob(".room.*"))  # without a name: gone with the process
            links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
            held.extend(
                link.stat().st_blocks * 512 for link in links
                if link.is_symlink() and str(tmp_path / ".room.") in os.readlink(link)
            )  # fmt: skip

    state = tmp_path / "state.h5"
    run_model(replace(asked, save_state=state, memory_bytes=None, logits=False), on_event)
    assert held
    assert held[0] >= state.stat().st_size
    held.clear()
    run_model(replace(asked, memory_bytes=None, logits=False), on_event)
    assert held == []  # the control: nothing is held for nothing


def test_room_is_given_back_where_it_is_not_used(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with Outputs() as outputs:
        outputs.hold(tmp_path / "a", 1 << 16)
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT RUN: no /dev/full")
def test_a_full_stdout_loses_no_file(asked: RunOptions, tmp_path: Path) -> None:
    out = tmp_path / "tokens.h5"
    command = [
        "run",
        asked.source,
        "--cache",
        asked.cache,
        "--ids",
        "5,9,2",
        "--gen",
        "4",
        "--json",
    ]
    with open("/dev/full", "wb") as full:
        for files in ((), ("-o", out)):
            done = subprocess.run(
                [sys.executable, "-m", "stages.cli", *map(str, (*command, *files))], stdout=full,
                stderr=subprocess.PIPE, text=True, cwd=REPO, check=False, timeout=60,
            )  # fmt: skip
            assert done.returncode == 1, done.stderr
            assert "stdout: got no space left on device" in done.stderr
    assert len(read_tokens(out).ranks[0]) >= 1
