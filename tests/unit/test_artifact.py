"""Artifacts: content digest, atomic writes, refusals; then the safetensors writer."""

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors import safe_open

from k3tool import artifact, atomic
from k3tool.artifact import Dataset, InputRef, open_artifact, write_artifact
from k3tool.checkpoint.safetensors_writer import SafetensorsWriter, TensorLayout
from k3tool.errors import ArtifactError, K3Error


def _datasets() -> dict[str, Dataset]:
    return {
        "b/rows": Dataset(np.arange(12, dtype=np.uint32).reshape(3, 4), ("row", "word"), "words"),
        "a": Dataset(np.linspace(0, 1, 5), ("x",)),
        "names": Dataset(["", "Grüße", "z"], ("name",)),
        "none": Dataset([], ("name",)),
        "records": Dataset(np.zeros(0, dtype=np.uint8), ("byte",), dtype="mxfp4"),
    }


def _write(path: Path, **changes: object) -> str:
    values: dict = {
        "kind": "plan",
        "schema": 3,
        "datasets": _datasets(),
        "attrs": {"n": 3, "ok": True, "ratio": 0.5, "word": "x"},
        "inputs": [InputRef("shards", "shards", "s", "ab" * 32)],
        "params": {"tp": 8},
        "isa_hash": "cafe",
    }
    return write_artifact(path, **{**values, **changes})


def test_round_trip(tmp_path: Path) -> None:
    digest = _write(tmp_path / "plan.h5")
    with open_artifact(tmp_path / "plan.h5", "plan", 3, isa_hash="cafe") as opened:
        assert opened.digest == digest
        assert opened.names() == ["a", "b/rows", "names", "none", "records"]
        assert opened.read("b/rows").tolist() == np.arange(12).reshape(3, 4).tolist()
        assert opened.read("names").tolist() == ["", "Grüße", "z"]
        assert opened.read("none").tolist() == []
        assert opened.unit("b/rows") == "words"
        assert opened.attrs == {"n": 3, "ok": True, "ratio": 0.5, "word": "x"}
        assert [type(opened.attrs[key]) for key in ("n", "ok", "ratio")] == [int, bool, float]
        assert opened.inputs == [InputRef("shards", "shards", "s", "ab" * 32)]
        assert opened.params == {"tp": 8}
        offset, size = opened.extent("b/rows")
        raw = (tmp_path / "plan.h5").read_bytes()[offset : offset + size]
        assert raw == np.arange(12, dtype="<u4").tobytes()
        with pytest.raises(ArtifactError, match="absent"):
            opened.read("c")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.h5"]


def test_same_content_same_digest(tmp_path: Path) -> None:
    backwards = dict(reversed(_datasets().items()))
    assert _write(tmp_path / "1.h5") == _write(tmp_path / "2.h5", datasets=backwards)
    renamed = [InputRef("shards", "shards", "other folder", "ab" * 32)]
    assert _write(tmp_path / "1.h5") == _write(tmp_path / "3.h5", inputs=renamed)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "isa"},
        {"schema": 4},
        {"params": {"tp": 4}},
        {"inputs": []},
        {"inputs": [InputRef("shards", "shards", "s", "ac" * 32)]},
        {"isa_hash": "beef"},
        {"attrs": {"n": 3}},
        {"target": "cpu"},
        {"datasets": {**_datasets(), "a": Dataset(np.linspace(0, 2, 5), ("x",))}},
        {"datasets": {**_datasets(), "a": Dataset(np.linspace(0, 1, 5), ("y",))}},
        {"datasets": {**_datasets(), "names": Dataset(["Gr", "üßez", ""], ("name",))}},
    ],
)
def test_other_content_other_digest(tmp_path: Path, change: dict) -> None:
    assert _write(tmp_path / "1.h5") != _write(tmp_path / "2.h5", **change)


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        ({"kind": "isa"}, "kind"),
        ({"kind": "plan", "schema": 2}, "schema"),
        ({"kind": "plan", "isa_hash": "beef"}, "isa_hash"),
    ],
)
def test_wrong_artifact_is_refused_by_field(tmp_path: Path, wanted: dict, word: str) -> None:
    _write(tmp_path / "plan.h5")
    with pytest.raises(ArtifactError) as caught:
        open_artifact(tmp_path / "plan.h5", **wanted)
    assert word in caught.value.object
    open_artifact(tmp_path / "plan.h5", "plan", 3, isa_hash="cafe").close()  # the control


def test_changed_value_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "plan.h5")
    with h5py.File(tmp_path / "plan.h5", "r+") as file:
        file["b/rows"][0, 0] = 7
    with pytest.raises(ArtifactError, match="sha256"):
        open_artifact(tmp_path / "plan.h5", "plan", 3)


def test_changed_attribute_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "plan.h5")
    with h5py.File(tmp_path / "plan.h5", "r+") as file:
        file.attrs["k3.params"] = "{}"
    with pytest.raises(ArtifactError, match="sha256"):
        open_artifact(tmp_path / "plan.h5", "plan", 3)


def test_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("no")
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["a"] = 1
    for name in ("absent.h5", "text.h5", "foreign.h5", "."):
        with pytest.raises(ArtifactError):
            open_artifact(tmp_path / name, "plan", 3)


@pytest.mark.fuzz
def test_any_flipped_bit_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "plan.h5")
    good = (tmp_path / "plan.h5").read_bytes()
    random = np.random.default_rng(7)
    for position in [0, 7, 20, 511, *random.integers(len(good), size=200)]:
        bad = bytearray(good)
        bad[position] ^= 1 << random.integers(8)
        (tmp_path / "bad.h5").write_bytes(bad)
        with pytest.raises(ArtifactError):
            open_artifact(tmp_path / "bad.h5", "plan", 3)
    open_artifact(tmp_path / "plan.h5", "plan", 3).close()  # the control


def test_content_digest_is_checked_even_if_the_file_hash_fits(tmp_path: Path) -> None:
    _write(tmp_path / "plan.h5")
    with h5py.File(tmp_path / "plan.h5", "r+") as file:
        file["b/rows"][0, 0] = 7
    block = artifact._user_block("plan", artifact._sha256_behind_block(tmp_path / "plan.h5"))
    with (tmp_path / "plan.h5").open("r+b") as raw:
        raw.write(block)
    with pytest.raises(ArtifactError, match="content_sha256"):
        open_artifact(tmp_path / "plan.h5", "plan", 3)


@pytest.mark.parametrize("cut", [0, 1, 100, 2000, -1])
def test_cut_file_is_refused(tmp_path: Path, cut: int) -> None:
    _write(tmp_path / "plan.h5")
    good = (tmp_path / "plan.h5").read_bytes()
    (tmp_path / "plan.h5").write_bytes(good[:cut])
    with pytest.raises(ArtifactError):
        open_artifact(tmp_path / "plan.h5", "plan", 3)


def test_unwritable_folder_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(K3Error) as caught:
        _write(tmp_path / "absent" / "plan.h5")
    assert caught.value.exit_code == 1


# -- safetensors -------------------------------------------------------------------------------

LAYOUT = [
    TensorLayout("bytes", "U8", (3, 2), 6),
    TensorLayout("floats", "F32", (2,), 8),
    TensorLayout("empty", "U8", (0,), 0),
]


def _fill(writer: SafetensorsWriter) -> None:
    writer.start("bytes")
    writer.append(np.arange(4, dtype=np.uint8))
    writer.append(bytes([4, 5]))
    writer.finish()
    writer.start("floats")
    writer.append(np.array([1.5, -2.0], dtype=np.float32))
    writer.finish()
    writer.start("empty")
    writer.finish()


def test_safetensors_opens_with_the_stock_library(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "t.safetensors", LAYOUT, {"b": 1, "a": [2]}) as writer:
        _fill(writer)
    with safe_open(tmp_path / "t.safetensors", framework="np") as file:
        assert sorted(file.keys()) == ["bytes", "empty", "floats"]
        assert file.get_tensor("bytes").tolist() == [[0, 1], [2, 3], [4, 5]]
        assert file.get_tensor("floats").tolist() == [1.5, -2.0]
        assert json.loads(file.metadata()["k3"]) == {"a": [2], "b": 1}
    raw = (tmp_path / "t.safetensors").read_bytes()
    assert (8 + int.from_bytes(raw[:8], "little")) % 4096 == 0
    assert raw[4096:4102] == bytes(range(6))


def _mistake(path: Path, mistake: str) -> None:
    with SafetensorsWriter(path, LAYOUT, {}) as writer:
        if mistake == "order":
            writer.start("floats")
        elif mistake == "short":
            writer.start("bytes")
            writer.finish()
        elif mistake == "raise":
            writer.start("bytes")
            raise RuntimeError


@pytest.mark.parametrize("mistake", ["order", "short", "missing", "raise"])
def test_failed_safetensors_leaves_nothing(tmp_path: Path, mistake: str) -> None:
    with pytest.raises(RuntimeError if mistake == "raise" else AssertionError):
        _mistake(tmp_path / "t.safetensors", mistake)
    assert list(tmp_path.iterdir()) == []


def test_a_name_too_long_to_exist_is_no_such_file() -> None:
    with pytest.raises(ArtifactError, match="no such file, need an isa artifact"):
        open_artifact("x" * 300, "isa")


# -- Ctrl-C ------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, b"an older one"])
@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_ctrl_c_while_an_artifact_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, before: bytes | None
) -> None:
    path = tmp_path / "plan.h5"
    if before is not None:
        path.write_bytes(before)
    real_write = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        real_write(self, data[: len(data) // 2])
        assert [each.name for each in tmp_path.iterdir() if each != path]  # there is half a file
        raise KeyboardInterrupt

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "write":
            patch.setattr(Path, "write_bytes", half)
        else:
            patch.setattr(atomic if where == "fsync" else os, where, stop)
        with pytest.raises(KeyboardInterrupt):
            _write(path)
    left = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert left == ({} if before is None else {"plan.h5": before})
    _write(path)  # the control: nothing in the way, and nothing left beside it
    open_artifact(path, "plan", 3).close()
    assert [each.name for each in tmp_path.iterdir()] == ["plan.h5"]


def _interrupted_folder(path: Path) -> None:
    with atomic.atomic_folder(path) as folder:
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt


def test_ctrl_c_while_a_folder_is_written(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupted_folder(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def _interrupted_safetensors(path: Path) -> None:
    with SafetensorsWriter(path, LAYOUT, {}) as writer:
        writer.start("bytes")
        writer.append(bytes([4, 5]))
        raise KeyboardInterrupt


def test_ctrl_c_while_safetensors_are_written(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupted_safetensors(tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []
