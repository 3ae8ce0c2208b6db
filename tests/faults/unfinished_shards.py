"""Work that a shard leaves when it is ended in the middle, and what lies in a folder."""

import errno
from pathlib import Path

import pytest

from k3tool.checkpoint import shard_copy
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.errors import K3Error


def fail_after(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    written: list[int] = []
    real = shard_copy.SafetensorsWriter.append

    def append(self: object, data: object, **words: bool) -> None:
        written.append(1)
        if len(written) > count:
            raise error
        real(self, data, **words)

    monkeypatch.setattr(shard_copy.SafetensorsWriter, "append", append)


def unfinished(source: Path, out: Path, tp: int = 2, **words: object) -> Path:
    """Leave work behind that a full disk ended; return its folder."""
    with pytest.MonkeyPatch.context() as patch:
        fail_after(patch, 500, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(K3Error, match="No space left"):
            shard_checkpoint(source, tp, out, jobs=1, **words)
    work = out.with_name(f".{out.name}.shard")
    assert work.is_dir()
    return work
