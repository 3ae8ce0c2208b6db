"""The Device that a GPU is, through CuPy: the one file that imports it, when a GPU is asked for.

Plain calls of the driver and the runtime; no arrays, no memory pool, no kernel cache of CuPy's,
which does not notice an edited header.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.errors import TargetError, UnsoundError
from k3tool.runtime.gpu_build import object_of
from k3tool.runtime.gpu_runtime import Launched
from k3tool.runtime.gpu_vendors import DRIVERS
from k3tool.tables import need_text
from k3tool.targets import get_target

_DONE, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady; HIP has the same numbers
_OUT_OF_MEMORY, _UNAVAILABLE = 2, 46
_CPU = "leave --target out to run on the CPU"
Load = Callable[[str], Any]


def open_device(target: str, ordinal: int = 0, load: Load = ctypes.CDLL) -> CupyDevice:
    """Return a device of a target's vendor, as the driver numbers them. `load` opens a library.

    Raises: TargetError where CuPy, its vendor's build of it, the driver or a device is absent.
    """
    family = get_target(target).family
    vendor = DRIVERS[family]
    need = f"PyPI package {vendor.cupy}"
    try:
        import cupy
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError)
        got = "no CuPy" if is_absent else f"a CuPy that does not load: {_one_line(error)}"
        raise TargetError(f"--target {target}", got=got, need=need, hint=_CPU) from None
    if bool(cupy.cuda.runtime.is_hip) != (family == "hip"):
        got = f"CuPy {cupy.__version__} for the other vendor"
        raise TargetError(f"--target {target}", got=got, need=need, hint=_CPU)
    try:
        return CupyDevice(cupy, family == "hip", ordinal, load)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise TargetError(
            f"--target {target}", got=_one_line(error), need="a device and a driver CuPy can use",
            hint=f"another process has the device to itself: {vendor.monitor} names it"
            if error.status == _UNAVAILABLE else _CPU,
        ) from None  # fmt: skip


class CupyDevice:
    """One device: its ranks' memory, a stream a rank, and one for copies beside them."""

    def __init__(self, cupy: Any, is_hip: bool, ordinal: int = 0, load: Load = ctypes.CDLL) -> None:
        """Take the imported module; makes a context."""
        self._vendor, self._load = DRIVERS["hip" if is_hip else "cuda"], load
        self._driver, self._runtime = cupy.cuda.driver, cupy.cuda.runtime
        self._module = cupy.cuda.function.Module
        self._errors = (self._runtime.CUDARuntimeError, self._driver.CUDADriverError)
        self._is_hip, self._ordinal = is_hip, ordinal
        self._use()
        found = self._runtime.getDeviceProperties(ordinal)
        self.name = found["name"].decode()
        self.driver = f"driver {self._runtime.driverGetVersion()}"
        self.arch = f"sm_{found['major']}{found['minor']}"
        if is_hip:
            self.arch = found["gcnArchName"].decode().partition(":")[0]
        self.n_units = int(found["multiProcessorCount"])
        said = os.environ.get(self._vendor.queues, "")
        self.n_streams = (int(said) if said.isdecimal() else self._vendor.n_queues) - 1  # copies
        self.queues = self._vendor.queues
        # %globaltimer counts nanoseconds, s_memrealtime the 100 MHz of the reference clock.
        self.ticks_per_second = 1e8 if is_hip else 1e9
        self._held: list[int] = []
        self._modules: dict[bytes, Any] = {}
        self._streams: dict[int, int] = {}
        self._graphs: list[int] = []
        self._copies = self._new_stream()

    def _new_stream(self) -> int:
        self._use()
        # Non-blocking: copies while a launch runs must not wait for it as the default stream does.
        return int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def _use(self) -> None:
        """Make it this thread's device: calls mean the current one."""
        self._runtime.setDevice(self._ordinal)

    @contextmanager
    def _sound(self, what: str) -> Iterator[None]:
        try:
            self._use()
            yield
        except self._errors as error:
            need = "a device in order"
            raise UnsoundError(f"{self.name}: {what}", got=_one_line(error), need=need) from None

    # -- memory ----------------------------------------------------------------------------------

    def members(self) -> tuple[CupyDevice, ...]:
        """Return it alone."""
        return (self,)

    def member(self, rank: int, n_ranks: int) -> CupyDevice:
        """Return it, whatever the rank."""
        return self

    def free_bytes(self) -> int:
        """Return the device's free memory, whoever holds the rest."""
        with self._sound("memory"):
            return int(self._runtime.memGetInfo()[0])

    def alloc(self, n_bytes: int) -> int:
        """Return memory of zeros. Raises: TargetError where it has gone since it was asked for."""
        try:
            self._use()
            address = int(self._runtime.malloc(max(n_bytes, 1)))
        except self._runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise UnsoundError(
                    f"{self.name}: memory", got=_one_line(error), need="a device in order"
                ) from None
            raise TargetError(
                f"memory of {self.name}", got=_one_line(error),
                need=f"{need_text(n_bytes)} at once",
                hint=f"another process may have taken it since: {self._vendor.monitor}",
            ) from None  # fmt: skip
        self._held.append(address)
        with self._sound("memory"):
            self._runtime.memsetAsync(address, 0, n_bytes, self._copies)
            self._runtime.streamSynchronize(self._copies)
        return address

    def map_ranks(self, n_ranks: int, n_bytes: int) -> tuple[int, int]:
        """Return one piece of memory for all ranks' segments: they are on one device."""
        stride = -(-n_bytes // 4096) * 4096
        return self.alloc(n_ranks * stride), stride

    def upload(self, address: int, data: Any) -> None:
        """Write a contiguous buffer."""
        host = np.frombuffer(data, np.uint8)
        self._copy(address, host.ctypes.data, host.nbytes, self._runtime.memcpyHostToDevice)

    def download(self, address: int, n_bytes: int) -> bytes:
        """Read memory."""
        host = np.empty(n_bytes, np.uint8)
        self._copy(host.ctypes.data, address, n_bytes, self._runtime.memcpyDeviceToHost)
        return host.tobytes()

    def _copy(self, to: int, start: int, n_bytes: int, kind: int) -> None:
        with self._sound("a copy"):
            self._runtime.memcpyAsync(to, start, n_bytes, kind, self._copies)
            self._runtime.streamSynchronize(self._copies)

    def copy(self, to: int, start: int, n_bytes: int, times: int = 1) -> None:
        """Copy inside the device's memory, `times` after each other."""
        kind = self._runtime.memcpyDeviceToDevice
        with self._sound("a copy"):
            for _ in range(times):
                self._runtime.memcpyAsync(to, start, n_bytes, kind, self._copies)
            self._runtime.streamSynchronize(self._copies)

    # -- kernels ---------------------------------------------------------------------------------

    def build(self, target: str, phases: Sequence[str], ops: Sequence[str], folder: Path) -> bytes:
        """Return the interpreter's object, compiled here or found in `folder`."""
        return object_of(target, phases, ops, folder)

    def load(self, data: bytes, name: str) -> Any:
        """Return a kernel. Raises: TargetError where the driver refuses the object."""
        try:
            self._use()
            if data not in self._modules:
                module = self._module()
                module.load(data)
                self._modules[data] = module
            return self._modules[data].get_function(name)
        except self._errors as error:
            raise TargetError(
                f"object for {self.name}: {name}", got=_one_line(error),
                need="an object that its driver loads", hint="update the driver",
            ) from None  # fmt: skip

    def resident_blocks(self, kernel: Any, lanes: int) -> int:
        """Return units times the blocks that fit one, by its registers and shared memory."""
        count = self._driver.occupancyMaxActiveBlocksPerMultiprocessor
        with self._sound("occupancy"):
            if not self._vendor.occupancy:
                return int(count(kernel.ptr, lanes, 0)) * self.n_units
            found, call = ctypes.c_int(), self._vendor.occupancy
            failed = getattr(self._load(self._vendor.library), call)(
                ctypes.byref(found), ctypes.c_void_p(kernel.ptr), lanes, ctypes.c_size_t(0)
            )
        if failed:
            got = f"{call} error {failed}"
            raise UnsoundError(f"{self.name}: occupancy", got=got, need="a device in order")
        return found.value * self.n_units

    def launch(
        self, kernel: Any, n_blocks: int, lanes: int, arguments: Sequence[int], stream: int
    ) -> None:
        """Start a cooperative launch.

        HIP's is plain, and resident because its grid fits: HIP runs cooperative launches one after
        the other, whatever their streams, and ranks that wait for each other would never end.
        """
        self._start(Launched(kernel, n_blocks, lanes, tuple(arguments)), stream, not self._is_hip)

    def _start(self, one: Launched, stream: int, is_cooperative: bool) -> None:
        values = (ctypes.c_uint64 * len(one.arguments))(*one.arguments)
        step = ctypes.sizeof(ctypes.c_uint64)
        places = (ctypes.c_void_p * len(one.arguments))(
            *(ctypes.addressof(values) + step * i for i in range(len(one.arguments)))
        )
        at = ctypes.addressof(places)
        shape = (one.n_blocks, 1, 1, one.lanes, 1, 1, 0, self._stream(stream), at)
        with self._sound("a launch"):
            if is_cooperative:
                self._driver.launchCooperativeKernel(one.kernel.ptr, *shape)
            else:
                self._driver.launchKernel(one.kernel.ptr, *shape, 0)

    def _stream(self, number: int) -> int:
        if number not in self._streams:
            self._streams[number] = self._new_stream()
        return self._streams[number]

    def capture(self, launches: Sequence[Launched]) -> int:
        """Return a graph of plain launches."""
        stream = self._stream(0)
        with self._sound("a capture"):
            self._runtime.streamBeginCapture(stream)
            for one in launches:
                self._start(one, 0, is_cooperative=False)
            graph = self._runtime.streamEndCapture(stream)
            self._graphs.append(int(self._runtime.graphInstantiate(graph)))
            self._runtime.graphDestroy(graph)
        return self._graphs[-1]

    def replay(self, graph: int) -> None:
        """Start a graph and return."""
        with self._sound("a graph"):
            self._runtime.graphLaunch(graph, self._stream(0))

    def is_idle(self) -> bool:
        """Return whether every stream has done its work."""
        for stream in self._streams.values():
            with self._sound("a launch"):
                status = int(self._runtime.streamQuery(stream))
            if status == _NOT_READY:
                return False
            if status != _DONE:
                raise UnsoundError(
                    f"{self.name}: a launch", got=f"error {status} of the driver",
                    need="a launch that ends",
                )  # fmt: skip
        return True

    def close(self) -> None:
        """Free all memory, unless a launch still uses it: freeing would wait for it without end."""
        try:
            if not self.is_idle():
                return
            self._use()
        except (UnsoundError, *self._errors):
            return
        while self._graphs:
            self._runtime.graphExecDestroy(self._graphs.pop())
        for stream in (*self._streams.values(), self._copies):
            self._runtime.streamDestroy(stream)
        self._streams.clear()
        while self._held:
            self._runtime.free(self._held.pop())
        self._modules.clear()


def _one_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
