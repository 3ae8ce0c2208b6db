"""The ranks of one run on one device or several, in this process: what a RankGroup is on the CPU.

It loads the program's interpreters, places every rank, and launches steps. What ranks say has the
same records and faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from k3tool.errors import TargetError
from k3tool.isa.stream import Isa
from k3tool.isa.table import ALL_PHASES
from k3tool.progress import Progress
from k3tool.runtime import records
from k3tool.runtime.agreement import agreed
from k3tool.runtime.digest import digest_words
from k3tool.runtime.gpu_memory import RankMemory, require_memory
from k3tool.runtime.gpu_object import check_object, read_identity
from k3tool.runtime.gpu_runtime import (
    CANARY,
    Device,
    Devices,
    check_arch,
    check_arithmetic,
    let_go,
    wait_idle,
)
from k3tool.runtime.gpu_source import builds, program_ops
from k3tool.runtime.image_view import view_image
from k3tool.runtime.ranks import GRACE_SECONDS, FaultError, Launch
from k3tool.runtime.records import RECORD_DTYPE, Fault
from k3tool.runtime.requests import Span, Step
from k3tool.runtime.slots import state_rows
from k3tool.runtime.stepping import Stepping
from k3tool.tables import bytes_text, count_text
from k3tool.targets import get_build
from k3tool.trace.downloads import Downloads

Array = npt.NDArray[Any]
_CANDIDATE_DTYPE = np.dtype(
    [("best", "<f4"), ("id", "<u4"), ("second", "<f4"), ("reserved", "<u4")]
)
_STOPPED = 0xFFFFFFFF  # the driver's word in the abort word


class GpuGroup(Stepping):
    """A context manager over ranks on devices: an Engine, and the images' own request (`steps`).

    It owns the devices and closes them.
    """

    def __init__(
        self, launch: Launch, isa: Isa, device: Devices, folder: Path, say: Callable[[str], None],
        *, is_launch_per_op: bool = False,
    ) -> None:  # fmt: skip
        """Keep what to start; `folder` is where objects are kept, `say` gets progress in words.

        A step is one launch, or one for each instruction: what one launch is measured against, and
        where a trace has to see each result before the next instruction may write over it.
        """
        kept_rows = launch.logits_shape[0] if launch.logits_shape is not None else 0
        super().__init__(view_image(launch.images[0]), state_rows(isa), kept_rows, 0)
        self._launch, self._isa, self._device = launch, isa, device
        self._folder, self._say = folder, say
        recorder = launch.recorder
        self._hashes = None if recorder is None else Downloads(recorder, self._read_tensor)
        is_launch_per_op = is_launch_per_op or recorder is not None
        self._ranks = [
            RankMemory(isa, image, len(launch.images), is_launch_per_op=is_launch_per_op)
            for image in launch.images
        ]
        n_ranks = len(self._ranks)
        self._homes = [device.member(number, n_ranks) for number in range(n_ranks)]
        self._kernels: list[dict[int, Any]] = [{} for _ in self._ranks]
        self._lanes: dict[int, int] = {}
        self._epoch = 0
        self._begun: tuple[Step, int] | None = None  # a step, and when it was launched
        self._kept: Array | None = None
        self._abort_word = 0
        self.peak_bytes = 0

    @property
    def ranks(self) -> tuple[RankMemory, ...]:
        """Return where each rank lies, for those who measure."""
        return tuple(self._ranks)

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
            for device in self._device.members():
                own = [rank for rank, home in self._at_home if home is device]
                self._check_blocks(device, own)
                self.peak_bytes += require_memory(device, own)
        except BaseException:
            self._device.close()
            raise
        if self._launch.logits_shape is not None:
            self._kept = np.zeros(self._launch.logits_shape, "<f4")
        return self

    def __exit__(self, *error: object) -> None:
        """Give the device back, whatever happened."""
        self._device.close()

    def wait_ready(self, progress: Progress) -> None:
        """Return when every rank is in the device's memory. Raises: as RankMemory.place."""
        device, ranks = self._device, self._ranks
        self._say(f"{bytes_text(self.peak_bytes)} on {device.name}")
        segments = device.map_ranks(len(ranks), max(rank.segment_bytes for rank in ranks))
        self._abort_word, _ = device.map_ranks(1, 4)
        ticks = int(self._launch.deadline_seconds * device.ticks_per_second)
        total, done = sum(rank.weight_bytes for rank in ranks), 0

        def add(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            progress(done, total)

        for rank, home in self._at_home:
            rank.place(home, segments, self._abort_word, ticks, add)

    def _load(self) -> None:
        """Load each phase's kernel, after its object has been asked what it is."""
        isa, device = self._isa, self._device

        def build(one: tuple[tuple[str, ...], tuple[str, ...]]) -> bytes:
            return device.members()[0].build(isa.target, *one, self._folder)

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
                for kernels, home in zip(self._kernels, self._homes, strict=True):
                    kernels[index] = home.load(data, row.kernel)
                self._lanes[index] = row.lanes
            for one in device.members():
                canary = one.load(data, CANARY)
                check_arithmetic(one, canary, found.lanes, self._launch.deadline_seconds)

    def _check_blocks(self, device: Device, own: Sequence[RankMemory]) -> None:
        """Refuse what is not all resident: first blocks would wait for last, ranks for ranks."""
        if len(own) > device.n_streams:
            raise TargetError(
                f"{device.name}: launches at once", got=count_text(len(own), "rank"),
                need=f"at most {device.n_streams}: others would wait in the same queue",
                hint=f"--devices, or {device.queues}={len(own) + 1} in the environment",
            )  # fmt: skip
        need = sum(rank.n_blocks for rank in own)
        for phase, kernel in self._kernels[own[0].rank].items():
            got = device.resident_blocks(kernel, self._lanes[phase])
            if got < need:
                ranks = len(own)
                raise TargetError(
                    f"{device.name}: {ALL_PHASES[phase]}", got=f"{got} resident blocks",
                    need=f"{need}, {need // ranks} for each of {count_text(ranks, 'rank')}",
                    hint=f"compile for it: --workgroups {got // ranks}",
                )  # fmt: skip

    # -- steps -----------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Launch the step on every rank; where it is traced, `finish` does, launch by launch."""
        for rank, home in self._at_home:
            rank.write_step(home, step, self._epoch)
        self._begun, self._epoch = (step, time.monotonic_ns()), self._epoch + 1
        if self._hashes is None:
            self._launch_step(step)

    def _launch_step(self, step: Step) -> None:
        """Launch on every rank; a trace takes each instruction's results when all have ended."""
        segments = zip(*(rank.launches(step.phase) for rank in self._ranks), strict=True)
        for inst, segment in enumerate(segments):
            try:
                for (rank, home), argument in zip(self._at_home, segment, strict=True):
                    kernel, lanes = self._kernels[rank.rank][step.phase], self._lanes[step.phase]
                    home.launch(kernel, rank.n_blocks, lanes, (argument,), rank.rank)
            except BaseException:  # ranks that have begun wait for one that never will
                let_go(self._device, self._abort)
                raise
            if self._hashes is not None:
                self._wait()
                self._hashes.take(inst)

    def finish(self) -> Array:
        """Wait for the launches and return the ranks' records, compared: Stepping.finish."""
        assert self._begun is not None
        (step, start), self._begun = self._begun, None
        if self._hashes is not None:
            self._hashes.begin(step)
            self._launch_step(step)
        self._wait()
        ns, n = time.monotonic_ns() - start, len(step.tokens)
        rows = np.zeros((max(step.n_wanted, 1), len(self._ranks)), RECORD_DTYPE)
        rows["kind"], rows["phase"], rows["step"] = records.PROMPT, step.phase, step.number
        rows["n_tokens"], rows["ns"] = n, ns
        for row, token in zip(rows, step.tokens[n - len(rows) :], strict=True):
            row["position"], row["slot"], row["rank"] = token.position, token.slot, self._numbers
        self._hear(step, rows)
        if self._hashes is not None:
            self._hashes.end()
        for number, rank in enumerate(self._ranks):
            self._choose(rank, step, rows[:, number])
        return np.stack([agreed(row) for row in rows])

    def end(self) -> None:
        """Nothing is left to hear of a device."""

    def logits(self) -> Array:
        """Return the gathered logits, float32 [rows, vocab]; the steps must have ended."""
        assert self._kept is not None
        return self._kept

    def kept_logits(self, first: int, n: int) -> Array:
        """Return a copy of rows of the kept logits, float32 [n, vocab]."""
        return self.logits()[first : first + n].copy()

    def _read_spans(self, spans: Sequence[Span], n_bytes: int) -> tuple[bytes, ...]:
        return tuple(
            b"".join(
                home.download(rank.tensor_address(s.handle) + s.offset, s.n_bytes) for s in spans
            )
            for rank, home in self._at_home
        )

    def _write_spans(self, spans: Sequence[Span], ranks: Sequence[bytes]) -> None:
        for (rank, home), data in zip(self._at_home, ranks, strict=True):
            for s in spans:
                address = rank.tensor_address(s.handle) + s.offset
                home.upload(address, data[s.at : s.at + s.n_bytes])

    @property
    def _at_home(self) -> list[tuple[RankMemory, Device]]:
        return list(zip(self._ranks, self._homes, strict=True))

    @property
    def _numbers(self) -> list[int]:
        return [rank.rank for rank in self._ranks]

    def _read_tensor(self, rank: int, handle: int, at: int, n_bytes: int) -> bytes:
        """Return bytes of a rank's tensor."""
        return self._homes[rank].download(self._ranks[rank].tensor_address(handle) + at, n_bytes)

    def _wait(self) -> None:
        """Return when every launch has ended."""
        patience = self._launch.deadline_seconds + GRACE_SECONDS
        wait_idle(self._device, patience, self._moved, self._abort)

    def _moved(self) -> bytes:
        return b"".join(rank.progress(home) for rank, home in self._at_home)

    def _abort(self) -> None:
        """Tell every rank to stop at its next wait."""
        self._homes[0].upload(self._abort_word, _STOPPED.to_bytes(4, "little"))

    def _hear(self, step: Step, rows: Array) -> None:
        """Take the ranks' digests. Raises: FaultError with the best explanation of a stop."""
        faults: list[Fault] = []
        for number, (rank, home) in enumerate(self._at_home):
            control = rank.control(home)
            rows["digest"][:, number] = control["digest"]
            if control["stop"]:
                fault = rows[0, number].copy()
                fault["position"], fault["fault"] = step.tokens[0].position, control["fault"]
                faults.append(records.parse_fault(fault))
        if faults:
            raise FaultError(min(faults, key=lambda fault: fault.order))

    def _read_logits(self, rank: RankMemory, step: Step, first: int) -> Array:
        """Return a rank's columns of the logits of tokens from `first` on."""
        row, n = rank.phase_row(step.phase), len(step.tokens) - first
        cols, address = int(row["logits_cols"]), rank.tensor_address(int(row["logits_handle"]))
        data = self._homes[rank.rank].download(address + 4 * cols * first, 4 * cols * n)
        return np.frombuffer(data, "<f4").reshape(n, cols)

    def _choose(self, rank: RankMemory, step: Step, rows: Array) -> None:
        """Take the folded argmax after each wanted token, and keep logits that were asked for."""
        n, wanted = len(step.tokens), len(step.tokens) - step.n_wanted
        first = wanted if step.row is None else step.head_from
        if first == n:
            return
        logits = self._read_logits(rank, step, first)
        cols = logits.shape[1]
        if step.row is not None and self._kept is not None:
            column = rank.rank * cols
            self._kept[step.row : step.row + len(logits), column : column + cols] = logits
        if not step.n_wanted:
            return
        handle, size = int(rank.phase_row(step.phase)["output_handle"]), _CANDIDATE_DTYPE.itemsize
        address = rank.tensor_address(handle) + wanted * size
        found = np.frombuffer(
            self._homes[rank.rank].download(address, step.n_wanted * size), _CANDIDATE_DTYPE
        )
        rows["kind"] = records.TOKEN
        for name in ("best", "id", "second"):
            rows[name] = found[name]
        for row, own in zip(rows, logits[wanted - first :], strict=True):
            row["logits_digest"] = digest_words(own.view("<u4"), rank.rank * cols)
            if row["id"] >= self.vocab:
                raise FaultError(_odd_token(row))


def _odd_token(row: Any) -> Fault:
    """Return the fault of a chosen id that no vocabulary has."""
    found = row.copy()
    found["fault"] = 0
    for name, value in (("code", records.RANGE), ("inst", records.NO_INDEX),
                        ("opcode", 0xFFFF), ("detail", row["id"])):  # fmt: skip
        found["fault"][name] = value
    return records.parse_fault(found)
