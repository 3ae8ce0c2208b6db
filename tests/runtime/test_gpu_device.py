"""A GPU that is asked for and not here: exit code 5, never the CPU in its place."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from k3tool.errors import TargetError, UsageError
from k3tool.runtime.gpu_device import builds_of, require_device
from k3tool.targets import BUILDS

GPU_TARGETS = sorted({target for target, _ in BUILDS})


def driver(*, init=0, error=0, n_devices=0):
    """A library whose calls answer so; it notes which was opened."""

    def count(pointer):
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = n_devices
        return error

    calls = {name: lambda flags: init for name in ("cuInit", "hipInit")}
    calls |= dict.fromkeys(("cuDeviceGetCount", "hipGetDeviceCount"), count)
    return lambda name: SimpleNamespace(**calls)


def absent(name):
    raise OSError(name)


def test_the_cpu_asks_no_driver():
    require_device("cpu", absent)


def test_control_a_device_is_taken():
    require_device("cuda:sm_90a", driver(n_devices=2))


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize(
    ("load", "message"),
    [
        (absent, r"got no lib(cuda|amdhip64)\.so"),
        (driver(init=100), "(cu|hip)Init error 100"),
        (driver(error=3), "(cuDeviceGetCount|hipGetDeviceCount) error 3"),
        (driver(), "got no device"),
    ],
    ids=["no-driver", "driver-fails", "count-fails", "no-device"],
)
def test_what_is_absent_is_named(target, load, message):
    with pytest.raises(TargetError, match=message) as caught:
        require_device(target, load)
    assert caught.value.object == f"--target {target}"
    assert "CPU" in caught.value.hint


def test_an_unknown_target_is_a_usage_error():
    with pytest.raises(UsageError, match="hip:gfx950"):
        require_device("cuda:sm_70", absent)


def test_builds_are_named():
    lines = list(builds_of("hip:gfx950"))
    assert len(lines) == 4
    flash = "decode, with MLA_PAGES or MLA_ATTEND: k3_interp of kernels_hip/flash.hip, 512 lanes"
    assert flash in lines[0]
    assert "decode: k3_interp of kernels_hip/interp.hip, 512 lanes a block, waves" in lines[1]


@pytest.mark.parametrize("target", ["cuda:sm_90a", "hip:gfx942"])
def test_run_does_not_fall_back_to_the_cpu(k3tool, tmp_path, target):
    """Before anything is read: no checkpoint is there, and the target is what is refused."""
    done = k3tool("run", tmp_path / "absent", "--ids", "1", "--target", target)
    assert done.code == 5
    assert f"k3tool run: --target {target}: got " in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("option", "value"),
    [("--memory", "8GB"), ("--threads", 2), ("--leaves", "avx2"), ("--weights", "copied")],
)
def test_what_concerns_the_cpu_alone_is_refused(k3tool, tmp_path, option, value):
    given = ("run", tmp_path, "--ids", "1", "--target", "cuda:sm_90a")
    done = k3tool(*given, option, value)
    assert done.code == 2
    assert f"{option}: got also --target cuda:sm_90a, need one of the two" in done.err


def test_run_refuses_an_unknown_target(k3tool, tmp_path):
    done = k3tool("run", tmp_path / "absent", "--ids", "1", "--target", "cuda:sm_70")
    assert done.code == 2
