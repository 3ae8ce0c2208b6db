"""Ranks on several devices: one range of addresses for all their segments, and the devices as one.

An interpreter finds rank r's segment r strides from rank 0's (kernels_common/launch.h), wherever
that memory is: a range is reserved, each rank's memory is made on its own device, mapped into it,
and every device is given access. Peers must also take atomics over the link between them: gates are
counted from far. The calls are those of the vendors' virtual memory (gpu_vendors).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from k3tool.errors import TargetError, UnsoundError
from k3tool.runtime.gpu_runtime import Device
from k3tool.runtime.gpu_vendors import XGMI, Driver, version_text

_ON_DEVICE, _READ_WRITE = 1, 3
_RECOMMENDED = 1  # of the granularities
_ONE_DEVICE = "--devices 1 places all ranks on one"


class Location(ctypes.Structure):
    """CUmemLocation, hipMemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp, hipMemAllocationProp; the last word is flags, none is asked for."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", Location),
        ("handle_data", ctypes.c_void_p), ("flags", ctypes.c_uint64),
    )  # fmt: skip


class Access(ctypes.Structure):
    """CUmemAccessDesc, hipMemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class PeerMemory:
    """Memory of several devices at addresses that all of them reach."""

    def __init__(
        self, vendor: Driver, ordinals: Sequence[int], load: Callable[[str], Any] = ctypes.CDLL
    ) -> None:  # fmt: skip
        """Ask the driver.

        Raises: TargetError naming two devices that do not reach each other, or a driver whose
        memory does not take atomics from far.
        """
        self._vendor, self._ordinals = vendor, tuple(ordinals)
        self._driver = load(vendor.library)
        self._ranges: list[tuple[int, int]] = []
        self._mapped: list[tuple[int, int, int]] = []
        self._check_version()
        for first in self._ordinals:
            for second in self._ordinals:
                if first != second:
                    self._check_pair(first, second)

    def _name(self, call: str) -> str:
        return f"{self._vendor.prefix}{call}"

    def _call(self, call: str, *arguments: Any) -> None:
        name = self._name(call)
        failed = getattr(self._driver, name)(*arguments)
        if failed:
            raise UnsoundError(f"peers' memory: {name}", got=f"error {failed}", need="memory")

    def _check_version(self) -> None:
        """Refuse a driver that would give memory of another kind and say nothing."""
        if not self._vendor.least:
            return
        found = ctypes.c_int()
        self._call("RuntimeGetVersion", ctypes.byref(found))
        if found.value < self._vendor.least:
            raise TargetError(
                "--devices", got=f"{self._vendor.package}'s runtime {version_text(found.value)}",
                need=f"{version_text(self._vendor.least)}: earlier ones cache peers' memory",
                hint=_ONE_DEVICE,
            )  # fmt: skip

    def _check_pair(self, first: int, second: int) -> None:
        reaches = {
            "peer access": self._attribute(self._vendor.access, first, second),
            "atomics over its link": self._has_atomics(first, second),
        }
        for what in (what for what, is_there in reaches.items() if not is_there):
            raise TargetError(
                f"devices {first} and {second}", got=f"no {what}", need=what, hint=_ONE_DEVICE
            )

    def _attribute(self, attribute: int, first: int, second: int) -> bool:
        found = ctypes.c_int()
        self._call("DeviceGetP2PAttribute", ctypes.byref(found), attribute, first, second)
        return bool(found.value)

    def _has_atomics(self, first: int, second: int) -> bool:
        if self._vendor.atomics is not None:
            return self._attribute(self._vendor.atomics, first, second)
        kind, hops = ctypes.c_uint32(), ctypes.c_uint32()
        self._call(
            "ExtGetLinkTypeAndHopCount", first, second, ctypes.byref(kind), ctypes.byref(hops)
        )  # fmt: skip
        return kind.value == XGMI

    @contextmanager
    def _on(self, ordinal: int) -> Iterator[Properties]:
        """Give what to ask for on a device, which is the current one meanwhile if it has to be."""
        asked = Properties(self._vendor.kind, 0, Location(_ON_DEVICE, ordinal), None, 0)
        if not self._vendor.is_current:
            yield asked
            return
        before = ctypes.c_int()
        self._call("GetDevice", ctypes.byref(before))
        self._call("SetDevice", ordinal)
        try:
            yield asked
        finally:
            self._call("SetDevice", before.value)

    def map(self, homes: Sequence[int], n_bytes: int) -> tuple[int, int]:
        """Return (address of rank 0's bytes, bytes from one rank's to the next), not cleared.

        `homes` are the ranks' devices. Raises: UnsoundError with what the driver says.
        """
        stride = self._stride(n_bytes)
        base = ctypes.c_uint64()
        size = stride * len(homes)
        self._call(
            "MemAddressReserve", ctypes.byref(base), ctypes.c_size_t(size), ctypes.c_size_t(0),
            ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        self._ranges.append((base.value, size))
        for rank, home in enumerate(homes):
            self._map_one(home, base.value + rank * stride, stride)
        return base.value, stride

    def _map_one(self, home: int, at: int, size: int) -> None:
        """Make a rank's memory and map it for all devices.

        Access is given to each mapping by itself: HIP takes a range of several only where their
        sizes add up as its version counts them.
        """
        made, address, n_bytes = ctypes.c_uint64(), ctypes.c_uint64(at), ctypes.c_size_t(size)
        with self._on(home) as asked:
            self._call(
                "MemCreate", ctypes.byref(made), n_bytes, ctypes.byref(asked), ctypes.c_uint64(0)
            )  # fmt: skip
        self._mapped.append((at, size, made.value))
        self._call("MemMap", address, n_bytes, ctypes.c_size_t(0), made, ctypes.c_uint64(0))
        each = (Access * len(self._ordinals))(
            *(Access(Location(_ON_DEVICE, ordinal), _READ_WRITE) for ordinal in self._ordinals)
        )
        self._call("MemSetAccess", address, n_bytes, each, ctypes.c_size_t(len(each)))

    def _stride(self, n_bytes: int) -> int:
        """Return the bytes of a rank: whole pieces of what every device maps."""
        largest = 1
        for ordinal in self._ordinals:
            found = ctypes.c_size_t()
            with self._on(ordinal) as asked:
                self._call(
                    "MemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(asked),
                    _RECOMMENDED,
                )  # fmt: skip
            largest = max(largest, found.value)
        return -(-n_bytes // largest) * largest

    def close(self) -> None:
        """Give everything back; what the driver says of it changes nothing."""

        def tell(call: str, *arguments: Any) -> None:
            getattr(self._driver, self._name(call))(*arguments)

        while self._mapped:
            at, size, handle = self._mapped.pop()
            tell("MemUnmap", ctypes.c_uint64(at), ctypes.c_size_t(size))
            tell("MemRelease", ctypes.c_uint64(handle))
        while self._ranges:
            at, size = self._ranges.pop()
            tell("MemAddressFree", ctypes.c_uint64(at), ctypes.c_size_t(size))


class DeviceSet:
    """Several equal devices as the Devices of one group: ranks in order, as many on each."""

    def __init__(
        self, devices: Sequence[Device], ordinals: Sequence[int], peers: PeerMemory
    ) -> None:
        """Take over the devices; `ordinals` are what the driver calls them."""
        self._devices, self._ordinals, self._peers = tuple(devices), tuple(ordinals), peers
        first = self._devices[0]
        self.name, self.driver = f"{len(devices)} x {first.name}", first.driver
        self.arch, self.ticks_per_second = first.arch, first.ticks_per_second

    def members(self) -> tuple[Device, ...]:
        """Return the devices."""
        return self._devices

    def member(self, rank: int, n_ranks: int) -> Device:
        """Return the device of a rank."""
        return self._devices[self._place(rank, n_ranks)]

    def _place(self, rank: int, n_ranks: int) -> int:
        return rank * len(self._devices) // n_ranks

    def map_ranks(self, n_ranks: int, n_bytes: int) -> tuple[int, int]:
        """Return one range of addresses for all ranks' segments, of zeros, each on its device."""
        places = [self._place(rank, n_ranks) for rank in range(n_ranks)]
        address, stride = self._peers.map([self._ordinals[place] for place in places], n_bytes)
        for rank, place in enumerate(places):
            self._devices[place].upload(address + rank * stride, bytes(n_bytes))
        return address, stride

    def is_idle(self) -> bool:
        """Return whether every launch on every device has ended."""
        return all(device.is_idle() for device in self._devices)

    def close(self) -> None:
        """Give everything back; what a launch still uses stays."""
        try:
            is_idle = self.is_idle()
        except UnsoundError:
            is_idle = False
        for device in self._devices:
            device.close()
        if is_idle:
            self._peers.close()
