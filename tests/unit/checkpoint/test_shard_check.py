"""`shard --check`: it passes what is right and names each thing that is not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.checkpoint import shard_check
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_check import check_shards
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.errors import ArtifactError

Oracle = Callable[[str], Path]
LAYER = "language_model.model.layers."
COLUMNS = LAYER + "2.self_attn.o_proj.weight"
ROWS = LAYER + "3.block_sparse_moe.experts.7.w3.weight_packed"
WHOLE = LAYER + "4.input_layernorm.weight"


@pytest.fixture
def eight(oracle: Oracle, tmp_path: Path) -> Path:
    shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "s")
    return tmp_path / "s"


def _span(folder: Path, name: str) -> tuple[Path, int, int]:
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.tensor_info(name)
        return folder / info.file, info.offset, info.n_bytes


def _rank(shards: Path, rank: int) -> Path:
    return shards / f"rank-{rank:02d}-of-08"


def _put(folder: Path, name: str, data: bytes, at: int = 0) -> None:
    path, offset, _ = _span(folder, name)
    with path.open("r+b") as file:
        file.seek(offset + at)
        file.write(data)


def _bytes(folder: Path, name: str) -> bytes:
    path, offset, size = _span(folder, name)
    return path.read_bytes()[offset : offset + size]


def test_right_shards_pass(k3tool: Callable, oracle: Oracle, eight: Path) -> None:
    outcome = k3tool("shard", "--check", eight, oracle("tiny_tp8"))
    assert outcome.code == 0
    assert outcome.out.startswith("PASS    all ranks asked for are their source ranges: 8 of 8")


@pytest.mark.parametrize("block", [700, 1 << 20])
@pytest.mark.parametrize(
    ("name", "own", "other"),
    [
        (COLUMNS, "columns [48, 64)", "columns [80, 96)"),
        (ROWS, "rows [96, 128)", "rows [160, 192)"),
    ],
)
def test_another_ranks_range_is_named_as_such(
    k3tool: Callable, oracle: Oracle, eight: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, own: str, other: str, block: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(shard_check, "BLOCK_BYTES", block)
    _put(_rank(eight, 3), name, _bytes(_rank(eight, 5), name))
    outcome = k3tool("shard", "--check", eight, oracle("tiny_tp8"))
    assert outcome.code == 4
    lines = outcome.out.splitlines()
    assert lines[0] == f"FAIL    rank 3: {name}: got rank 5's {other}, need {own}"
    assert lines[1].startswith("FAIL    ranks differ: 8 of 8 ranks")
    assert len(lines) == 2
    assert "1 slices or records that differ" in outcome.err


@pytest.mark.parametrize("name", [COLUMNS, ROWS, WHOLE])
def test_one_flipped_bit(k3tool: Callable, oracle: Oracle, eight: Path, name: str) -> None:
    data = _bytes(_rank(eight, 6), name)
    _put(_rank(eight, 6), name, bytes([data[77] ^ 4]), at=77)
    outcome = k3tool("shard", "--check", eight, oracle("tiny_tp8"), "--json")
    assert outcome.code == 4
    report = json.loads(outcome.out)
    assert report["sound"] is False
    (fault,) = report["faults"]
    assert (fault["rank"], fault["name"]) == (6, name)
    assert fault["got"] == "other bytes from byte 77 on"


def test_ranks_that_are_not_here_fail_unless_the_others_are_asked_for(
    k3tool: Callable, oracle: Oracle, tmp_path: Path
) -> None:
    shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "s", ranks=[1, 4])
    outcome = k3tool("shard", "--check", tmp_path / "s", oracle("tiny_tp8"))
    assert outcome.code == 4
    assert outcome.out.startswith(
        "NOT RUN ranks 0, 2, 3, 5, 6, 7: their folders are not here\nFAIL    the ranks here are"
    )
    assert "got only ranks 1, 4 of 8, need ranks 0, 2, 3, 5, 6, 7 too" in outcome.err
    as_json = k3tool("shard", "--check", tmp_path / "s", oracle("tiny_tp8"), "--json")
    assert (as_json.code, json.loads(as_json.out)["sound"]) == (4, False)


def test_the_ranks_of_one_node_are_checked_alone(
    k3tool: Callable, oracle: Oracle, tmp_path: Path
) -> None:
    shard_checkpoint(oracle("tiny_tp8"), 8, tmp_path / "s", ranks=[1, 4])
    check = ("shard", "--check", tmp_path / "s", oracle("tiny_tp8"))
    outcome = k3tool(*check, "--rank", 1, "--rank", 4)
    assert outcome.code == 0, outcome
    assert outcome.out.startswith("PASS    all ranks asked for are their source ranges: 2 of 8")
    assert k3tool(*check, "--rank", 1).code == 0
    assert k3tool(*check, "--rank", 1, "--rank", 2).code == 4
    assert k3tool(*check, "--rank", 2).code == 3  # nothing to compare
    assert k3tool(*check, "--rank", 8).code == 2
    _put(_rank(tmp_path / "s", 4), WHOLE, b"\0\1", at=2)  # the control: it looks at what it says
    assert (k3tool(*check, "--rank", 4).code, k3tool(*check, "--rank", 1).code) == (4, 0)


def test_tensor_that_lies_elsewhere_or_nowhere(oracle: Oracle, eight: Path) -> None:
    path, _, _ = _span(_rank(eight, 2), WHOLE)
    raw = path.read_bytes()
    near = WHOLE.replace("input", "post_attention")
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header[WHOLE], header[near] = header[near], header[WHOLE]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(raw[:8] + text + raw[8 + length :])
    faults = check_shards(eight, oracle("tiny_tp8")).faults
    assert {fault.name for fault in faults} == {WHOLE, near}
    assert any("by shards.h5" in fault.need for fault in faults)


def test_another_checkpoints_shards_are_refused(
    k3tool: Callable, oracle: Oracle, eight: Path
) -> None:
    with pytest.raises(ArtifactError, match=r"shards\.h5: checkpoint"):
        check_shards(eight, oracle("tiny13"))
    outcome = k3tool("shard", "--check", eight, oracle("tiny_tp8"), "--tp", 8)
    assert (outcome.code, "--tp: got also --check, need one" in outcome.err) == (2, True)


# -- what a run would refuse -------------------------------------------------------------------


def _other_eps(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    assert '"rms_norm_eps": 1e-05' in text
    (folder / "config.json").write_text(
        text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 2e-05')
    )


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _with_spaces(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + " ")


INDEX = "model.safetensors.index.json"
# name -> (what is done, in which folder, what is said on stdout or stderr)
REFUSED_BY_RUN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "other config": (_other_eps, ".", "FAIL    shards.h5: config.json: got "),
    "no config": (_without("config.json"), ".", "FAIL    shards.h5: config.json: got absent"),
    "config a folder": (
        lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()),
        ".", "FAIL    shards.h5: config.json: got a folder",
    ),
    "other config of a rank": (_other_eps, "rank-05-of-08", "FAIL    rank 5: config.json: got "),
    "no config of a rank": (_without("config.json"), "rank-05-of-08", "got no config.json"),
    "no index of a rank": (_without(INDEX), "rank-05-of-08", f"FAIL    rank 5: {INDEX}: got no"),
    "other index of a rank": (
        _with_spaces(INDEX), "rank-05-of-08", "FAIL    rank 5: files of its folder: got identity",
    ),
    "no rank.h5": (_without("rank.h5"), "rank-05-of-08", "rank.h5: got no such file"),
    "another rank's rank.h5": (
        lambda folder: shutil.copy(folder.parent / "rank-04-of-08" / "rank.h5", folder),
        "rank-05-of-08", "rank-05-of-08: got rank 4 of",
    ),
    "a rank too many": (
        lambda folder: shutil.copytree(folder / "rank-00-of-08", folder / "rank-08-of-08"),
        ".", "FAIL    shards.h5: rank-08-of-08: got a rank of another degree",
    ),
    "a rank of another degree": (
        lambda folder: (folder / "rank-00-of-02").mkdir(), ".", "rank-00-of-02: got a rank of",
    ),
    "a side file added": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": 1}'), ".",
        "FAIL    shards.h5: generation_config.json: got a file that was added after sharding",
    ),
    "a side file added as a link to nothing": (
        lambda folder: (folder / "tokenizer.json").symlink_to("absent"), ".",
        "FAIL    shards.h5: tokenizer.json: got a file that was added after sharding",
    ),
}  # fmt: skip


def _open_as_run_does(shards: Path) -> None:
    for rank in range(8):
        Shards.open(shards).rank(rank).close()


@pytest.mark.parametrize("kind", REFUSED_BY_RUN)
def test_what_run_refuses_is_no_pass(
    k3tool: Callable, oracle: Oracle, eight: Path, kind: str
) -> None:
    damage, where, said = REFUSED_BY_RUN[kind]
    damage(eight / where)
    with pytest.raises(ArtifactError):
        _open_as_run_does(eight)
    outcome = k3tool("shard", "--check", eight, oracle("tiny_tp8"))
    assert outcome.code in (3, 4), outcome
    assert said in (outcome.out if outcome.code == 4 else outcome.err), outcome
    assert "PASS" not in outcome.out
    if where != ".":  # the control: the others are asked for alone
        assert k3tool("shard", "--check", eight, oracle("tiny_tp8"), "--rank", 2).code == 0
