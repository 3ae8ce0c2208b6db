"""CuPy's names that k3tool.runtime.gpu_cupy calls, on an emulated device: its glue, without a GPU.

Signatures are those of CuPy 14.2, and so are the two calls that its build for ROCm answers with an
error whatever is asked; memory, streams and launches are the emulated device's. What a driver
really answers is not shown by it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from k3tool.runtime.gpu_runtime import Launched
from k3tool.runtime.gpu_vendors import DRIVERS
from tests.kernels.emulated_device import KERNELS, EmulatedDevice

NAMES = tuple(KERNELS)


class FakeError(RuntimeError):
    """As CUDARuntimeError and CUDADriverError: a text and a status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class FakeModule:
    """A module of the device that is current when it is loaded."""

    here: Callable[[], tuple[int, EmulatedDevice]]
    functions: dict[int, tuple[bytes, int, int]]  # by handle: code, which of NAMES, device

    def load(self, cubin: bytes) -> None:
        if cubin[:4] != b"\x7fELF":
            raise FakeError(200, "CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid\nmore")
        self.code, (self.ordinal, device) = cubin, self.here()
        self.device = device

    def get_function(self, name: str) -> Any:
        self.device.load(self.code, name)
        handle = 0x4000 + 8 * len(self.functions)
        self.functions[handle] = self.code, NAMES.index(name), self.ordinal
        return SimpleNamespace(ptr=handle)


class Calls:
    """What the calls share: which device is current, streams, functions, graphs by handle.

    Calls mean the device that setDevice has named last; streams and modules belong to theirs.
    """

    def __init__(self, devices: Sequence[EmulatedDevice]) -> None:
        self.devices, self.current = devices, 0
        self.streams: dict[int, tuple[int, int]] = {}  # handle -> device, and number there
        self.functions: dict[int, tuple[bytes, int, int]] = {}
        self.captured: dict[int, list[Launched]] = {}  # by stream, while it captures
        self.graphs: dict[int, list[Launched]] = {}  # of graphs and what was made of them
        self._handles = itertools.count(0x2000, 8)

    def here(self) -> EmulatedDevice:
        return self.devices[self.current]

    # -- devices and memory ------------------------------------------------------------------------

    def set_device(self, ordinal: int) -> None:
        assert 0 <= ordinal < len(self.devices)
        self.current = ordinal

    def properties(self, ordinal: int) -> dict[str, Any]:
        return {"name": b"fake GPU", "major": 9, "minor": 0, "gcnArchName": b"gfx942:sramecc+",
                "multiProcessorCount": self.devices[ordinal].n_units}  # fmt: skip

    def copy(self, to: int, start: int, n_bytes: int, kind: int, stream: int) -> None:
        self.number(stream)
        for address in {1: [to], 2: [start], 3: [to, start]}[kind]:
            self.here()._require(address, n_bytes)
        ctypes.memmove(to, start, n_bytes)

    def free(self, address: int) -> None:
        assert address in {at for at, _ in self.here().pieces}
        self.here().freed.append(address)

    # -- streams and graphs ------------------------------------------------------------------------

    def number(self, stream: int) -> int:
        """A stream of the current device: any other is an invalid handle to the driver."""
        ordinal, found = self.streams[stream]
        assert ordinal == self.current, "a stream of another device than the current one"
        return found

    def stream_create(self, flags: int) -> int:
        assert flags == 1
        own = sum(ordinal == self.current for ordinal, _ in self.streams.values())
        self.streams[0x1000 + 8 * len(self.streams)] = self.current, own
        return max(self.streams)

    def begin_capture(self, stream: int, mode: int = 2) -> None:
        self.number(stream)
        self.captured[stream] = []

    def end_capture(self, stream: int) -> int:
        return self.new_graph(self.captured.pop(stream))

    def new_graph(self, launches: list[Launched]) -> int:
        handle = next(self._handles)
        self.graphs[handle] = launches
        return handle

    def graph_launch(self, graph: int, stream: int) -> None:
        self.number(stream)
        self.here().replay(self.here().capture(self.graphs[graph]))

    # -- launches ----------------------------------------------------------------------------------

    def occupancy(self, function: int, lanes: int, shared: int) -> int:
        assert function in self.functions
        return 1

    def cooperative(self, function: int, *shape: int) -> None:
        assert len(shape) == 9
        assert not self.captured, "a graph of plain launches was asked for"
        self._launch(function, *shape)

    def plain(self, function: int, *shape: int) -> None:
        assert len(shape) == 10
        assert shape[9] == 0  # extra
        self._launch(function, *shape)

    def _launch(self, function: Any, *shape: Any) -> None:
        *grid, stream, params = shape[:9]
        n_blocks, lanes = grid[0], grid[3]
        assert grid == [n_blocks, 1, 1, lanes, 1, 1, 0]
        code, which, ordinal = self.functions[function]
        assert ordinal == self.current, "a function of another device than the current one"
        n = 1 if NAMES[which] == "k3_interp" else 2
        places = (ctypes.c_void_p * n).from_address(params)
        values = [ctypes.c_uint64.from_address(place or 0).value for place in places]
        kernel = self.here().load(code, NAMES[which])
        if stream in self.captured:
            self.captured[stream].append(Launched(kernel, n_blocks, lanes, tuple(values)))
            return
        self.here().launch(kernel, n_blocks, lanes, values, self.number(stream))


def fake_cupy(*devices: EmulatedDevice, is_hip: bool = False, **changed: Any) -> Any:
    """Return a module in CuPy's place; `changed` replaces calls of its runtime."""
    calls = Calls(devices)
    of_module = {
        "here": staticmethod(lambda: (calls.current, calls.here())), "functions": calls.functions
    }  # fmt: skip
    module = type("Module", (FakeModule,), of_module)
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(**_runtime(calls, is_hip) | changed),
        driver=_driver(calls, is_hip),
        function=SimpleNamespace(Module=module),
    )
    return SimpleNamespace(cuda=cuda, __version__="14.2.0")


def _runtime(calls: Calls, is_hip: bool) -> dict[str, Any]:
    here = calls.here
    return {
        "is_hip": is_hip, "CUDARuntimeError": FakeError, "streamNonBlocking": 1,
        "memcpyHostToDevice": 1, "memcpyDeviceToHost": 2, "memcpyDeviceToDevice": 3,
        "streamBeginCapture": calls.begin_capture, "streamEndCapture": calls.end_capture,
        "graphInstantiate": lambda graph: calls.new_graph(calls.graphs[graph]),
        "graphLaunch": calls.graph_launch, "graphDestroy": calls.graphs.pop,
        "graphExecDestroy": calls.graphs.pop,
        "setDevice": calls.set_device, "getDeviceProperties": calls.properties,
        "streamCreateWithFlags": calls.stream_create, "streamSynchronize": lambda stream: None,
        "streamQuery": lambda stream: 0 if here().is_idle() else 600,
        "streamDestroy": lambda stream: None, "driverGetVersion": lambda: 13020,
        "memGetInfo": lambda: (here().free_bytes(), here().total_bytes),
        "malloc": lambda n_bytes: here().alloc(n_bytes), "free": calls.free,
        "memcpyAsync": calls.copy,
        "memsetAsync": lambda at, value, n_bytes, stream: ctypes.memset(at, value, n_bytes),
    }  # fmt: skip


def _driver(calls: Calls, is_hip: bool) -> Any:
    absent = refuse(999, "hipErrorUnknown: unknown error")
    return SimpleNamespace(
        CUDADriverError=FakeError, launchKernel=calls.plain,
        launchCooperativeKernel=absent if is_hip else calls.cooperative,
        occupancyMaxActiveBlocksPerMultiprocessor=absent if is_hip else calls.occupancy,
    )  # fmt: skip


def hip_library(name: str, blocks: int = 1, status: int = 0) -> Any:
    """Return ROCm's library as far as one device asks it, for `load`."""
    assert name == DRIVERS["hip"].library

    def occupancy(found: Any, function: Any, lanes: int, shared: Any) -> int:
        assert (lanes, shared.value) == (512, 0)
        found._obj.value = blocks
        return status

    return SimpleNamespace(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor=occupancy)


def refuse(status: int, text: str) -> Any:
    """Return a call that fails so."""

    def call(*arguments: Sequence[Any]) -> Any:
        raise FakeError(status, text)

    return call
