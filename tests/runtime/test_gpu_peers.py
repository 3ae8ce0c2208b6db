"""Ranks on several devices: emulated ones, each with memory of its own, and a driver in between.

A device reaches what it allocated, and of others' memory what the driver has given it access to;
anything else ends the launch. What a link between GPUs really does is NOT RUN.
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
from k3tool.runtime.gpu_peers import DeviceSet, PeerMemory, Properties
from k3tool.runtime.ranks import Launch
from tests.kernels.emulated_device import EmulatedDevice
from tests.kernels.fake_cupy import fake_cupy, refuse
from tests.runtime import toy
from tests.runtime.test_gpu_group import COMPARED, CUDA, program_of, run

Code = Callable[[str], bytes]
PIECE = 1 << 16


@dataclass
class FakeDriver:
    """The calls of the driver's virtual memory, with their order and sizes held to the manual."""

    devices: Sequence[EmulatedDevice]
    apart: tuple[int, int, int] = (-1, -1, 0)  # two devices, and the attribute they lack
    forgotten: int = -1  # negative control: a device that is given no access
    ranges: dict[int, Any] = field(default_factory=dict)
    made: dict[int, tuple[int, int]] = field(default_factory=dict)  # handle -> size, device
    mapped: dict[int, int] = field(default_factory=dict)  # address -> size
    handles: Any = field(default_factory=lambda: itertools.count(7))

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGetP2PAttribute(self, found: Any, attribute: int, a: int, b: int) -> int:
        assert a != b
        found._obj.value = int((a, b, attribute) != self.apart)
        return 0

    def _check(self, asked: Any) -> int:
        properties = asked._obj
        assert ctypes.sizeof(Properties) == 32
        assert (properties.type, properties.handle_types, properties.location.type) == (1, 0, 1)
        return int(properties.location.id)

    def cuMemGetAllocationGranularity(self, found: Any, asked: Any, option: int) -> int:
        found._obj.value = PIECE << self._check(asked) % 2  # devices need not agree
        return 0

    def cuMemAddressReserve(self, at: Any, size: Any, align: Any, wish: Any, flags: Any) -> int:
        memory = mmap.mmap(-1, size.value)
        at._obj.value = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.ranges[at._obj.value] = memory
        return 0

    def cuMemCreate(self, handle: Any, size: Any, asked: Any, flags: Any) -> int:
        device = self._check(asked)
        assert size.value % (PIECE << device % 2) == 0
        handle._obj.value = next(self.handles)
        self.made[handle._obj.value] = size.value, device
        return 0

    def cuMemMap(self, at: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert size.value == self.made[handle.value][0]
        assert any(a <= at.value < a + len(m) for a, m in self.ranges.items())
        self.mapped[at.value] = size.value
        return 0

    def cuMemSetAccess(self, at: Any, size: Any, each: Any, count: Any) -> int:
        parts = {a: n for a, n in self.mapped.items() if at.value <= a < at.value + size.value}
        assert sum(parts.values()) == size.value, "access to what is not mapped"
        for access in each[: count.value]:
            assert (access.location.type, access.flags) == (1, 3)
            if access.location.id != self.forgotten:
                pieces = [(a, range(n)) for a, n in parts.items()]
                self.devices[access.location.id].pieces.extend(pieces)
        return 0

    def cuMemUnmap(self, at: Any, size: Any) -> int:
        assert self.mapped.pop(at.value) == size.value
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        del self.made[handle.value]
        return 0

    def cuMemAddressFree(self, at: Any, size: Any) -> int:
        assert len(self.ranges.pop(at.value)) == size.value
        return 0


def several(code: Code, n: int, **given: Any) -> tuple[DeviceSet, FakeDriver]:
    devices = [EmulatedDevice(code("cuda"), name=f"device {i}") for i in range(n)]
    driver = FakeDriver(devices, **given)
    return DeviceSet(devices, range(n), PeerMemory(range(n), lambda name: driver)), driver


def toy_group(device: Any, folder: Path, tp: int) -> GpuGroup:
    isa = program_of(CUDA, tp)
    launch = Launch(None, toy.images(isa, folder), deadline_seconds=5.0)
    return GpuGroup(launch, isa, device, folder, lambda text: None)


@pytest.mark.parametrize(("tp", "n"), [(2, 2), (4, 2), (4, 4)])
def test_ranks_of_several_devices_say_what_those_of_one_say(
    device_code: Code, tmp_path: Path, tp: int, n: int
) -> None:
    devices, driver = several(device_code, n)
    found = run(toy_group(devices, tmp_path, tp))
    want = run(toy_group(EmulatedDevice(device_code("cuda")), tmp_path, tp))
    assert len(found) == len(want) == 7
    for ours, theirs in zip(found, want, strict=True):
        for name in COMPARED:
            assert (ours[name] == theirs[name]).all(), name
    for place, device in enumerate(driver.devices):
        ranks = {stream for which, stream in device.launched if which == 0}
        assert ranks == set(range(place * tp // n, (place + 1) * tp // n))
        assert device.is_closed
        assert 1 in {which for which, _ in device.launched}  # the canaries, of every device
    assert (driver.mapped, driver.made, driver.ranges) == ({}, {}, {})


def test_control_a_peer_without_access_ends_the_launch(device_code: Code, tmp_path: Path) -> None:
    devices, _ = several(device_code, 2, forgotten=1)
    with pytest.raises((AssertionError, UnsoundError), match=r"not the device's|illegal address"):
        run(toy_group(devices, tmp_path, 2))


def test_control_memory_of_one_device_is_not_the_others(device_code: Code, tmp_path: Path) -> None:
    """Ranks on two devices whose segments are device 0's own memory: what a map is for."""
    devices, driver = several(device_code, 2)
    devices.map_ranks = driver.devices[0].map_ranks  # type: ignore[method-assign]
    with pytest.raises(UnsoundError, match="device 1: got an illegal address, need access"):
        run(toy_group(devices, tmp_path, 2))


@pytest.mark.parametrize(("attribute", "what"), [(2, "peer access"), (3, "atomics over its link")])
def test_devices_that_do_not_reach_each_other_are_named(
    device_code: Code, attribute: int, what: str
) -> None:
    with pytest.raises(TargetError, match=f"devices 2 and 1: got no {what}") as caught:
        several(device_code, 3, apart=(2, 1, attribute))
    assert "--devices 1" in caught.value.hint


def test_each_device_has_room_for_its_ranks(device_code: Code, tmp_path: Path) -> None:
    devices, driver = several(device_code, 2)
    driver.devices[1].total_bytes = 4096
    with pytest.raises(TargetError, match=r"memory of device 1: .* bytes for 1 rank,"):
        run(toy_group(devices, tmp_path, 2))
    devices, driver = several(device_code, 2)
    driver.devices[1].n_units = 3
    with pytest.raises(TargetError, match="device 1: decode: got 3 resident blocks, need 4, 4 for"):
        run(toy_group(devices, tmp_path, 2))


def test_through_the_calls_of_cupy(
    device_code: Code, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every call with its own device current: streams and modules belong to one."""
    emulated = [EmulatedDevice(device_code("cuda")) for _ in range(2)]
    driver = FakeDriver(emulated)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(*emulated))
    devices = find_devices(CUDA, 2, lambda name: driver)
    for member in devices.members():
        monkeypatch.setattr(
            type(member), "build", lambda self, *asked: emulated[0].code, raising=True
        )
    rows = run(toy_group(devices, tmp_path, 2))
    tokens = [int(row["id"][0]) for row in rows if row["kind"][0] == 2 + 1]
    assert tokens == toy.expected_tokens(toy.random_weights(), (5,), 6)
    for device in emulated:
        assert {which for which, _ in device.launched} == {0, 1}


def test_what_is_asked_for_and_not_here(
    device_code: Code, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, k3tool: Any
) -> None:
    emulated = [EmulatedDevice(device_code("cuda")) for _ in range(2)]
    driver = FakeDriver(emulated)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(*emulated))
    with pytest.raises(TargetError, match="--devices: got 3, need at most 2, which are here"):
        find_devices(CUDA, 3, lambda name: driver)
    with pytest.raises(TargetError, match="--devices: got 2 for hip:gfx942, need 1: the memory"):
        find_devices("hip:gfx942", 2, lambda name: driver)
    apart = replace(driver, apart=(0, 1, 2))
    with pytest.raises(TargetError, match="devices 0 and 1: got no peer access"):
        find_devices(CUDA, 2, lambda name: apart)
    busy = fake_cupy(*emulated, streamCreateWithFlags=refuse(46, "cudaErrorDevicesUnavailable: x"))
    monkeypatch.setitem(sys.modules, "cupy", busy)
    with pytest.raises(TargetError, match="got cudaErrorDevicesUnavailable: x") as caught:
        find_devices(CUDA, 2, lambda name: driver)
    assert "another process" in caught.value.hint
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
