"""The ranks of one run on a device, in this process: what a RankGroup is on the CPU.

It loads the program's interpreters, places every rank, and drives steps: prompt in chunks, then a
token a step, as kernels_cpu/main.c does. What ranks say has the same records and faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from k3tool.errors import TargetError
from k3tool.isa.stream import Isa
from k3tool.isa.table import ALL_PHASES
from k3tool.progress import Progress
from k3tool.runtime import records
from k3tool.runtime.digest import digest_words
from k3tool.runtime.gpu_memory import RankMemory, require_memory
from k3tool.runtime.gpu_object import check_object, read_identity
from k3tool.runtime.gpu_runtime import (
    CANARY,
    Device,
    check_arch,
    check_arithmetic,
    wait_idle,
)
from k3tool.runtime.gpu_source import builds, program_ops
from k3tool.runtime.ranks import GRACE_SECONDS, FaultError, Launch, agreed
from k3tool.runtime.records import RECORD_DTYPE, Fault
from k3tool.tables import bytes_text, count_text
from k3tool.targets import get_build

Array = npt.NDArray[Any]
_CANDIDATE_DTYPE = np.dtype(
    [("best", "<f4"), ("id", "<u4"), ("second", "<f4"), ("reserved", "<u4")]
)
_STOPPED = 0xFFFFFFFF  # the driver's word in the abort word
_DECODE = ALL_PHASES.index("decode")


@dataclass(slots=True)
class _Sofar:
    """How far the run is: tokens read and chosen, steps taken."""

    n_read: int = 0
    n_chosen: int = 0
    epoch: int = 0
    logits: Array | None = None


class GpuGroup:
    """A context manager over ranks on one device; `steps` yields what all of them agree on.

    It owns the device and closes it.
    """

    def __init__(
        self, launch: Launch, isa: Isa, device: Device, folder: Path, say: Callable[[str], None],
        *, is_launch_per_op: bool = False,
    ) -> None:  # fmt: skip
        """Keep what to start; `folder` is where objects are kept, `say` gets progress in words.

        A step is one launch, or one for each instruction: what one launch is measured against.
        """
        self._launch, self._isa, self._device = launch, isa, device
        self._folder, self._say = folder, say
        self._ranks = [
            RankMemory(isa, image, len(launch.images), is_launch_per_op=is_launch_per_op)
            for image in launch.images
        ]
        self._kernels: dict[int, Any] = {}
        self._lanes: dict[int, int] = {}
        self._at = _Sofar()
        self._abort_word = 0
        self.peak_bytes = 0

    @property
    def leaves(self) -> str:
        """Return what computes: the device's name."""
        return self._device.name

    # -- start and stop --------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Check and load; memory is asked for. Raises: TargetError, K3Error of a compiler."""
        try:
            check_arch(self._device, self._isa.target)
            self._load()
            self._check_blocks()
            self.peak_bytes = require_memory(self._device, self._ranks)
        except BaseException:
            self._device.close()
            raise
        if self._launch.logits_shape is not None:
            self._at.logits = np.zeros(self._launch.logits_shape, "<f4")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the device back, whatever happened."""
        self._device.close()

    def wait_ready(self, progress: Progress) -> None:
        """Return when every rank is in the device's memory. Raises: as RankMemory.place."""
        device, ranks = self._device, self._ranks
        self._say(f"{bytes_text(self.peak_bytes)} on {device.name}")
        segments = device.map_ranks(len(ranks), max(rank.segment_bytes for rank in ranks))
        self._abort_word = device.alloc(4)
        ticks = int(self._launch.deadline_seconds * device.ticks_per_second)
        total, done = sum(rank.weight_bytes for rank in ranks), 0

        def add(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            progress(done, total)

        for rank in ranks:
            rank.place(device, segments, self._abort_word, ticks, add)

    def _load(self) -> None:
        """Load each phase's kernel, after its object has been asked what it is."""
        isa, device = self._isa, self._device

        def build(one: tuple[tuple[str, ...], tuple[str, ...]]) -> bytes:
            return device.build(isa.target, *one, self._folder)

        needed = list(builds(program_ops(isa)).items())
        for phases, ops in needed:
            source = get_build(isa.target, phases[0], ops).source
            self._say(f"compiling or reading {source} of {isa.target} for {' and '.join(phases)}")
        with ThreadPoolExecutor() as pool:  # a compiler takes most of a minute
            objects = pool.map(build, needed)
        for (phases, _), data in zip(needed, objects, strict=True):
            found = read_identity(data, f"interpreter of {isa.target} for {' and '.join(phases)}")
            for phase in phases:
                index, row = ALL_PHASES.index(phase), get_build(isa.target, phase)
                check_object(found, isa, phase, n_segments=self._ranks[0].n_segments(index))
                self._kernels[index] = device.load(data, row.kernel)
                self._lanes[index] = row.lanes
            canary = device.load(data, CANARY)
            check_arithmetic(device, canary, found.lanes, self._launch.deadline_seconds)

    def _check_blocks(self) -> None:
        """Refuse a grid that is not all resident: its first blocks would wait for its last."""
        need = sum(rank.n_blocks for rank in self._ranks)
        for phase, kernel in self._kernels.items():
            got = self._device.resident_blocks(kernel, self._lanes[phase])
            if got < need:
                ranks = len(self._ranks)
                raise TargetError(
                    f"{self._device.name}: {ALL_PHASES[phase]}", got=f"{got} resident blocks",
                    need=f"{need}, {need // ranks} for each of {count_text(ranks, 'rank')}",
                    hint=f"compile for it: --workgroups {got // ranks}",
                )  # fmt: skip

    # -- steps -----------------------------------------------------------------------------------

    def steps(self) -> Iterator[Array]:
        """Yield, for each step, all ranks' records ([R] RECORD_DTYPE), after comparing them.

        Raises: FaultError for a trap; UnsoundError when ranks differ or a launch does not end.
        """
        view, at = self._ranks[0].view, self._at
        header, prompt = view.header, view.sections["prompt", 0].tolist()
        chunk, phase = int(header["chunk"]), int(header["first_phase"])
        stops = set(view.sections["stop", 0].tolist())
        for first in range(0, len(prompt), chunk):
            ids = prompt[first : first + chunk]
            rows = self._step(phase, ids, first + len(ids) == len(prompt))
            if first + len(ids) < len(prompt):
                yield rows
        while True:
            chosen = int(rows["id"][0])
            if chosen >= int(header["vocab"]):
                raise FaultError(self._odd_token(rows[0]))
            at.n_chosen += 1
            yield rows
            if at.n_chosen == int(header["n_gen"]) or chosen in stops:
                return
            rows = self._step(_DECODE, [chosen], True)

    def logits(self) -> Array:
        """Return the gathered logits, float32 [rows, vocab]; the steps must have ended."""
        assert self._at.logits is not None
        return self._at.logits

    def _step(self, phase: int, ids: Sequence[int], wants_token: bool) -> Array:
        """Run the ranks on `ids` at once and return their records."""
        device, at, n = self._device, self._at, len(ids)
        all_logits = bool(self._ranks[0].view.header["all_logits"])
        head_from = 0 if all_logits else n - 1 if wants_token else n
        for rank in self._ranks:
            rank.write_step(device, ids, at.n_read, head_from, at.epoch)
        start = time.monotonic_ns()
        kernel, lanes = self._kernels[phase], self._lanes[phase]
        for segment in zip(*(rank.launches(phase) for rank in self._ranks), strict=True):
            for rank, argument in zip(self._ranks, segment, strict=True):
                device.launch(kernel, rank.n_blocks, lanes, (argument,), rank.rank)
        patience = self._launch.deadline_seconds + GRACE_SECONDS
        wait_idle(device, patience, self._moved, self._abort)
        ns = time.monotonic_ns() - start
        rows = np.zeros(len(self._ranks), RECORD_DTYPE)
        for rank, row in zip(self._ranks, rows, strict=True):
            row["kind"], row["rank"], row["phase"] = records.PROMPT, rank.rank, phase
            row["step"], row["n_tokens"], row["ns"] = at.n_chosen, n, ns
            row["position"] = at.n_read + n - 1
        self._hear(rows)
        for rank, row in zip(self._ranks, rows, strict=True):
            logits = self._read_logits(rank, phase, head_from, n)
            if wants_token:
                self._choose(rank, phase, row, logits[-1])
        at.n_read, at.epoch = at.n_read + n, at.epoch + 1
        return agreed(rows)

    def _moved(self) -> bytes:
        return b"".join(rank.progress(self._device) for rank in self._ranks)

    def _abort(self) -> None:
        """Tell every rank to stop at its next wait."""
        self._device.upload(self._abort_word, _STOPPED.to_bytes(4, "little"))

    def _hear(self, rows: Array) -> None:
        """Take the ranks' digests. Raises: FaultError with the best explanation of a stop."""
        faults: list[Fault] = []
        for rank, row in zip(self._ranks, rows, strict=True):
            control = rank.control(self._device)
            row["digest"] = control["digest"]
            if control["stop"]:
                fault = row.copy()
                fault["position"], fault["fault"] = self._at.n_read, control["fault"]
                faults.append(records.parse_fault(fault))
        if faults:
            raise FaultError(min(faults, key=lambda fault: fault.order))

    def _read_logits(self, rank: RankMemory, phase: int, head_from: int, n: int) -> Array:
        """Return a rank's columns of the rows that were computed, and gather them."""
        row = rank.phase_row(phase)
        cols, address = int(row["logits_cols"]), rank.tensor_address(int(row["logits_handle"]))
        first = head_from if self._at.logits is not None else max(head_from, n - 1)
        data = self._device.download(address + 4 * cols * first, 4 * cols * (n - first))
        found = np.frombuffer(data, "<f4").reshape(n - first, cols)
        if self._at.logits is not None:
            at, column = self._at.n_read + first, rank.rank * cols
            self._at.logits[at : at + n - first, column : column + cols] = found
        return found

    def _choose(self, rank: RankMemory, phase: int, row: Any, logits: Array) -> None:
        """Take the folded argmax of the last token, which is the same on every rank."""
        handle, size = int(rank.phase_row(phase)["output_handle"]), _CANDIDATE_DTYPE.itemsize
        last = int(row["n_tokens"]) - 1
        data = self._device.download(rank.tensor_address(handle) + last * size, size)
        found = np.frombuffer(data, _CANDIDATE_DTYPE)[0]
        row["kind"] = records.TOKEN
        for name in ("best", "id", "second"):
            row[name] = found[name]
        row["logits_digest"] = digest_words(logits.view("<u4"), rank.rank * len(logits))

    def _odd_token(self, row: Any) -> Fault:
        """Return the fault of a chosen id that no vocabulary has."""
        found = row.copy()
        found["fault"] = 0
        for name, value in (("code", records.RANGE), ("inst", records.NO_INDEX),
                            ("opcode", 0xFFFF), ("detail", row["id"])):  # fmt: skip
            found["fault"][name] = value
        found["position"] = self._at.n_read
        return records.parse_fault(found)
