"""Whether a GPU that a run was asked for is here; never another target in its place.

Only the driver is asked, through ctypes, and only when a GPU target is named. It loads no object:
no launch of the interpreters has been written yet, and `require_device` says so where it finds a
device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from k3tool.errors import TargetError
from k3tool.isa.table import ALL_PHASES
from k3tool.targets import get_build, get_target

_CPU = "leave --target out to run on the CPU"


@dataclass(frozen=True, slots=True)
class Driver:
    """A vendor's driver library and its two calls that are asked first."""

    library: str
    start: str
    count: str
    package: str


DRIVERS = {
    "cuda": Driver("libcuda.so.1", "cuInit", "cuDeviceGetCount", "NVIDIA's driver"),
    "hip": Driver("libamdhip64.so", "hipInit", "hipGetDeviceCount", "ROCm"),
}


def builds_of(target: str) -> Iterator[str]:
    """Yield a line for each phase: which build serves a GPU target."""
    for phase in ALL_PHASES:
        build = get_build(target, phase)
        lanes = f"{build.lanes} lanes a block, waves of {build.wave}"
        yield f"{target} {phase}: {build.kernel} of {build.source}, {lanes}"


def require_device(target: str, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> None:
    """Return if `target` can run here. `load` opens a library.

    Raises: UsageError for an unknown target; TargetError where driver, device or launch is absent.
    """
    family = get_target(target).family
    if family == "cpu":
        return
    driver = DRIVERS[family]
    need = f"a device, and {driver.package}"
    try:
        library = load(driver.library)
    except OSError:
        raise TargetError(
            f"--target {target}", got=f"no {driver.library}", need=need, hint=_CPU
        ) from None
    failed = getattr(library, driver.start)(0)
    if failed:
        got = f"{driver.start} error {failed}"
        raise TargetError(f"--target {target}", got=got, need=need, hint=_CPU)
    count = ctypes.c_int()
    failed = getattr(library, driver.count)(ctypes.byref(count))
    if failed or count.value < 1:
        got = f"{driver.count} error {failed}" if failed else "no device"
        raise TargetError(f"--target {target}", got=got, need=need, hint=_CPU)
    raise TargetError(
        f"--target {target}", got=f"{count.value} devices, and no launch in this build",
        need="an interpreter that this build can launch", hint=_CPU,
    )  # fmt: skip
