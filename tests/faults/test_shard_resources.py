"""Shard where disk, memory or the terminal give out: what it refuses, what it leaves."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.checkpoint import shard_space
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.errors import K3Error
from k3tool.runtime.options import parse_size
from tests.faults.unfinished_shards import fail_after
from tests.folders import tree

Oracle = Callable[[str], Path]
REPO = Path(__file__).resolve().parents[2]


# -- resources ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 1500])
def test_disk_full_leaves_old_output_and_whole_files(
    oracle: Oracle, tmp_path: Path, count: int
) -> None:
    out = tmp_path / "out"
    shard_checkpoint(oracle("tiny_tp8"), 2, out)
    before = tree(out)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        fail_after(patch, count, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(K3Error, match="No space left") as caught:
            shard_checkpoint(oracle("tiny_tp8"), 8, out, force=True, jobs=1, say=lines.append)
    assert caught.value.exit_code == 1
    assert "free some room" in str(caught.value.hint)
    assert tree(out) == before
    left = [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]
    assert left == []
    if count == 3:  # nothing was finished, so nothing is kept
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert lines == []
    else:
        assert "the same command goes on from there" in lines[0]
    info = shard_checkpoint(oracle("tiny_tp8"), 8, out, force=True)
    assert (info.resumed_bytes > 0) == (count == 1500)
    shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "straight")
    assert tree(out) == tree(tmp_path / "straight")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "straight"]


def test_too_little_room_is_refused_before_the_first_byte(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_space, "free_bytes", lambda folder: 1_000_000)
    fail_after(monkeypatch, 0, AssertionError("a byte was written"))
    with pytest.raises(K3Error, match=r"got 1\.000 MB free, need") as caught:
        shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "out")
    used = sum(len(data) for data in tree(tmp_path / "out").values())
    need, of_what = str(caught.value.need).split(" for ")
    assert used <= parse_size(need) < 1.5 * used
    assert of_what == "8 ranks"
    assert "k3tool shard --rank" in str(caught.value.hint)


def test_room_is_looked_at_before_the_tensors(
    k3tool: Callable, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By shard and by run, which would compile first; the folder is named, not said to be `.`.

    What inspect says of the checkpoint comes before it: room does not make that whole.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shard_space, "free_bytes", lambda folder: 1_000_000)
    monkeypatch.setattr("k3tool.checkpoint.shard_writer.plan_shards", _unexpected)
    monkeypatch.setattr("k3tool.runtime.prepare.program", _unexpected)
    outcome = k3tool("shard", oracle("tiny_tp8"), "--tp", 8, "--rank", 2, "-o", "out")
    assert outcome.code == 1
    assert f"{tmp_path}: got 1.000 MB free, need " in outcome.err
    assert " MB for 1 rank\n" in outcome.err
    assert "hint: free some" in outcome.err
    assert "--rank" not in outcome.err, "a way out that was just taken"
    outcome = k3tool("run", oracle("tiny_tp8"), "--ids", 1, "--tp", 8, "--cache", "cache")
    assert outcome.code == 1
    assert f"{tmp_path / 'cache'}: got 1.000 MB free, need " in outcome.err
    monkeypatch.setattr(shard_space, "free_bytes", lambda folder: 1 << 40)
    with pytest.raises(AssertionError, match="reached"):  # the control: room is all it lacked
        shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "out")


def _unexpected(*args: object, **given: object) -> None:
    raise AssertionError("reached")


def test_a_disk_that_is_really_full(oracle: Oracle, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=22m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("NOT RUN: a small disk cannot be mounted here")
    try:
        shard_checkpoint(oracle("tiny_tp8"), 2, disk / "out")
        before = tree(disk / "out")
        with pytest.raises(K3Error, match="B free"):
            shard_checkpoint(oracle("tiny_tp8"), 8, disk / "out", force=True)
        with pytest.MonkeyPatch.context() as patch:  # someone else fills it meanwhile
            patch.setattr(shard_space, "free_bytes", lambda folder: 1 << 40)
            (disk / "filler").write_bytes(bytes(5 << 20))
            with pytest.raises(K3Error, match="No space left on device"):
                shard_checkpoint(oracle("tiny_tp8"), 8, disk / "out", force=True)
        assert tree(disk / "out") == before
        assert list(disk.rglob("*.tmp")) == []
        (disk / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
        info = shard_checkpoint(oracle("tiny_tp8"), 8, disk / "out", force=True)
        assert info.resumed_bytes > 0
        assert [path.name for path in disk.iterdir()] == ["out"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("where", ["file/out", "/proc/k3shards", "/sys/k3shards"])
def test_places_that_cannot_be_written(
    k3tool: Callable, oracle: Oracle, tmp_path: Path, where: str
) -> None:
    (tmp_path / "file").write_text("")
    outcome = k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", tmp_path / where)
    assert outcome.code == 1
    assert "need a writable folder" in outcome.err
    assert len(outcome.err.splitlines()) == 2


def test_mount_points_are_refused(k3tool: Callable, oracle: Oracle) -> None:
    outcome = k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", "/proc")
    assert (outcome.code, "got a mount point, need a folder below it" in outcome.err) == (2, True)


SLOW = """
import os, signal, sys, threading, time
from k3tool.checkpoint.safetensors_writer import SafetensorsWriter
from stages.cli import run_command
real, written = SafetensorsWriter.append, []
def append(self, data, **words):
    written.append(1)
    if len(written) == 600:
        os.kill(os.getpid(), signal.SIGINT)
    if len(written) >= 600:
        time.sleep(0.02)
    real(self, data, **words)
SafetensorsWriter.append = append
sys.exit(run_command(sys.argv[1:]))
"""


def test_ctrl_c_leaves_work_that_goes_on(k3tool: Callable, oracle: Oracle, tmp_path: Path) -> None:
    arguments = ["shard", oracle("tiny_tp8"), "--tp", 2, "--jobs", 2, "-o", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", SLOW, *map(str, arguments)],
        cwd=REPO, capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    said, last = done.stderr.splitlines()
    assert "the same command goes on from there" in said
    assert last == "interrupted"
    assert [path.name for path in tmp_path.iterdir()] == [".out.shard"]
    assert list(tmp_path.rglob("*.tmp")) == []
    outcome = k3tool(*arguments)
    assert outcome.code == 0
    assert "files are there, checking them" in outcome.err
    assert "by a run before" in outcome.out
    shard_checkpoint(oracle("tiny_tp8"), 2, tmp_path / "straight")
    assert tree(tmp_path / "out") == tree(tmp_path / "straight")


def test_a_reader_that_has_gone(oracle: Oracle, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "stages.cli", "shard", str(oracle("tiny_tp8")), "--tp", "2"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out")], cwd=REPO, stdout=write, stderr=subprocess.PIPE,
        timeout=60, check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "out" / "shards.h5").is_file()


# -- memory ------------------------------------------------------------------------------------

MEMORY = """
import re, sys
from pathlib import Path
from k3tool.checkpoint.shard_writer import shard_checkpoint
shard_checkpoint(sys.argv[1], 2, sys.argv[2], jobs=2)
# Not ru_maxrss: it outlives fork and exec, so a large parent would hide a small child.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""


def test_memory_does_not_grow_with_a_tensor(
    oracle: Oracle, writable: Callable[[str], Path], tmp_path: Path, quick: Path
) -> None:
    """Embedding and head of 84 MB each cost no more than blocks; `bench shard` has real ones."""
    plain = _peak(oracle("tiny_tp8"), quick / "plain")
    large = writable("tiny_tp8")
    _lengthen_vocabulary(large, 1 << 18)
    assert _peak(large, quick / "large") - plain < 40 << 20


def _peak(source: Path, out: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(source), str(out)],
        cwd=REPO, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    shutil.rmtree(out)
    return int(done.stdout)


def _lengthen_vocabulary(folder: Path, rows: int) -> None:
    """Give both matrices of the vocabulary that many rows, as holes."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = rows
    (folder / "config.json").write_text(json.dumps(config))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    added = 0
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        header.pop("__metadata__", None)
        offset, parts = 0, []
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = entry["data_offsets"]
            size = end - start
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                entry["shape"][0], size = rows, rows * entry["shape"][1] * 2
                added += size - (end - start)
            entry["data_offsets"] = [offset, offset + size]
            parts.append((offset, data[start : min(end, start + size)]))
            offset += size
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for at, piece in parts:
                file.seek(8 + len(text) + at)
                file.write(piece)
            file.truncate(8 + len(text) + offset)
    index["metadata"]["total_size"] += added
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
