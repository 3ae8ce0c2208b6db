"""The Device of k3tool.runtime.gpu_runtime on emulated blocks: a run above it needs no GPU.

Memory is this process's; every address that a copy is asked for is looked up, so that a layout that
reaches past an allocation is an error and not somebody else's bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.errors import UnsoundError
from k3tool.runtime.gpu_object import LAUNCH_DTYPE
from k3tool.runtime.gpu_runtime import Launched
from tests.kernels.emulated import Emulated, compile_unit

# Libraries that no device uses, by code and domains. Each takes of the room that a process has for
# threads' own variables, and gives none back: a new one for every device runs out of it.
LEFT: dict[tuple[bytes, int], list[ctypes.CDLL]] = {}
KERNELS = {"k3_interp": 0, "k3_canary": 1, "k3_barrier": 2}


def build_object(device: Emulated, folder: Path) -> bytes:
    """Compile an emulated vendor's interpreter as a library and return its bytes."""
    made = compile_unit(device, "device_host.cpp", folder, "-fPIC", "-shared", "-pthread")
    return made.read_bytes()


@dataclass(slots=True)
class EmulatedDevice:
    """One emulated device, whose object is `code`; what a test changes, it is told here."""

    code: bytes
    name: str = "emulated blocks"
    driver: str = "no driver"
    arch: str = "sm_90"
    n_units: int = 32
    n_streams: int = 8
    queues: str = "QUEUES"
    ticks_per_second: float = 1e9
    total_bytes: int = 1 << 32
    n_domains: int = 1
    spoil: Spoil | None = None  # negative control: called with each launch's K3Launch
    blocks_less: int = 0  # negative control: a launch that loses blocks
    never_idle: bool = False  # negative control: a launch that never ends
    pieces: list[Any] = field(default_factory=list)
    libraries: dict[bytes, ctypes.CDLL] = field(default_factory=dict)
    is_closed: bool = False
    freed: list[int] = field(default_factory=list)
    launched: list[tuple[int, int]] = field(default_factory=list)  # (kernel, stream)
    built: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)

    def members(self) -> tuple[EmulatedDevice, ...]:
        return (self,)

    def member(self, rank: int, n_ranks: int) -> EmulatedDevice:
        return self

    def free_bytes(self) -> int:
        return self.total_bytes - sum(len(piece[1]) for piece in self.pieces)

    def alloc(self, n_bytes: int) -> int:
        memory = mmap.mmap(-1, max(n_bytes, 1))
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.pieces.append((at, memory))
        return at

    def map_ranks(self, n_ranks: int, n_bytes: int) -> tuple[int, int]:
        stride = -(-n_bytes // 4096) * 4096
        return self.alloc(n_ranks * stride), stride

    def _require(self, address: int, n_bytes: int) -> None:
        inside = any(at <= address and address + n_bytes <= at + len(m) for at, m in self.pieces)
        assert inside, f"{n_bytes} bytes at {address:#x} are not the device's"

    def _require_peers(self, launch: Any) -> None:
        """Refuse what a device's own memory unit would: a peer that was not made accessible."""
        own = int(launch["rank"])
        peers = [
            int(launch["gates"]) + (rank - own) * int(launch["peer_stride"])
            for rank in range(int(launch["n_ranks"]))
        ]
        for address in (*peers, int(launch["abort_word"])):
            if not any(at <= address < at + len(memory) for at, memory in self.pieces):
                raise UnsoundError(self.name, got="an illegal address", need="access to its peers")

    def upload(self, address: int, data: Any) -> None:
        host = np.frombuffer(data, np.uint8)
        self._require(address, host.nbytes)
        ctypes.memmove(address, host.ctypes.data, host.nbytes)

    def download(self, address: int, n_bytes: int) -> bytes:
        self._require(address, n_bytes)
        return ctypes.string_at(address, n_bytes)

    def copy(self, to: int, start: int, n_bytes: int, times: int = 1) -> None:
        self._require(start, n_bytes)
        self._require(to, n_bytes)
        for _ in range(times):
            ctypes.memmove(to, start, n_bytes)

    def build(self, target: str, phases: Sequence[str], ops: Sequence[str], folder: Path) -> bytes:
        self.built.append((tuple(phases), tuple(ops)))
        return self.code

    def load(self, data: bytes, name: str) -> tuple[ctypes.CDLL, int]:
        if data not in self.libraries:
            left = LEFT.get((data, self.n_domains))
            self.libraries[data] = left.pop() if left else _open(data)
        return self.libraries[data], KERNELS[name]

    def resident_blocks(self, kernel: Any, lanes: int) -> int:
        return self.n_units

    def launch(
        self, kernel: Any, n_blocks: int, lanes: int, arguments: Sequence[int], stream: int
    ) -> None:
        library, which = kernel
        first, second = (*arguments, 0)[:2]
        n = n_blocks - (self.blocks_less if which == 0 else 0)
        if which == 0:
            found = np.frombuffer(self.download(first, LAUNCH_DTYPE.itemsize), LAUNCH_DTYPE)[0]
            self._require_peers(found)
            if self.spoil is not None:
                self.spoil(self, found)
        words = (ctypes.c_uint32(word) for word in (stream, which, n, self.n_domains))
        failed = library.k3_device_launch(*words, ctypes.c_void_p(first), ctypes.c_void_p(second))
        self.launched.append((which, stream))
        if failed:
            raise UnsoundError(self.name, got="no thread", need="a launch")

    def capture(self, launches: Sequence[Launched]) -> tuple[Launched, ...]:
        return tuple(launches)

    def replay(self, graph: tuple[Launched, ...]) -> None:
        for one in graph:  # the stream has one thread, so each starts when the last has ended
            self.launch(*one, 0)

    def is_idle(self) -> bool:
        return not self.never_idle and all(
            library.k3_device_is_idle() for library in self.libraries.values()
        )

    def close(self) -> None:
        """Leave the libraries to the next device, if no launch is still under way in them."""
        if not self.is_closed and self.is_idle():
            for data, library in self.libraries.items():
                LEFT.setdefault((data, self.n_domains), []).append(library)
            self.libraries = {}
        self.is_closed = True


def _open(data: bytes) -> ctypes.CDLL:
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        return ctypes.CDLL(file.name)


Spoil = Callable[[EmulatedDevice, Any], None]
