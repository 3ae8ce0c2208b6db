"""Start the rank processes of one run, compare what they say step by step, stop them all.

Ranks compute and decide alone; this driver only listens. It compares every step of every rank, and
when one dies, traps or differs, all are stopped and the error names that rank. Nothing outlives it:
images and shared segments are memory files without a name, ranks die with their driver.
"""

import mmap
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from k3tool.errors import ArtifactError, K3Error, TargetError, UnsoundError
from k3tool.isa.table import LOAD_BLOCK_BYTES
from k3tool.progress import Progress
from k3tool.runtime import records
from k3tool.runtime.records import RECORD_DTYPE, Fault
from k3tool.runtime.trace import LINE_BYTES, Trace, read_trace, trace_bytes

Array = npt.NDArray[Any]
GRACE_SECONDS = 1.0  # after a first fault: time for others to report a better one
COPY_BLOCK_BYTES = 4 << 20  # a step of a rank's progress while it copies: BLOCK of copy.c
STARTUP_SECONDS = 60.0  # a rank may take so long, and the deadline, to map its memory
_DRIVER_STOPPED = 0xFFFFFFFF
_SAME_ON_ALL = ("kind", "step", "phase", "position", "n_tokens", "id", "best", "second", "digest")
_EXIT_ERRORS: dict[int, type[K3Error]] = {3: ArtifactError, 5: TargetError}


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a group: one image a rank, and what is not in an image.

    `interpreter` is None on a GPU, where `n_threads` is 0.
    """

    interpreter: Path | None
    images: Sequence[bytes]
    n_threads: int = 1
    leaves: str = "auto"
    deadline_seconds: float = 60.0
    logits_shape: tuple[int, int] | None = None
    program: str = "the program"  # what the images are made of, for messages
    copies: bool = False  # weights are read into memory first, not used as mapped
    n_io: int = 0  # threads that read weights, per rank
    start_bytes: int = 0  # that all ranks read before their first step, at most
    expert_trace: int | None = None  # a descriptor that rank 0 writes K3ExpertEvent rows to
    trace_events: int = 0  # a worker; 0 for no trace
    first_position: int = 0  # above 0: a measurement with noise in all states


@dataclass(slots=True)
class _Rank:
    """One process and what it has said so far."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: int
    pending: bytes = b""
    steps: list[Any] = field(default_factory=list)
    leaves: str = ""
    ended: bool = False
    peak_bytes: int = 0
    end: Any = None  # the END record
    is_direct: bool = False


class RankGroup:
    """A context manager over running ranks; `steps` yields what all of them agree on."""

    def __init__(self, launch: Launch) -> None:
        """Keep what to start; nothing runs before the context is entered."""
        self._launch = launch
        self._ranks: list[_Rank] = []
        self._descriptors: list[int] = []
        self._faults: list[Fault] = []
        self._selector = selectors.DefaultSelector()
        self._shared: mmap.mmap | None = None
        self._logits: int | None = None
        self._traces: list[int] = []
        self._segments: int | None = None
        self._names: dict[str, str] = {}  # of memory files, by the path that a rank opens

    # -- start and stop ------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start every rank. Raises: TargetError when memory or processes cannot be had."""
        try:
            shared = self._segments = self._memory_file("the shared segments", mmap.PAGESIZE)
            self._shared = mmap.mmap(shared, mmap.PAGESIZE)
            if self._launch.logits_shape is not None:
                rows, vocab = self._launch.logits_shape
                self._logits = self._memory_file("the logits", rows * vocab * 4)
            for number, image in enumerate(self._launch.images):
                self._start(number, image, shared)
        except OSError as error:
            self._stop()
            raise TargetError("ranks", got=error.strerror, need="memory and processes") from None
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop every rank, whatever happened."""
        self._stop()

    def _memory_file(self, name: str, n_bytes: int) -> int:
        descriptor = os.memfd_create("k3")
        self._descriptors.append(descriptor)
        self._names[_open_path(descriptor)] = name
        os.ftruncate(descriptor, n_bytes)
        return descriptor

    def _in_names(self, text: str) -> str:
        """Return what a rank said with the names of memory files: their paths say nothing."""
        for path in sorted(self._names, key=len, reverse=True):
            text = text.replace(path, self._names[path])
        return text

    def _start(self, number: int, image: bytes, shared: int) -> None:
        at = self._memory_file(f"the image of {self._launch.program}", 0)
        with open(at, "wb", closefd=False) as file:
            file.write(image)
        reading, writing = os.pipe()
        self._descriptors.append(reading)
        launch = self._launch
        command = [
            str(launch.interpreter), "--image", _open_path(at), "--shared", _open_path(shared),
            "--records", str(writing), "--threads", str(launch.n_threads),
            "--leaves", launch.leaves, "--deadline", repr(launch.deadline_seconds),
        ]  # fmt: skip
        if launch.copies:
            command += ["--copy", "1"]
        passed = [at, shared, writing]
        if self._logits is not None:
            command += ["--logits", _open_path(self._logits)]
            passed.append(self._logits)
        if launch.trace_events:
            n_bytes = trace_bytes(launch.n_threads, launch.trace_events)
            self._traces.append(self._memory_file("the trace", n_bytes))
            command += ["--trace", _open_path(self._traces[-1])]
            passed.append(self._traces[-1])
        if launch.expert_trace is not None and number == 0:
            command += ["--expert-trace", str(launch.expert_trace)]
            passed.append(launch.expert_trace)
        if launch.first_position:
            command += ["--from", str(launch.first_position)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=passed
            )
        finally:
            os.close(writing)
        rank = _Rank(number, process, reading)
        self._ranks.append(rank)
        self._selector.register(reading, selectors.EVENT_READ, rank)

    def _stop(self) -> None:
        self._abort()
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            if rank.process.stderr is not None:
                rank.process.stderr.close()
        self._selector.close()
        if self._shared is not None:
            self._shared.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _abort(self) -> None:
        """Tell every rank to stop at its next wait."""
        if self._shared is not None and not self._shared.closed:
            word = np.frombuffer(self._shared, "<u4", 1)
            if word[0] == 0:
                word[0] = _DRIVER_STOPPED
            del word  # an exported buffer would keep the map open

    # -- what they say -------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Return the ranks' process ids."""
        return [rank.process.pid for rank in self._ranks]

    @property
    def leaves(self) -> str:
        """Return the leaf set in use, empty before the ranks are ready."""
        return self._ranks[0].leaves if self._ranks else ""

    @property
    def peak_bytes(self) -> int:
        """Return the sum of the ranks' peak resident memory (mapped weights included)."""
        return sum(rank.peak_bytes for rank in self._ranks)

    @property
    def is_direct(self) -> bool:
        """Return whether every rank reads its weights around the page cache."""
        return all(rank.is_direct for rank in self._ranks)

    def ends(self, name: str) -> list[int]:
        """Return a field of every rank's last record; the ranks must have ended."""
        return [int(rank.end[name]) for rank in self._ranks]

    def folder_bytes(self) -> tuple[int, ...]:
        """Return the bytes that all ranks read, by folder; the ranks must have ended."""
        rows = np.array([rank.end["n_device_bytes"] for rank in self._ranks])
        return tuple(rows.sum(axis=0).tolist())

    def logits(self) -> Array:
        """Return the gathered logits, float32 [rows, vocab]; the ranks must have ended."""
        assert self._logits is not None
        assert self._launch.logits_shape is not None
        shape = self._launch.logits_shape
        with mmap.mmap(self._logits, shape[0] * shape[1] * 4, access=mmap.ACCESS_READ) as data:
            return np.frombuffer(data, "<f4").reshape(shape).copy()

    def trace(self, rank: int) -> Trace:
        """Return what a rank's workers did and when; the rank must have ended."""
        return read_trace(self._traces[rank], self._launch.n_threads, self._launch.trace_events)

    def steps(self) -> Iterator[Array]:
        """Yield, for each step, all ranks' records ([R] RECORD_DTYPE), after comparing them.

        Raises: UnsoundError when a rank traps, dies or differs; ArtifactError or TargetError when
        one refuses its image or machine.
        """
        done = 0
        while True:
            # First what is there already: ranks of a short run may have ended in wait_ready.
            while all(len(rank.steps) > done for rank in self._ranks):
                yield self._agreed(done)
                done += 1
            if all(rank.ended for rank in self._ranks):
                break
            self._hear(self._launch.deadline_seconds + GRACE_SECONDS)
        if any(len(rank.steps) != done for rank in self._ranks):
            counts = [len(rank.steps) for rank in self._ranks]
            raise UnsoundError("ranks", got=f"{counts} steps", need="equally many on every rank")

    def wait_ready(self, progress: Progress | None = None) -> None:
        """Return when every rank has mapped its memory. Raises: as `steps`.

        `progress` hears, about once a second, of the bytes that are read first.
        """
        total = self._launch.start_bytes
        block = COPY_BLOCK_BYTES if self._launch.copies else LOAD_BLOCK_BYTES

        def tick(lines: bytes) -> None:
            if progress is not None and total and lines:
                blocks = int(np.frombuffer(lines, "<u4")[:: LINE_BYTES // 4].sum())
                progress(min(blocks * block, total), total)

        while not all(rank.leaves for rank in self._ranks):
            self._hear(self._launch.deadline_seconds + STARTUP_SECONDS, tick)

    def _hear(self, patience: float, tick: Callable[[bytes], None] | None = None) -> None:
        """Listen until some rank says something; `tick` gets the progress lines meanwhile.

        Ranks watch each other, but one that is stopped (SIGSTOP, a debugger) watches nobody, and
        alone it would be waited for without end. Raises: UnsoundError naming who got nowhere.
        """
        seen, since = self._progress(), time.monotonic()
        while not (ready := self._selector.select(min(patience, 1.0))):
            now = self._progress()
            if tick is not None:
                tick(now)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                self._abort()
                raise _silent([rank for rank in self._ranks if not rank.ended], patience)
        for key, _ in ready:
            self._listen(key.data)

    def _progress(self) -> bytes:
        """Return all ranks' progress lines (kernels_cpu/memory.h), whatever lies between."""
        assert self._segments is not None
        n_lines = self._launch.n_threads + self._launch.n_io
        n_bytes = os.fstat(self._segments).st_size
        if n_bytes <= mmap.PAGESIZE:
            return b""  # no rank has laid out the segments yet
        stride = (n_bytes - mmap.PAGESIZE) // len(self._launch.images)
        starts = (mmap.PAGESIZE + rank * stride for rank in range(len(self._launch.images)))
        return b"".join(os.pread(self._segments, n_lines * LINE_BYTES, at) for at in starts)

    def _agreed(self, step: int) -> Array:
        rows = np.array([rank.steps[step] for rank in self._ranks], RECORD_DTYPE)
        for rank in self._ranks:
            rank.steps[step] = None  # a long run must not keep every record twice
        try:
            return agreed(rows)
        except UnsoundError:
            self._abort()
            raise

    def _listen(self, rank: _Rank) -> None:
        data = os.read(rank.pipe, RECORD_DTYPE.itemsize * 64)
        if not data:
            self._selector.unregister(rank.pipe)
            if not rank.ended:
                self._died(rank)
            return
        data = rank.pending + data
        whole = len(data) // RECORD_DTYPE.itemsize * RECORD_DTYPE.itemsize
        rank.pending = data[whole:]
        for row in np.frombuffer(data[:whole], RECORD_DTYPE):
            self._take(rank, row)

    def _take(self, rank: _Rank, row: Any) -> None:
        kind = int(row["kind"])
        if kind == records.READY:
            rank.leaves = bytes(row["name"]).decode()
            rank.is_direct = bool(row["is_direct"])
        elif kind in (records.PROMPT, records.TOKEN):
            rank.steps.append(row)
        elif kind == records.END:
            rank.ended, rank.peak_bytes, rank.end = True, int(row["peak_bytes"]), row
        elif kind == records.FAULT:
            self._faults.append(records.parse_fault(row))
            rank.ended = True
            if len(self._faults) == 1:
                self._fail()

    # -- failing -------------------------------------------------------------------------------

    def _fail(self) -> None:
        """Collect what others report within the grace time, then raise the best explanation."""
        self._abort()
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end and not all(rank.ended for rank in self._ranks):
            for key, _ in self._selector.select(max(0.0, end - time.monotonic())):
                self._listen(key.data)
        silent = [rank for rank in self._ranks if not rank.ended]
        if silent and all(fault.is_waiting for fault in self._faults):
            raise _silent(silent, self._launch.deadline_seconds)
        raise FaultError(min(self._faults, key=lambda fault: fault.order))

    def _died(self, rank: _Rank) -> None:
        """Raise for a rank whose pipe closed before its last record."""
        rank.ended = True
        if self._faults:
            return  # it stopped because another did
        code = rank.process.wait()
        self._abort()
        assert rank.process.stderr is not None
        said = self._in_names(_one_line(rank.process.stderr.read().decode(errors="replace")))
        if code in _EXIT_ERRORS:
            raise _EXIT_ERRORS[code](f"rank {rank.number}", got=said, need="what it can run")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise UnsoundError(
            f"rank {rank.number}", got=f"{how} {said}".strip(), need="all ranks until the end"
        )


def _silent(ranks: Sequence[_Rank], seconds: float) -> UnsoundError:
    """Name the ranks that did not advance, stopped ones first: the others wait for them."""
    stopped = [rank for rank in ranks if _state(rank.process.pid) in "Tt"]
    named = ", ".join(str(rank.number) for rank in stopped or ranks)
    got = "stopped by a signal" if stopped else f"no progress in {seconds:g} s"
    return UnsoundError(
        f"rank {named}", got=got, need="all ranks to advance",
        hint="let it run, or raise --deadline where one step takes longer",
    )  # fmt: skip


def _state(pid: int) -> str:
    """Return a process's state as the system names it (T: stopped), "?" where it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "?"
    return text.rpartition(")")[2].split()[0]


class FaultError(Exception):
    """A trap of a rank, before it is put in the words of a program (records.Fault.error)."""

    def __init__(self, fault: Fault) -> None:
        """Keep the fault."""
        super().__init__(fault)
        self.fault = fault


def _open_path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _one_line(text: str) -> str:
    """Return the first line that says something (a sanitizer draws a rule above its report)."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line.strip("=")), "")


def agreed(rows: Array) -> Array:
    """Return all ranks' records of a step. Raises: UnsoundError naming who differs, and in what."""
    keys = [tuple(row[name].tobytes() for name in _SAME_ON_ALL) for row in rows]
    if len(set(keys)) > 1:
        raise _disagreement(rows, keys)
    return rows


def _disagreement(rows: Array, keys: list[tuple[bytes, ...]]) -> K3Error:
    """Name the ranks that differ from what most say; on a tie from what rank 0 says."""
    common = max(keys, key=lambda key: (keys.count(key), key == keys[0]))
    reference = rows[keys.index(common)]
    bad = [index for index, key in enumerate(keys) if key != common]
    row = rows[bad[0]]
    fields = [name for name in _SAME_ON_ALL if row[name].tobytes() != reference[name].tobytes()]
    name = "id" if "id" in fields else fields[0]
    text = ("{:#x}" if name == "digest" else "{}").format
    ranks = ", ".join(map(str, bad))
    return UnsoundError(
        f"rank {ranks}: step {row['step']}, position {row['position']}: {', '.join(fields)}",
        got=text(row[name]),
        need=f"{text(reference[name])} as on {len(keys) - len(bad)} of {len(keys)} ranks",
        hint="k3tool verify coverage; shard again if weights on disk changed",
    )
