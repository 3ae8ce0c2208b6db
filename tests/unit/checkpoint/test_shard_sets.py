"""Sets of shards: ranks from several machines, files of bounded size, images kept or dropped."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.artifact import open_artifact
from k3tool.checkpoint import shard_writer
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.released_layout import CONFIG_FILE, RELEASED_DATA
from k3tool.checkpoint.shard_check import check_shards
from k3tool.checkpoint.shard_layout import shard_files
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.errors import ArtifactError, UsageError, listed
from k3tool.model.config import K3Config
from k3tool.model.vision import is_vision
from k3tool.model.weight_slices import n_bytes, rank_shape
from tests.folders import tree

Oracle = Callable[[str], Path]


@pytest.fixture(scope="module")
def whole(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sets") / "whole"
    shard_checkpoint(oracle("tiny_tp8"), 4, out)
    return out


# -- many machines -----------------------------------------------------------------------------


def test_nodes_write_one_set(oracle: Oracle, whole: Path, tmp_path: Path) -> None:
    digests = set()
    for rank in range(4):
        info = shard_checkpoint(oracle("tiny_tp8"), 4, tmp_path / f"node{rank}", ranks=[rank])
        digests.add(info.digest)
    assert digests == {Shards.open(whole).digest}
    gathered = tmp_path / "node2"
    for rank in (0, 1, 3):
        shutil.copytree(tmp_path / f"node{rank}", gathered, dirs_exist_ok=True)
        held = Shards.open(gathered).ranks
        assert rank in held
        if rank != 3:
            with pytest.raises(ArtifactError, match="only ranks") as caught:
                Shards.open(gathered).rank(3)
            assert listed(sorted(set(range(4)) - set(held))) in str(caught.value.need)
            assert "--rank 3" in str(caught.value.hint)
    assert tree(gathered) == tree(whole)


def test_nodes_may_share_the_folder(oracle: Oracle, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for ranks in ([2], [0, 1], [3]):
        shard_checkpoint(oracle("tiny_tp8"), 4, out, ranks=ranks)
        with pytest.raises(UsageError, match="finished shards"):
            shard_checkpoint(oracle("tiny_tp8"), 4, out, ranks=ranks)
    assert tree(out) == tree(whole)
    damaged = next((out / "rank-01-of-04").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    shard_checkpoint(oracle("tiny_tp8"), 4, out, ranks=[1], force=True)
    assert tree(out) == tree(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_other_content_is_refused_before_the_first_byte(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = oracle("tiny_tp8"), tmp_path / "out"
    shard_checkpoint(source, 2, out, ranks=[0])
    before = tree(out)

    def write(*arguments: object) -> None:
        raise AssertionError("a file was written")

    monkeypatch.setattr(shard_writer, "write_file", write)
    for force in (False, True):
        with pytest.raises(UsageError, match="other content"):
            shard_checkpoint(source, 2, out, ranks=[1], keep_vision=True, force=force)
    assert tree(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(AssertionError, match="was written"):  # the control: the right one writes
        shard_checkpoint(source, 2, out, ranks=[1])
    monkeypatch.undo()
    shard_checkpoint(source, 2, out, ranks=[1])
    assert Shards.open(out).ranks == (0, 1)


def test_whole_work_that_another_set_forestalled_blocks_nothing(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node names its set while we write ours with other options: only theirs goes on."""
    source, out = oracle("tiny_tp8"), tmp_path / "out"
    finish = shard_writer.ShardJob._finish_ranks

    def late(job: shard_writer.ShardJob) -> None:
        finish(job)
        monkeypatch.undo()
        shard_checkpoint(source, 2, out, ranks=[0])

    monkeypatch.setattr(shard_writer.ShardJob, "_finish_ranks", late)
    with pytest.raises(UsageError, match="other content"):
        shard_checkpoint(source, 2, out, ranks=[1], keep_vision=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.shard-01", "out"]
    shard_checkpoint(source, 2, out, ranks=[1])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert Shards.open(out).ranks == (0, 1)


def test_ranks_of_other_shards_do_not_mix(
    oracle: Oracle, writable: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shard_checkpoint(oracle("tiny_tp8"), 4, out, ranks=[0, 1])
    before = tree(out)
    other = writable("tiny_tp8")
    (other / "generation_config.json").write_text("{}")
    for tp, ranks in ((2, [0]), (4, [2])):
        for force in (False, True):
            with pytest.raises(UsageError):
                shard_checkpoint(other, tp, out, ranks=ranks, force=force)
    assert tree(out) == before
    shard_checkpoint(other, 4, tmp_path / "b", ranks=[2])
    shutil.copytree(tmp_path / "b" / "rank-02-of-04", out / "rank-02-of-04")
    with pytest.raises(ArtifactError, match="rank-02-of-04: got rank 2 of shards"):
        Shards.open(out)
    shutil.rmtree(out / "rank-02-of-04")
    (out / "rank-00-of-04").rename(out / "rank-03-of-04")
    with pytest.raises(ArtifactError, match="rank-03-of-04: got rank 0"):
        Shards.open(out)
    (out / "rank-03-of-04").rename(out / "rank-00-of-08")
    with pytest.raises(ArtifactError, match="rank-00-of-08: got a rank of another degree"):
        Shards.open(out)


# -- files -------------------------------------------------------------------------------------


def test_large_layers_take_several_files(oracle: Oracle, whole: Path, tmp_path: Path) -> None:
    limit = 40_000
    shard_checkpoint(oracle("tiny_tp8"), 4, tmp_path / "out", max_file_bytes=limit)
    split, plain = Shards.open(tmp_path / "out").rank(1), Shards.open(whole).rank(1)
    assert len(split.index.files) > len(plain.index.files) == 9
    for file in split.index.files:
        header = split.header(file)
        infos = [
            split.tensor_info(name) for name, at in split.index.weight_map.items() if at == file
        ]
        units = {info.name.split(".w")[0] for info in infos}
        assert sum(info.n_bytes for info in infos) <= limit or len(units) == 1
        assert header.size > 0
        for info in infos:  # an expert lies in one file
            if ".experts." in info.name:
                six = [
                    name
                    for name in split.index.weight_map
                    if name.startswith(info.name.split(".w")[0] + ".")
                ]
                assert {split.index.weight_map[name] for name in six} == {file}
    for name in plain.names():
        assert np.array_equal(split.read(name), plain.read(name)), name
    assert check_shards(tmp_path / "out", oracle("tiny_tp8")).faults == []


def test_released_layers_are_cut_at_16_gb() -> None:
    config = K3Config.load(Path(__file__).parents[2] / "data" / "kimi-k3-config.json")
    layers = [file.layer for file in shard_files(config, 1)]
    assert [layers.count(layer) for layer in (0, 1, 92, None)] == [1, 2, 2, 1]
    assert len(list(shard_files(config, 2))) == 94


# -- the image side ----------------------------------------------------------------------------


def test_images_are_kept_on_every_rank_if_asked(
    oracle: Oracle, whole: Path, tmp_path: Path
) -> None:
    info = shard_checkpoint(oracle("tiny_tp8"), 4, tmp_path / "out", keep_vision=True)
    plain = Shards.open(whole)
    assert (info.kept_vision, info.dropped) == (2, ())
    assert info.digest != plain.digest
    shards = Shards.open(tmp_path / "out")
    with Checkpoint.open(oracle("tiny_tp8")) as source:
        images = [name for name in source.names() if is_vision(name)]
        for rank in range(4):
            folder = shards.rank(rank)
            assert sorted(folder.names()) == sorted([*plain.rank(rank).names(), *images])
            for name in images:
                assert folder.read(name).tobytes() == source.read(name).tobytes()
    assert check_shards(tmp_path / "out", oracle("tiny_tp8")).faults == []
    with open_artifact(tmp_path / "out" / "shards.h5", "shards") as artifact:
        assert not any(map(is_vision, artifact.read("dropped/name")))


def test_bytes_of_a_rank_add_up(oracle: Oracle, tmp_path: Path) -> None:
    info = shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "out")
    with Checkpoint.open(oracle("tiny_tp8")) as source:
        total = sum(source.tensor_info(name).n_bytes for name in source.names())
    split = 8 * (info.rank_bytes - info.replicated_bytes)
    assert split + info.replicated_bytes + info.dropped_bytes + info.padding_bytes == total
    data = sum(
        path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        for path in (tmp_path / "out" / "rank-06-of-08").glob("*.safetensors")
    )
    assert data == info.rank_bytes


@pytest.mark.parametrize(("tp", "most_files"), [(1, 2), (8, 1)])
def test_files_of_the_release_hold_at_most_16_gb(tp: int, most_files: int) -> None:
    config = K3Config.from_dict(json.loads((RELEASED_DATA / CONFIG_FILE).read_text()))
    files = list(shard_files(config, tp))
    sizes = [
        sum(n_bytes(rank_shape(spec, tp), spec.dtype) for spec in file.tensors) for file in files
    ]
    assert max(sizes) <= 16_000_000_000
    of_layers = Counter(file.layer for file in files if file.layer is not None)
    assert len(of_layers) == config.num_hidden_layers
    assert max(of_layers.values()) == most_files
