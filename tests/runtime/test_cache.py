"""What a cache entry is named by: every input that changes it makes another one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.runtime import cache, finite
from k3tool.runtime.options import RunOptions

Path_of = Callable[[str], Path]


def quiet(text: str) -> None:
    """Say nothing."""


def program(folder: Path, kept: Path, **change: Any) -> cache.Program:
    options = RunOptions(folder, (1, 2), 2, cache=kept, **change)
    source = cache.open_source(options)
    return cache.program(source, options, quiet)


def shards(folder: Path, kept: Path) -> str:
    options = RunOptions(folder, (1, 2), 2, tp=2, cache=kept)
    weights = cache.rank_weights(cache.open_source(options), options, quiet, quiet)
    for rank in weights.ranks:
        rank.folder.close()
    return weights.made


def test_a_program_is_named_by_op_table_and_compiler(
    writable: Path_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kept = writable("tiny_tp8"), tmp_path / "cache"
    first = program(folder, kept)
    assert (first.made, program(folder, kept).made) == ("built", "reused")
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_compiler_hash", lambda: "another")
        other = program(folder, kept)
        assert (other.made, other.name != first.name) == ("built", True)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "isa_hash", lambda: "another")
        other = program(folder, kept)
        assert (other.made, other.name != first.name) == ("built", True)
    assert program(folder, kept).name == first.name


def test_the_compiler_hash_is_of_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages inside as well, prices of targets, and what Coq has checked."""
    sources = [f"k3tool/{name}/a.py" for name in cache._COMPILER_FOLDERS]
    sources += ["k3tool/compiler/inner/b.py", *cache._COMPILER_FILES]
    assert {"k3tool/targets.py", "proofs/proved.json"} < set(sources)
    for name in sources:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    seen = {cache._compiler_hash()}
    for name in sources:
        (tmp_path / name).write_text("x = 2\n")
        seen.add(cache._compiler_hash())
    assert len(seen) == 1 + len(sources)


def test_shards_are_made_again_when_the_checkpoint_differs(
    writable: Path_of, tmp_path: Path
) -> None:
    folder, kept = writable("tiny_tp8"), tmp_path / "cache"
    weights = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    assert [shards(folder, kept) for _ in range(2)] == ["built", "reused"]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert shards(folder, kept) == "built"
    stat = weights.stat()  # a byte that the identity does not sample shows in the time alone
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert [shards(folder, kept) for _ in range(2)] == ["built", "reused"]
    config = folder / "config.json"
    config.write_bytes(config.read_bytes() + b"\n")  # a size
    assert [shards(folder, kept) for _ in range(2)] == ["built", "reused"]


def test_a_folder_is_looked_at_again_after_a_touch(writable: Path_of, tmp_path: Path) -> None:
    """That all is finite is remembered by sizes and times too: the identity only samples."""
    folder = writable("tiny_tp8")
    weights = min(folder.glob("*.safetensors"))

    def looks() -> int:
        said: list[str] = []
        options = RunOptions(folder, (1,), 1, cache=tmp_path / "cache")
        source = cache.open_source(options)
        assert source.checkpoint is not None
        finite.require_finite(source.checkpoint, cache.cache_folder(options), said.append)
        source.checkpoint.close()
        return len(said)

    assert [looks(), looks()] == [1, 0]
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert [looks(), looks()] == [1, 0]
