"""Holes in place of weights are not run; nothing that a file system counts is a proof of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.checkpoint import stand_in
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.sample_writer import write_sample
from k3tool.checkpoint.stand_in import has_hole, held_bytes, is_stand_in

Run = Callable[..., Any]
NORM = "model.norm.weight"


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    write_sample(tmp_path / "wide", "wide")
    return tmp_path / "wide"


def hollow(folder: Path, *, but: str | None = None) -> None:
    """Make holes of all data but one tensor's, as a file system that is asked to does."""
    kept = {}
    with Checkpoint.open(folder) as checkpoint:
        files = [checkpoint.file_path(file) for file in checkpoint.index.files]
        if but is not None:
            (name,) = (name for name in checkpoint.names() if name.endswith(but))
            info = checkpoint.tensor_info(name)
            kept[checkpoint.file_path(info.file)] = info.offset, checkpoint.read(name).tobytes()
    for file in files:
        size, length = file.stat().st_size, int.from_bytes(file.read_bytes()[:8], "little")
        os.truncate(file, 8 + length)
        os.truncate(file, size)
    for file, (offset, data) in kept.items():
        with file.open("r+b") as opened:
            opened.seek(offset)
            opened.write(data)


def judged(folder: Path) -> bool:
    with Checkpoint.open(folder) as checkpoint:
        return is_stand_in([checkpoint])


def test_holes_are_refused_before_anything_is_compiled(
    k3tool: Run, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("run", sample, "--ids", 1, "--gen", 1, "--cache", tmp_path / "cache")
    assert k3tool(*asked).code == 0  # the control
    hollow(sample)

    def program(*_: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("k3tool.runtime.prepare.program", program)
    done = k3tool(*asked)
    assert (done.code, done.out) == (3, "")
    assert f"k3tool run: {sample}: got holes for data: " in done.err
    assert "hint: finish the download; a stand-in is for inspect, shard --dry-run, " in done.err
    for what in ("inspect", "doctor"):
        options = ("--no-measure",) if what == "doctor" else ()
        assert k3tool(what, sample, *options).code == 0, "what it is for"
    plan = tmp_path / "plan.h5"
    assert k3tool("compile-plan", sample, "--tp", 1, "-o", plan).code == 0
    assert k3tool("shard", sample, "--tp", 2, "-o", tmp_path / "s", "--dry-run").code == 0


def test_a_model_that_says_something_is_none(sample: Path) -> None:
    """Whatever else is a hole: experts that were never trained, or a compressed file system's."""
    hollow(sample, but=NORM)
    files = list(sample.glob("*.safetensors"))
    assert has_hole(max(files, key=lambda file: file.stat().st_size))
    assert 2 * held_bytes(files) < sum(file.stat().st_size for file in files)
    assert not judged(sample)
    hollow(sample)
    assert judged(sample)


@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize("has_holes", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_what_a_file_system_says_is_no_proof(
    sample: Path, monkeypatch: pytest.MonkeyPatch, is_zero: bool, has_holes: bool, counts: bool
) -> None:
    """One that compresses, or is far away, may say all of it of a sound checkpoint."""
    if is_zero:
        hollow(sample)
    monkeypatch.setattr(stand_in, "has_hole", lambda file: has_holes)
    monkeypatch.setattr(stand_in, "held_bytes", lambda files: 10**12 if counts else 0)
    assert judged(sample) == (is_zero and has_holes and not counts)


def test_zeros_that_were_written_are_weights(sample: Path) -> None:
    hollow(sample)
    for file in sample.glob("*.safetensors"):
        file.write_bytes(file.read_bytes())
    assert not judged(sample)


def test_without_its_last_norm_something_else_is_wrong(sample: Path) -> None:
    hollow(sample)
    with Checkpoint.open(sample) as checkpoint:
        (name,) = (name for name in checkpoint.names() if name.endswith(NORM))
        checkpoint.file_path(checkpoint.index.weight_map[name]).unlink()
    assert not judged(sample)
