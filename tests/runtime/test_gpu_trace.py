"""A traced group on a device: the hashes of the CPU's ranks on the toy program, and how it ends."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.errors import TargetError, UnsoundError
from k3tool.isa.stream import Isa
from k3tool.isa.table import PAGE_TOKENS
from k3tool.isa.windows import build_windows
from k3tool.runtime.engine import StepToken
from k3tool.runtime.fault_words import fault_error
from k3tool.runtime.gpu_group import GpuGroup
from k3tool.runtime.ranks import FaultError, Launch, RankGroup
from k3tool.runtime.requests import Step
from k3tool.targets import get_target
from k3tool.trace.downloads import Downloads
from k3tool.trace.recorder import Recorder
from tests.kernels.emulated_device import EmulatedDevice
from tests.runtime import toy

TARGETS: dict[str, dict[str, Any]] = {
    "cuda:sm_90a": {}, "hip:gfx942": {"arch": "gfx942", "n_domains": 8}
}  # fmt: skip
Code = Callable[[str], bytes]


def toy_of(tp: int) -> Isa:
    """Return the toy with what a trace asks of a program's parameters."""
    isa = toy.toy_isa(tp, 9)
    return replace(isa, params=isa.params | {"pages_per_slot": isa.params["ctx"] // PAGE_TOKENS})


def program_of(target: str, tp: int) -> Isa:
    """Return the toy's program for a target, with windows where the target has domains."""
    isa, found = replace(toy_of(tp), target=target), get_target(target)
    return toy.change_stream(
        isa, lambda stream: replace(stream, windows=build_windows(stream.queues, found))
    )


def device_of(target: str, code: Code, **damage: Any) -> EmulatedDevice:
    return EmulatedDevice(code(get_target(target).family), **TARGETS[target], **damage)


def run(
    isa: Isa, device: EmulatedDevice, folder: Path, recorder: Recorder, seconds: float = 5.0
) -> list[int]:
    """Run to the end and return tokens; faults in the words of the program."""
    launch = Launch(None, toy.images(isa, folder), deadline_seconds=seconds, recorder=recorder)
    with GpuGroup(launch, isa, device, folder, lambda text: None) as group:
        try:
            group.wait_ready(lambda done, total: None)
            return [int(rows["id"][0]) for rows in group.steps()][-6:]
        except FaultError as stop:
            raise fault_error(isa, stop.fault, [], []) from None


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("target", TARGETS)
def test_the_hashes_are_those_of_the_cpu(
    device_code: Code, tmp_path: Path, target: str, tp: int
) -> None:
    isa, here = program_of(target, tp), toy_of(tp)
    with Recorder(tmp_path / "a", isa) as device, Recorder(tmp_path / "b", here) as cpu:
        run(isa, device_of(target, device_code), tmp_path, device)
        with RankGroup(toy.launch(toy.images(here, tmp_path), recorder=cpu)) as group:
            n_steps = len(list(group.steps()))
        found, want = list(device.steps()), list(cpu.steps())
        assert (device.error, cpu.error) == (0, 0)
        assert len(found) == len(want) == n_steps
        for ours, theirs in zip(found, want, strict=True):
            assert ours[:4] == theirs[:4]
            assert np.array_equal(ours.hashes, theirs.hashes)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_that_trapped_is_not_in_the_trace(
    device_code: Code, tmp_path: Path, tp: int
) -> None:
    """A group that waits for a rank that has left ends all the same, once a step."""

    def unknown_opcode(device: EmulatedDevice, launch: Any) -> None:
        if launch["rank"] == tp - 1 and launch["phase"] == 0:
            at = int(launch["insts"]) + 64 * toy.NORM
            device.upload(at, np.array([250], "<u2").tobytes())

    isa, start = program_of("cuda:sm_90a", tp), time.monotonic()
    device = device_of("cuda:sm_90a", device_code, spoil=unknown_opcode)
    with Recorder(tmp_path / "trace", isa) as recorder:
        with pytest.raises(TargetError, match="opcode 250, no handler"):
            run(isa, device, tmp_path, recorder, seconds=1.0)
        assert {step.phase for step in recorder.steps()} == {"prefill"}
    assert time.monotonic() - start < 30


def test_a_launch_that_loses_a_block_ends_at_the_deadline(
    device_code: Code, tmp_path: Path
) -> None:
    isa = program_of("cuda:sm_90a", 2)
    device = device_of("cuda:sm_90a", device_code, blocks_less=1)
    with Recorder(tmp_path / "trace", isa) as recorder:
        with pytest.raises(UnsoundError, match="when the deadline passed"):
            run(isa, device, tmp_path, recorder, seconds=0.5)
        assert not list(recorder.steps())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT RUN: no /dev/full")
def test_a_full_disk_ends_the_trace_and_not_the_run(device_code: Code, tmp_path: Path) -> None:
    isa = program_of("cuda:sm_90a", 2)
    want = toy.expected_tokens(toy.random_weights(), (5,), 6)
    with Recorder(tmp_path / "trace", isa) as recorder:
        os.dup2(os.open("/dev/full", os.O_RDWR), recorder._ranks[1].hashes)
        assert run(isa, device_of("cuda:sm_90a", device_code), tmp_path, recorder) == want
        assert recorder.error == errno.ENOSPC
        assert not list(recorder.steps())


def test_a_mixture_of_sequences_ends_the_trace(tmp_path: Path) -> None:
    """Rows take their numbers from one sequence, on the CPU too."""
    isa = program_of("cuda:sm_90a", 1)
    with Recorder(tmp_path / "trace", isa) as recorder:
        hashes = Downloads(recorder, lambda rank, handle, at, n_bytes: bytes(n_bytes))
        for tokens, n_steps in (([StepToken(1, 0, 0)], 1), (
            [StepToken(1, 1, 0), StepToken(1, 0, 1)], 1), ([StepToken(1, 2, 0)], 1),
        ):  # fmt: skip
            hashes.begin(Step(1, tokens, 1, 0))
            hashes.take(toy.NORM)
            hashes.end()
            assert len(list(recorder.steps())) == n_steps
        assert recorder.error == errno.ENOTSUP
