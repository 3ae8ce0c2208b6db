"""Reading tensors, rows and columns; the index; identity; what opening refuses."""

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint import identity
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import ArtifactError

HEAD = "language_model.lm_head.weight"
LAYER = "language_model.model.layers.1."


def test_short_reads(oracle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A read above 2^31 bytes comes back short: every read loops."""
    with Checkpoint.open(oracle("tiny_tp8")) as checkpoint:
        whole = checkpoint.read(HEAD)
        real = os.preadv

        def short(descriptor: int, buffers: list, offset: int) -> int:
            return real(descriptor, [buffers[0][:1001]], offset)

        monkeypatch.setattr(os, "preadv", short)
        assert np.array_equal(checkpoint.read(HEAD), whole)


def test_one_read_asks_for_no_more_than_a_gib(
    tmp_path: Path, oracle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse tensor of just over 2^31 bytes (the released embedding has 2.35e9), read whole.

    Linux gives at most 2^31 - 4096 bytes a call. The calls are recorded and answered without
    memory; the last one, past that limit, is a real one.
    """
    n_bytes = (1 << 31) + 4096
    header = {"big": {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + n_bytes)
        file.seek(-1, os.SEEK_END)
        file.write(b"\x07")
    (tmp_path / "config.json").write_bytes((oracle("tiny_tp8") / "config.json").read_bytes())
    real, asked = os.preadv, []

    def preadv(descriptor: int, buffers: list, offset: int) -> int:
        asked.append((offset - 8 - len(text), len(buffers[0])))
        if len(buffers[0]) > 4096:
            return len(buffers[0])
        return real(descriptor, buffers, offset)

    memory = mmap.mmap(-1, n_bytes)  # pages that nobody touches cost nothing
    with Checkpoint.open(tmp_path) as checkpoint:
        monkeypatch.setattr(os, "preadv", preadv)
        info = checkpoint.tensor_info("big")
        checkpoint.read_into(info, info.offset, memoryview(memory))
    gib = 1 << 30
    assert asked == [(0, gib), (gib, gib), (2 * gib, 4096)]
    assert memory[-1] == 7


def test_without_index_the_headers_rule(writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    with Checkpoint.open(folder) as with_index:
        names = with_index.names()
        assert not with_index.index.from_headers
    (folder / INDEX_NAME).unlink()
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.index.from_headers
        assert checkpoint.names() == names


def test_absent_tensor_is_named_with_its_file(writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"][HEAD] = "model-00001-of-000011.safetensors"
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with Checkpoint.open(folder) as checkpoint:
        with pytest.raises(ArtifactError, match=r"model-00001-of-000011\.safetensors.*lm_head"):
            checkpoint.read(HEAD)
        with pytest.raises(ArtifactError, match="nonsense"):
            checkpoint.read("nonsense")


def test_file_cut_after_opening(writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.tensor_info(HEAD)
        os.truncate(folder / info.file, info.offset + 100)
        with pytest.raises(ArtifactError, match="end of file"):
            checkpoint.read(HEAD)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../b.safetensors"}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"language_model.a": "b"}, "metadata": {"total_size": "many"}}',
        "{",
    ],
)
def test_bad_index(writable: Callable[[str], Path], text: str) -> None:
    folder = writable("tiny_tp8")
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(ArtifactError, match=r"index\.json"):
        Checkpoint.open(folder)


def test_folder_that_is_none(tmp_path: Path, oracle: Callable[[str], Path]) -> None:
    with pytest.raises(ArtifactError, match="no such folder"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(ArtifactError, match=r"no config\.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_bytes((oracle("tiny13") / "config.json").read_bytes())
    with pytest.raises(ArtifactError, match="no safetensors files"):
        Checkpoint.open(tmp_path)


def _flatten(folder: Path, *, config: bool, names: bool) -> None:
    """Rewrite a nested checkpoint as the flat text-only export: its config, its names, or both."""
    if config:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw["text_config"]))
    if names:
        path = folder / INDEX_NAME
        path.write_text(path.read_text().replace('"language_model.', '"'))
        for file in folder.glob("*.safetensors"):
            raw = file.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            text = raw[8 : 8 + length].replace(b'"language_model.', b'"')
            file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def test_flat_export_gives_the_same_tensors(
    writable: Callable[[str], Path], oracle: Callable[[str], Path]
) -> None:
    folder = writable("tiny_tp8")
    _flatten(folder, config=True, names=True)
    with Checkpoint.open(folder) as flat, Checkpoint.open(oracle("tiny_tp8")) as nested:
        assert flat.config.prefix == ""
        assert np.array_equal(flat.read("lm_head.weight"), nested.read(HEAD))


@pytest.mark.parametrize("which", ["config", "names"])
def test_mixed_layout_is_refused_by_name(writable: Callable[[str], Path], which: str) -> None:
    folder = writable("tiny_tp8")
    _flatten(folder, config=which == "config", names=which == "names")
    with pytest.raises(ArtifactError, match=r"model\.embed_tokens|lm_head|model\.layers"):
        Checkpoint.open(folder)


# -- identity ----------------------------------------------------------------------------------


def _identity(folder: Path) -> str:
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.identity


def test_identity_sees_every_part(writable: Callable[[str], Path]) -> None:
    folder = writable("tiny_tp8")
    seen = {_identity(folder)}
    assert seen == {_identity(folder)}
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.tensor_info(HEAD)
    data = bytearray((folder / info.file).read_bytes())
    data[info.offset + 5] ^= 1  # one bit of one weight
    (folder / info.file).write_bytes(data)
    seen.add(_identity(folder))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("4096", "4097"))
    seen.add(_identity(folder))
    (folder / INDEX_NAME).write_text((folder / INDEX_NAME).read_text() + " ")
    seen.add(_identity(folder))
    assert len(seen) == 4


def test_identity_separates_equal_headers(oracle: Callable[[str], Path]) -> None:
    """tiny13 and tiny13_eps have the same headers, config and index, and other weights."""
    assert _identity(oracle("tiny13")) != _identity(oracle("tiny13_eps"))


def test_sample_of_a_large_file_has_both_ends() -> None:
    size = 17_000_000_000
    ranges = identity.sample_ranges(1000, size)
    assert ranges[0][0] == 1000
    assert sum(ranges[-1]) == size
    assert len(ranges) == len(set(ranges)) == identity.N_SAMPLES
    small = identity.sample_ranges(1000, 5_000_000)
    assert small[0][0] == 1000
    assert sum(length for _, length in small) == 5_000_000 - 1000
