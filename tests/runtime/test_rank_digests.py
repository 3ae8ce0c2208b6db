"""Ranks of a compiled model are compared on every value they all hold, alone or in a group.

A collective hides a rank that went astray: the sum is the same on all. So a replicated weight that
is altered on one rank must show in that rank's own values, in either program.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import save_plan
from k3tool.errors import UnsoundError
from k3tool.isa.emit import emit
from k3tool.isa.stream import Isa, load_isa, save_isa
from k3tool.runtime.image import Request, build_image
from k3tool.runtime.interpreter import load
from k3tool.runtime.ranks import Launch, RankGroup
from k3tool.runtime.weights import RankWeights

TP = 2
IN_GROUPS = (
    "layers.0.self_attn.f_a_proj.weight",
    "layers.1.self_attn.f_a_proj.weight",
    "layers.3.self_attn.q_a_proj.weight",
    "layers.3.self_attn.kv_a_proj_with_mqa.weight",
    "layers.4.block_sparse_moe.gate.weight",
    "layers.4.block_sparse_moe.routed_expert_down_proj.weight",
)
ALONE = ("layers.4.input_layernorm.weight", "embed_tokens.weight", "norm.weight")


@pytest.fixture(scope="module")
def isa(oracle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Isa:
    folder = tmp_path_factory.mktemp("program")
    with Checkpoint.open(oracle("tiny_tp8")) as checkpoint:
        plan = compile_plan(
            checkpoint.config, tp=TP, target="cpu", workgroups=4, chunk=8, batch=1, ctx=256
        )
    save_isa(emit(save_plan(plan, folder / "plan.h5"), "cpu", "plan.h5"), folder / "isa.h5")
    return load_isa(folder / "isa.h5")


def altered(folder: Path, name: str) -> None:
    """Change every element of a stored tensor by its lowest bit."""
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.tensor_info(f"language_model.model.{name}")
    with (folder / info.file).open("r+b") as file:
        file.seek(info.offset)
        raw = np.frombuffer(file.read(info.n_bytes), "<u2") ^ 1
        file.seek(info.offset)
        file.write(raw.tobytes())


def steps(isa: Isa, folders: list[Path], first_phase: str) -> int:
    """Run rank r on the shards of folders[r]; return how many steps the ranks agreed on."""
    chunk = 1 if first_phase == "decode" else 3
    request = Request((5, 9, 2), 3, (), chunk, first_phase=first_phase)
    images = []
    for rank, folder in enumerate(folders):
        with Shards.open(folder).rank(rank) as weights:
            images.append(build_image(isa, rank, RankWeights(weights, TP), request, 512))
    with RankGroup(Launch(load().path, images, 1, "auto", 30.0)) as group:
        group.wait_ready()
        return sum(1 for _ in group.steps())


@pytest.fixture
def shards(writable: Callable[[str], Path], tmp_path: Path) -> Callable[[str | None], list[Path]]:
    def make(name: str | None) -> list[Path]:
        checkpoint = writable("tiny_tp8")
        shard_checkpoint(checkpoint, TP, tmp_path / "whole")
        if name is None:
            return [tmp_path / "whole"] * TP
        altered(checkpoint, name)
        shard_checkpoint(checkpoint, TP, tmp_path / "altered")
        return [tmp_path / "whole", tmp_path / "altered"]

    return make


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_equal_weights_agree(
    isa: Isa, shards: Callable[[str | None], list[Path]], phase: str
) -> None:
    assert steps(isa, shards(None), phase) >= 3


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", [*IN_GROUPS, *ALONE])
def test_a_replicated_weight_altered_on_one_rank_is_named(
    isa: Isa, shards: Callable[[str | None], list[Path]], name: str, phase: str
) -> None:
    with pytest.raises(UnsoundError, match=r"rank 1: step 0.*digest"):
        steps(isa, shards(name), phase)
