"""A file that a library writes keeps the first error and never says that a write failed."""

import os
from pathlib import Path

import numpy as np
import pytest

from k3tool.artifact import Dataset, InputRef, open_artifact, write_artifact, write_large_artifact
from k3tool.disk_file import DiskFile
from k3tool.errors import K3Error

DATASETS = {
    "a/numbers": Dataset(np.arange(5000, dtype="<u8"), ("n",)),
    "texts": Dataset(["x", "y"], ("n",)),
    "empty": Dataset(np.zeros(0, "<u4"), ("n",)),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT RUN: no /dev/full")
def test_a_write_that_fails_is_kept() -> None:
    with DiskFile(Path("/dev/full")) as file:
        assert file.write(b"1234") == 4
        assert file.write(b"5678") == 4
        assert file.error is not None
        assert file.error.errno == 28


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT RUN: no /dev/full")
def test_what_the_disk_did_not_take_is_read_back() -> None:
    """A library that reads other bytes than it wrote, or fewer, crashes when it closes the file."""
    with DiskFile(Path("/dev/full")) as file:
        file.seek(4)
        file.write(b"abcdefgh")
        file.seek(6)
        file.write(b"XY")
        assert file.seek(0, os.SEEK_END) == 12
        file.seek(2)
        assert file.read(20) == b"\0\0abXYefgh"


def test_a_large_artifact_is_one_like_any_other(tmp_path: Path) -> None:
    given = {"inputs": [InputRef("x", "y", "z", "0")], "params": {"tp": 1}, "target": "cpu"}
    large = write_large_artifact(
        tmp_path / "large", "trace", 1, {k: lambda v=v: v for k, v in DATASETS.items()}, **given
    )
    assert large == write_artifact(tmp_path / "small", "trace", 1, DATASETS, **given)
    with open_artifact(tmp_path / "large", "trace", 1) as file:
        assert file.names() == sorted(DATASETS)
        assert (file.read("a/numbers") == DATASETS["a/numbers"].data).all()
        assert file.read("texts").tolist() == ["x", "y"]


def test_a_full_disk_leaves_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = os.pwrite, []

    def full(descriptor: int, data: bytes, at: int) -> int:
        calls.append(len(data))
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return write(descriptor, data, at)

    monkeypatch.setattr("k3tool.disk_file.os.pwrite", full)
    with pytest.raises(K3Error, match="No space left on device"):
        write_large_artifact(
            tmp_path / "out", "trace", 1, {k: lambda v=v: v for k, v in DATASETS.items()}
        )
    assert len(calls) == 4
    assert not list(tmp_path.iterdir())
