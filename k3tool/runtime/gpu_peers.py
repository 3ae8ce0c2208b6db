"""Ranks on several devices: one range of addresses for all their segments, and the devices as one.

An interpreter finds rank r's segment r strides from rank 0's (kernels_common/launch.h), wherever
that memory is: a range is reserved, each rank's memory is made on its own device, mapped into it,
and every device is given access. Peers must also take atomics over the link between them: gates are
counted from far. CUDA alone; the driver's calls are those of its virtual memory management.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from k3tool.errors import TargetError, UnsoundError
from k3tool.runtime.gpu_runtime import Device

_LIBRARY = "libcuda.so.1"
_ACCESS, _ATOMICS = 2, 3  # CUdevice_P2PAttribute
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_RECOMMENDED = 1  # of the granularities
_ONE_DEVICE = "--devices 1 places all ranks on one"


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp; the last word holds flags, none of which is asked for."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", Location),
        ("handle_data", ctypes.c_void_p), ("flags", ctypes.c_uint64),
    )  # fmt: skip


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class PeerMemory:
    """Memory of several devices at addresses that all of them reach."""

    def __init__(
        self, ordinals: Sequence[int], load: Callable[[str], Any] = ctypes.CDLL
    ) -> None:  # fmt: skip
        """Ask the driver. Raises: TargetError naming two devices that do not reach each other."""
        self._driver, self._ordinals = load(_LIBRARY), tuple(ordinals)
        self._ranges: list[tuple[int, int]] = []
        self._mapped: list[tuple[int, int, int]] = []
        for first in self._ordinals:
            for second in self._ordinals:
                if first != second:
                    self._check_pair(first, second)

    def _call(self, name: str, *arguments: Any) -> None:
        failed = getattr(self._driver, name)(*arguments)
        if failed:
            raise UnsoundError(f"peers' memory: {name}", got=f"error {failed}", need="memory")

    def _check_pair(self, first: int, second: int) -> None:
        for attribute, what in ((_ACCESS, "peer access"), (_ATOMICS, "atomics over its link")):
            found = ctypes.c_int()
            self._call("cuDeviceGetP2PAttribute", ctypes.byref(found), attribute, first, second)
            if not found.value:
                raise TargetError(
                    f"devices {first} and {second}", got=f"no {what}", need=what, hint=_ONE_DEVICE
                )

    def map(self, homes: Sequence[int], n_bytes: int) -> tuple[int, int]:
        """Return (address of rank 0's bytes, bytes from one rank's to the next), not cleared.

        `homes` are the ranks' devices. Raises: UnsoundError with what the driver says.
        """
        stride = self._stride(n_bytes)
        base = ctypes.c_uint64()
        size = stride * len(homes)
        self._call(
            "cuMemAddressReserve", ctypes.byref(base), ctypes.c_size_t(size), ctypes.c_size_t(0),
            ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        self._ranges.append((base.value, size))
        for rank, home in enumerate(homes):
            made, at = ctypes.c_uint64(), base.value + rank * stride
            asked = _properties(home)
            self._call(
                "cuMemCreate", ctypes.byref(made), ctypes.c_size_t(stride), ctypes.byref(asked),
                ctypes.c_uint64(0),
            )  # fmt: skip
            self._mapped.append((at, stride, made.value))
            self._call(
                "cuMemMap", ctypes.c_uint64(at), ctypes.c_size_t(stride), ctypes.c_size_t(0), made,
                ctypes.c_uint64(0),
            )  # fmt: skip
        each = (Access * len(self._ordinals))(
            *(Access(Location(_ON_DEVICE, ordinal), _READ_WRITE) for ordinal in self._ordinals)
        )
        self._call(
            "cuMemSetAccess", base, ctypes.c_size_t(size), each, ctypes.c_size_t(len(each))
        )  # fmt: skip
        return base.value, stride

    def _stride(self, n_bytes: int) -> int:
        """Return the bytes of a rank: whole pieces of what every device maps."""
        largest = 1
        for ordinal in self._ordinals:
            found, asked = ctypes.c_size_t(), _properties(ordinal)
            self._call(
                "cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(asked),
                _RECOMMENDED,
            )  # fmt: skip
            largest = max(largest, found.value)
        return -(-n_bytes // largest) * largest

    def close(self) -> None:
        """Give everything back."""
        while self._mapped:
            at, size, handle = self._mapped.pop()
            self._driver.cuMemUnmap(ctypes.c_uint64(at), ctypes.c_size_t(size))
            self._driver.cuMemRelease(ctypes.c_uint64(handle))
        while self._ranges:
            at, size = self._ranges.pop()
            self._driver.cuMemAddressFree(ctypes.c_uint64(at), ctypes.c_size_t(size))


def _properties(ordinal: int) -> Properties:
    return Properties(_PINNED, 0, Location(_ON_DEVICE, ordinal), None, 0)


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
