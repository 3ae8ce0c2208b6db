"""inspect, shard, sample and provenance from the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.artifact import open_artifact
from k3tool.checkpoint.shards import Shards

Oracle = Callable[[str], Path]


# -- inspect -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny13", "tiny13_eps", "tiny_tp8", "tiny_wide"])
def test_whole_checkpoint(k3tool: Callable, oracle: Oracle, name: str) -> None:
    outcome = k3tool("inspect", oracle(name))
    assert outcome.code == 0
    assert outcome.err == ""
    assert "\nwhole: " in outcome.out
    kinds = ("kda dense ", "kda moe ", "mla moe ")
    rows = [line.split() for line in outcome.out.splitlines() if line.startswith(kinds)]
    n_layers = {"tiny13": 13, "tiny13_eps": 13, "tiny_tp8": 8, "tiny_wide": 6}[name]
    assert sum(int(row[2]) for row in rows) == n_layers
    assert all(row[-2] == "whole" for row in rows)
    layers = [each for row in rows for each in _numbers(row[-1])]
    assert sorted(layers) == list(range(n_layers))


def _numbers(text: str) -> list[int]:
    """Return what ranges such as 1-2,4 stand for."""
    ends = [part.split("-") for part in text.split(",")]
    return [n for part in ends for n in range(int(part[0]), int(part[-1]) + 1)]


def test_inspect_json_and_artifact(k3tool: Callable, oracle: Oracle, tmp_path: Path) -> None:
    outcome = k3tool("inspect", oracle("tiny_tp8"), "--json", "-o", tmp_path / "c.h5")
    report = json.loads(outcome.out)
    assert outcome.code == 0
    assert report["whole"] is True
    assert report["legal_tp"] == [1, 2, 4, 8]
    assert report["tensors"] == {"expected": 710, "indexed": 712}
    assert report["vision"]["found"] == 2
    assert sum(row["n_bytes"] for row in report["modules"]) == report["bytes"] == 8_090_608
    with open_artifact(tmp_path / "c.h5", "coverage", 1) as artifact:
        assert artifact.digest == report["digest"]
        assert artifact.attrs["whole"] is True
        assert artifact.inputs[0].content_sha256 == report["identity"]
        assert int(artifact.read("modules/sound").sum()) == 710


def test_rank_folder_is_whole_too(k3tool: Callable, oracle: Oracle, tmp_path: Path) -> None:
    assert k3tool("shard", oracle("tiny_tp8"), "--tp", 4, "-o", tmp_path / "s").code == 0
    outcome = k3tool("inspect", tmp_path / "s" / "rank-03-of-04", "--json")
    report = json.loads(outcome.out)
    assert (outcome.code, report["whole"], report["tp"], report["rank"]) == (0, True, 4, 3)
    folder = k3tool("inspect", tmp_path / "s")
    assert folder.code == 3
    assert "rank-00-of-04" in folder.err


# -- shard -------------------------------------------------------------------------------------


def test_shard_prints_what_it_did(k3tool: Callable, oracle: Oracle, tmp_path: Path) -> None:
    outcome = k3tool("shard", oracle("tiny_tp8"), "--tp", 8, "-o", tmp_path / "s", "-v")
    assert outcome.code == 0
    assert outcome.err == ""  # no bar where stderr is no terminal
    assert "dropped vision_tower.patch_embed.proj.weight" in outcome.out
    assert outcome.out.strip().endswith(Shards.open(tmp_path / "s").digest[:16])


def test_shard_json(k3tool: Callable, oracle: Oracle, tmp_path: Path) -> None:
    outcome = k3tool("shard", oracle("tiny13"), "--tp", 1, "-o", tmp_path / "s", "--json")
    report = json.loads(outcome.out)
    assert report["ranks"] == [0]
    unread = report["dropped_bytes"] + report["padding_bytes"]
    assert report["read_bytes"] + unread == 9_380_736


def test_shard_refuses_an_illegal_degree(k3tool: Callable, oracle: Oracle, tmp_path: Path) -> None:
    outcome = k3tool("shard", oracle("tiny13"), "--tp", 4, "-o", tmp_path / "s")
    assert outcome.code == 2
    assert "moe_intermediate_size = 96 in groups of 32" in outcome.err
    assert list(tmp_path.iterdir()) == []


# -- sample ------------------------------------------------------------------------------------


def test_sample_is_whole_legal_and_repeatable(k3tool: Callable, tmp_path: Path) -> None:
    assert k3tool("sample", tmp_path / "a").code == 0
    assert k3tool("sample", tmp_path / "b").code == 0
    report = json.loads(k3tool("inspect", tmp_path / "a", "--json").out)
    assert report["whole"]
    assert report["legal_tp"] == [1, 2, 4, 8]
    assert report["vision"]["expected"] == report["vision"]["found"] == 12
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names[:2] == ["config.json", "model-00001-of-000011.safetensors"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    other = k3tool("sample", tmp_path / "c", "--seed", 1)
    assert other.code == 0
    assert (
        json.loads(k3tool("inspect", tmp_path / "c", "--json").out)["identity"]
        != report["identity"]
    )


def test_sample_bytes_are_pinned(k3tool: Callable, tmp_path: Path) -> None:
    """Another NumPy or machine must write the same checkpoint: published digests depend on it."""
    k3tool("sample", tmp_path / "a")
    report = json.loads(k3tool("inspect", tmp_path / "a", "--json").out)
    assert report["identity"].startswith("987503b29be06894")


def test_sample_does_not_overwrite(k3tool: Callable, tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("x")
    outcome = k3tool("sample", tmp_path)
    assert outcome.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["keep.txt"]
    assert k3tool("sample", tmp_path / "x", "--preset", "huge").code == 2


# -- provenance --------------------------------------------------------------------------------


def test_provenance_reaches_the_checkpoint(
    k3tool: Callable, oracle: Oracle, tmp_path: Path
) -> None:
    k3tool("shard", oracle("tiny_tp8"), "--tp", 2, "-o", tmp_path / "s")
    identity = json.loads(k3tool("inspect", oracle("tiny_tp8"), "--json").out)["identity"]
    outcome = k3tool("provenance", tmp_path / "s" / "shards.h5")
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1].strip() == f"checkpoint: tiny_tp8 {identity[:16]}"
    assert k3tool("provenance", tmp_path / "s").out == outcome.out  # the folder stands for its file
    chain = json.loads(k3tool("provenance", tmp_path / "s" / "shards.h5", "--json").out)
    assert chain["params"] == {"keep_vision": False, "tp": 2}
    assert chain["inputs"][0]["digest"] == identity


def test_provenance_of_no_artifact(k3tool: Callable, tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_text("x")
    assert k3tool("provenance", tmp_path / "x.h5").code == 3
    folder = k3tool("provenance", tmp_path)
    assert folder.code == 3
    assert "got a folder, need an artifact file" in folder.err
    assert k3tool("provenance", tmp_path / "y.h5").code == 3
