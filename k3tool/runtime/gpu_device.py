"""Whether a GPU that a run was asked for is here; never another target in its place.

The driver is asked first, through ctypes, and only when a GPU target is named: its absence is a
plain sentence then, whatever CuPy would say of it. It loads no object.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from k3tool.errors import K3Error, TargetError, excluded
from k3tool.isa.table import ALL_PHASES
from k3tool.runtime.gpu_cupy import open_device
from k3tool.runtime.gpu_peers import DeviceSet, PeerMemory
from k3tool.runtime.gpu_runtime import Device, Devices, check_arch
from k3tool.runtime.gpu_vendors import DRIVERS
from k3tool.runtime.options import RunOptions
from k3tool.targets import BUILDS, get_target

Load = Callable[[str], Any]
_CPU = "leave --target out to run on the CPU"


def builds_of(target: str) -> Iterator[str]:
    """Yield a line for each phase and build: which serves a GPU target, and when."""
    get_target(target)
    for phase in ALL_PHASES:
        for build in BUILDS[target, phase]:
            lanes = f"{build.lanes} lanes a block, waves of {build.wave}"
            when = f", with {' or '.join(build.ops)}" if build.ops else ""
            yield f"{target} {phase}{when}: {build.kernel} of {build.source}, {lanes}"


def require_device(target: str, load: Load = ctypes.CDLL, n: int = 1) -> None:
    """Return if `target` can run here, on `n` devices. `load` opens a library.

    Raises: UsageError for an unknown target; TargetError where driver or device is absent.
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
    if count.value < n:
        raise TargetError("--devices", got=n, need=f"at most {count.value}, which are here")


def find_device(target: str) -> Device:
    """Return the device that a target runs on. Raises: TargetError where it is absent or unfit."""
    (device,) = _open(target, 1)
    return device


def find_devices(target: str, n: int, load: Load = ctypes.CDLL) -> Devices:
    """Return the first `n` devices, as one where there are several. `load` opens a library.

    Raises: TargetError where one is absent or unfit, or two do not reach each other.
    """
    if n == 1:
        return find_device(target)
    vendor, devices = DRIVERS[get_target(target).family], _open(target, n, load)
    try:
        return DeviceSet(devices, range(n), PeerMemory(vendor, range(n), load))
    except K3Error:
        _close(devices)
        raise


def _open(target: str, n: int, load: Load = ctypes.CDLL) -> list[Device]:
    require_device(target, load, n)
    devices: list[Device] = []
    try:
        for ordinal in range(n):
            devices.append(open_device(target, ordinal, load))
            check_arch(devices[-1], target)
    except TargetError:
        _close(devices)
        raise
    return devices


def _close(devices: Sequence[Device]) -> None:
    for device in devices:
        device.close()


def check_gpu_options(options: RunOptions) -> None:
    """Refuse what concerns the CPU alone, and would be dropped in silence.

    Raises: UsageError naming the first.
    """
    given = {
        "--memory": options.memory_bytes is not None, "--threads": options.threads is not None,
        "--leaves": options.leaves != "auto", "--weights": options.weights != "auto",
        "--expert-trace": options.expert_trace is not None,
    }  # fmt: skip
    for name in (name for name, is_given in given.items() if is_given):
        raise excluded(name, f"--target {options.target}", "a GPU has no use for it")
