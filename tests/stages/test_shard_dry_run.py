"""shard --dry-run says what comes, refuses what shard refuses, and touches nothing."""

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from k3tool.checkpoint import shard_dry_run, shard_writer
from k3tool.checkpoint.sample_writer import write_sample
from k3tool.tables import bytes_text, have_text, need_text

Run = Callable[..., Any]
COMMON = (
    "tp", "ranks", "identity", "tensors", "rank_bytes", "replicated_bytes", "written_bytes",
    "dropped", "dropped_bytes", "padding_bytes", "kept_vision",
)  # fmt: skip


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry") / "ckpt"
    write_sample(folder)
    return folder


def seen(folder: Path) -> dict[str, tuple[int, int]]:
    """Return everything below a folder by inode and time of its last change."""
    stats = {path: path.lstat() for path in sorted(folder.rglob("*"))}
    return {str(path): (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def data_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


@pytest.mark.parametrize("more", [(), ("--rank", 1), ("--keep-vision",)])
def test_what_is_said_is_what_comes(
    k3tool: Run, sample: Path, tmp_path: Path, more: tuple[object, ...]
) -> None:
    out = tmp_path / "in" / "shards"
    asked = ("shard", sample, "--tp", 2, "-o", out, *more)
    said = k3tool(*asked, "--dry-run", "--json")
    assert said.code == 0, said.err
    assert list(tmp_path.iterdir()) == []
    words = k3tool(*asked, "--dry-run", "-v").out
    found = json.loads(said.out)
    assert f"would write {out}: ranks " in words
    for name, n_bytes in found["files"].items():
        assert f"  {name}  {bytes_text(n_bytes)}\n" in words
    made = json.loads(k3tool(*asked, "--json").out)
    assert {key: found[key] for key in COMMON} == {key: made[key] for key in COMMON}
    for rank in found["ranks"]:
        files = (out / f"rank-{rank:02d}-of-02").glob("*.safetensors")
        assert {file.name: data_bytes(file) for file in files} == found["files"]
    on_disk = sum(path.stat().st_size for path in out.rglob("*"))
    assert found["written_bytes"] < on_disk <= found["need_bytes"]


def test_what_does_not_fit_is_said_before_it_is_refused(
    k3tool: Run, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much is missing, and of what; --json keeps bytes. The one that fits is the control."""
    asked = ("shard", sample, "--tp", 2, "-o", tmp_path / "shards", "--dry-run")
    need = json.loads(k3tool(*asked, "--json").out)["need_bytes"]
    for free, code in ((need - 1, 1), (need, 0)):
        monkeypatch.setattr(shard_dry_run, "free_bytes", lambda folder, free=free: free)
        said = k3tool(*asked)
        assert said.code == code
        assert "would write" in said.out
        assert (": it does not fit\n" in said.out) == (code == 1)
        room = f"{tmp_path}: got {have_text(need - 1)} free, need {need_text(need)} for 2 ranks\n"
        assert (room in said.err) == (code == 1)
        found = k3tool(*asked, "--json")
        assert found.code == code
        fields = ("fits", "free_bytes", "need_bytes")
        assert [json.loads(found.out)[name] for name in fields] == [code == 0, free, need]
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_is_said_to_go_on(
    k3tool: Run, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("shard", sample, "--tp", 2, "-o", tmp_path / "shards", "--jobs", 1)
    fresh = json.loads(k3tool(*asked[:-2], "--dry-run", "--json").out)
    write, written = shard_writer.write_file, []

    def fail_at_third(*arguments: Any) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(1)
        return write(*arguments)

    monkeypatch.setattr(shard_writer, "write_file", fail_at_third)
    assert k3tool(*asked).code == 130
    monkeypatch.undo()
    before = seen(tmp_path)
    assert before  # unfinished work stands there
    found = json.loads(k3tool(*asked[:-2], "--dry-run", "--json").out)
    assert found["finished_files"] == 2
    assert 0 < found["need_bytes"] < fresh["need_bytes"]
    for other in (("--keep-vision",), ("--keep-vision", "--force")):
        answer = k3tool(*asked[:-2], "--dry-run", *other)
        assert answer.code == (0 if "--force" in other else 2)
        assert "goes on" not in answer.out
    assert seen(tmp_path) == before
    assert json.loads(k3tool(*asked, "--json").out)["resumed_bytes"] > 0


def _finished(k3tool: Run, sample: Path, out: Path) -> None:
    assert k3tool("shard", sample, "--tp", 2, "-o", out).code == 0


def _foreign(k3tool: Run, sample: Path, out: Path) -> None:
    out.mkdir()
    (out / "notes").write_text("mine")


def _of_others(k3tool: Run, sample: Path, out: Path) -> None:
    other = out.parent / "other"
    write_sample(other, seed=1)
    assert k3tool("shard", other, "--tp", 2, "--rank", 1, "-o", out).code == 0


def _incomplete(k3tool: Run, sample: Path, out: Path) -> None:
    next(iter(sample.glob("*.safetensors"))).unlink()


def _locked(k3tool: Run, sample: Path, out: Path) -> IO[str]:
    work = out.with_name(f".{out.name}.shard")
    work.mkdir()
    (work / "key").write_text("{}")
    (work / "lock").write_bytes(b"k3tool shard\n")
    lock = (work / "lock").open()
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


@pytest.mark.parametrize(
    ("arguments", "prepare"),
    [
        (("--tp", 3), None), (("--tp", 2, "--rank", 2), None), (("--tp", 2), _finished),
        (("--tp", 4, "--rank", 0, "--force"), _finished), (("--tp", 2), _foreign),
        (("--tp", 2, "--force"), _foreign), (("--tp", 2), _incomplete),
        (("--tp", 2, "--rank", 0), _of_others), (("--tp", 2), _locked),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)  # fmt: skip
def test_what_shard_refuses_is_refused(
    k3tool: Run, sample: Path, tmp_path: Path, arguments: tuple[object, ...],
    prepare: Callable[..., IO[str] | None] | None,
) -> None:  # fmt: skip
    source, out = tmp_path / "ckpt", tmp_path / "shards"
    shutil.copytree(sample, source)
    held = None if prepare is None else prepare(k3tool, source, out)
    before = seen(tmp_path)
    asked = ("shard", source, "-o", out, *arguments)
    said = k3tool(*asked, "--dry-run")
    assert seen(tmp_path) == before
    done = k3tool(*asked)
    assert (said.code, said.err, said.out) == (done.code, done.err, "")
    assert said.code != 0
    if held is not None:
        held.close()


def test_what_is_replaced_is_named(k3tool: Run, sample: Path, tmp_path: Path) -> None:
    """The control of those that are refused: with --force it is no refusal, and still nothing."""
    out = tmp_path / "shards"
    _finished(k3tool, sample, out)
    before = seen(tmp_path)
    done = k3tool("shard", sample, "--tp", 2, "-o", out, "--force", "--dry-run")
    assert done.code == 0, done.err
    assert "replaced: rank-00-of-02, rank-01-of-02" in done.out
    assert seen(tmp_path) == before


@pytest.mark.parametrize("more", [("--mpi",), ("--jobs", 2)])
def test_options_of_the_work_are_refused(k3tool: Run, sample: Path, more: tuple[Any, ...]) -> None:
    assert k3tool("shard", sample, "--tp", 2, "-o", "x", "--dry-run", *more).code == 2
    assert k3tool("shard", sample, "--check", "x", "--dry-run").code == 2
