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


def fake_cupy(*devices: EmulatedDevice, is_hip: bool = False, **changed: Any) -> Any:
    """Return a module in CuPy's place; `changed` replaces calls of its runtime.

    Calls mean the device that setDevice has named last; streams and modules belong to theirs.
    """
    current = [0]
    streams: dict[int, tuple[int, int]] = {}  # handle -> device, and number there

    def here() -> EmulatedDevice:
        return devices[current[0]]

    def set_device(ordinal: int) -> None:
        assert 0 <= ordinal < len(devices)
        current[0] = ordinal

    def number(stream: int) -> int:
        """A stream of the current device: any other is an invalid handle to the driver."""
        ordinal, found = streams[stream]
        assert ordinal == current[0], "a stream of another device than the current one"
        return found

    def stream_create(flags: int) -> int:
        assert flags == 1
        own = sum(ordinal == current[0] for ordinal, _ in streams.values())
        streams[0x1000 + 8 * len(streams)] = current[0], own
        return max(streams)

    functions: dict[int, tuple[bytes, int, int]] = {}
    captured: dict[int, list[Launched]] = {}  # by stream, while it captures
    handles = itertools.count(0x2000, 8)
    graphs: dict[int, list[Launched]] = {}  # by handle, of graphs and what was made of them

    def occupancy(function: int, lanes: int, shared: int) -> int:
        assert function in functions
        return 1

    def cooperative(function: int, *shape: int) -> None:
        assert len(shape) == 9
        assert not captured, "a graph of plain launches was asked for"
        launch(function, *shape)

    def plain(function: int, *shape: int) -> None:
        assert len(shape) == 10
        assert shape[9] == 0  # extra
        launch(function, *shape)

    def begin_capture(stream: int, mode: int = 2) -> None:
        number(stream)
        captured[stream] = []

    def end_capture(stream: int) -> int:
        return new_graph(captured.pop(stream))

    def new_graph(launches: list[Launched]) -> int:
        handle = next(handles)
        graphs[handle] = launches
        return handle

    def graph_launch(graph: int, stream: int) -> None:
        number(stream)
        here().replay(here().capture(graphs[graph]))

    def launch(function: Any, *shape: Any) -> None:
        *grid, stream, params = shape[:9]
        n_blocks, lanes = grid[0], grid[3]
        assert grid == [n_blocks, 1, 1, lanes, 1, 1, 0]
        code, which, ordinal = functions[function]
        assert ordinal == current[0], "a function of another device than the current one"
        n = 1 if NAMES[which] == "k3_interp" else 2
        places = (ctypes.c_void_p * n).from_address(params)
        values = [ctypes.c_uint64.from_address(place or 0).value for place in places]
        kernel = here().load(code, NAMES[which])
        if stream in captured:
            captured[stream].append(Launched(kernel, n_blocks, lanes, tuple(values)))
            return
        here().launch(kernel, n_blocks, lanes, values, number(stream))

    def copy(to: int, start: int, n_bytes: int, kind: int, stream: int) -> None:
        number(stream)
        for address in {1: [to], 2: [start], 3: [to, start]}[kind]:
            here()._require(address, n_bytes)
        ctypes.memmove(to, start, n_bytes)

    def free(address: int) -> None:
        assert address in {at for at, _ in here().pieces}
        here().freed.append(address)

    def properties(ordinal: int) -> dict[str, Any]:
        return {"name": b"fake GPU", "major": 9, "minor": 0, "gcnArchName": b"gfx942:sramecc+",
                "multiProcessorCount": devices[ordinal].n_units}  # fmt: skip

    runtime = {
        "is_hip": is_hip, "CUDARuntimeError": FakeError, "streamNonBlocking": 1,
        "memcpyHostToDevice": 1, "memcpyDeviceToHost": 2, "memcpyDeviceToDevice": 3,
        "streamBeginCapture": begin_capture, "streamEndCapture": end_capture,
        "graphInstantiate": lambda graph: new_graph(graphs[graph]), "graphLaunch": graph_launch,
        "graphDestroy": graphs.pop, "graphExecDestroy": graphs.pop,
        "setDevice": set_device, "getDeviceProperties": properties,
        "streamCreateWithFlags": stream_create, "streamSynchronize": lambda stream: None,
        "streamQuery": lambda stream: 0 if here().is_idle() else 600,
        "streamDestroy": lambda stream: None, "driverGetVersion": lambda: 13020,
        "memGetInfo": lambda: (here().free_bytes(), here().total_bytes),
        "malloc": lambda n_bytes: here().alloc(n_bytes), "free": free, "memcpyAsync": copy,
        "memsetAsync": lambda at, value, n_bytes, stream: ctypes.memset(at, value, n_bytes),
    }  # fmt: skip
    absent = refuse(999, "hipErrorUnknown: unknown error")
    driver = SimpleNamespace(
        CUDADriverError=FakeError, launchKernel=plain,
        launchCooperativeKernel=absent if is_hip else cooperative,
        occupancyMaxActiveBlocksPerMultiprocessor=absent if is_hip else occupancy,
    )  # fmt: skip
    of_module = {"here": staticmethod(lambda: (current[0], here())), "functions": functions}
    module = type("Module", (FakeModule,), of_module)
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(**runtime | changed), driver=driver,
        function=SimpleNamespace(Module=module),
    )  # fmt: skip
    return SimpleNamespace(cuda=cuda, __version__="14.2.0")


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
