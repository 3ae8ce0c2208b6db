"""From options to what can be started: program, weights, images, in the order of what may refuse.

A run and an engine are prepared alike; a run's images carry its request, an engine's carry none,
and are given steps.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3tool.checkpoint.identity import WHOLE_FILE_BYTES
from k3tool.checkpoint.stand_in import require_data
from k3tool.checkpoint.whole import require_whole
from k3tool.errors import ArtifactError, UsageError
from k3tool.isa.stream import Isa
from k3tool.isa.table import ALL_PHASES
from k3tool.memory import give_back
from k3tool.page_cache import as_found
from k3tool.progress import at_step, progress_of, waiting
from k3tool.runtime.cache import (
    Program,
    Source,
    Weights,
    cache_folder,
    open_source,
    program,
    rank_weights,
    require_copy_space,
)
from k3tool.runtime.copying import copies, weight_bytes
from k3tool.runtime.fault_words import fault_error
from k3tool.runtime.finite import require_finite
from k3tool.runtime.gpu_device import builds_of, check_gpu_options, find_devices
from k3tool.runtime.gpu_group import GpuGroup
from k3tool.runtime.gpu_runtime import Devices
from k3tool.runtime.image import Request, build_image
from k3tool.runtime.image_view import image_paths, start_bytes
from k3tool.runtime.interpreter import check_leaves, load
from k3tool.runtime.options import RunOptions, check_length, check_request, logits_shape
from k3tool.runtime.ranks import FaultError, Launch, RankGroup
from k3tool.runtime.room import check_room
from k3tool.runtime.slots import state_rows
from k3tool.runtime.stop_ids import stop_ids
from k3tool.runtime.weights import RankWeights
from k3tool.tables import count_text
from k3tool.targets import get_target

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """All that is settled before ranks start. `request` is None for an engine."""

    options: RunOptions
    source: Source
    program: Program
    weights: Weights
    launch: Launch
    request: Request | None
    device: Devices | None = None

    @property
    def cache(self) -> str | None:
        """Return the cache folder where it had a part in this run."""
        used = {"built", "reused"} & {self.program.made, self.weights.made}
        return str(cache_folder(self.options)) if used else None

    def group(self, say: Say) -> RankGroup | GpuGroup:
        """Return the ranks, not started: processes, or in this process on a device."""
        if self.device is None:
            return RankGroup(self.launch)
        return GpuGroup(
            self.launch, self.program.isa, self.device, cache_folder(self.options), say,
            is_launch_per_op=self.options.is_launch_per_op,
        )  # fmt: skip

    @contextlib.contextmanager
    def faults_in_words(self) -> Iterator[None]:
        """Raise a rank's trap as the error that a user reads."""
        try:
            yield
        except FaultError as stop:
            paths = image_paths(self.launch.images[stop.fault.rank])
            ranks = self.weights.ranks
            raise fault_error(self.program.isa, stop.fault, ranks, paths) from None


@waiting("reading headers")
def prepare(
    options: RunOptions, say: Say, note: Say, device: Devices | None = None, *,
    is_engine: bool = False, logits_rows: int = 0,
    accept: Callable[[Isa, str], None] = lambda isa, identity: None,
) -> Job:  # fmt: skip
    """Settle a run, or an engine that keeps `logits_rows` rows of logits, at most one a slot.

    `say` gets progress in words, `note` what a user has to know before it happens. `device` is
    what a GPU target runs on, found here unless given. `accept` may refuse the program, or the
    checkpoint by its identity, before weights are read, or copied for ranks.
    Raises: UsageError before any weight is read; ArtifactError for inputs; TargetError when this
    machine cannot.
    """
    with as_found(_read_whole(options)):
        return _prepare(options, say, note, device, is_engine, logits_rows, accept)


def _prepare(
    options: RunOptions, say: Say, note: Say, device: Devices | None, is_engine: bool,
    logits_rows: int, accept: Callable[[Isa, str], None],
) -> Job:  # fmt: skip
    device = _device(options, device, say)
    source = _source(options, is_engine)
    interpreter = None if device is not None else _interpreter(options)
    streams = program(source, options, say)
    accept(streams.isa, source.identity)
    if options.expert_trace is not None and streams.isa.residency is None:
        need = "--memory: without it none is fetched"
        raise UsageError("--expert-trace", got="no memory budget", need=need)
    if is_engine:
        _require_phases(streams)
    request = None if is_engine else _request(options, streams, source)
    weights = rank_weights(source, options, say, note)
    at_step("laying out what ranks read")
    try:
        images = [
            build_image(streams.isa, rank, folder, request, source.config.vocab_size)
            for rank, folder in enumerate(weights.ranks)
        ]
        copied = False
        if device is None:
            check_room(images, weights.ranks)
            copied = copies(options.weights, streams.isa, weights.ranks, options.gen)
        n_bytes = start_bytes(images, weight_bytes(weights.ranks) if copied else 0)
        for rank in weights.ranks:  # last: of a large model it takes minutes
            require_finite(rank.folder, cache_folder(options), say)
    finally:
        _close(weights.ranks)
    kept = logits_shape(options, source.config)
    if logits_rows:
        kept = min(logits_rows, int(streams.isa.params["batch"])), source.config.vocab_size
    launch = Launch(
        interpreter, images, 0 if device else _threads(options, source.tp), options.leaves,
        options.deadline_seconds, kept, streams.name,
        copies=copied, n_io=streams.isa.crew.load + streams.isa.crew.fetch, start_bytes=n_bytes,
        states=state_rows(streams.isa),
    )  # fmt: skip
    if streams.isa.residency is not None:
        give_back()
    return Job(options, source, streams, weights, launch, request, device)


def _read_whole(options: RunOptions) -> list[Path]:
    """Return the files that the identity reads whole, of a run under a memory budget.

    It reads weights around the page cache, and is to leave that as it was. Without a budget the
    weights are mapped: what is there need not come again.
    """
    if options.memory_bytes is None:
        return []
    folders = (options.source, *options.beside)
    files = [file for folder in folders for file in folder.rglob("*.safetensors")]
    return [file for file in files if file.is_file() and file.stat().st_size <= WHOLE_FILE_BYTES]


def _source(options: RunOptions, is_engine: bool) -> Source:
    """Return the weights asked for, whole, of a model that the request fits."""
    source = open_source(options)
    if source.tp % options.devices:
        need = f"a divisor of {count_text(source.tp, 'rank')}: as many on each"
        raise UsageError("--devices", got=options.devices, need=need)
    check_request(options, source.config, has_ids=not is_engine)
    if source.checkpoint is not None:
        require_data(source.checkpoint)
        at_step("comparing tensors with the config")
        require_whole(source.checkpoint)
        require_copy_space(source, options)
    return source


@contextlib.contextmanager
def running(job: Job, say: Say) -> Iterator[RankGroup | GpuGroup]:
    """Start a job's ranks and give them ready; traps come out in the words of its program."""
    with job.faults_in_words(), job.group(say) as group:
        if job.launch.copies:
            say("reading the weights into memory")
        with progress_of("reading the weights into memory") as progress:
            group.wait_ready(progress)
        # What ranks opened by name is what was looked at; from here on they hold it, or watch it.
        for rank in job.weights.ranks:
            rank.folder.require_unchanged("the run")
        yield group


def _device(options: RunOptions, device: Devices | None, say: Say) -> Devices | None:
    """Return a GPU target's device, None on the CPU; refuse what is not here before anything is
    read.
    """
    if get_target(options.target).family == "cpu":
        if options.devices != 1:
            raise UsageError("--devices", got=options.devices, need="1, or a GPU's --target")
        return None
    for line in builds_of(options.target):
        say(line)
    check_gpu_options(options)
    return device or find_devices(options.target, options.devices)


def _interpreter(options: RunOptions) -> Path:
    found = load(options.interpreter, any_source=options.interpreter is not None)
    check_leaves(found, options.leaves)
    return found.path


def _close(weights: Sequence[RankWeights]) -> None:
    for rank in weights:
        rank.folder.close()


def _threads(options: RunOptions, tp: int) -> int:
    """Return threads per rank: by default the allowed cores shared out, at least one each."""
    return options.threads or max(1, len(os.sched_getaffinity(0)) // tp)


def _request(options: RunOptions, program: Program, source: Source) -> Request:
    """Fit the request to the program. Raises: UsageError where it does not."""
    isa = program.isa
    limit = source.config.max_position_embeddings
    check_length(options, int(isa.params["ctx"]), limit)
    _require_phases(program, {options.prefill, "decode"})
    stream = isa.streams[options.prefill]
    most = 1 if options.prefill == "decode" else stream.max_tokens
    chunk = most if options.chunk is None else options.chunk
    if isa.residency is not None:
        chunk = min(chunk, most)  # a budget may leave room for the experts of fewer tokens
    if chunk > most:
        raise UsageError("--chunk", got=chunk, need=f"at most {most}, the program's")
    ends = () if options.ignore_eos else stop_ids(source.path, source.config)
    ends = tuple(sorted({*ends, *options.stop_ids}))
    return Request(options.ids, options.gen, ends, chunk, options.logits, options.prefill)


def _require_phases(program: Program, phases: Collection[str] = ALL_PHASES) -> None:
    """Refuse a program that cannot read a prompt, or not go on after it."""
    found = sorted(program.isa.streams)
    if not set(phases) <= set(found):
        raise ArtifactError(
            f"{program.name}: phases", got=found, need=" and ".join(sorted(phases)),
            hint="compile the plan without --phase",
        )  # fmt: skip
