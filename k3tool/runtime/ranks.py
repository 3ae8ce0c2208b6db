"""Start the rank processes of one run, compare what they say step by step, stop them all.

Ranks run the steps that this driver asks for, each the same on all of them. It compares every
answer of every rank, and when one dies, traps or differs, all are stopped and the error names that
rank. Nothing outlives it: images and shared segments are memory files without a name, ranks die
with their driver.
"""

import mmap
import os
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from k3tool.errors import TargetError, UnsoundError
from k3tool.isa.table import LOAD_BLOCK_BYTES
from k3tool.progress import Progress
from k3tool.runtime.agreement import agreed
from k3tool.runtime.image_view import view_image
from k3tool.runtime.interpreter import cannot_start
from k3tool.runtime.rank_process import RankProcess, silent
from k3tool.runtime.records import RECORD_DTYPE, Fault
from k3tool.runtime.requests import RESTORE, SAVE, Span, Step, encode_spans, encode_step
from k3tool.runtime.slots import StateRow
from k3tool.runtime.stepping import Stepping
from k3tool.runtime.trace import LINE_BYTES, Trace, read_trace, trace_bytes
from k3tool.trace.recorder import Recorder

Array = npt.NDArray[Any]
GRACE_SECONDS = 1.0  # after a first fault: time for others to report a better one
COPY_BLOCK_BYTES = 4 << 20  # a step of a rank's progress while it copies: BLOCK of copy.c
STARTUP_SECONDS = 60.0  # a rank may take so long, and the deadline, to map its memory
_DRIVER_STOPPED = 0xFFFFFFFF


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
    recorder: Recorder | None = None  # of a hash of every result
    first_position: int = 0  # above 0: a measurement with noise in all states
    states: Sequence[StateRow] = ()  # of a slot, where they are to be kept


class RankGroup(Stepping):
    """A context manager over running ranks: an Engine, and the images' own request (`steps`)."""

    def __init__(self, launch: Launch) -> None:
        """Keep what to start; nothing runs before the context is entered."""
        kept_rows = launch.logits_shape[0] if launch.logits_shape is not None else 0
        view = view_image(launch.images[0])
        super().__init__(view, launch.states, kept_rows, launch.first_position)
        self._launch = launch
        self._ranks: list[RankProcess] = []
        self._n_wanted = 0  # of the step begun
        self._descriptors: list[int] = []
        self._faults: list[Fault] = []
        self._selector = selectors.DefaultSelector()
        self._shared: mmap.mmap | None = None
        self._logits: int | None = None
        self._traces: list[int] = []
        self._exchanges: list[int] = []  # a file for each rank's states, where they can be kept
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
            other = TargetError("ranks", got=error.strerror, need="memory and processes")
            raise cannot_start("ranks", error) or other from None
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
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
        launch = self._launch
        command = [
            str(launch.interpreter), "--image", _open_path(at), "--shared", _open_path(shared),
            "--threads", str(launch.n_threads), "--leaves", launch.leaves,
            "--deadline", repr(launch.deadline_seconds),
        ]  # fmt: skip
        passed = [at, shared]
        if launch.copies:
            command += ["--copy", "1"]
        if self._logits is not None:
            command += ["--logits", _open_path(self._logits)]
            passed.append(self._logits)
        if launch.states:
            self._exchanges.append(self._memory_file("the states of a slot", 0))
            command += ["--exchange", _open_path(self._exchanges[-1])]
            passed.append(self._exchanges[-1])
        if launch.trace_events:
            n_bytes = trace_bytes(launch.n_threads, launch.trace_events)
            self._traces.append(self._memory_file("the trace", n_bytes))
            command += ["--trace", _open_path(self._traces[-1])]
            passed.append(self._traces[-1])
        if launch.expert_trace is not None and number == 0:
            command += ["--expert-trace", str(launch.expert_trace)]
            passed.append(launch.expert_trace)
        if launch.recorder is not None:
            words, descriptors = launch.recorder.arguments(number)
            command += words
            passed += descriptors
        if launch.first_position:
            command += ["--noise", "1"]
        rank = RankProcess(number, command, passed)
        self._ranks.append(rank)
        self._selector.register(rank.records, selectors.EVENT_READ, rank)

    def _stop(self) -> None:
        self._abort()
        for rank in self._ranks:
            rank.process.kill()  # all of them before the first is waited for
        for rank in self._ranks:
            rank.stop()
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
        """Return the gathered logits, float32 [rows, vocab]."""
        assert self._launch.logits_shape is not None
        return self.kept_logits(0, self._launch.logits_shape[0])

    def kept_logits(self, first: int, n: int) -> Array:
        """Return a copy of rows of the kept logits, float32 [n, vocab]."""
        assert self._logits is not None
        with open(self._logits, "rb", closefd=False) as file:
            file.seek(first * self.vocab * 4)
            found = np.fromfile(file, "<f4", n * self.vocab)  # one read(2) gives at most 2 GiB
        return found.reshape(n, self.vocab)

    def trace(self, rank: int) -> Trace:
        """Return what a rank's workers did and when; the rank must have ended."""
        return read_trace(self._traces[rank], self._launch.n_threads, self._launch.trace_events)

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
                raise silent([rank for rank in self._ranks if not rank.ended], patience)
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

    # -- what they are asked -------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Send a step to every rank."""
        self._n_wanted = step.n_wanted
        self._ask(encode_step(step))

    def finish(self) -> Array:
        """Return all ranks' records of the step, after comparing them: Stepping.finish."""
        n = max(self._n_wanted, 1)
        rows = self._answers(n)
        try:
            return np.stack([agreed(row) for row in rows])
        except UnsoundError:
            self._abort()
            raise

    def watch(self) -> None:
        """Raise for a process that died while nothing was asked of it: Stepping.watch."""
        for key, _ in self._selector.select(0):
            self._listen(key.data)

    def end(self) -> None:
        """Let every rank end. Raises: as `finish`."""
        for rank in self._ranks:
            rank.close_requests()
        while not all(rank.ended for rank in self._ranks):
            self._hear(self._launch.deadline_seconds + GRACE_SECONDS)

    def _ask(self, request: bytes) -> None:
        for rank in self._ranks:
            rank.ask(request)

    def _answers(self, n: int) -> Array:
        """Wait for `n` records of every rank: [n, R]."""
        while any(len(rank.answers) < n for rank in self._ranks):
            self._hear(self._launch.deadline_seconds + GRACE_SECONDS)
        rows = np.zeros((n, len(self._ranks)), RECORD_DTYPE)
        for number, rank in enumerate(self._ranks):
            for row in rows:
                row[number] = rank.answers.popleft()
        return rows

    def _read_spans(self, spans: Sequence[Span], n_bytes: int) -> tuple[bytes, ...]:
        for file in self._exchanges:
            os.ftruncate(file, max(n_bytes, 1))
        self._ask(encode_spans(SAVE, spans))
        self._answers(1)
        return tuple(_read(file, n_bytes) for file in self._exchanges)

    def _write_spans(self, spans: Sequence[Span], ranks: Sequence[bytes]) -> None:
        for file, data in zip(self._exchanges, ranks, strict=True):
            os.ftruncate(file, len(data))
            with open(file, "wb", closefd=False) as out:
                out.seek(0)
                out.write(data)
        self._ask(encode_spans(RESTORE, spans))
        self._answers(1)

    def _listen(self, rank: RankProcess) -> None:
        faults = rank.listen()
        if faults is None:
            self._selector.unregister(rank.records)
            if not rank.ended:
                self._died(rank)
            return
        for fault in faults:
            self._faults.append(fault)
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
        waiting = [rank for rank in self._ranks if not rank.ended]
        if waiting and all(fault.is_waiting for fault in self._faults):
            raise silent(waiting, self._launch.deadline_seconds)
        raise FaultError(min(self._faults, key=lambda fault: fault.order))

    def _died(self, rank: RankProcess) -> None:
        """Raise for a rank whose pipe closed before its last record."""
        rank.ended = True
        if self._faults:
            return  # it stopped because another did
        rank.process.wait()
        self._abort()
        raise rank.death(self._in_names(rank.stderr_line()))


class FaultError(Exception):
    """A trap of a rank, before it is put in the words of a program (records.Fault.error)."""

    def __init__(self, fault: Fault) -> None:
        """Keep the fault."""
        super().__init__(fault)
        self.fault = fault


def _open_path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _read(file: int, n_bytes: int) -> bytes:
    """Return the first bytes of a memory file; one read gives at most 2 GiB."""
    with open(file, "rb", closefd=False) as data:
        data.seek(0)
        return data.read(n_bytes)
