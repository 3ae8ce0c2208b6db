"""Files with a right digest and odd contents: every field of every kind absent or of another form.

Whatever stands in a file, a command that reads it answers with a refusal or a verdict, never with a
traceback; a field that a reader needs is named with its file when it is absent.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from k3tool.artifact import Array, Dataset, open_artifact, write_artifact

Run = Callable[..., Any]
ODD: tuple[object, ...] = (
    None, True, -1, 0, 1 << 70, "many", "", 0.5, float("nan"), [], ["x", 1], {}, {"a": "b"},
)  # fmt: skip
ODD_ATTRS: tuple[Any, ...] = (-1, 1 << 40, "many", "", 0.5, float("nan"), True)
# Told to a person and not read again, or read where it is there.
UNREAD = {
    "plan": {"chunk_note", "priced_by", "config"},
    "isa": {"priced_by", "config"},
    "tokens": {"gen", "prefill", "ignore_eos"},
    "shards": {"tp"},  # the attribute of this name is read
    "rank": {"tp", "rank"},
    "fingerprint": set(),
}
UNREAD_DATA = {
    "shards": {"source_files", "dtypes", "splits", "tensors/dtype", "tensors/split"},
    "rank": {"tensors/max_scale"},
}


class Content(NamedTuple):
    """All that a file says, to be written again with one thing changed."""

    kind: str
    schema: int
    data: dict[str, Array]
    attrs: dict[str, Any]
    params: dict[str, Any]
    inputs: list[Any]
    words: dict[str, Any]


def content(path: Path) -> Content:
    with open_artifact(path) as file:
        data = {name: file.read(name) for name in file.names()}
        words = {"target": file.target, "phase": file.phase, "isa_hash": file.isa_hash}
        return Content(
            file.kind, file.schema, data, file.attrs, file.params, list(file.inputs), words
        )


def write(path: Path, c: Content) -> None:
    datasets = {
        name: Dataset(list(data) if data.dtype.kind == "O" else data, ("x",) * data.ndim)
        for name, data in c.data.items()
    }
    write_artifact(path, c.kind, c.schema, datasets, c.attrs, c.inputs, c.params, **c.words)


def odd_columns(data: Array) -> Iterator[Array]:
    """Yield what stands where a column should: other types, shapes, lengths and values."""
    yield np.zeros((), "<f8")
    yield np.zeros((2, 2, 2), "<u1")
    yield np.array([], dtype="<f4")
    if data.dtype.kind == "O":
        yield np.zeros(len(data), "<i8")
        yield np.append(data, np.array(["one more"], dtype=object))
        yield np.array(["\u0663", *data[1:]], dtype=object)
        yield np.array(["a/../b"] * len(data), dtype=object)
        return
    yield data[:-1]
    yield data.astype("<f8")
    yield data.reshape(-1)[: max(1, data.size // 2)]
    if data.size:
        most = np.iinfo(data.dtype).max if data.dtype.kind in "iu" else np.inf
        for value in (0, most, -1 if data.dtype.kind != "u" else 1):
            changed = data.copy()
            changed.flat[0] = value
            yield changed


def changes(c: Content) -> Iterator[tuple[str, Content, bool]]:
    """Yield (what was changed, the new content, whether a needed field is absent)."""
    for name in c.params:
        rest = {key: value for key, value in c.params.items() if key != name}
        yield f"params: {name}", c._replace(params=rest), name not in UNREAD[c.kind]
        for value in ODD:
            yield f"params: {name} = {value!r}", c._replace(params={**rest, name: value}), False
    for name in c.attrs:
        rest = {key: value for key, value in c.attrs.items() if key != name}
        yield name, c._replace(attrs=rest), (c.kind, name) != ("rank", "tp")
        for value in ODD_ATTRS:
            yield f"{name} = {value!r}", c._replace(attrs={**rest, name: value}), False
    for name, data in c.data.items():
        rest = {key: value for key, value in c.data.items() if key != name}
        is_needed = name not in UNREAD_DATA.get(c.kind, ()) and not name.startswith("dropped/")
        yield name, c._replace(data=rest), is_needed
        for at, odd in enumerate(odd_columns(data)):
            yield f"{name}: form {at}", c._replace(data={**rest, name: odd}), False


def attack(
    k3tool: Run, path: Path, commands: list[tuple[object, ...]], every: int = 1,
    bind: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Change one thing at a time; `every` takes one command in turn where they are slow.

    `bind` tells files that name this one its new digest, so that the change is all that is wrong.
    """
    whole, saved = content(path), path.with_name("saved")
    shutil.copy(path, saved)
    try:
        write(path, whole)
        bind()
        controls = [k3tool(*command) for command in commands]
        assert [done.code for done in controls] == [0] * len(commands), controls
        for number, (what, changed, is_absent) in enumerate(changes(whole)):
            write(path, changed)
            bind()
            absence_told = False
            for at, command in enumerate(commands):
                if every > 1 and (number + at) % every and not is_absent:
                    continue
                done = k3tool(*command)
                where = (command[:2], what, done)
                assert done.code in (0, 2, 3, 4, 5), where
                assert "Traceback" not in done.err, where
                what = what.split("/rank-")[0]  # of a rank's records it is their number
                named = path.name in done.err and what.removeprefix("params: ") in done.err
                absence_told |= done.code == 3 and named
            assert absence_told or not is_absent, (commands, what)
    finally:
        shutil.copy(saved, path)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand files are written here; none has to outlive a power cut."""
    monkeypatch.setattr("k3tool.atomic.fsync", lambda path: None)


@pytest.fixture
def program(k3tool: Run, oracle: Run, tmp_path: Path) -> tuple[Path, Path]:
    plan, isa = tmp_path / "plan.h5", tmp_path / "isa.h5"
    sizes = ("--tp", 1, "--workgroups", 2, "--chunk", 2)
    assert k3tool("compile-plan", oracle("tiny_tp8"), *sizes, "-o", plan).code == 0
    assert k3tool("emit-isa", plan, "-o", isa).code == 0
    return plan, isa


def test_control_a_reader_that_indexes_is_noticed(
    k3tool: Run, program: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this file asserts can fail: a reader without typed access ends in a traceback."""
    monkeypatch.setattr("k3tool.compiler.plan.program_params", lambda file: dict(file.params))
    with pytest.raises((KeyError, AssertionError)):
        attack(k3tool, program[0], [("emit-isa", program[0], "-o", program[0].with_name("x.h5"))])


def test_plans(k3tool: Run, oracle: Run, tmp_path: Path, program: tuple[Path, Path]) -> None:
    plan = program[0]
    attack(k3tool, plan, [
        ("emit-isa", plan, "-o", tmp_path / "x.h5"),
        ("disasm", plan, "--range", "0:2"),
        ("bench", "chain", plan),
    ], every=3)  # fmt: skip


def test_streams(k3tool: Run, program: tuple[Path, Path]) -> None:
    isa = program[1]
    attack(k3tool, isa, [
        ("disasm", isa, "--range", "0:2"),
        ("verify", "coverage", isa),
    ], every=2)  # fmt: skip


def test_tokens(k3tool: Run, oracle: Run, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.h5"
    run = ("run", oracle("tiny_tp8"), "--ids", "1,2", "--gen", 2, "--ignore-eos", "--tp", 2)
    assert k3tool(*run, "-o", tokens, "--cache", tmp_path / "c").code == 0
    other = tmp_path / "other.h5"
    shutil.copy(tokens, other)
    attack(k3tool, tokens, [("verify", "ranks", tokens), ("verify", "ranks", other, tokens)])


def test_shards_and_their_ranks(k3tool: Run, oracle: Run, tmp_path: Path) -> None:
    source, shards = oracle("tiny_tp8"), tmp_path / "shards"
    assert k3tool("shard", source, "--tp", 2, "-o", shards).code == 0
    check = ("shard", "--check", shards, source)
    plan = ("compile-plan", shards, "-o", tmp_path / "p.h5")
    attack(k3tool, shards / "rank-01-of-02" / "rank.h5", [check, plan], every=2)


def test_what_all_ranks_share(k3tool: Run, oracle: Run, tmp_path: Path) -> None:
    source, shards = oracle("tiny_tp8"), tmp_path / "shards"
    assert k3tool("shard", source, "--tp", 2, "-o", shards).code == 0
    ranks = {path: content(path) for path in shards.glob("rank-*/rank.h5")}
    assert len(ranks) == 2

    def bind() -> None:
        with open_artifact(shards / "shards.h5") as file:
            digest = file.digest
        for path, rank in ranks.items():
            write(path, rank._replace(inputs=[rank.inputs[0]._replace(content_sha256=digest)]))

    check = ("shard", "--check", shards, source)
    plan = ("compile-plan", shards, "-o", tmp_path / "p.h5")
    attack(k3tool, shards / "shards.h5", [check, plan], every=2, bind=bind)


def test_fingerprints(k3tool: Run, oracle: Run, tmp_path: Path) -> None:
    fingerprint, source = tmp_path / "f.h5", oracle("tiny_tp8")
    done = k3tool("inspect", source, "--values", "--fingerprint", fingerprint)
    assert done.code == 0, done.err
    attack(k3tool, fingerprint, [("inspect", source, "--values", "--against", fingerprint)])
