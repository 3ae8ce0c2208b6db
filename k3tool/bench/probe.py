"""A child that times matrix products and plain reading in memory of its own: `k3-cpu --measure`.

**Read bandwidth** means everywhere: the best of {1, 4 streams} x {software prefetch or none}, 2 MiB
pages, at least 1 GiB, all threads, 64-byte loads. It decides nothing; the benchmarks pair it with
what they measure. The child sleeps between commands, so that it disturbs nothing beside it.
"""

import contextlib
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from k3tool.errors import TargetError, UnsoundError
from k3tool.runtime.interpreter import check_leaves, load

LEAST_BYTES = 1 << 30
CACHES = 4  # the memory walked is at least so many times the last-level cache
READ_WAYS = ((1, 0), (1, 1), (4, 0), (4, 1))  # streams, software prefetch
PEER = "double"  # the starting engine's order of summation, in place of a leaf set


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the sum of all last-level caches, 0 where the system does not say."""
    found: dict[tuple[int, str], int] = {}
    for index in folder.glob("cpu[0-9]*/cache/index*"):
        try:
            level = int((index / "level").read_text())
            size, shared = (index / "size").read_text(), (index / "shared_cpu_list").read_text()
        except (OSError, ValueError):
            continue
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size.strip()[-1:])
        if unit:
            found[level, shared] = int(size.strip()[:-1]) * unit
    last = max((level for level, _ in found), default=0)
    return sum(n for (level, _), n in found.items() if level == last)


class Product(NamedTuple):
    """A matrix product to time: bf16 or mxfp4 weights, rows of `k` in `blocks` blocks."""

    kind: str
    k: int
    blocks: int = 1

    @property
    def label(self) -> str:
        """Return it in words."""
        name = "MXFP4" if self.kind == "mxfp4" else self.kind
        return f"{name} {f'{self.blocks} blocks' if self.blocks > 1 else 'rows'} of {self.k}"


class Probe:
    """A running child; use it as a context manager.

    `threads` is one a CPU of this process's affinity mask unless given; `path` is another build's
    interpreter, whose sources may be others. Rates are bytes a second.
    Raises: TargetError where the interpreter is stale or the child does not start.
    """

    def __init__(
        self, threads: int | None = None, n_bytes: int | None = None, path: Path | None = None
    ) -> None:
        """Start the child and wait until it has filled its memory."""
        self.threads = threads or self.default_threads()
        self.n_bytes = n_bytes or max(LEAST_BYTES, CACHES * last_level_cache_bytes())
        self.interpreter = load(path, any_source=path is not None)
        self._way = READ_WAYS[0]
        command = [str(self.interpreter.path), "--measure", "--threads", str(self.threads),
                   "--bytes", str(self.n_bytes)]  # fmt: skip
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            said = self._line().split()
        except TargetError:
            self.close()
            raise
        self.huge_share = int(said[3]) / int(said[2])
        self.auto = said[4]

    @staticmethod
    def default_threads() -> int:
        """Return one thread a CPU that this process may use."""
        return len(os.sched_getaffinity(0))

    def __enter__(self) -> "Probe":
        """Return the running child."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the child."""
        self.close()

    def close(self) -> None:
        """End the child and wait for it."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()  # its end is the child's
        self._child.stdout.close()
        self._child.wait()

    def choose_read(self, repeats: int = 2) -> str:
        """Find the quickest way of reading, which `read` takes from now on; return it in words."""
        best = {way: max(self._read(way) for _ in range(repeats)) for way in READ_WAYS}
        self._way = max(best, key=lambda way: best[way])
        streams, ahead = self._way
        return f"{streams} stream{'s' * (streams > 1)}, {'with' if ahead else 'no'} prefetch"

    def read(self) -> float:
        """Return the rate of one pass of reading."""
        return self._read(self._way)

    def fma(self) -> float:
        """Return the rate of fused multiply-adds in registers, in operations a second, two each."""
        return 2 * self._rate("fma")

    def pairs(self, leaves: str) -> float | None:
        """Return the same by products of bf16 pairs; None where the leaf set's leaves use none."""
        check_leaves(self.interpreter, leaves)
        said = self._tell(f"pairs {leaves}")
        return None if said == "none" else 2 * self._rate_of(said)

    def barrier(self, rounds: int) -> float:
        """Return the seconds of one round of a plain barrier of all threads."""
        return 1 / self._rate(f"barrier {rounds}")

    def product(self, leaves: str, product: Product, mode: str) -> float:
        """Return the rate of one pass over the memory's rows, in bytes of weights.

        `leaves` is a leaf set or PEER; `mode` f32 or bf16 says what the activations are.
        """
        return self._rate(self._ask("gemv", leaves, product, mode))

    def check(self, leaves: str, product: Product, mode: str) -> None:
        """Compare the first rows with the scalar leaves. Raises: UnsoundError where bits differ."""
        wrong = int(self._tell(self._ask("check", leaves, product, mode)))
        if wrong:
            what = f"{product.label}, mode {mode}, {leaves}"
            raise UnsoundError(what, got=f"{wrong} values differ", need="the scalar leaves' values")

    def _ask(self, verb: str, leaves: str, product: Product, mode: str) -> str:
        if leaves != PEER:
            check_leaves(self.interpreter, leaves)
        return f"{verb} {leaves} {product.kind} {mode} {product.k} {product.blocks}"

    def _read(self, way: tuple[int, int]) -> float:
        return self._rate(f"read {way[0]} {way[1]}")

    def _rate(self, command: str) -> float:
        return self._rate_of(self._tell(command))

    @staticmethod
    def _rate_of(said: str) -> float:
        seconds, n_bytes = said.split()
        return int(n_bytes) / float(seconds)

    def _tell(self, command: str) -> str:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(command + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # _line says what became of it
        said = self._line()
        if said.startswith("error "):
            raise TargetError("k3-cpu --measure", got=said[6:], need="a command it knows")
        return said

    def _line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            got = f"exit code {self._child.wait()}"
            raise TargetError("k3-cpu --measure", got=got, need="an answer")
        return line.strip()
