"""Ranks on several devices: emulated ones, each with memory of its own, and a driver in between.

A device reaches what it allocated, and of others' memory what the driver has given it access to;
anything else ends the launch. Both vendors, each by the names, numbers and habits of its driver.
What a link between GPUs really does is NOT RUN.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from k3tool.errors import TargetError, UnsoundError
from k3tool.runtime.gpu_device import find_devices
from k3tool.runtime.gpu_group import GpuGroup
from k3tool.runtime.gpu_peers import Access, DeviceSet, PeerMemory, Properties
from k3tool.runtime.gpu_vendors import DRIVERS, Driver, version_text
from k3tool.runtime.ranks import Launch
from tests.kernels.emulated_device import EmulatedDevice
from tests.kernels.fake_cupy import fake_cupy, hip_library, refuse
from tests.runtime import toy
from tests.runtime.test_gpu_group import COMPARED, CUDA, HIP, program_of, run

Code = Callable[[str], bytes]
PIECE = 1 << 16


TARGETS = {"cuda": CUDA, "hip": HIP}
VENDORS = pytest.mark.parametrize("vendor", ["cuda", "hip"])
UNCACHED = 0x40000000
XGMI, PCIE = 4, 2
ACCESS, ATOMICS = "peer access", "atomics over its link"


@dataclass
class FakeDriver:
    """The calls of the driver's virtual memory, with their order and sizes held to the manual."""

    devices: Sequence[EmulatedDevice]
    vendor: str = "cuda"
    apart: tuple[int, int, str] = (-1, -1, "")  # two devices, and what they lack
    forgotten: int = -1  # negative control: a device that is given no access
    version: int = 71260540
    current: int = 0
    ranges: dict[int, Any] = field(default_factory=dict)
    made: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # -> size, device, type
    mapped: dict[int, int] = field(default_factory=dict)  # address -> handle
    homes: list[int] = field(default_factory=list)  # of what was mapped, in order
    handles: Any = field(default_factory=lambda: itertools.count(7))

    def __getattr__(self, name: str) -> Any:
        """A call by its whole name: each library has its own vendor's alone."""
        own = {"cuda": ("cu", "_cuda_"), "hip": ("hip", "_hip_")}[self.vendor]
        call = name.removeprefix(own[0])
        if name.startswith("_") or call == name:
            raise AttributeError(name)
        for prefix in (own[1], "_both_"):
            if prefix + call in dir(type(self)):
                return getattr(self, prefix + call)
        raise AttributeError(name)

    def _both_Init(self, flags: int) -> int:
        return 0

    def _cuda_DeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return 0

    _hip_GetDeviceCount = _cuda_DeviceGetCount

    def _hip_RuntimeGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def _hip_ModuleOccupancyMaxActiveBlocksPerMultiprocessor(self, *asked: Any) -> int:
        library = hip_library(DRIVERS["hip"].library)
        return int(library.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(*asked))

    def _hip_GetDevice(self, ordinal: Any) -> int:
        ordinal._obj.value = self.current
        return 0

    def _hip_SetDevice(self, ordinal: int) -> int:
        assert 0 <= ordinal < len(self.devices)
        self.current = ordinal
        return 0

    def _cuda_DeviceGetP2PAttribute(self, found: Any, attribute: int, a: int, b: int) -> int:
        assert a != b
        found._obj.value = int((a, b, {2: ACCESS, 3: ATOMICS}[attribute]) != self.apart)
        return 0

    def _hip_DeviceGetP2PAttribute(self, found: Any, attribute: int, a: int, b: int) -> int:
        """Of atomics the runtime said the kind of the link, which is something for PCIe too."""
        assert a != b
        assert attribute in {1, 2}
        lacks = self.apart == (a, b, ACCESS)
        found._obj.value = self._kind(a, b) if attribute == 2 else int(not lacks)
        return 0

    def _hip_ExtGetLinkTypeAndHopCount(self, a: int, b: int, kind: Any, hops: Any) -> int:
        assert a != b
        kind._obj.value, hops._obj.value = self._kind(a, b), 1
        return 0

    def _kind(self, a: int, b: int) -> int:
        return PCIE if self.apart == (a, b, ATOMICS) else XGMI

    def _check(self, asked: Any) -> tuple[int, int]:
        """Return the device that memory is asked for on, which HIP takes to be the current one."""
        properties = asked._obj
        assert (properties.handle_types, properties.location.type, properties.flags) == (0, 1, 0)
        assert properties.type in ({1} if self.vendor == "cuda" else {1, UNCACHED})
        asked_for = int(properties.location.id)
        return (asked_for if self.vendor == "cuda" else self.current), int(properties.type)

    def _both_MemGetAllocationGranularity(self, found: Any, asked: Any, option: int) -> int:
        found._obj.value = PIECE << self._check(asked)[0] % 2  # devices need not agree
        return 0

    def _both_MemAddressReserve(self, at: Any, size: Any, align: Any, wish: Any, flags: Any) -> int:
        assert (align.value, wish.value, flags.value) == (0, 0, 0)
        memory = mmap.mmap(-1, size.value)
        at._obj.value = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.ranges[at._obj.value] = memory
        return 0

    def _both_MemCreate(self, handle: Any, size: Any, asked: Any, flags: Any) -> int:
        device, kind = self._check(asked)
        assert size.value % (PIECE << device % 2) == flags.value == 0
        handle._obj.value = next(self.handles)
        self.made[handle._obj.value] = size.value, device, kind
        return 0

    def _both_MemMap(self, at: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert (offset.value, flags.value) == (0, 0)
        assert size.value == self.made[handle.value][0]
        assert any(a <= at.value < a + len(m) for a, m in self.ranges.items())
        self.mapped[at.value] = handle.value
        self.homes.append(self.made[handle.value][1])
        return 0

    def _both_MemSetAccess(self, at: Any, size: Any, each: Any, count: Any) -> int:
        n, home, kind = self.made[self.mapped[at.value]]
        assert n == size.value, "access to what is not one mapping"
        for access in each[: count.value]:
            assert (access.location.type, access.flags) == (1, 3)
            device = access.location.id
            # As reported of MI300X: coarse-grained memory ends a launch that counts in it from far.
            is_far = self.vendor == "hip" and kind != UNCACHED and device != home
            if device != self.forgotten and not is_far:
                self.devices[device].pieces.append((at.value, range(n)))
        return 0

    def _both_MemUnmap(self, at: Any, size: Any) -> int:
        assert self.made[self.mapped.pop(at.value)][0] == size.value
        return 0

    def _both_MemRelease(self, handle: Any) -> int:
        del self.made[handle.value]
        return 0

    def _both_MemAddressFree(self, at: Any, size: Any) -> int:
        assert len(self.ranges.pop(at.value)) == size.value
        return 0


def emulated(code: Code, vendor: str, name: str) -> EmulatedDevice:
    if vendor == "cuda":
        return EmulatedDevice(code("cuda"), name=name)
    return EmulatedDevice(code("hip"), name=name, arch="gfx942", n_domains=8)


def several(
    code: Code, n: int, vendor: str = "cuda", row: Driver | None = None, **given: Any
) -> tuple[DeviceSet, FakeDriver]:
    devices = [emulated(code, vendor, f"device {i}") for i in range(n)]
    driver = FakeDriver(devices, vendor, **given)
    peers = PeerMemory(row or DRIVERS[vendor], range(n), lambda name: driver)
    return DeviceSet(devices, range(n), peers), driver


def toy_group(device: Any, folder: Path, tp: int, vendor: str = "cuda") -> GpuGroup:
    isa = program_of(TARGETS[vendor], tp, {"cuda": 4, "hip": 8}[vendor])
    launch = Launch(None, toy.images(isa, folder), deadline_seconds=5.0)
    return GpuGroup(launch, isa, device, folder, lambda text: None)


def test_what_is_passed_is_laid_out_as_in_both_headers() -> None:
    assert (ctypes.sizeof(Properties), ctypes.sizeof(Access)) == (32, 12)
    offsets = {name: getattr(Properties, name).offset for name, _ in Properties._fields_}
    assert offsets == {
        "type": 0, "handle_types": 4, "location": 8, "handle_data": 16, "flags": 24
    }  # fmt: skip


@VENDORS
@pytest.mark.parametrize(("tp", "n"), [(2, 2), (4, 2), (4, 4)])
def test_ranks_of_several_devices_say_what_those_of_one_say(
    device_code: Code, tmp_path: Path, tp: int, n: int, vendor: str
) -> None:
    devices, driver = several(device_code, n, vendor)
    found = run(toy_group(devices, tmp_path, tp, vendor))
    want = run(toy_group(emulated(device_code, vendor, "one"), tmp_path, tp, vendor))
    assert len(found) == len(want) == 7
    for ours, theirs in zip(found, want, strict=True):
        for name in COMPARED:
            assert (ours[name] == theirs[name]).all(), name
    homes = [rank * n // tp for rank in range(tp)]
    assert driver.homes == [*homes, 0]  # segments, and the word that stops all
    assert driver.current == 0  # as it was found
    for place, device in enumerate(driver.devices):
        ranks = {stream for which, stream in device.launched if which == 0}
        assert ranks == set(range(place * tp // n, (place + 1) * tp // n))
        assert device.is_closed
        assert 1 in {which for which, _ in device.launched}  # the canaries, of every device
    assert (driver.mapped, driver.made, driver.ranges) == ({}, {}, {})


def test_control_hip_makes_memory_on_the_current_device(device_code: Code, tmp_path: Path) -> None:
    """What the location of an allocation says is not enough: hence hipSetDevice around it."""
    row = replace(DRIVERS["hip"], is_current=False)
    devices, driver = several(device_code, 2, "hip", row)
    devices.map_ranks(2, 64)
    assert driver.homes == [0, 0]


def test_control_cached_memory_of_hip_ends_the_launch(device_code: Code, tmp_path: Path) -> None:
    devices, _ = several(device_code, 2, "hip", replace(DRIVERS["hip"], kind=1))
    with pytest.raises((AssertionError, UnsoundError), match=r"not the device's|illegal address"):
        run(toy_group(devices, tmp_path, 2, "hip"))


def test_a_runtime_of_hip_that_caches_it_anyway_is_refused(device_code: Code) -> None:
    with pytest.raises(
        TargetError, match=r"--devices: got ROCm's runtime 7\.0\.51831, need 7\.12\.60540: earlier"
    ) as caught:
        several(device_code, 2, "hip", version=70051831)
    assert "--devices 1" in caught.value.hint
    assert version_text(71260540) == "7.12.60540"


@VENDORS
def test_control_a_peer_without_access_ends_the_launch(
    device_code: Code, tmp_path: Path, vendor: str
) -> None:
    devices, _ = several(device_code, 2, vendor, forgotten=1)
    with pytest.raises((AssertionError, UnsoundError), match=r"not the device's|illegal address"):
        run(toy_group(devices, tmp_path, 2, vendor))


@VENDORS
def test_control_memory_of_one_device_is_not_the_others(
    device_code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str
) -> None:
    """Ranks on two devices whose segments are device 0's own memory: what a map is for."""
    devices, driver = several(device_code, 2, vendor)
    monkeypatch.setattr(devices, "map_ranks", driver.devices[0].map_ranks)
    with pytest.raises(UnsoundError, match="device 1: got an illegal address, need access"):
        run(toy_group(devices, tmp_path, 2, vendor))


@VENDORS
@pytest.mark.parametrize("what", [ACCESS, ATOMICS])
def test_devices_that_do_not_reach_each_other_are_named(
    device_code: Code, what: str, vendor: str
) -> None:
    """On HIP a link that is not xGMI, whatever the attribute of atomics says of it."""
    with pytest.raises(TargetError, match=f"devices 2 and 1: got no {what}") as caught:
        several(device_code, 3, vendor, apart=(2, 1, what))
    assert "--devices 1" in caught.value.hint


def test_control_the_attribute_of_hip_says_atomics_of_any_link(device_code: Code) -> None:
    """What it would come to if the attribute were asked, as on CUDA."""
    several(device_code, 3, "hip", replace(DRIVERS["hip"], atomics=2), apart=(2, 1, ATOMICS))


@VENDORS
def test_each_device_has_room_for_its_ranks(device_code: Code, tmp_path: Path, vendor: str) -> None:
    devices, driver = several(device_code, 2, vendor)
    driver.devices[1].total_bytes = 4096
    with pytest.raises(TargetError, match=r"memory of device 1: .*B for 1 rank,") as caught:
        run(toy_group(devices, tmp_path, 2, vendor))
    assert f"({DRIVERS[vendor].monitor})" in caught.value.hint
    devices, driver = several(device_code, 2, vendor)
    driver.devices[1].n_units = 3
    with pytest.raises(TargetError, match=r"device 1: decode: got 3 resident blocks, need \d, "):
        run(toy_group(devices, tmp_path, 2, vendor))


@VENDORS
def test_through_the_calls_of_cupy(
    device_code: Code, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str
) -> None:
    """Every call with its own device current: streams and modules belong to one."""
    behind = [emulated(device_code, vendor, "behind") for _ in range(2)]
    driver, asked = FakeDriver(behind, vendor), list[str]()
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(*behind, is_hip=vendor == "hip"))
    devices = find_devices(TARGETS[vendor], 2, lambda name: asked.append(name) or driver)
    assert asked == [DRIVERS[vendor].library] * 2
    for member in devices.members():
        monkeypatch.setattr(
            type(member), "build", lambda self, *asked: behind[0].code, raising=True
        )
    rows = run(toy_group(devices, tmp_path, 2, vendor))
    tokens = [int(row["id"][0]) for row in rows if row["kind"][0] == 2 + 1]
    assert tokens == toy.expected_tokens(toy.random_weights(), (5,), 6)
    for device in behind:
        assert {which for which, _ in device.launched} == {0, 1}


def test_what_is_asked_for_and_not_here(
    device_code: Code, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, k3tool: Any
) -> None:
    behind = [emulated(device_code, "cuda", "behind") for _ in range(2)]
    driver = FakeDriver(behind)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(*behind))
    with pytest.raises(TargetError, match="--devices: got 3, need at most 2, which are here"):
        find_devices(CUDA, 3, lambda name: driver)
    apart = replace(driver, apart=(0, 1, ACCESS))
    with pytest.raises(TargetError, match="devices 0 and 1: got no peer access"):
        find_devices(CUDA, 2, lambda name: apart)
    busy = fake_cupy(*behind, streamCreateWithFlags=refuse(46, "cudaErrorDevicesUnavailable: x"))
    monkeypatch.setitem(sys.modules, "cupy", busy)
    with pytest.raises(TargetError, match="got cudaErrorDevicesUnavailable: x") as caught:
        find_devices(CUDA, 2, lambda name: driver)
    assert caught.value.hint == "another process has the device to itself: nvidia-smi names it"
    done = k3tool("run", tmp_path, "--ids", "1", "--devices", 2)
    assert done.code == 2
    assert "--devices: got 2, need 1, or a GPU's --target" in done.err


def test_ranks_that_devices_cannot_share_out_are_refused(
    device_code: Code, monkeypatch: pytest.MonkeyPatch, oracle: Callable[[str], Path], k3tool: Any
) -> None:
    devices, _ = several(device_code, 2)
    monkeypatch.setattr("k3tool.runtime.prepare.find_devices", lambda target, n: devices)
    done = k3tool("run", oracle("tiny13"), "--ids", "1", "--target", CUDA, "--devices", 2)
    assert done.code == 2
    assert "--devices: got 2, need a divisor of 1 rank: as many on each" in done.err
