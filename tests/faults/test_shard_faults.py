"""Shard when something goes wrong in the middle: what is left, what it says, how it goes on."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.checkpoint import shard_copy, shard_writer
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.errors import ArtifactError, K3Error, UsageError
from tests.faults.unfinished_shards import unfinished
from tests.folders import tree

Oracle = Callable[[str], Path]
REPO = Path(__file__).resolve().parents[2]
SCALE = "language_model.model.layers.7.block_sparse_moe.experts.3.w1.weight_scale"


# -- killed ------------------------------------------------------------------------------------


def test_killed_at_any_moment(oracle: Oracle, quick: Path) -> None:
    """`shard_crashes.py` says what must hold."""
    seed = int.from_bytes(os.urandom(3), "little")
    command = [sys.executable, "tests/faults/shard_crashes.py", oracle("tiny_tp8"), quick, seed, 4]
    done = subprocess.run(
        list(map(str, command)), cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"seed {seed}\n{done.stderr}"
    *words, last = done.stdout.splitlines()
    result = json.loads(last)
    assert result["wrong"] == [], seed
    assert result["killed"] >= 8, seed
    assert "resumed" in words, seed


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_finished_file_is_read_again_before_it_is_trusted(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    """Without the look at its bytes the damage would stay: that is the control."""
    source, out = oracle("tiny_tp8"), tmp_path / "out"
    work = unfinished(source, out)
    file = sorted((work / "set").rglob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-5] ^= 16
    file.write_bytes(data)
    if not is_checked:
        monkeypatch.setattr(shard_writer, "stands", lambda *arguments: True)
    shard_checkpoint(source, 2, out)
    shard_checkpoint(source, 2, tmp_path / "straight")
    assert (tree(out) == tree(tmp_path / "straight")) == is_checked


@pytest.mark.parametrize("change", ["cut", "longer", "gone", "record cut", "record gone"])
def test_finished_files_and_records_that_changed(
    oracle: Oracle, tmp_path: Path, change: str
) -> None:
    source, out = oracle("tiny_tp8"), tmp_path / "out"
    work = unfinished(source, out)
    where = work / "journal" if "record" in change else next((work / "set").glob("rank-00*"))
    file = sorted(path for path in where.iterdir() if path.stat().st_size)[0]
    data = file.read_bytes()
    if "gone" in change:
        file.unlink()
    else:
        file.write_bytes(data + b"0" if change == "longer" else data[:-1])
    shard_checkpoint(source, 2, out)
    shard_checkpoint(source, 2, tmp_path / "straight")
    assert tree(out) == tree(tmp_path / "straight")


def testunfinished_work_for_something_else(writable: Callable[[str], Path], tmp_path: Path) -> None:
    source, out = writable("tiny_tp8"), tmp_path / "out"
    work = unfinished(source, out)
    before = tree(work)
    with pytest.raises(UsageError, match="unfinished shards of tp 2") as caught:
        shard_checkpoint(source, 4, out)
    assert "--force" in str(caught.value.hint)
    with pytest.raises(UsageError, match="before its files or these options changed"):
        shard_checkpoint(source, 2, out, keep_vision=True)
    os.utime(source / "model-00003-of-000011.safetensors")  # its bytes may be others now
    with pytest.raises(UsageError, match="before its files or these options changed"):
        shard_checkpoint(source, 2, out)
    assert tree(work) == before
    shard_checkpoint(source, 4, out, force=True)
    assert [path.name for path in out.parent.glob("*out*")] == ["out"]


def test_two_at_once(oracle: Oracle, tmp_path: Path) -> None:
    from k3tool.checkpoint.shard_journal import locked

    with (
        locked(tmp_path / ".out.shard"),
        pytest.raises(K3Error, match="another process that writes these shards"),
    ):
        shard_checkpoint(oracle("tiny_tp8"), 2, tmp_path / "out")
    shard_checkpoint(oracle("tiny_tp8"), 2, tmp_path / "out")


# -- values and reads --------------------------------------------------------------------------


def test_refused_values_leave_nothing_and_failed_reads_leave_work(
    writable: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = writable("tiny_tp8"), tmp_path / "out"
    real = shard_copy._Copier._check_scales

    def fail(self: object, info: shard_copy.TensorInfo, *words: object) -> None:
        if info.name == SCALE:
            try:
                raise OSError(errno.EIO, "Input/output error")
            except OSError as error:
                raise ArtifactError(info.name, got=error.strerror, need="a readable file") from None
        real(self, info, *words)

    monkeypatch.setattr(shard_copy._Copier, "_check_scales", fail)
    with pytest.raises(ArtifactError, match="Input/output error"):
        shard_checkpoint(source, 2, out, jobs=1)
    assert (tmp_path / ".out.shard" / "journal").is_dir()
    monkeypatch.undo()
    shutil.rmtree(tmp_path / ".out.shard")
    with shard_writer.Checkpoint.open(source) as checkpoint:
        info = checkpoint.tensor_info(SCALE)
    with (source / info.file).open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xff")
    with pytest.raises(ArtifactError, match="row 0, group 0: got scale byte 255"):
        shard_checkpoint(source, 2, out, jobs=1)
    assert not out.exists()
    assert list(tmp_path.glob(".out*")) == []


def test_a_name_that_a_killed_shard_has_not_given_yet(
    k3tool: Callable, oracle: Oracle, tmp_path: Path
) -> None:
    source, out = oracle("tiny_tp8"), tmp_path / "out"
    commands = (
        ("inspect", out),
        ("run", out, "--ids", 1, "--gen", 1, "--cache", tmp_path / "cache"),
        ("shard", "--check", out, source),
    )
    for command in commands:  # the control: nothing was begun
        assert "unfinished" not in k3tool(*command).err
    work = unfinished(source, out)
    for command in commands:
        answer = k3tool(*command)
        assert answer.code == 3
        assert f"{out}: got no such folder, but unfinished shards in {work.name}" in answer.err
        assert "hint: the same k3tool shard command again goes on from there" in answer.err
    work.rename(tmp_path / ".other.shard")  # another output's
    assert "unfinished" not in k3tool("inspect", out).err
    (tmp_path / ".other.shard").rename(work)
    shard_checkpoint(source, 2, out)
    assert k3tool("shard", "--check", out, source).code == 0
