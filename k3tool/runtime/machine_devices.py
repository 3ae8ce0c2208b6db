"""Which GPUs this machine has: what the driver's own calls and files say; no kernel is loaded.

CuPy is not imported: it takes seconds and says less of what is absent.
"""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

from k3tool.errors import TargetError
from k3tool.runtime.gpu_device import require_device
from k3tool.runtime.gpu_vendors import DRIVERS
from k3tool.targets import TARGETS
from k3tool.verdict import Check, not_run, passed

_NVIDIA = Path("/proc/driver/nvidia")
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_AMD_MODULE = Path("/sys/module/amdgpu/version")
_AMD_VERSION = "gfx_target_version"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*, of the driver API's cuda.h
Load = Callable[[str], ctypes.CDLL]


def device_checks(
    load: Load = ctypes.CDLL, nvidia: Path = _NVIDIA, amd: Path = _AMD_NODES,
    amd_module: Path = _AMD_MODULE,
) -> Iterator[Check]:  # fmt: skip
    """Yield a check for each vendor: its devices by architecture, or why there are none.

    PASS is a device that a target of ours names; another architecture is NOT RUN by name.
    """
    found = {"cuda": lambda: cuda_archs(load), "hip": lambda: amd_archs(amd)}
    drivers = {"cuda": _first_line(nvidia / "version"), "hip": _first_line(amd_module)}
    for family in DRIVERS:
        name = f"{family} devices"
        target = next(t.name for t in TARGETS.values() if t.family == family)
        try:
            require_device(target, load)
        except TargetError as error:
            yield not_run(name, f"{error.got}; needs {error.need}")
            continue
        archs = found[family]()
        driver = f" (driver: {drivers[family]})" if drivers[family] else ""
        known = [arch for arch in archs if _target_of(family, arch)]
        detail = ", ".join(archs) + driver
        if known:
            yield passed(name, f"{detail}: run --target {_target_of(family, known[0])}")
        else:
            served = " or ".join(t.name for t in TARGETS.values() if t.family == family)
            yield not_run(name, f"{detail or 'architecture unknown'}; needs {served}")


def _target_of(family: str, arch: str) -> str | None:
    """Return the target that serves an architecture: sm_90 is served by code for sm_90a."""
    names = (f"{family}:{arch}", f"{family}:{arch}a")
    return next((name for name in names if name in TARGETS), None)


def cuda_archs(load: Load) -> list[str]:
    """Return sm_NN of each device that the driver counts."""
    library = load(DRIVERS["cuda"].library)
    library.cuInit(0)
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    archs = []
    for number in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        failed = library.cuDeviceGet(ctypes.byref(device), number)
        for value, attribute in ((major, _MAJOR), (minor, _MINOR)):
            failed = failed or library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        if not failed:
            archs.append(f"sm_{major.value}{minor.value}")
    return archs


def amd_archs(nodes: Path) -> list[str]:
    """Return gfxNNN of each GPU in the kernel driver's topology; CPUs are nodes of it too.

    The file holds 90402 for gfx942: major, minor and stepping in two decimal digits each, of which
    the name writes the stepping in hexadecimal.
    """
    archs = []
    for path in sorted(nodes.glob("*/properties")):
        lines = (line.split() for line in path.read_text().splitlines())
        version = int(dict(line for line in lines if len(line) == 2).get(_AMD_VERSION, "0"))
        if version:
            major, minor, stepping = version // 10000, version // 100 % 100, version % 100
            archs.append(f"gfx{major}{minor:x}{stepping:x}")
    return archs


def _first_line(path: Path) -> str:
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return ""
