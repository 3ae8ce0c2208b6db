"""`bench decode`: what a token costs, as a share of what reading its bytes would, and why.

Bytes touched are what a token cannot do without: its weights (experts as chosen), KDA states read
and written, the latents up to its position, one embedding row. Their rate over a token's time is
compared with this machine's read bandwidth, measured in turn with the runs. Long contexts are not
read: a run begins behind one, with noise in all states, which costs a token as much.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from k3tool.bench.anatomy import Anatomy, Peaks, anatomy, middle, packet_bytes
from k3tool.bench.attention import (
    LEAST_ATTENTION,
    LONG_CONTEXT,
    Work,
    attention_seconds,
    attention_shares,
    attention_work,
)
from k3tool.bench.frame import (
    BenchReport,
    Limit,
    Paired,
    interleave,
    machine_line,
    other_line,
    rows_of_both,
    spread,
)
from k3tool.bench.operations import packet_operations
from k3tool.bench.probe import Probe
from k3tool.bench.several import decode_several, with_several
from k3tool.compiler.plan import Tensor
from k3tool.errors import UnsoundError, UsageError
from k3tool.isa.device import unpack
from k3tool.isa.table import ALL_PHASES
from k3tool.model.graph import MODES
from k3tool.runtime.cache import open_source, program, rank_weights
from k3tool.runtime.copying import has_copy
from k3tool.runtime.image import Request, build_image
from k3tool.runtime.interpreter import check_leaves, load
from k3tool.runtime.options import RunOptions, check_request
from k3tool.runtime.ranks import Launch, RankGroup
from k3tool.runtime.trace import Trace
from k3tool.tables import bytes_text
from k3tool.targets import DEFAULT_CONTEXT, check_layout

Array = npt.NDArray[Any]
LEAST_SHARE = {"f32": 0.75, "bf16": 0.85}  # of read bandwidth
LEAST_PREFILL = {"f32": 4.0, "bf16": 6.0}  # times decode's tokens a second
PREFILL_CHUNKS = 2  # the last is timed, the others bring the weights in
WARM_UP = 2  # tokens of a run that are not counted, for the same reason


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, at TP 1: `tokens` a run, behind `context` positions.

    `weights` auto copies them where there is room: what a run does that is long enough. `versus`
    is another interpreter, whose tokens are timed in turn with this one's. `batch` sequences at
    once are measured against one.
    """

    checkpoint: Path
    numerics: str = "f32"
    context: int = 1000
    tokens: int = 8
    repeats: int = 7
    threads: int | None = None
    leaves: str = "auto"
    workgroups: int | None = None
    chunk: int = 64
    cache: Path | None = None
    weights: str = "auto"
    versus: Path | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program with its weights and request, to be run again and again.

    What it says of packets is of one phase's, in that phase's last step.
    """

    launch: Launch
    phase: str
    packets: Array
    tensors: Sequence[Tensor]
    moved: Array  # bytes that each of them moves
    work: Array  # operations of each, as packet_operations has them
    attention: Work  # of the last token


def bench_decode(options: Options) -> BenchReport:
    """Measure decode against reading, and prefill against decode.

    Raises: UsageError for a mode that is not there or a context that does not fit; as `run` else.
    """
    check_mode(options.numerics)
    if options.versus is not None:
        load(options.versus, any_source=True)  # refused before anything is measured
    if options.batch is not None:
        check_layout("batch", options.batch)
    with Probe(options.threads) as probe:
        decode = prepare(options, probe.threads, n_prompt=1, context=options.context)
        several = _several(options, probe.threads)  # first: it may refuse what does not fit
        way = probe.choose_read()
        seen: list[Anatomy] = []
        peaks: list[float] = []

        def decode_rate() -> float:
            peaks.append(probe.fma())
            seen.append(decode_once(decode))
            return seen[-1].n_bytes / seen[-1].wall

        reading = interleave(probe.read, decode_rate, options.repeats, warm_up=1)
        prefilling, chunks, bounds = prefill_beside(options, probe, decode)
        other = beside_other(options, decode, decode_once)
    report = _report(options, decode.launch, way, reading, prefilling, middle(seen[1:]))
    report = with_attention(report, options.context, decode.attention, seen[1:], reading, peaks[1:])
    report = with_prefill(report, options, chunks, bounds)
    report = with_other(report, options, other)
    return report if several is None else with_several(report, options.batch or 1, several)


def _several(options: Options, threads: int) -> Paired | None:
    """Return tokens a second of one sequence and of several at once; None where nobody asked."""
    if options.batch is None:
        return None
    return decode_several(
        options.checkpoint, options.batch, context=options.context, tokens=options.tokens,
        repeats=options.repeats, threads=threads, numerics=options.numerics,
        leaves=options.leaves, cache=options.cache, workgroups=options.workgroups,
    )  # fmt: skip


def beside_other(
    options: Options, ready: Prepared, once: Callable[[Prepared], Anatomy]
) -> Paired | None:
    """Return seconds of a step on the other interpreter and on this one, in turn; None without.

    Raises: TargetError where it is none, or of another op table.
    """
    if options.versus is None:
        return None
    path = load(options.versus, any_source=True).path
    other = replace(ready, launch=replace(ready.launch, interpreter=path))
    return interleave(lambda: once(other).wall, lambda: once(ready).wall, options.repeats)


def check_mode(mode: str) -> None:
    """Refuse what is no mode of the arithmetic contract. Raises: UsageError."""
    if mode not in MODES:
        raise UsageError("--numerics", got=mode, need=" or ".join(MODES))


def prefill_beside(
    options: Options, probe: Probe, decode: Prepared
) -> tuple[Paired, list[Anatomy], list[Peaks]]:
    """Measure tokens a second of decode and prefill in turn, each chunk with the peaks beside it.

    The warm-up's chunk and peaks are not kept.
    """
    chunk, n_prompt = options.chunk, PREFILL_CHUNKS * options.chunk
    prefill = prepare(options, probe.threads, n_prompt=n_prompt, context=0, phase="prefill")
    chunks: list[Anatomy] = []
    peaks: list[Peaks] = []

    def prefill_rate() -> float:
        peaks.append(Peaks(probe.fma(), probe.pairs(options.leaves)))
        chunks.append(prefill_once(prefill))
        return chunk / chunks[-1].wall

    rates = interleave(lambda: 1 / decode_once(decode).wall, prefill_rate, options.repeats)
    return rates, chunks[1:], peaks[1:]


def prepare(
    options: Options, n_threads: int, *, n_prompt: int, context: int, phase: str = "decode"
) -> Prepared:
    """Compile, or find in the cache, what a run of `n_prompt` and `tokens` tokens needs."""
    gen = options.tokens + WARM_UP + 1  # the first token is the prompt's
    positions = context + n_prompt + gen
    asked = RunOptions(
        options.checkpoint, tuple(7919 * i % 251 for i in range(n_prompt)), gen, tp=1,
        threads=n_threads, chunk=options.chunk, ctx=max(DEFAULT_CONTEXT, positions),
        workgroups=options.workgroups, leaves=options.leaves, cache=options.cache,
        numerics=options.numerics,
    )  # fmt: skip
    source = open_source(asked)
    limit = source.config.max_position_embeddings
    if positions > limit:
        got, need = f"{positions} positions together", f"at most {limit}, the model's"
        hint = "give less --context, or a smaller --gen"
        raise UsageError("--context, --chunk, --gen", got=got, need=need, hint=hint)
    check_request(asked, source.config)
    interpreter = load()
    check_leaves(interpreter, options.leaves)
    isa = program(source, asked, _silent).isa
    weights = rank_weights(source, asked, _silent, _silent)
    request = Request(asked.ids, gen, (), options.chunk)
    try:
        image = build_image(isa, 0, weights.ranks[0], request, source.config.vocab_size)
        copied = has_copy(options.weights, weights.ranks)
    finally:
        weights.ranks[0].folder.close()
    slices = {name: len(stream.queues.entries) + 1 for name, stream in isa.streams.items()}
    chunks = -(-n_prompt // options.chunk)
    launch = Launch(
        interpreter.path, [image], n_threads, options.leaves,
        trace_events=gen * slices["decode"] + chunks * slices["prefill"], first_position=context,
        copies=copied,
    )  # fmt: skip
    packets = unpack(isa.streams[phase].instructions[0])
    last = positions - 1 if phase == "decode" else context + n_prompt - 1
    n_tokens = 1 if phase == "decode" else options.chunk
    moved = packet_bytes(packets, isa.tensors, last, n_tokens)
    work = packet_operations(packets, isa.tensors, last + 1 - n_tokens, n_tokens)
    return Prepared(launch, phase, packets, isa.tensors, moved, work, attention_work(packets, last))


def _silent(text: str) -> None:
    """Say nothing."""


def run_traced(ready: Prepared) -> Trace:
    """Run to the end and return what the rank did. Raises: UnsoundError if events are missing."""
    with RankGroup(ready.launch) as group:
        group.wait_ready()
        n_steps = len(list(group.steps()))
        trace = group.trace(0)
    if trace.n_dropped or len(trace.steps) != n_steps:
        got = f"{len(trace.steps)} steps, {trace.n_dropped} events lost"
        raise UnsoundError("trace", got=got, need=f"{n_steps} steps")
    return trace


def decode_once(ready: Prepared) -> Anatomy:
    """Run and return the token of the median time."""
    return middle(_steps(ready)[WARM_UP:])


def prefill_once(ready: Prepared) -> Anatomy:
    """Run and return the last chunk of the prompt."""
    return _steps(ready)[-1]


def _steps(ready: Prepared) -> list[Anatomy]:
    """Run and return the steps of the phase that was prepared."""
    trace = run_traced(ready)
    steps = trace.steps["step"][trace.steps["phase"] == ALL_PHASES.index(ready.phase)]
    return [
        anatomy(trace, int(step), ready.packets, ready.moved, ready.launch.n_threads, ready.work)
        for step in steps
    ]


def _report(
    options: Options, launch: Launch, way: str, reading: Paired, prefilling: Paired, token: Anatomy
) -> BenchReport:
    share, times = reading.ratio, prefilling.ratio
    rows = [
        ("read bandwidth", spread([rate / 1e9 for rate in reading.first]), "GB/s"),
        ("bytes of decode", spread([rate / 1e9 for rate in reading.second]), "GB/s"),
        ("decode / read bandwidth", share, "share"),
        ("decode", spread([rate / token.n_bytes for rate in reading.second]), "tokens/s"),
        ("prefill", spread(prefilling.second), "tokens/s"),
        ("prefill / decode", times, "times"),
    ]
    definition = [
        f"{options.checkpoint}, mode {options.numerics}, TP 1, {launch.n_threads} threads, leaves "
        f"{options.leaves}, weights {'copied' if launch.copies else 'mapped'}, "
        f"context {options.context} (noise), {options.tokens} tokens a run;",
        f"{bytes_text(token.n_bytes)} touched per token: weights, experts as chosen, KDA states "
        "read and written, latents up to the position, one embedding row;",
        f"read bandwidth: {way}, 2 MiB pages, the same threads; runs in turn; prefill: the last "
        f"of {PREFILL_CHUNKS} chunks of {options.chunk}, head on its last position",
        machine_line(),
    ]
    limits = [
        Limit("bandwidth share", share.median, at_least=LEAST_SHARE[options.numerics]),
        Limit("prefill / decode", times.median, at_least=LEAST_PREFILL[options.numerics]),
    ]
    facts = {
        "bandwidth_share": share.median,
        "read_bandwidth": spread(reading.first).median,
        "bandwidth_share_spread": share._asdict(),
        "bytes_per_token": token.n_bytes,
        "prefill_over_decode": times.median,
        "anatomy": token.as_dict(),
    }
    appendix = ["the token of the median time (ms of all workers divided by their number):"]
    return BenchReport("decode", definition, rows, limits, facts, [*appendix, *token.lines()])


def with_attention(
    report: BenchReport,
    context: int,
    work: Work,
    tokens: Sequence[Anatomy],
    reading: Paired,
    peaks: Sequence[float],
) -> BenchReport:
    """Return the report with latent attention's part of its bound; as it is for a model with none.

    At LONG_CONTEXT and beyond that part is to reach LEAST_ATTENTION.
    """
    if not work.operations:
        return report
    share = spread(attention_shares(work, tokens, reading.first, peaks))
    part = spread([attention_seconds(token) / token.wall for token in tokens])
    gflops = spread([peak / 1e9 for peak in peaks])
    rows = [
        *report.rows,
        ("multiply-add peak", gflops, "GFLOP/s"),
        ("attention / token", part, "share"),
        ("attention / its bound", share, "share"),
    ]
    definition = [
        *report.definition[:-1],
        f"attention: {bytes_text(work.n_bytes)} of latents, {work.operations / 1e9:.2f} GFLOP a "
        "token; its bound: the smaller of read bandwidth and peak over operations a byte, each of "
        "the same run; its time: what its ops kept workers busy",
        report.definition[-1],
    ]
    limits = list(report.limits)
    if context >= LONG_CONTEXT:
        limits.append(Limit("attention / its bound", share.median, at_least=LEAST_ATTENTION))
    facts = report.facts | {
        "attention_share": share.median, "attention_share_spread": share._asdict(),
        "attention_of_token": part.median, "multiply_add_peak": gflops.median * 1e9,
    }  # fmt: skip
    return replace(report, definition=definition, rows=rows, limits=limits, facts=facts)


def with_prefill(
    report: BenchReport, options: Options, chunks: Sequence[Anatomy], peaks: Sequence[Peaks]
) -> BenchReport:
    """Return the report with the anatomy of the median chunk, against the median peaks."""
    chunk, sides = middle(chunks), zip(chunks, peaks, strict=True)
    shares = [step.of_peak(step.whole, peak) for step, peak in sides]
    f32 = spread([peak.f32 for peak in peaks])
    pairs = [peak.pairs for peak in peaks if peak.pairs is not None]
    peak = Peaks(f32.median, spread(pairs).median if pairs else None)
    rows = [*report.rows]
    if pairs:
        gflops = spread([rate / 1e9 for rate in pairs])
        rows.append(("multiply-add peak of bf16 pairs", gflops, "GFLOP/s"))
    rows.append(("prefill / peak", spread(shares), "share"))
    registers = f"{peak.f32 / 1e9:.0f} GFLOP/s on binary32"
    if peak.pairs is not None:
        registers += f", {peak.pairs / 1e9:.0f} on bf16 pairs"
    head = (
        f"the chunk of the median time ({options.chunk} tokens; MB: weights once, of experts as "
        "many as it can choose; GFLOP/s: products, delta rule and attention; of peak: of "
        f"multiply-adds in registers in the same run, {registers}):"
    )
    facts = report.facts | {"prefill_anatomy": chunk.as_dict(peak)}
    appendix = [*report.appendix, "", head, *chunk.lines(peak)]
    return replace(report, rows=rows, facts=facts, appendix=appendix)


def with_other(report: BenchReport, options: Options, seconds: Paired | None) -> BenchReport:
    """Return the report with tokens of another interpreter beside this one's; None: as it is."""
    if seconds is None:
        return report
    rows = [*report.rows, *rows_of_both("a token", seconds)]
    definition = [*report.definition[:-1], other_line(options.versus), report.definition[-1]]
    return replace(report, rows=rows, definition=definition)
