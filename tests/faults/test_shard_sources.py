"""A checkpoint that somebody writes to while shard reads it is never given the old one's name."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.checkpoint import shard_plan, shard_space, shard_writer
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.shard_check import check_shards
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.errors import ArtifactError

FIRST, LAST = "model-00001-of-000011.safetensors", "model-00011-of-000011.safetensors"


def _in_place(source: Path, file: str) -> None:
    """Write over the last bytes of a file: of lm_head, say, in the last one."""
    with (source / file).open("r+b") as opened:
        opened.seek(-8, os.SEEK_END)
        opened.write(b"\1\2\3\4\5\6\7\x08")


def _replaced(source: Path, file: str) -> None:
    """Put another file in the place, of the same length and time."""
    before = (source / file).stat()
    (source / "new").write_bytes((source / file).read_bytes()[:-8] + b"\1\2\3\4\5\6\7\x08")
    os.utime(source / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    (source / "new").replace(source / file)


def _gone(source: Path, file: str) -> None:
    (source / file).unlink()


def _longer(source: Path, file: str) -> None:
    with (source / file).open("ab") as opened:
        opened.write(b"\0")


def _linked_elsewhere(source: Path, file: str) -> None:
    """Lead a link of a download cache to another blob."""
    shutil.copy2(source / file, source.parent / "blob")
    (source / file).unlink()
    (source / file).symlink_to(source.parent / "blob")


CHANGES = {
    "in place": (_in_place, "a file that was written to since shard began"),
    "replaced": (_replaced, "another file than when shard began"),
    "gone": (_gone, "no file any more since shard began"),
    "longer": (_longer, "a file that was written to since shard began"),
    "linked elsewhere": (_linked_elsewhere, "another file than when shard began"),
}


def _when(monkeypatch: pytest.MonkeyPatch, moment: str, change: Callable[[], None]) -> None:
    """Make a change right before a step of shard, in its first call."""
    owner, name = {
        "before a header is read": (shard_writer, "require_splittable"),
        "before a byte is copied": (shard_writer.ShardJob, "write"),
        "while it is copied": (shard_writer, "write_file"),
        "when all is copied": (shard_writer.ShardJob, "_finish_ranks"),
    }[moment]
    real, calls = getattr(owner, name), []

    def step(*arguments: object, **words: object) -> object:
        calls.append(name)
        if len(calls) == (3 if name == "write_file" else 1):
            change()
        return real(*arguments, **words)

    monkeypatch.setattr(owner, name, step)


@pytest.mark.parametrize(
    "moment", ["before a header is read", "before a byte is copied", "while it is copied",
               "when all is copied"],
)  # fmt: skip
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("ranks", [None, [1]])
def test_a_source_that_changes_meanwhile(
    writable: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
    moment: str, ranks: list[int] | None,
) -> None:  # fmt: skip
    source, (change, said) = writable("tiny_tp8"), CHANGES[kind]
    _when(monkeypatch, moment, lambda: change(source, LAST))
    with pytest.raises(ArtifactError) as caught:
        shard_checkpoint(source, 2, tmp_path / "out", ranks=ranks, jobs=1)
    if moment == "when all is copied" or kind not in ("gone", "longer"):
        assert said in str(caught.value.got)
    # Else a reader may meet it before the last look, and says what it met.
    assert LAST in caught.value.object
    assert caught.value.hint
    assert list(tmp_path.glob("*out*")) == []
    assert list(tmp_path.glob(".*out*")) == []


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
def test_config_and_index_that_change_meanwhile(
    writable: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = writable("tiny_tp8")

    def change() -> None:
        text = json.dumps(json.loads((source / name).read_text()), indent=3)
        (source / name).write_text(text)

    _when(monkeypatch, "while it is copied", change)
    with pytest.raises(ArtifactError, match=f"{name}: got a file that was written to since"):
        shard_checkpoint(source, 2, tmp_path / "out")
    assert list(tmp_path.glob("*out*")) == []


def test_a_side_file_that_changes(
    writable: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While shard runs it is refused; afterwards --check finds that the shards have the old one."""
    source, name = writable("tiny_tp8"), "generation_config.json"
    (source / name).write_text('{"eos_token_id": 1}')

    def change() -> None:
        (source / name).write_text('{"eos_token_id": 502}')

    _when(monkeypatch, "while it is copied", change)
    with pytest.raises(ArtifactError, match=f"{name}: got a file that was written to since"):
        shard_checkpoint(source, 2, tmp_path / "out")
    monkeypatch.undo()
    shard_checkpoint(source, 2, tmp_path / "out")
    assert check_shards(tmp_path / "out", source).is_sound, "the control"
    (source / name).write_text('{"eos_token_id": 3}')
    assert [f.name for f in check_shards(tmp_path / "out", source).faults] == [name]
    (source / name).unlink()
    assert [f.name for f in check_shards(tmp_path / "out", source).faults] == [name]


def test_what_is_no_change(
    writable: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: rights, another name beside it, files that are no part."""
    source = writable("tiny_tp8")

    def change() -> None:
        (source / FIRST).chmod(0o640)
        os.link(source / LAST, source.parent / "beside")
        (source / "README.md").write_text("x")

    _when(monkeypatch, "while it is copied", change)
    shard_checkpoint(source, 2, tmp_path / "out")
    assert check_shards(tmp_path / "out", source).is_sound


def test_without_the_last_look_the_old_identity_would_stand_over_new_bytes(
    writable: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = writable("tiny_tp8")
    _when(monkeypatch, "before a byte is copied", lambda: _in_place(source, LAST))
    monkeypatch.setattr(shard_writer.Sources, "require_unchanged", lambda self, files: None)
    shard_checkpoint(source, 2, tmp_path / "out")
    with pytest.raises(ArtifactError, match="checkpoint: got"):
        check_shards(tmp_path / "out", source)


# -- planning ----------------------------------------------------------------------------------


def test_planning_says_how_far_it_is(
    k3tool: Callable[..., object], oracle: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source, out = oracle("tiny_tp8"), tmp_path / "out"
    outcome = k3tool("shard", source, "--tp", 2, "-o", out)
    assert (outcome.code, outcome.err) == (0, "")  # the control: a short step says nothing
    monkeypatch.setattr(shard_plan, "EVERY_SECONDS", 0.0)
    for command in (
        ("shard", source, "--tp", 2, "-o", out, "--force"),
        ("shard", "--check", out, source),
    ):
        outcome = k3tool(*command)
        assert outcome.code == 0
        assert outcome.err.startswith("planning: ")
        assert " tensors have a place\n" in outcome.err


# -- what inspect says comes first -------------------------------------------------------------


def test_damage_is_said_before_room_and_degree(
    k3tool: Callable[..., object], writable: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same code and words from inspect and shard; room does not make a checkpoint whole."""
    source = writable("tiny_tp8")
    monkeypatch.setattr(shard_space, "free_bytes", lambda folder: 1000)
    shard = ("shard", source, "--tp", 2, "-o", tmp_path / "out")
    assert k3tool(*shard).code == 1  # the control
    kept = (source / "config.json").read_text()
    for field, value in (("vocab_size", 2**31 - 1), ("num_experts", 4096)):
        config = json.loads(kept)
        config["text_config"][field] = value
        (source / "config.json").write_text(json.dumps(config))
        said = k3tool("inspect", source)
        outcome = k3tool(*shard)
        assert (said.code, outcome.code) == (3, 3), (said, outcome)
        run = k3tool("run", source, "--tp", 2, "--ids", 1, "--cache", tmp_path / "cache")
        assert run.code == 3, run
        assert run.err.replace("k3tool run", "k3tool shard") == outcome.err
    (source / "config.json").write_text(kept)
    (source / LAST).unlink()
    assert (k3tool("inspect", source).code, k3tool(*shard).code) == (3, 3)
    assert list(tmp_path.glob("*out*")) == []
