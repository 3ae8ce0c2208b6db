"""A run on a device from options to tokens: the launch, on emulated blocks, against the CPU's bits.

All of it is the code that a GPU runs but for the driver's calls (k3tool/runtime/gpu_cupy.py). No
GPU has run it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import UnsoundError
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import Event, RunResult, run_model
from tests.kernels.emulated_device import EmulatedDevice

CUDA = "cuda:sm_90a"
SAME = ("step", "position", "id", "best", "second", "logits_digest")


def assert_same(found: RunResult, want: RunResult) -> None:
    """Compare everything but `digest`, which knows the program: targets have their own."""
    assert found.tokens == want.tokens
    for ours, theirs in ((found.prefill, want.prefill), (found.steps, want.steps)):
        assert ours is not None
        assert theirs is not None
        assert np.array_equal(ours.view("u4"), theirs.view("u4"))
    for ours, theirs in zip(found.records, want.records, strict=True):
        for field in SAME:
            assert (ours[field] == theirs[field]).all(), field


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("tiny13", {"tp": 1, "workgroups": 4, "chunk": 3}),
        ("tiny_tp8", {"tp": 2, "workgroups": 5, "prefill": "decode"}),
    ],
    ids=["chunks", "two-ranks"],
)
def test_a_device_gives_the_bits_of_the_cpu(
    engine: Callable[..., RunResult],
    device_code: Callable[[str], bytes],
    k3tool: Callable[..., Any],
    tmp_path: Path,
    name: str,
    given: dict[str, Any],
) -> None:
    device = EmulatedDevice(device_code("cuda"))
    files = [tmp_path / "device.h5", tmp_path / "cpu.h5"]
    fixed = {"gen": 2} | given
    on = {"interpreter": None, "target": CUDA, "device": device}
    found = engine(name, "p7", output=files[0], **on, **fixed)
    assert_same(found, engine(name, "p7", output=files[1], **fixed))
    assert device.is_closed
    assert found.leaves == device.name
    done = k3tool("verify", "ranks", *files)
    assert done.code == 0, done.out


def test_a_run_says_what_it_runs_on(
    oracle: Callable[[str], Path], device_code: Callable[[str], bytes], tmp_path: Path
) -> None:
    events: list[Event] = []
    said: list[str] = []
    device = EmulatedDevice(device_code("cuda"))
    options = RunOptions(
        oracle("tiny13"), (1,), 1, workgroups=4, chunk=3, cache=tmp_path, target=CUDA
    )
    result = run_model(options, events.append, said.append, device=device)
    assert [event["event"] for event in events] == ["start", "token", "end"]
    start = events[0]
    assert (start["target"], start["leaves"], start["threads"]) == (CUDA, device.name, 0)
    assert said[:2] == [
        f"{CUDA} {phase}: k3_interp of kernels_cuda/interp.cu, 256 lanes a block, waves of 32"
        for phase in ("decode", "prefill")
    ]
    held = sum(len(memory) for _, memory in device.pieces)
    assert 0 <= held - result.peak_memory_bytes < 8192  # canaries, a word, whole pages


def test_a_scale_of_no_number_is_refused_before_a_launch(
    oracle: Callable[[str], Path], device_code: Callable[[str], bytes], tmp_path: Path
) -> None:
    """Numerics, rule 4: of an expert that this prompt may never choose, too."""
    folder = tmp_path / "model"
    shutil.copytree(oracle("tiny13"), folder)
    with Checkpoint.open(folder) as checkpoint:
        name = next(n for n in checkpoint.names() if n.endswith(".weight_scale"))
        info = checkpoint.tensor_info(name)
    with (folder / info.file).open("r+b") as file:
        file.seek(info.offset + 5)
        file.write(b"\xfd")
    device = EmulatedDevice(device_code("cuda"))
    options = RunOptions(
        folder, (1,), 1, workgroups=4, chunk=3, cache=tmp_path / "cache", target=CUDA
    )
    with pytest.raises(UnsoundError, match=rf"{name}: got scale byte 253, need at most 252"):
        run_model(options, device=device)
    assert 0 not in {which for which, _ in device.launched}
    assert device.is_closed
