"""Shards: joined again they are the checkpoint, in the promised order, with provenance."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from k3tool.artifact import open_artifact
from k3tool.checkpoint import shard_copy
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.safetensors_writer import SafetensorsWriter, TensorLayout
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.errors import ArtifactError, UsageError
from k3tool.model.vision import is_vision
from k3tool.model.weight_slices import rank_shape
from k3tool.model.weights import Split, expected_tensors

Oracle = Callable[[str], Path]


@pytest.fixture(scope="module")
def eight(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "tp8"
    shard_checkpoint(oracle("tiny_tp8"), 8, out)
    return out


@pytest.mark.parametrize(
    ("name", "tp"), [("tiny13", 1), ("tiny_tp8", 2), ("tiny_tp8", 8), ("tiny_wide", 4)]
)
def test_joined_ranks_are_the_checkpoint(
    oracle: Oracle, tmp_path: Path, name: str, tp: int
) -> None:
    shard_checkpoint(oracle(name), tp, tmp_path / "out")
    shards = Shards.open(tmp_path / "out")
    ranks = [shards.rank(rank) for rank in range(tp)]
    with Checkpoint.open(oracle(name)) as source:
        expected = list(expected_tensors(source.config))
        assert sorted(spec.name for spec in expected) == ranks[0].names()
        for spec in expected:
            whole = source.read(spec.name)
            parts = [rank.read(spec.name) for rank in ranks]
            assert {part.shape for part in parts} == {rank_shape(spec, tp)}
            if spec.split is Split.REPLICATE:
                assert all(np.array_equal(part, whole) for part in parts)
            else:
                joined = np.concatenate(parts, axis=1 if spec.split is Split.COLS else 0)
                assert np.array_equal(joined, whole[: spec.live]), spec.name


def test_blocks_smaller_than_a_tensor_change_nothing(
    oracle: Oracle, eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_copy, "BLOCK_BYTES", 700)
    shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "out")
    assert Shards.open(tmp_path / "out").digest == Shards.open(eight).digest
    for file in sorted(eight.rglob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "out" / file.relative_to(eight)).read_bytes()


def test_experts_come_first_page_aligned_and_contiguous(eight: Path) -> None:
    parts = ("w1", "w2", "w3")
    for file in sorted((eight / "rank-02-of-08").glob("*.safetensors"))[1:8]:
        raw = file.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        assert start % 4096 == 0
        header = json.loads(raw[8:start])
        header.pop("__metadata__")
        names = sorted(header, key=lambda name: header[name]["data_offsets"])
        order = [
            f"experts.{expert}.{part}.weight_{kind}"
            for expert in range(12)
            for part in parts
            for kind in ("packed", "scale")
        ]
        assert [name.split("block_sparse_moe.")[-1] for name in names[:72]] == order
        assert not any(".experts." in name for name in names[72:])
        for name in names:
            width = {"F32": 4, "BF16": 2, "U8": 1}[header[name]["dtype"]]
            assert (start + header[name]["data_offsets"][0]) % width == 0, name


def test_opens_with_the_stock_library(eight: Path) -> None:
    names = []
    for file in (eight / "rank-07-of-08").glob("*.safetensors"):
        with safe_open(file, framework="np") as opened, Checkpoint.open(file.parent) as ours:
            for name in sorted(opened.keys()):
                names.append(name)
                piece = opened.get_slice(name)
                info = ours.tensor_info(name)
                assert (piece.get_dtype(), tuple(piece.get_shape())) == (info.dtype, info.shape)
                if info.dtype in ("U8", "F32"):  # NumPy has no bf16
                    assert np.array_equal(opened.get_tensor(name), ours.read(name))
    index = json.loads((eight / "rank-07-of-08" / "model.safetensors.index.json").read_text())
    assert sorted(names) == sorted(index["weight_map"])


def test_provenance_says_where_every_byte_went(oracle: Oracle, eight: Path) -> None:
    with (
        Checkpoint.open(oracle("tiny_tp8")) as source,
        open_artifact(eight / "shards.h5", "shards", 2) as artifact,
        open_artifact(eight / "rank-05-of-08" / "rank.h5", "rank", 1) as rank,
    ):
        assert artifact.inputs[0].content_sha256 == source.identity
        placed = artifact.read("tensors/name").tolist()
        dropped = artifact.read("dropped/name").tolist()
        reasons = artifact.read("dropped/reason").tolist()
        padded = [name for name, why in zip(dropped, reasons, strict=True) if "padding" in why]
        assert sorted({*placed, *dropped}) == source.names()
        assert padded == [name for name in placed if name.endswith("A_log")]
        assert all(map(is_vision, set(dropped) - set(padded)))
        total = int(
            artifact.read("tensors/source_bytes").sum() + artifact.read("dropped/bytes").sum()
        )
        assert total == source.index.total_size
        row = placed.index("language_model.model.layers.2.self_attn.o_proj.weight")
        axis, extent = (int(artifact.read(f"tensors/{key}")[row]) for key in ("axis", "extent"))
        part = source.read(placed[row])[:, extent * 5 // 8 : extent * 6 // 8]
        assert axis == 1
        file = artifact.read("rank_files")[artifact.read("tensors/rank_file")[row]]
        raw = (eight / "rank-05-of-08" / file).read_bytes()
        start = (
            8 + int.from_bytes(raw[:8], "little") + int(artifact.read("tensors/rank_offset")[row])
        )
        assert raw[start : start + part.nbytes] == part.tobytes()
        sha256 = rank.read("tensors/sha256")[row].tobytes()
        assert sha256 == hashlib.sha256(part.tobytes()).digest()
        assert rank.read("tensors/max_scale").max() == 126


def test_same_input_same_digest_and_a_rank_alone(
    oracle: Oracle, eight: Path, tmp_path: Path
) -> None:
    again = shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "again")
    assert again.digest == Shards.open(eight).digest
    alone = shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "alone", ranks=[3])
    assert alone.ranks == (3,)
    one = Shards.open(tmp_path / "alone")
    assert one.rank(3).identity == Shards.open(eight).rank(3).identity
    with pytest.raises(ArtifactError, match="rank 2"):
        one.rank(2)


def test_no_folder_of_ours_is_a_checkpoint_to_shard(eight: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="rank folder"):
        shard_checkpoint(eight / "rank-00-of-08", 1, tmp_path / "x")
    with pytest.raises(ArtifactError, match="rank shards"):
        shard_checkpoint(eight, 1, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_existing_output(oracle: Oracle, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = shard_checkpoint(oracle("tiny_tp8"), 2, out)
    with pytest.raises(UsageError, match="finished shards"):
        shard_checkpoint(oracle("tiny_tp8"), 4, out)
    assert Shards.open(out).digest == first.digest
    shard_checkpoint(oracle("tiny_tp8"), 4, out, force=True)
    assert Shards.open(out).tp == 4
    assert sorted(path.name for path in out.glob("rank-*")) == [
        f"rank-{r:02d}-of-04" for r in range(4)
    ]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="no shards folder"):
        shard_checkpoint(oracle("tiny_tp8"), 4, precious, force=True)
    assert (precious / "thesis.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "precious"]


@pytest.mark.parametrize("ranks", [[8], [-1], []])
def test_wrong_ranks(oracle: Oracle, tmp_path: Path, ranks: list[int]) -> None:
    with pytest.raises(UsageError, match="--rank"):
        shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "x", ranks=ranks)


def test_changed_rank_is_refused(oracle: Oracle, tmp_path: Path) -> None:
    shard_checkpoint(oracle("tiny_tp8"), 2, tmp_path / "out")
    shards = Shards.open(tmp_path / "out")
    shards.rank(1)
    file = tmp_path / "out" / "rank-01-of-02" / "model-00003-of-000009.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    shards.rank(0)
    with pytest.raises(ArtifactError, match="rank-01-of-02"):
        shards.rank(1)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_edited_file_beside_the_ranks_is_refused(
    writable: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    source = writable("tiny_tp8")
    (source / "generation_config.json").write_text('{"eos_token_id": 502}')
    shard_checkpoint(source, 2, tmp_path / "out")
    Shards.open(tmp_path / "out")
    path = tmp_path / "out" / name
    path.write_text(path.read_text().replace("502", "501"))
    with pytest.raises(ArtifactError, match=name):
        Shards.open(tmp_path / "out")
    path.unlink()
    with pytest.raises(ArtifactError, match=name):
        Shards.open(tmp_path / "out")


@pytest.mark.parametrize("text", ["[", "[]", '{"tp": 2}', '{"tp": "2", "rank": 0}', "null"])
def test_foreign_k3_metadata_is_refused(writable: Callable[[str], Path], text: str) -> None:
    folder = writable("tiny_tp8")
    path = folder / "model-00001-of-000011.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"] = {"k3": text}
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length :])
    with pytest.raises(ArtifactError, match=r"__metadata__\.k3"):
        Checkpoint.open(folder)


def _rewrite_in_second_form(folder: Path) -> None:
    """Store A_log without padding and the convolutions as matrices, as some exports do."""
    with Checkpoint.open(folder) as checkpoint:
        files = {name: checkpoint.header(name) for name in checkpoint.index.files}
        for name, header in files.items():
            arrays = {}
            for tensor, info in header.tensors.items():
                array = checkpoint.read(tensor)
                if tensor.endswith("A_log"):
                    array = array[:8]
                elif "conv1d" in tensor:
                    array = array[:, 0, :]
                arrays[tensor] = (info.dtype, array)
            layout = [TensorLayout(t, d, a.shape, a.nbytes) for t, (d, a) in arrays.items()]
            checkpoint.close()
            with SafetensorsWriter(folder / name, layout, {}) as writer:
                for tensor, (_, array) in arrays.items():
                    writer.start(tensor)
                    writer.append(array)
                    writer.finish()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["metadata"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_second_stored_forms_shard_to_the_same_bytes(
    writable: Callable[[str], Path], eight: Path, tmp_path: Path
) -> None:
    folder = writable("tiny_tp8")
    _rewrite_in_second_form(folder)
    shard_checkpoint(folder, 8, tmp_path / "out")
    ours, released = Shards.open(tmp_path / "out").rank(6), Shards.open(eight).rank(6)
    assert ours.names() == released.names()
    for name in ours.names():
        assert ours.read(name).tobytes() == released.read(name).tobytes(), name
    assert ours.tensor_info("language_model.model.layers.1.self_attn.q_conv1d.weight").shape == (
        16,
        4,
    )
