"""Shard when something goes wrong in the middle: what is left, what it says, how it goes on."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.checkpoint import shard_copy, shard_writer
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.errors import K3Error

Oracle = Callable[[str], Path]


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
