"""Shard when something goes wrong in the middle: what is left, what it says, how it goes on."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k3tool.checkpoint import shard_copy, shard_writer
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.errors import ArtifactError, K3Error, UsageError

Oracle = Callable[[str], Path]
REPO = Path(__file__).resolve().parents[2]
SCALE = "language_model.model.layers.7.block_sparse_moe.experts.3.w1.weight_scale"


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _fail_after(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    written: list[int] = []
    real = shard_copy.SafetensorsWriter.append

    def append(self: object, data: object, **words: bool) -> None:
        written.append(1)
        if len(written) > count:
            raise error
        real(self, data, **words)

    monkeypatch.setattr(shard_copy.SafetensorsWriter, "append", append)


def _unfinished(source: Path, out: Path, tp: int = 2, **words: object) -> Path:
    """Leave work behind that a full disk ended; return its folder."""
    with pytest.MonkeyPatch.context() as patch:
        _fail_after(patch, 500, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(K3Error, match="No space left"):
            shard_checkpoint(source, tp, out, jobs=1, **words)
    work = out.with_name(f".{out.name}.shard")
    assert work.is_dir()
    return work


# -- killed ------------------------------------------------------------------------------------


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in memory where there is one: a kill is the same there, fsync is not."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="k3-test-") as folder:
        yield Path(folder)


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
    work = _unfinished(source, out)
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
    work = _unfinished(source, out)
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


def test_unfinished_work_for_something_else(
    writable: Callable[[str], Path], tmp_path: Path
) -> None:
    source, out = writable("tiny_tp8"), tmp_path / "out"
    work = _unfinished(source, out)
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
    work = _unfinished(source, out)
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
        _fail_after(patch, count, OSError(errno.ENOSPC, "No space left on device"))
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
    monkeypatch.setattr(shard_writer, "free_bytes", lambda folder: 1_000_000)
    _fail_after(monkeypatch, 0, AssertionError("a byte was written"))
    with pytest.raises(K3Error, match="got 1000000 bytes free, need") as caught:
        shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "out")
    used = sum(len(data) for data in tree(tmp_path / "out").values())
    assert used <= int(str(caught.value.need).split()[0]) < 1.5 * used
    assert str(caught.value.need).endswith(" bytes for 8 ranks")
    assert "k3tool shard --rank" in str(caught.value.hint)


def test_room_is_looked_at_before_the_tensors(
    k3tool: Callable, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By shard and by run, which would compile first; the folder is named, not said to be `.`.

    What inspect says of the checkpoint comes before it: room does not make that whole.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shard_writer, "free_bytes", lambda folder: 1_000_000)
    monkeypatch.setattr("k3tool.checkpoint.shard_writer.plan_shards", _unexpected)
    monkeypatch.setattr("k3tool.runtime.prepare.program", _unexpected)
    outcome = k3tool("shard", oracle("tiny_tp8"), "--tp", 8, "--rank", 2, "-o", "out")
    assert outcome.code == 1
    assert f"{tmp_path}: got 1000000 bytes free, need " in outcome.err
    assert " bytes for 1 rank\n" in outcome.err
    assert "hint: free some" in outcome.err
    assert "--rank" not in outcome.err, "a way out that was just taken"
    outcome = k3tool("run", oracle("tiny_tp8"), "--ids", 1, "--tp", 8, "--cache", "cache")
    assert outcome.code == 1
    assert f"{tmp_path / 'cache'}: got 1000000 bytes free, need " in outcome.err
    monkeypatch.setattr(shard_writer, "free_bytes", lambda folder: 1 << 40)
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
        with pytest.raises(K3Error, match="bytes free"):
            shard_checkpoint(oracle("tiny_tp8"), 8, disk / "out", force=True)
        with pytest.MonkeyPatch.context() as patch:  # someone else fills it meanwhile
            patch.setattr(shard_writer, "free_bytes", lambda folder: 1 << 40)
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
