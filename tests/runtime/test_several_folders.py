"""Weights in several folders, a device each: same bits, each read where it comes soonest."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import save_plan
from k3tool.compiler.residency import Residency, streamable, with_residency
from k3tool.compiler.ring import least_ring, ring_places
from k3tool.errors import ArtifactError, UsageError
from k3tool.runtime.devices import joint_rate, share_out
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import RunResult, run_model
from tests.runtime.bits import bits
from tests.runtime.controls import controls_of

IDS = (5, 9, 2, 40, 7)
TP = 2


@pytest.fixture
def tiny(oracle: Callable[[str], Path]) -> Path:
    return oracle("tiny_tp8")


@pytest.fixture
def pair(tiny: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with the same shards."""
    first, second = tmp_path / "a", tmp_path / "b"
    shard_checkpoint(tiny, TP, first)
    shutil.copytree(first, second)
    return first, second


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def split(pair: tuple[Path, Path]) -> None:
    """Leave every weight file in one of two folders."""
    for number, file in enumerate(weight_files(pair[0])):
        gone = pair[number % 2] / file.relative_to(pair[0])
        gone.unlink()


@pytest.fixture
def plan(tiny: Path, pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """A plan that streams all it can through the least ring."""
    shards = Shards.open(pair[0])
    made = compile_plan(
        shards.config, tp=TP, target="cpu", workgroups=8, chunk=4, batch=1, ctx=256,
        inputs=[shards.as_input("shards")], checkpoint_identity=shards.identity,
    )  # fmt: skip
    names = streamable(made)
    size = least_ring(made, names) // 4096 * 4096
    while ring_places(made, names, size) is None:
        size += 4096
    save_plan(with_residency(made, Residency(names, size, 12, 2, 3)), tmp_path / "plan.h5")
    return tmp_path / "plan.h5"


def run(pair: tuple[Path, ...], cache: Path, **changes: Any) -> RunResult:
    asked = RunOptions(pair[0], IDS, 5, beside=pair[1:], cache=cache, ignore_eos=True, logits=True)
    return run_model(replace(asked, **changes))


@pytest.mark.parametrize("way", ["copies", "split"])
def test_the_bits_are_those_of_one_folder(
    pair: tuple[Path, Path], plan: Path, tmp_path: Path, way: str
) -> None:
    want = bits(run(pair[:1], tmp_path))
    if way == "split":
        split(pair)
    assert bits(run(pair, tmp_path)) == want, "mapped"
    result = run(pair, tmp_path, plan=plan)
    assert bits(result) == want
    assert result.reading is not None
    assert len(result.reading.folder_bytes) == len(result.folders) == 2
    assert sum(result.reading.folder_bytes) == result.reading.n_bytes > 0
    assert min(result.reading.folder_bytes) > 0


def test_ranks_may_lie_in_different_folders(
    pair: tuple[Path, Path], plan: Path, tmp_path: Path
) -> None:
    want = bits(run(pair[:1], tmp_path))
    shutil.rmtree(pair[0] / "rank-01-of-02")
    shutil.rmtree(pair[1] / "rank-00-of-02")
    assert bits(run(pair, tmp_path, plan=plan)) == want


def test_a_checkpoint_at_one_rank(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    want = bits(run((tiny,), tmp_path))
    assert bits(run((tiny, copy), tmp_path)) == want
    with pytest.raises(UsageError, match="--shards: got 2 folders of a checkpoint at --tp 2"):
        run((tiny, copy), tmp_path, tp=2)
    file = weight_files(copy)[1]
    with file.open("r+b") as out:
        out.seek(-1, os.SEEK_END)
        last = out.read(1)
        out.seek(-1, os.SEEK_END)
        out.write(bytes([last[0] ^ 1]))
    with pytest.raises(ArtifactError, match=f"{file.name}: got other bytes, need a copy of"):
        run((tiny, copy), tmp_path)


# -- balance -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return controls_of(tmp_path_factory, "devices")


SLOW = "K3_CONTROL_DEVICE_NS=20000"  # 50 MB/s, and a quarter of it: far below any real device


def test_a_slow_device_gets_fewer_reads(
    pair: tuple[Path, Path], plan: Path, tmp_path: Path, controls: Callable[..., Path]
) -> None:
    """The second device takes four times as long: by queues it serves about a fifth."""
    shares = []
    for defines in ((SLOW,), (SLOW, "K3_CONTROL_ALTERNATE")):
        result = run(pair, tmp_path, plan=plan, interpreter=controls(*defines))
        assert result.reading is not None
        shares.append(result.reading.folder_bytes[1] / result.reading.n_bytes)
    assert 0 < shares[0] < 0.35
    assert shares[1] > 0.4, "the control: by bytes alone both serve alike"


def test_two_real_devices() -> None:
    pytest.skip("NOT RUN: needs weights on two devices")


def test_predicted_parts_follow_rates() -> None:
    held = {(0,): 10.0, (0, 1): 100.0}
    assert share_out(held, [3.0, 1.0]) == (85, 25)
    assert joint_rate((85, 25), [3.0, 1.0]) == pytest.approx(110 / (85 / 3))
    assert share_out({(1,): 7.0}, [3.0, 1.0]) == (0, 7)


def test_plan_only_counts_by_folder(k3tool: Callable[..., Any], pair: tuple[Path, Path]) -> None:
    split(pair)
    words = ("--shards", pair[0], "--shards", pair[1], "--memory", "190MB", "--plan-only")
    done = k3tool("run", *words, "--storage-rate", 2, "--memory-rate", 20)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if line.startswith("from a folder")]
    assert [line.rsplit(": ")[1] for line in lines] == [str(folder) for folder in pair]
    assert all("a token at 2.00 GB/s" in line for line in lines)


# -- refusals ----------------------------------------------------------------------------------


@pytest.fixture
def halves(tiny: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint whose files lie in one of two folders each."""
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        shutil.copytree(tiny, folder)
    split(folders)
    return folders


@pytest.mark.parametrize("order", [1, -1])
def test_every_folder_is_looked_at(halves: tuple[Path, Path], tmp_path: Path, order: int) -> None:
    """Whichever is named first: a mark of an unfinished download, or a file of no index."""
    first, second = halves[::order]
    assert len(run((first, second), tmp_path / "c").tokens) == 5, "the control"
    mark = second / f"{weight_files(second)[0].name}.aria2"
    mark.touch()
    with pytest.raises(ArtifactError, match=rf"{mark}: got a leftover of it"):
        run((first, second), tmp_path / "c")
    mark.unlink()
    shutil.copy(weight_files(second)[0], second / "extra.safetensors")
    with pytest.raises(ArtifactError, match=r"extra.safetensors: got a file that is not in the"):
        run((first, second), tmp_path / "c")


@pytest.mark.parametrize("order", [1, -1])
def test_end_tokens_do_not_depend_on_the_order(
    halves: tuple[Path, Path], tmp_path: Path, order: int
) -> None:
    (halves[1] / "generation_config.json").write_text('{"eos_token_id": 189}')
    with pytest.raises(ArtifactError, match=r"generation_config.json: got (absent|there), need"):
        run(halves[::order], tmp_path / "c")
    (halves[0] / "generation_config.json").write_text('{"eos_token_id": 188}')
    with pytest.raises(ArtifactError, match=r"generation_config.json: got other bytes, need"):
        run(halves[::order], tmp_path / "c")


def test_folders_that_do_not_belong_together(
    pair: tuple[Path, Path], oracle: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second = pair
    link = tmp_path / "link"
    link.symlink_to(first)
    with pytest.raises(UsageError, match=f"--shards: got {link} twice"):
        run((first, link), tmp_path)
    other = tmp_path / "other"
    shard_checkpoint(oracle("tiny_tp8"), 4, other)
    with pytest.raises(ArtifactError, match=r"other: tp: got 4, need 2, that of"):
        run((first, other), tmp_path)
    wide = tmp_path / "wide"
    shard_checkpoint(oracle("tiny_wide"), 2, wide)
    with pytest.raises(ArtifactError, match=r"wide: checkpoint: got \w+\.\., need"):
        run((first, wide), tmp_path)
    for file in weight_files(second):
        file.unlink()
    with pytest.raises(ArtifactError, match=f"{second}: got none of the weight files"):
        run(pair, tmp_path)
    lost = weight_files(first)[0]
    lost.unlink()
    with pytest.raises(ArtifactError, match=f"{lost.name}: got in none of"):
        run(pair, tmp_path)


def test_a_copy_that_differs(pair: tuple[Path, Path], tmp_path: Path) -> None:
    file = weight_files(pair[1])[-1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match=f"{file}: got other bytes, need a copy of {pair[0]}"):
        run(pair, tmp_path)


def test_one_checkpoint_opens_without_folders(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        assert checkpoint.folders == (tiny,)
        assert checkpoint.places(checkpoint.index.files[0]) == [0]
