"""What a launch needs of a device, in one protocol, and what is asked of any device before use.

Two implementations: CuPy's (`gpu_cupy`), and blocks emulated on the host (the tests'), so that all
that lies above this line runs bit for bit where no GPU is. It knows no program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from k3tool.errors import TargetError, UnsoundError
from k3tool.targets import get_target

CANARY = "k3_canary"  # of K3_CANARY_KERNEL
BARRIER = "k3_barrier"  # of K3_BARRIER_KERNEL
_LOOK_SECONDS = 1.0  # between looks at what has moved while a launch runs
_SPIN_SECONDS = 0.02  # a short step is not made longer by a nap of the host's
_NAP_SECONDS = 0.0005


class Launched(NamedTuple):
    """A launch that waits for nothing: what a graph is made of."""

    kernel: Any
    n_blocks: int
    lanes: int
    arguments: tuple[int, ...]


class Devices(Protocol):
    """What a group of ranks runs on: one device, or several of which each rank has one."""

    name: str
    driver: str  # its version, in words
    arch: str  # as compilers name it, without a suffix: sm_90, gfx942
    ticks_per_second: float  # of the clock that k3_clock reads

    def members(self) -> tuple[Device, ...]:
        """Return the devices."""
        ...

    def member(self, rank: int, n_ranks: int) -> Device:
        """Return the device of a rank."""
        ...

    def map_ranks(self, n_ranks: int, n_bytes: int) -> tuple[int, int]:
        """Return (address of rank 0's segment, bytes from one rank's to the next), of zeros.

        One process: every rank reaches every segment at the same address.
        """
        ...

    def is_idle(self) -> bool:
        """Return whether every launch has ended."""
        ...

    def close(self) -> None:
        """Give everything back; leaves it where a launch still runs, which may use it."""
        ...


class Device(Devices, Protocol):
    """One device of a target; addresses are of its memory, streams small numbers.

    Every call but `launch` returns when it is done. `upload` and `download` may be called while a
    launch runs. Raises: UnsoundError when the driver says that a launch broke the device.
    """

    n_units: int
    n_streams: int  # launches that run at once, beside copies
    queues: str  # the variable of the environment that says so

    def free_bytes(self) -> int:
        """Return the memory that nobody holds now."""
        ...

    def alloc(self, n_bytes: int) -> int:
        """Return memory of zeros on a boundary of 256 bytes, held until `close`."""
        ...

    def upload(self, address: int, data: Any) -> None:
        """Write a contiguous buffer."""
        ...

    def download(self, address: int, n_bytes: int) -> bytes:
        """Read memory."""
        ...

    def copy(self, to: int, start: int, n_bytes: int, times: int = 1) -> None:
        """Copy inside the device's memory, `times` after each other."""
        ...

    def build(self, target: str, phases: Sequence[str], ops: Sequence[str], folder: Path) -> bytes:
        """Return the object of an interpreter; `folder` may hold what was built before."""
        ...

    def load(self, data: bytes, name: str) -> Any:
        """Return a kernel of an object."""
        ...

    def resident_blocks(self, kernel: Any, lanes: int) -> int:
        """Return how many blocks of a kernel the whole device holds at once."""
        ...

    def launch(
        self, kernel: Any, n_blocks: int, lanes: int, arguments: Sequence[int], stream: int
    ) -> None:
        """Start a kernel of pointers, all its blocks resident, and return; streams run at once."""
        ...

    def capture(self, launches: Sequence[Launched]) -> Any:
        """Return a graph of launches, each behind the one before; for measuring."""
        ...

    def replay(self, graph: Any) -> None:
        """Start a graph and return."""
        ...


def check_arch(device: Devices, target: str) -> None:
    """Refuse a device of another architecture: code for sm_90a runs on 9.0 alone.

    Raises: TargetError with what the device says it is.
    """
    arch = target.partition(":")[2]
    need = arch.removesuffix("a") if get_target(target).family == "cuda" else arch
    if device.arch != need:
        raise TargetError(
            f"--target {target}", got=f"{device.name}, which is {device.arch}", need=need,
            hint="name the device's own target, or leave --target out to run on the CPU",
        )  # fmt: skip


# Operands {a, c, subnormal, 1, 2^-126, 2, -2^-76, 2^-76} of K3_CANARY_KERNEL, and what rule 1 says.
_CANARY_IN = np.array(
    [0x3F800001, 0xBF800002, 0x00400000, 0x3F800000, 0x00800000, 0x40000000, 0x99800000,
     0x19800000], "<u4"
)  # fmt: skip
_CANARY_OUT = np.array([0, 0, 0, 0x00800000], "<u4")
_CANARIES = ("a * a + c contracted", "a subnormal operand", "a subnormal result",
             "flush before rounding")  # fmt: skip


def check_arithmetic(device: Device, kernel: Any, lanes: int, seconds: float) -> None:
    """Run the canaries of numerics, rule 1. Raises: TargetError naming the first that fails."""
    at = device.alloc(_CANARY_IN.nbytes + _CANARY_OUT.nbytes)
    device.upload(at, _CANARY_IN)
    device.launch(kernel, 1, lanes, (at, at + _CANARY_IN.nbytes), 0)
    wait_idle(device, seconds, lambda: b"", lambda: None)
    found = np.frombuffer(device.download(at + _CANARY_IN.nbytes, _CANARY_OUT.nbytes), "<u4")
    for what, got, need in zip(_CANARIES, found.tolist(), _CANARY_OUT.tolist(), strict=True):
        if got != need:
            raise TargetError(
                f"arithmetic of {device.name}: {what}", got=f"{got:#010x}", need=f"{need:#010x}",
                hint="report this: the object's flags and the contract differ",
            )  # fmt: skip


def wait_idle(
    device: Devices, patience: float, progress: Callable[[], bytes], stop: Callable[[], None]
) -> None:
    """Return when every launch has ended.

    `progress` reads what only grows while blocks get on; `stop` asks them to leave, after which
    they have a second. Raises: UnsoundError when nothing moved for `patience` seconds.
    """
    start = looked = moved = time.monotonic()
    seen = b""
    try:
        while not device.is_idle():
            now = time.monotonic()
            time.sleep(0.0 if now - start < _SPIN_SECONDS else _NAP_SECONDS)
            if now - looked < min(_LOOK_SECONDS, patience):
                continue
            found, looked = progress(), now
            if found != seen:
                seen, moved = found, now
            elif now - moved > patience:
                raise UnsoundError(
                    device.name, got=f"no progress in {patience:g} s", need="a step to end",
                    hint="raise --deadline where one step takes longer",
                )  # fmt: skip
    except BaseException:
        let_go(device, stop)
        raise


def let_go(device: Devices, stop: Callable[[], None]) -> None:
    """Ask blocks to leave, and give them a second: what they use may be freed after it."""
    stop()
    end = time.monotonic() + _LOOK_SECONDS
    while time.monotonic() < end and not device.is_idle():
        time.sleep(_NAP_SECONDS)
