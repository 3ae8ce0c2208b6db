"""One run from options to tokens: settle the request, find the program, start ranks, gather.

The library entry is `run_model`; the stage prints its events. It writes only what was asked for,
whole or not at all; one file that cannot be written takes none of the others with it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.artifact import InputRef
from k3tool.atomic import atomic_path
from k3tool.canonical import canonical_json
from k3tool.isa.stream import Isa
from k3tool.runtime import records
from k3tool.runtime.engine import SlotState
from k3tool.runtime.expert_trace import TraceFile
from k3tool.runtime.gpu_runtime import Devices
from k3tool.runtime.options import RunOptions
from k3tool.runtime.outputs import Outputs, hold_room
from k3tool.runtime.prepare import Job, prepare, running
from k3tool.runtime.ranks import RankGroup
from k3tool.runtime.sampling import chooser
from k3tool.runtime.state_file import SavedState, check_state, read_state, write_state
from k3tool.runtime.tokens import TOKEN_DTYPE, write_tokens
from k3tool.trace.file import Given
from k3tool.trace.session import HashTrace

Array = npt.NDArray[Any]
Event = dict[str, Any]
OnEvent = Callable[[Event], None]
Say = Callable[[str], None]
# From a token, and whether it is the last anyway, to the text that it ends, None while none did.
Follow = Callable[[int, bool], str | None]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a run under a memory budget read, all ranks together.

    `n_bytes` are those of its steps, without what was loaded at the start; `is_direct` says whether
    they came around the page cache. `folder_bytes` are `n_bytes` by folder, in the order of source
    and beside. `hits` and `misses` are experts asked for.
    """

    n_bytes: int
    hits: int
    misses: int
    is_direct: bool
    trace_error: int  # errno that ended the trace of experts, 0 where none did
    folder_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run gave. Rates are tokens per second by the slowest rank, None where nothing ran.

    `records` holds each rank's (N,) TOKEN_DTYPE rows; `prefill` (T, V) and `steps` (N, V) are
    float32 logits where they were asked for, steps[0] = prefill[-1]. `stop` is the end id or the
    text that ended it, None where all tokens came.
    """

    tokens: tuple[int, ...]
    reason: str
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    peak_memory_bytes: int
    leaves: str
    tp: int
    records: tuple[Array, ...]
    prefill: Array | None = None
    steps: Array | None = None
    tokens_digest: str | None = None
    reading: Reading | None = None
    folders: tuple[str, ...] = ()
    stop: int | str | None = None


@dataclass(slots=True)
class _Tally:
    """What has been heard so far."""

    rows: list[Array] = field(default_factory=list)
    prefill_ns: int = 0
    decode_ns: int = 0
    stop: str | None = None


def run_model(
    options: RunOptions,
    on_event: OnEvent | None = None,
    say: Say | None = None,
    note: Say | None = None,
    device: Devices | None = None,
    follow: Follow | None = None,
    saved: SavedState | None = None,
) -> RunResult:
    """Run a model and return its tokens; `on_event` gets `start`, `token` and `end` as they come.

    `say` gets progress in words, `note` what a user has to know before it happens. `device` is
    what a GPU target runs on, found here unless given. `follow` hears of every token before its
    event, and may end the run with it by naming the text that does. `saved` is what
    options.load_state holds, where it was read already.
    Raises: UsageError before any weight is read; ArtifactError for inputs; UnsoundError when ranks
    trap, die or differ; TargetError when this machine cannot; K3Error where a file cannot be
    written, before weights are read where the disk has not the room for it.
    """
    quiet: Say = say or (lambda text: None)
    tell, warn = on_event or (lambda event: None), note or quiet
    if saved is None and options.load_state is not None:
        saved = read_state(options.load_state)
    options = options if saved is None else saved.go_on(options)
    with Outputs() as outputs:

        def accept(isa: Isa, identity: str) -> None:
            if saved is not None:
                check_state(saved, isa, identity)
            hold_room(outputs, options, isa)

        job = prepare(options, quiet, warn, device, accept=accept)
        given = Given(() if saved is None else saved.ids[:-1], options.ids, ())
        hashes = HashTrace(options.trace_hashes, options.trace_at, job.program.isa, given,
                           _inputs(job), warn)  # fmt: skip

        def heard(event: Event) -> None:
            if event["event"] == "token":
                hashes.chosen.append(event["id"])
            tell(event)

        with TraceFile(options.expert_trace, job.program.isa) as trace, hashes:
            recorded = replace(job.launch, expert_trace=trace.descriptor, recorder=hashes.recorder)
            job = replace(job, launch=recorded)
            result, kept = _run_ranks(job, heard, quiet, follow, saved)
            result = _write(outputs, job, result, kept, saved)
            _publish(outputs, job, result, trace, hashes)
    tell(_end_event(result, len(options.ids)))
    outputs.require_all()
    return result


# -- the ranks' life ---------------------------------------------------------------------------


def _run_ranks(
    job: Job, on_event: OnEvent, say: Say, follow: Follow | None, saved: SavedState | None
) -> tuple[RunResult, SlotState | None]:
    """Return what came of the run, and its slot where it is to be kept."""
    options, tally = job.options, _Tally()
    n_before = 0 if saved is None else saved.n_generated
    kept: list[SlotState] = []

    def ends(token: int, is_last: bool) -> bool:
        tally.stop = follow(token, is_last) if follow is not None else None
        return tally.stop is not None

    with running(job, say) as group:
        on_event(start_event(job, group.leaves))
        if saved is not None:
            group.restore_slot(0, saved.slot)
        keep = None if options.save_state is None else lambda: kept.append(group.save_slot(0))
        for rows in group.steps(chooser(options.sampler, n_before), ends, keep):
            _hear(tally, rows, options, on_event)
        logits = group.logits() if options.logits else None
        peak, leaves = group.peak_bytes, group.leaves
        reading = _reading(job, group) if isinstance(group, RankGroup) else None
    result = replace(_result(job, tally, peak, leaves, logits), reading=reading)
    return result, kept[0] if kept else None


def _reading(job: Job, group: RankGroup) -> Reading | None:
    if job.program.isa.residency is None:
        return None
    n_bytes, hits, misses = (
        sum(group.ends(name)) for name in ("n_read_bytes", "n_hits", "n_misses")
    )
    error = max(group.ends("trace_error"))
    folders = group.folder_bytes()[: 1 + len(job.options.beside)]
    return Reading(n_bytes, hits, misses, group.is_direct, error, folders)


def _hear(tally: _Tally, rows: Array, options: RunOptions, on_event: OnEvent) -> None:
    """Take one agreed step of all ranks."""
    slowest = int(rows["ns"].max())
    if int(rows["step"][0]) == 0:
        tally.prefill_ns += slowest
    else:
        tally.decode_ns += slowest
    if int(rows["kind"][0]) != records.TOKEN:
        return
    tally.rows.append(rows)
    row = rows[0]
    on_event(
        {
            "event": "token",
            "step": int(row["step"]),
            "id": int(row["id"]),
            "position": int(row["position"]),
            "margin": float(row["best"]) - float(row["second"]),
            "ranks_agree": len(rows),
        }
    )


def _result(job: Job, tally: _Tally, peak: int, leaves: str, logits: Array | None) -> RunResult:
    options, source = job.options, job.source
    assert job.request is not None
    tokens = tuple(int(rows["id"][0]) for rows in tally.rows)
    n_prompt, n_decoded = len(options.ids), len(tokens) - 1
    stop: int | str | None = tally.stop
    if stop is None and tokens[-1] in job.request.stop_ids:
        stop = tokens[-1]
    by_rank = []
    for rank in range(source.tp):
        column = np.zeros(len(tally.rows), TOKEN_DTYPE)
        for index, rows in enumerate(tally.rows):
            for name in TOKEN_DTYPE.names or ():
                column[name][index] = rows[name][rank]
        by_rank.append(column)
    return RunResult(
        tokens=tokens,
        reason="length" if stop is None else "stop",
        stop=stop,
        prefill_tokens_per_second=_rate(n_prompt, tally.prefill_ns),
        decode_tokens_per_second=_rate(n_decoded, tally.decode_ns),
        peak_memory_bytes=peak,
        leaves=leaves,
        tp=source.tp,
        records=tuple(by_rank),
        prefill=None if logits is None else logits[:n_prompt],
        steps=None if logits is None else logits[n_prompt - 1 : n_prompt + n_decoded],
        folders=(str(options.source), *map(str, options.beside)),
    )  # fmt: skip


def _rate(n_tokens: int, ns: int) -> float | None:
    return n_tokens * 1e9 / ns if n_tokens and ns else None


# -- events and files --------------------------------------------------------------------------


def start_event(job: Job, leaves: str) -> Event:
    """Return what is known when the ranks are ready."""
    isa, source, options, launch = job.program.isa, job.source, job.options, job.launch
    return {
        "event": "start",
        "source": str(source.path),
        "folders": [str(path) for path in (options.source, *options.beside)],
        "checkpoint": source.identity,
        "isa": isa.digest,
        "program": job.program.made,
        "weights": job.weights.made,
        "cache": job.cache,
        "inputs": [ref._asdict() for ref in isa.inputs],
        "target": isa.target,
        "tp": source.tp,
        "threads": launch.n_threads,
        "memory_bytes": options.memory_bytes,
        "copied": launch.copies,
        "workgroups": isa.n_workgroups,
        "leaves": leaves,
        "numerics": isa.params["numerics"],
        "start": options.start,
        "prompt_tokens": len(options.ids),
        "gen": options.gen,
        "sampling": _sampling(options),
    }


def _sampling(options: RunOptions) -> dict[str, object] | None:
    """Return how tokens are drawn, None where the best is taken."""
    return None if options.sampler.is_greedy else asdict(options.sampler)


def _end_event(result: RunResult, n_prompt: int) -> Event:
    return {
        "event": "end",
        "tokens": list(result.tokens),
        "prompt_tokens": n_prompt,
        "new_tokens": len(result.tokens),
        "reason": result.reason,
        "stop": result.stop,
        "prefill_tokens_per_second": result.prefill_tokens_per_second,
        "decode_tokens_per_second": result.decode_tokens_per_second,
        "peak_memory_bytes": result.peak_memory_bytes,
        "ranks": result.tp,
        "tokens_digest": result.tokens_digest,
        "reading": None if result.reading is None else asdict(result.reading),
    }


def _inputs(job: Job) -> list[InputRef]:
    """Return what a run's artifacts were made of."""
    source = job.source
    # Of shards only the checkpoint's identity is known, not what its folder was called.
    name = source.path.resolve().name if source.checkpoint is not None else "checkpoint"
    isa = job.program.isa
    inputs = [
        InputRef("checkpoint", "checkpoint", name, source.identity),
        InputRef("isa", "isa", job.program.name, isa.digest),
    ]
    if job.options.plan is not None:
        inputs += [ref for ref in isa.inputs if ref.role == "plan"]
    if source.shards is not None:
        inputs.append(source.shards.as_input("shards"))
    return inputs


def _write(
    outputs: Outputs, job: Job, result: RunResult, kept: SlotState | None, saved: SavedState | None
) -> RunResult:
    """Write tokens, logits and state, the small ones first; return the result with their digest."""
    options = job.options
    history = (*(() if saved is None else saved.ids[:-1]), *options.ids)
    if options.output is not None:
        with outputs.writing(options.output):
            digest = _write_tokens(options.output, job, result, history)
            result = replace(result, tokens_digest=digest)
    if options.logits_output is not None:
        with outputs.writing(options.logits_output):
            _write_logits(options.logits_output, result)
    if options.save_state is not None:
        assert kept is not None
        n_generated = len(result.tokens) + (0 if saved is None else saved.n_generated)
        with outputs.writing(options.save_state):
            write_state(
                options.save_state, (*history, *result.tokens), kept, n_generated,
                job.program.isa, _inputs(job),
            )  # fmt: skip
    return result


def _publish(
    outputs: Outputs, job: Job, result: RunResult, trace: TraceFile, hashes: HashTrace
) -> None:
    """Give the traces their names."""
    if job.options.expert_trace is not None:
        with outputs.writing(job.options.expert_trace):
            trace.publish(result.reading.trace_error if result.reading is not None else 0)
    if job.options.trace_hashes is not None:
        with outputs.writing(job.options.trace_hashes):
            hashes.publish()


def _write_logits(path: Path, result: RunResult) -> None:
    assert result.prefill is not None
    assert result.steps is not None
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, prefill=result.prefill, steps=result.steps)


def _write_tokens(output: Path, job: Job, result: RunResult, prompt: tuple[int, ...]) -> str:
    options, isa, source = job.options, job.program.isa, job.source
    params: dict[str, object] = {
        "tp": source.tp,
        "numerics": isa.params["numerics"],
        "gen": options.gen,
        "prefill": options.prefill,
        "ignore_eos": options.ignore_eos,
    }
    if not options.sampler.is_greedy:
        params["sampling"] = _sampling(options)
    return write_tokens(
        output, result.records, prompt, params=params, inputs=_inputs(job), target=isa.target
    )


def describe(event: Event) -> str:
    """Return an event as one line of JSON."""
    return canonical_json(event)
