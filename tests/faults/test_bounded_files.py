"""Files that a user gives and that are read whole: devices, pipes, folders and endless ones.

Each reader is met through what calls it; nothing that is refused here may be read before.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.checkpoint import regular_file
from k3tool.checkpoint.index import INDEX_NAME, read_index
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.regular_file import MOST_BYTES, read_regular
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.checkpoint.side_files import GENERATION_CONFIG
from k3tool.errors import ArtifactError
from k3tool.model.config import K3Config
from k3tool.runtime.expert_trace import read_expert_trace
from k3tool.runtime.stop_ids import stop_ids

Run = Callable[..., Any]


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _longer(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # of holes: it takes no room


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "device": (_device, "got no regular file"),
    "pipe": (os.mkfifo, "got no regular file"),
    "folder": (Path.mkdir, "got a folder"),
    "link to nothing": (lambda path: path.symlink_to("absent"), "got a link to nothing"),
    "longer than the bound": (_longer, f"got {MOST_BYTES + 1} bytes, need .*, at most"),
}


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest) -> tuple[Callable[[Path], object], str]:
    """Return what puts something odd at a path, and what a refusal says of it."""
    return ODD[request.param]


Odd = tuple[Callable[[Path], object], str]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda path: K3Config.load(path)),
        (INDEX_NAME, lambda path: read_index(path.parent)),
        ("experts.trace", read_expert_trace),
    ],
)
def test_readers_of_one_file(
    tmp_path: Path, odd: Odd, name: str, read: Callable[[Path], object]
) -> None:
    make, said = odd
    make(tmp_path / name)
    with pytest.raises(ArtifactError, match=f"{name}: {said}"):
        read(tmp_path / name)


def test_end_ids_and_side_files(writable: Callable[[str], Path], tmp_path: Path, odd: Odd) -> None:
    """What shard copies beside the weights, and what run then reads end tokens from."""
    source, (make, said) = writable("tiny_tp8"), odd
    with Checkpoint.open(source) as checkpoint:
        config = checkpoint.config
    for name in (GENERATION_CONFIG, "tokenizer.json"):
        (source / name).unlink(missing_ok=True)
        make(source / name)
        if name == GENERATION_CONFIG:
            with pytest.raises(ArtifactError, match=f"{name}: {said}"):
                stop_ids(source, config)
        with pytest.raises(ArtifactError, match=f"{name}: {said}"):
            shard_checkpoint(source, 2, tmp_path / "out")
        assert not list(tmp_path.glob("*out*"))
        (source / name).unlink() if not (source / name).is_dir() else (source / name).rmdir()
    shard_checkpoint(source, 2, tmp_path / "out")


def test_side_files_of_shards(writable: Callable[[str], Path], tmp_path: Path, odd: Odd) -> None:
    source, out, (make, _) = writable("tiny_tp8"), tmp_path / "out", odd
    (source / GENERATION_CONFIG).write_text('{"eos_token_id": 3}')
    shard_checkpoint(source, 2, out)
    Shards.open(out)
    (out / GENERATION_CONFIG).unlink()
    make(out / GENERATION_CONFIG)
    with pytest.raises(ArtifactError, match=GENERATION_CONFIG):
        Shards.open(out)


def test_a_listing(k3tool: Run, oracle: Run, tmp_path: Path, odd: Odd) -> None:
    plan, (make, said) = tmp_path / "plan.h5", odd
    assert k3tool("compile-plan", oracle("tiny_tp8"), "--tp", 1, "-o", plan).code == 0
    make(tmp_path / "text")
    done = k3tool("disasm", plan, "--assemble", tmp_path / "text", "-o", tmp_path / "edited.h5")
    assert (done.code, done.out) == (3, "")
    assert said.split(", need")[0] in done.err
    assert not (tmp_path / "edited.h5").exists()


def test_bench_cache(k3tool: Run, tmp_path: Path, odd: Odd) -> None:
    make, said = odd
    make(tmp_path / "trace")
    done = k3tool("bench", "cache", tmp_path / "trace")
    assert (done.code, done.out) == (3, "")
    assert said.split(", need")[0] in done.err


def test_the_bound_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the bound is read; a byte more is not, whether its size says so or not."""
    monkeypatch.setattr(regular_file, "MOST_BYTES", 100)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_regular(path, "a file") == b"x" * 100
    path.write_bytes(b"x" * 101)
    with pytest.raises(ArtifactError, match="got 101 bytes, need a file, at most 100 bytes"):
        read_regular(path, "a file")
    maps = Path("/proc/self/maps")  # regular, of size 0, and longer than that
    with pytest.raises(ArtifactError, match=r"got \d+ bytes, need a file, at most 100 bytes"):
        read_regular(maps, "a file")
    monkeypatch.undo()
    assert b"[stack]" in read_regular(maps, "a file")


@pytest.mark.parametrize("slots", ["1e400", "[" * 100_000, "null", '"x"'])
def test_a_traces_head_that_holds_no_sizes(tmp_path: Path, slots: str) -> None:
    def trace(value: str) -> Path:
        rest = json.dumps({"expert_bytes": 1, "n_experts": 1, "streamed_bytes": 0})[1:]
        head = f'{{"slots": {value}, {rest}'.encode()
        path = tmp_path / "trace"
        path.write_bytes(b"K3XTRACE" + len(head).to_bytes(8, "little") + head + bytes(16))
        return path

    assert read_expert_trace(trace("3")).slots == 3
    with pytest.raises(ArtifactError, match="head: got unreadable"):
        read_expert_trace(trace(slots))
