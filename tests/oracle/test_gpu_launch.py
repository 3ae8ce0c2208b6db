"""A run on a device from options to tokens: the launch, on emulated blocks, against the CPU's bits.

All of it is the code that a GPU runs but for the driver's calls (k3tool/runtime/gpu_cupy.py). No
GPU has run it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import UnsoundError
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import RunResult, run_model
from k3tool.runtime.sampling import Sampler
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


def test_a_seed_draws_the_same_tokens_on_a_device(
    engine: Callable[..., RunResult], device_code: Callable[[str], bytes]
) -> None:
    device = EmulatedDevice(device_code("cuda"))
    drawn = Sampler(temperature=2.0, top_p=0.99, seed=11)
    fixed = {"gen": 2, "workgroups": 4, "chunk": 3, "logits": False}
    on = {"interpreter": None, "target": CUDA, "device": device}
    found = engine("tiny13", (5, 9, 2), sampler=drawn, **on, **fixed)
    assert found.tokens == engine("tiny13", (5, 9, 2), sampler=drawn, **fixed).tokens
    assert found.tokens != engine("tiny13", (5, 9, 2), **fixed).tokens


@pytest.fixture
def on_device(
    monkeypatch: pytest.MonkeyPatch, device_code: Callable[[str], bytes], k3tool: Callable[..., Any]
) -> Callable[..., tuple[Any, EmulatedDevice]]:
    """Return a function that runs the command line where a device, maybe a damaged one, is."""

    def run(*words: object, **damage: Any) -> tuple[Any, EmulatedDevice]:
        device = EmulatedDevice(device_code("cuda"), **damage)
        monkeypatch.setattr("k3tool.runtime.prepare.find_devices", lambda target, n: device)
        return k3tool("run", *words, "--target", CUDA, "--workgroups", 4, "--chunk", 3), device

    return run


def test_the_command_is_the_same_as_on_the_cpu(
    oracle: Callable[[str], Path], on_device: Callable[..., Any], tmp_path: Path
) -> None:
    cache, logits = ("--cache", tmp_path), tmp_path / "logits.npz"
    asked = (oracle("tiny13"), "--ids", "1", "--gen", 1, *cache)
    done, device = on_device(*asked, "--json", "-v", "--logits", logits)
    assert done.code == 0, done.err
    start, token, end = map(json.loads, done.out.splitlines())
    assert (start["target"], start["leaves"], start["threads"]) == (CUDA, device.name, 0)
    assert token["ranks_agree"] == 1
    assert end["tokens"] == [token["id"]]
    held = sum(len(memory) for _, memory in device.pieces)
    assert 0 <= held - end["peak_memory_bytes"] < 8192  # canaries, a word, whole pages
    for phase in ("decode", "prefill"):  # the row of targets.BUILDS
        row = f"{CUDA} {phase}: k3_interp of kernels_cuda/interp.cu, 256 lanes a block, waves of 32"
        assert row in done.err
    with np.load(logits) as arrays:
        assert int(arrays["prefill"][0].argmax()) == token["id"]

    done, device = on_device(*asked, total_bytes=4096)
    assert (done.code, done.out) == (5, "")
    assert "memory of emulated blocks: got 4.048 KB free" in done.err
    done, device = on_device(*asked, "--deadline", 0.5, blocks_less=1)
    assert (done.code, done.out) == (4, "")
    assert "when the deadline passed" in done.err
    assert device.is_closed


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


def test_a_state_goes_on_on_the_other_target(
    engine: Callable[..., RunResult], device_code: Callable[[str], bytes], tmp_path: Path
) -> None:
    """A kept sequence belongs to no target: from the CPU to a device, and back."""
    prompt, fixed = (5, 9, 2), {"workgroups": 4, "chunk": 3, "ignore_eos": True}
    whole = engine("tiny13", prompt, gen=3, **fixed)
    for n, saves_on_device in enumerate((False, True)):
        state = tmp_path / f"{n}.h5"
        on = {
            "interpreter": None, "target": CUDA, "device": EmulatedDevice(device_code("cuda")),
        }  # fmt: skip
        here, there = (on, {}) if saves_on_device else ({}, on)
        engine("tiny13", prompt, gen=2, save_state=state, **fixed, **here)
        found = engine("tiny13", (), gen=1, load_state=state, **fixed, **there)
        assert found.tokens == whole.tokens[2:]
        assert found.steps is not None
        assert whole.steps is not None
        assert np.array_equal(found.steps.view("u4"), whole.steps[2:].view("u4"))
        assert not np.array_equal(found.steps.view("u4"), whole.steps[1:2].view("u4"))  # control
