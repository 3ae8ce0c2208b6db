"""What shard may replace and where it may work: nothing that anybody else put there."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.checkpoint import shard_writer
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.errors import ArtifactError, UsageError
from k3tool.runtime.cache import open_source, rank_weights
from k3tool.runtime.options import RunOptions

Oracle = Callable[[str], Path]
Run = Callable[..., object]


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def pair(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("outputs") / "pair"
    shard_checkpoint(oracle("tiny_tp8"), 2, out)
    return out


@pytest.fixture
def out(pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair, tmp_path / "out"))


# -- what others put into the output -----------------------------------------------------------


def _folder_named_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    (folder / "config.json" / "thesis.txt").write_text("x")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file": lambda folder: (folder / "notes.txt").write_text("x"),
    "a hidden file": lambda folder: (folder / ".notes").write_text("x"),
    "a folder": lambda folder: (folder / "more").mkdir(),
    "weights of another name": lambda folder: (folder / "lora.safetensors").write_text("x"),
    "a link": lambda folder: (folder / "there").symlink_to("/"),
    "a folder of our name": _folder_named_config,
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("where", ["", "rank-00-of-02", "rank-01-of-02"])
def test_forced_shards_replace_nothing_foreign(
    k3tool: Run, oracle: Oracle, out: Path, kind: str, where: str
) -> None:
    FOREIGN[kind](out / where)
    before = tree(out.parent)
    outcome = k3tool("shard", oracle("tiny_tp8"), "--tp", 4, "-o", out, "--force")
    assert outcome.code == 2, outcome
    assert "which shard did not write, need nothing but shards" in outcome.err
    assert "hint: move it somewhere else first" in outcome.err
    assert tree(out.parent) == before


def test_a_side_file_that_shard_did_not_write_is_foreign(
    k3tool: Run, oracle: Oracle, out: Path
) -> None:
    (out / "chat_template.jinja").write_text("mine")
    force = ("shard", oracle("tiny_tp8"), "--tp", 2, "-o", out, "--force")
    assert "chat_template.jinja, which shard did not write" in k3tool(*force).err
    (out / "chat_template.jinja").unlink()
    assert k3tool(*force).code == 0  # the control


def test_a_rank_alone_is_replaced_and_what_lies_beside_it_kept(
    k3tool: Run, oracle: Oracle, out: Path
) -> None:
    rank = ("shard", oracle("tiny_tp8"), "--tp", 2, "-o", out, "--rank", 1, "--force")
    (out / "notes.txt").write_text("x")
    assert k3tool(*rank).code == 0
    assert (out / "notes.txt").read_text() == "x"
    (out / "rank-01-of-02" / "notes.txt").write_text("y")
    before = tree(out)
    outcome = k3tool(*rank)
    assert (outcome.code, "rank-01-of-02/notes.txt, which" in outcome.err) == (2, True)
    assert tree(out) == before


def test_links_in_an_output_go_alone(k3tool: Run, oracle: Oracle, out: Path) -> None:
    """A rank's folder may lie on another disk: the link to it is replaced, not what is there."""
    disk = out.parent / "disk"
    (out / "rank-01-of-02").rename(disk)
    (out / "rank-01-of-02").symlink_to(disk)
    before = tree(disk)
    assert Shards.open(out).ranks == (0, 1)
    assert k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", out, "--force").code == 0
    assert tree(disk) == before
    assert not (out / "rank-01-of-02").is_symlink()


def test_damaged_shards_are_replaced_by_force(k3tool: Run, oracle: Oracle, out: Path) -> None:
    (out / "shards.h5").write_bytes(b"cut")
    assert k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", out, "--force").code == 0
    (out / "shards.h5").write_bytes(b"cut")
    (out / "notes.txt").write_text("x")
    assert k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", out, "--force").code == 2


def test_an_input_whose_files_lie_in_the_output(
    k3tool: Run, oracle: Oracle, out: Path, tmp_path: Path
) -> None:
    """The folder is elsewhere, its files are links: they would go with the old ranks."""
    source = tmp_path / "ckpt"
    shutil.copytree(oracle("tiny_tp8"), source)
    file = next(source.glob("*.safetensors"))
    file.rename(out / "rank-00-of-02" / file.name)
    file.symlink_to(out / "rank-00-of-02" / file.name)
    done = k3tool("shard", source, "--tp", 2, "-o", out, "--force")
    assert done.code == 2
    assert f"a folder that {source}/{file.name} leads into" in done.err
    assert file.is_file()


def test_a_foreign_file_with_the_name_of_weights(k3tool: Run, oracle: Oracle, out: Path) -> None:
    precious = out / "rank-00-of-02" / "model-00001-of-000096.safetensors"
    precious.write_bytes(b"precious")
    done = k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", out, "--force")
    assert done.code == 2
    assert precious.name in done.err
    assert precious.read_bytes() == b"precious"


def test_a_folder_is_not_ours_by_one_unreadable_file(
    k3tool: Run, oracle: Oracle, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("shards.h5", "config.json", "tokenizer.json"):
        (folder / name).write_bytes(b"a")
    before = tree(folder)
    done = k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", folder, "--force")
    assert done.code == 2
    assert "no shards folder" in done.err
    assert tree(folder) == before


@pytest.mark.parametrize("options", [(), ("--force",), ("--rank", 0, "--force")])
def test_an_input_is_never_inside_the_output(
    k3tool: Run, oracle: Oracle, out: Path, options: tuple[object, ...]
) -> None:
    shutil.copytree(oracle("tiny_tp8"), out / "ckpt")
    (out.parent / "link").symlink_to(out / "ckpt")
    before = tree(out)
    for source in (out / "ckpt", out.parent / "link"):
        for target in (out, out / "ckpt"):
            outcome = k3tool("shard", source, "--tp", 2, "-o", target, *options)
            assert outcome.code == 2, outcome
            assert "lies in, need a folder apart from it" in outcome.err
    assert tree(out) == before


def test_run_replaces_nothing_foreign_in_its_cache(oracle: Oracle, tmp_path: Path) -> None:
    options = RunOptions(oracle("tiny_tp8"), (1,), 1, tp=2, cache=tmp_path / "cache")

    def made() -> str:
        weights = rank_weights(open_source(options), options, str, str)
        for rank in weights.ranks:
            rank.folder.close()
        return weights.made

    assert made() == "built"
    (shards,) = (tmp_path / "cache").glob("shards-*")
    (shards / "notes.txt").write_text("x")
    assert made() == "reused"
    (shards / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"notes\.txt, which shard did not write"):
        made()
    (shards / "notes.txt").unlink()
    assert made() == "built"


def test_what_came_after_the_moves_were_noted(
    k3tool: Run, oracle: Oracle, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is killed before it replaces the old shards; somebody keeps notes beside them."""
    shard = ("shard", oracle("tiny_tp8"), "--tp", 4, "-o", out, "--force")
    with monkeypatch.context() as patch:
        patch.setattr("k3tool.checkpoint.shard_publish._carry_out", _killed)
        with pytest.raises(Killed):
            shard_checkpoint(oracle("tiny_tp8"), 4, out, force=True)
    (out / "rank-00-of-02" / "notes.txt").write_text("x")
    before = tree(out)
    outcome = k3tool(*shard)
    assert (outcome.code, "notes.txt, which shard did not write" in outcome.err) == (2, True)
    assert tree(out) == before
    (out / "rank-00-of-02" / "notes.txt").unlink()
    assert k3tool(*shard).code == 0
    assert Shards.open(out).tp == 4
    assert [path.name for path in out.parent.iterdir()] == ["out"]


class Killed(BaseException):
    """What no step may catch for good."""


def _killed(*arguments: object, **words: object) -> None:
    raise Killed


# -- places ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/", "got the root folder, need a folder below it"),
        ("loop", "got a link that leads to itself, need a new folder"),
    ],
)
def test_places_that_no_folder_can_have(
    k3tool: Run, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str,
    said: str,
) -> None:  # fmt: skip
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(shard_writer, "require_splittable", _unexpected)
    outcome = k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", tmp_path / place)
    assert (outcome.code, said in outcome.err) == (2, True), outcome
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def _unexpected(*args: object, **given: object) -> None:
    raise AssertionError("reached")


@pytest.mark.parametrize("tp", [1025, 10**7, 10**20, 10**200])
@pytest.mark.parametrize("command", ["shard", "run", "compile-plan"])
def test_degrees_without_end_are_refused_at_once(
    k3tool: Run, oracle: Oracle, tmp_path: Path, tp: int, command: str
) -> None:
    output = {
        "shard": ("-o", tmp_path / "x"),
        "run": ("--ids", 1, "--cache", tmp_path / "x"),
        "compile-plan": ("-o", tmp_path / "x"),
    }[command]
    outcome = k3tool(command, oracle("tiny_tp8"), "--tp", tp, *output)
    assert (outcome.code, outcome.err.startswith(f"k3tool {command}: --tp: got {tp}")) == (2, True)
    assert "hint: " in outcome.err
    assert list(tmp_path.iterdir()) == []


# -- the folder where shards grow --------------------------------------------------------------


def _foreign_works(work: Path) -> dict[str, Callable[[], object]]:
    def folder(*names: str) -> None:
        work.mkdir()
        for name in names:
            (work / name).write_text("mine")

    def link(name: str) -> None:
        (work.parent / "precious").mkdir(exist_ok=True)
        (work.parent / "precious" / name).write_text("mine")
        work.symlink_to("precious")

    def inner_link() -> None:
        link("thesis.txt")
        work.unlink()
        work.mkdir()
        (work / "lock").touch()
        (work / "set").symlink_to(work.parent / "precious")

    return {
        "files": lambda: folder("thesis.txt"),
        "a key of another lock": lambda: folder("key", "moves"),
        "another lock": lambda: folder("lock"),
        "another lock and key": lambda: folder("lock", "key"),
        "our names, no lock": lambda: (folder(), (work / "set").mkdir()),
        "a lock beside other files": lambda: (folder("thesis.txt"), (work / "lock").touch()),
        "a link": lambda: link("thesis.txt"),
        "a link to what looks like ours": lambda: link("set"),
        "a link to nothing": lambda: work.symlink_to("absent"),
        "a link inside": inner_link,
        "a file": lambda: work.write_text("mine"),
        "a pipe as lock": lambda: (folder(), os.mkfifo(work / "lock")),
    }


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("kind", _foreign_works(Path()))
@pytest.mark.parametrize("ranks", [(), ("--rank", 1)])
def test_a_foreign_work_folder_is_let_alone(
    k3tool: Run, oracle: Oracle, tmp_path: Path, kind: str, force: tuple[str, ...],
    ranks: tuple[object, ...],
) -> None:  # fmt: skip
    work = tmp_path / (".out.shard-01" if ranks else ".out.shard")
    _foreign_works(work)[kind]()
    before = tree(tmp_path)
    command = ("shard", oracle("tiny_tp8"), "--tp", 2, "-o", tmp_path / "out", *ranks, *force)
    outcome = k3tool(*command)
    assert outcome.code == 2, outcome
    assert f"{work}: got a " in outcome.err
    assert "need nothing there: it is where shards grow" in outcome.err
    assert "hint: move it away" in outcome.err
    assert tree(tmp_path) == before


def test_an_empty_work_folder_or_one_with_an_empty_lock_is_ours(
    oracle: Oracle, tmp_path: Path
) -> None:
    work = tmp_path / ".out.shard"
    work.mkdir()
    shard_checkpoint(oracle("tiny_tp8"), 2, tmp_path / "out")
    work.mkdir()
    (work / "lock").touch()
    (work / "journal").mkdir()
    shard_checkpoint(oracle("tiny_tp8"), 2, tmp_path / "out", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


GARBAGE = {
    "cut": b'[["out',
    "empty": b"",
    "other": b"{}",
    "no moves": b"[]",
    "nested": b"[" * 100_000,
    "no bytes of a text": b"\xff\xfe",
    "a number": b"1" * 5000,
    "somewhere else": json.dumps([["out/precious", "out", 5]]).encode(),
    "out of it": json.dumps([[".out.shard/set", "precious", 5]]).encode(),
    "half right": json.dumps([[".out.shard/set", "out", 5], ["x"]]).encode(),
}


def _all_written(source: Path, out: Path) -> Path:
    """Leave the work of a run that was killed while it gave its shards their name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k3tool.checkpoint.shard_publish._carry_out", _killed)
        with pytest.raises(Killed):
            shard_checkpoint(source, 2, out)
    work = out.with_name(f".{out.name}.shard")
    assert (work / "moves").is_file()
    return work


@pytest.mark.parametrize("garbage", GARBAGE)
def test_moves_that_cannot_be_read(
    k3tool: Run, oracle: Oracle, tmp_path: Path, garbage: str
) -> None:
    source, out = oracle("tiny_tp8"), tmp_path / "out"
    (tmp_path / "precious").mkdir()
    work = _all_written(source, out)
    shutil.copytree(work, tmp_path / "kept")
    (work / "moves").write_bytes(GARBAGE[garbage])
    before = tree(tmp_path)
    outcome = k3tool("shard", source, "--tp", 2, "-o", out)
    assert outcome.code == 3, outcome
    assert f"{work}/moves: got no list of moves" in outcome.err
    assert "hint: --force discards the unfinished shards" in outcome.err
    assert tree(tmp_path) == before
    if garbage == "cut":  # the control: the moves as they were
        shutil.copy(tmp_path / "kept" / "moves", work / "moves")
        assert k3tool("shard", source, "--tp", 2, "-o", out).code == 0
    else:
        assert k3tool("shard", source, "--tp", 2, "-o", out, "--force").code == 0
    assert Shards.open(out).ranks == (0, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "out", "precious"]


@pytest.mark.parametrize("name", ["key", "moves", "journal"])
def test_own_files_are_read_with_a_bound(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of holes, longer than memory: it counts as one that cannot be read."""
    source, out = oracle("tiny_tp8"), tmp_path / "out"
    work = _all_written(source, out)
    if name != "moves":
        (work / "moves").unlink()
    path = min((work / "journal").iterdir()) if name == "journal" else work / name
    os.truncate(path, 1 << 40)
    if name != "journal":
        with pytest.raises((UsageError, shard_writer.ArtifactError)):
            shard_checkpoint(source, 2, out)
    shard_checkpoint(source, 2, out, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
