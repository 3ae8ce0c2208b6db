"""The calls that are made of CuPy, with a module in its place; what a GPU answers is NOT RUN.

What CuPy says in words (no package, no driver, no memory, a broken launch) becomes one sentence.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3tool.errors import TargetError, UnsoundError
from k3tool.runtime import gpu_build
from k3tool.runtime.compile_gpu import Compiled
from k3tool.runtime.gpu_build import object_of
from k3tool.runtime.gpu_compilers import Kernel
from k3tool.runtime.gpu_cupy import open_device
from k3tool.runtime.gpu_group import GpuGroup
from k3tool.runtime.gpu_source import op_names
from k3tool.runtime.ranks import Launch
from tests.kernels.emulated_device import EmulatedDevice
from tests.kernels.fake_cupy import FakeError, fake_cupy, hip_library, refuse
from tests.runtime import toy
from tests.runtime.test_gpu_group import CUDA, HIP, program_of, run

Code = Callable[[str], bytes]
VENDOR_DOMAINS = {"cuda": 1, "hip": 8}
# How many arguments CuPy's calls take where their place takes any; 0: it has none.
COUNTS = {
    "launchCooperativeKernel": 10, "launchKernel": 11, "driverGetVersion": 0, "memGetInfo": 0,
    "graphDestroy": 1, "graphExecDestroy": 1,
}  # fmt: skip


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, device_code: Code) -> Callable[..., Any]:
    """Return a function that opens a device of a module in CuPy's place."""

    def make(
        target: str = CUDA, load: Callable[[str], Any] = hip_library, **changed: Any
    ) -> tuple[Any, EmulatedDevice]:
        vendor = target.partition(":")[0]
        emulated = EmulatedDevice(device_code(vendor), n_domains=VENDOR_DOMAINS[vendor])
        cupy = fake_cupy(emulated, **{"is_hip": vendor == "hip"} | changed)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        device = open_device(target, load=load)
        monkeypatch.setattr(type(device), "build", lambda self, *asked: emulated.code)
        return device, emulated

    return make


@pytest.mark.parametrize("target", [CUDA, HIP])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_run_through_its_calls(opened: Any, tmp_path: Path, tp: int, target: str) -> None:
    device, emulated = opened(target)
    arch = target.partition(":")[2].removesuffix("a")
    assert (device.name, device.arch, device.n_units) == ("fake GPU", arch, 32)
    isa = program_of(target, tp, 4 if target == CUDA else 8)
    launch = Launch(None, toy.images(isa, tmp_path))
    rows = run(GpuGroup(launch, isa, device, tmp_path, lambda text: None))
    tokens = [int(row["id"][0]) for row in rows if row["kind"][0] == 2 + 1]
    assert tokens == toy.expected_tokens(toy.random_weights(), (5,), 6)
    streams = {stream for which, stream in emulated.launched if which == 0}
    assert len(streams) == tp  # ranks run at once
    assert sorted(emulated.freed) == sorted(at for at, _ in emulated.pieces)


def test_no_cupy_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for target, package in ((CUDA, "cupy-cuda13x"), ("hip:gfx942", "cupy-rocm-7-0")):
        with pytest.raises(TargetError, match=f"got no CuPy, need PyPI package {package}"):
            open_device(target)


def test_a_cupy_of_the_other_vendor_is_refused(opened: Any) -> None:
    with pytest.raises(TargetError, match=r"got CuPy 14\.2\.0 for the other vendor"):
        opened(is_hip=True)


def test_a_driver_that_cupy_cannot_use_is_refused(opened: Any) -> None:
    with pytest.raises(TargetError, match="got cudaErrorInsufficientDriver: too old, need"):
        opened(setDevice=refuse(35, "cudaErrorInsufficientDriver: too old\nand more"))


@pytest.mark.parametrize("target", [CUDA, HIP])
def test_memory_that_went_meanwhile_says_how_much(opened: Any, target: str) -> None:
    device, _ = opened(target, malloc=refuse(2, "cudaErrorMemoryAllocation: out of memory"))
    with pytest.raises(TargetError, match=r"memory of fake GPU: .*need 4\.096 KB") as caught:
        device.alloc(4096)
    assert ("nvidia-smi" in caught.value.hint) == (target == CUDA)
    assert ("amd-smi" in caught.value.hint) == (target == HIP)
    device, _ = opened(malloc=refuse(700, "cudaErrorIllegalAddress: an illegal access"))
    with pytest.raises(UnsoundError, match="cudaErrorIllegalAddress"):
        device.alloc(4096)


def test_a_launch_that_broke_the_device_is_unsound(opened: Any, tmp_path: Path) -> None:
    isa = program_of(CUDA, 1)
    device, _ = opened(streamQuery=lambda stream: 700)
    group = GpuGroup(Launch(None, toy.images(isa, tmp_path)), isa, device, tmp_path, print)
    with pytest.raises(UnsoundError, match="a launch: got error 700 of the driver"), group:
        pass


def test_ranks_that_would_share_a_queue_are_refused(
    monkeypatch: pytest.MonkeyPatch, opened: Any, tmp_path: Path
) -> None:
    """A launch behind another one in its queue waits for it, and that one for its peer."""
    for target, name, default in (
        (CUDA, "CUDA_DEVICE_MAX_CONNECTIONS", 7), (HIP, "GPU_MAX_HW_QUEUES", 3)
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
        assert opened(target)[0].n_streams == default  # one is for copies
        monkeypatch.setenv(name, "2")
        device, _ = opened(target)
        isa = program_of(target, 2, 4 if target == CUDA else 8)
        group = GpuGroup(Launch(None, toy.images(isa, tmp_path)), isa, device, tmp_path, print)
        with pytest.raises(TargetError, match="got 2 ranks, need at most 1: ") as caught, group:
            pass
        assert f"{name}=3 in the environment" in caught.value.hint


def test_hip_is_asked_how_many_blocks_fit(opened: Any) -> None:
    """CuPy's build for ROCm has no such call: it says hipErrorUnknown of every kernel."""
    device, emulated = opened(HIP, lambda name: hip_library(name, blocks=3))
    kernel = device.load(emulated.code, "k3_interp")
    assert device.resident_blocks(kernel, 512) == 3 * 32
    with pytest.raises(FakeError, match="hipErrorUnknown"):
        device._driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.ptr, 512, 0)
    device, emulated = opened(HIP, lambda name: hip_library(name, status=1))
    with pytest.raises(UnsoundError, match=r"hipModuleOccupancy\w+ error 1"):
        device.resident_blocks(device.load(emulated.code, "k3_interp"), 512)


def test_an_object_that_the_driver_refuses(opened: Any) -> None:
    device, _ = opened()
    with pytest.raises(TargetError, match=r"k3_interp: got CUDA_ERROR_INVALID_IMAGE.*need an"):
        device.load(b"no object", "k3_interp")


def test_memory_of_a_launch_that_runs_is_not_freed(opened: Any) -> None:
    device, emulated = opened(streamQuery=lambda stream: 600)
    at = device.alloc(64)
    emulated.load(emulated.code, "k3_canary")
    device.launch(device.load(emulated.code, "k3_canary"), 1, 256, (at, at + 32), 0)
    device.close()
    assert emulated.freed == []


# ---- objects ------------------------------------------------------------------------------------


def test_an_object_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device_code: Code
) -> None:
    kernel, phases = Kernel("k3_interp", 200, 0, 0, 0, 0, 0), ("decode", "prefill")
    code, ops = device_code("cuda"), op_names("cuda", "decode")
    made = Compiled(CUDA, "nvcc 1", (kernel,), (), code, "")
    calls: list[str] = []

    def compiler(source: Any, target: str) -> Compiled:
        calls.append(source.digest)
        return made

    monkeypatch.setattr(gpu_build, "find_compiler", lambda target: compiler)
    for _ in range(2):
        assert object_of(CUDA, phases, ops, tmp_path) == code
    assert len(calls) == 1
    (kept,) = tmp_path.glob("gpu-*.object")
    whole = kept.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # anywhere in its code: it still says that it is what was asked
    for n, damaged in enumerate((whole[:5000], bytes(flipped), b"", code), start=2):
        kept.write_bytes(damaged)
        assert object_of(CUDA, phases, ops, tmp_path) == code
        assert len(calls) == n
        assert kept.read_bytes() == whole
    with pytest.raises(TargetError, match=r"ops: got .*, need "):
        object_of(CUDA, phases, ops[1:], tmp_path)
    kept.unlink()
    made = replace(made, kernels=(replace(kernel, spills=4),))
    with pytest.raises(UnsoundError, match="4 spilled"):
        object_of(CUDA, phases, ops, tmp_path)
    monkeypatch.setattr(gpu_build, "find_compiler", lambda target: None)
    with pytest.raises(TargetError, match="compiler for cuda:sm_90a: got none, need nvcc"):
        object_of(CUDA, phases, ops, tmp_path)


def test_the_place_is_a_module() -> None:
    """Control: what stands in CuPy's place answers like a module, not like everything."""
    with pytest.raises(AttributeError):
        _ = fake_cupy(EmulatedDevice(b"")).ndarray
    assert isinstance(fake_cupy(EmulatedDevice(b"")), SimpleNamespace)


def required(call: Callable[..., Any]) -> int:
    """Return how many arguments have no default."""
    kinds = inspect.signature(call).parameters.values()
    return sum(kind.default is inspect.Parameter.empty for kind in kinds)


def test_cupy_takes_the_arguments_that_its_place_does() -> None:
    """Each call with as many objects, which none takes for numbers: nothing is called."""
    cupy = pytest.importorskip("cupy", reason="NOT RUN: CuPy is not installed")
    place = fake_cupy(EmulatedDevice(b""))
    for part in ("runtime", "driver"):
        real = getattr(cupy.cuda, part)
        for name, stand_in in vars(getattr(place.cuda, part)).items():
            assert hasattr(real, name), name
            if isinstance(stand_in, type) or not callable(stand_in) or not COUNTS.get(name, 1):
                continue
            n = COUNTS.get(name) or required(stand_in)
            with pytest.raises(TypeError, match="integer"):
                getattr(real, name)(*(object() for _ in range(n)))
            with pytest.raises(TypeError, match="argument"):
                getattr(real, name)(*(object() for _ in range(n + 2)))
