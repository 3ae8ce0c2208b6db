"""A disk that has no room for a trace keeps its first steps, and the run goes on."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from k3tool.trace.file import TraceFile
from tests.conftest import Outcome

Run = Callable[..., Outcome]
N_TOKENS = 200


@pytest.fixture(params=["1m", "2m"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Yield a disk that the first recording fills (1 MB), and one that has no room for two."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("NOT RUN: no right to mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_the_first_steps_are_kept_as_many_as_fit(
    k3tool: Run, oracle: Callable[[str], Path], disk: Path, tmp_path: Path
) -> None:
    words = ("run", oracle("tiny_tp8"), "--cache", tmp_path / "cache", "--ids", "1,2,3", "--gen",
             N_TOKENS, "--ignore-eos", "--trace-hashes")  # fmt: skip
    whole = k3tool(*words, tmp_path / "whole.h5")
    cut = k3tool(*words, disk / "cut.h5")
    assert (cut.code, cut.out) == (0, whole.out), cut.err
    assert "no space left on the disk: the trace keeps the first" in cut.err
    assert "synchronously" not in cut.err
    with TraceFile(tmp_path / "whole.h5") as every, TraceFile(disk / "cut.h5") as first:
        assert (every.is_whole, first.is_whole) == (True, False)
        assert N_TOKENS // 10 < len(first) < len(every)
        for left, right in zip(first.steps(), every.steps(), strict=False):
            assert left[:4] == right[:4]
            assert np.array_equal(left.hashes, right.hashes)


def test_a_disk_without_room_for_one_step_is_refused_in_plain_words(
    k3tool: Run, oracle: Callable[[str], Path], disk: Path, tmp_path: Path
) -> None:
    left = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "fill").write_bytes(bytes(left - 40_960))
    refused = k3tool("run", oracle("tiny_tp8"), "--cache", tmp_path / "cache", "--ids", 1, "--gen",
                     20, "--ignore-eos", "--trace-hashes", disk / "cut.h5")  # fmt: skip
    assert refused.code == 1
    assert f"{disk / 'cut.h5'}: got No space left on device, need a writable file" in refused.err
    assert [path.name for path in disk.iterdir()] == ["fill"]
