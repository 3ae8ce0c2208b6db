"""`bench prefill`: tokens a second by chunk, as a multiple of decode and a share of the machine.

A chunk reads every weight once for all its tokens, so it is bound by multiply-adds where decode is
bound by bytes. The last of some chunks is timed, beside decode and the machine's own limits in the
same run; the anatomy says for the chunk of the median time where it went.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from k3tool.bench.anatomy import Anatomy, Peaks, middle
from k3tool.bench.decode import (
    LEAST_PREFILL,
    PREFILL_CHUNKS,
    Options,
    beside_other,
    check_mode,
    prefill_beside,
    prefill_once,
    prepare,
)
from k3tool.bench.frame import (
    BenchReport,
    Limit,
    Paired,
    Spread,
    machine_line,
    other_line,
    rows_of_both,
    spread,
)
from k3tool.bench.probe import Probe
from k3tool.runtime.interpreter import load
from k3tool.targets import DEFAULT_CHUNK, check_layout

CHUNKS = (16, DEFAULT_CHUNK, 256)


class OfChunk(NamedTuple):
    """One chunk: rates in turn (decode, prefill), its steps, and the limits beside each."""

    tokens: int
    rates: Paired
    steps: Sequence[Anatomy]
    peaks: Sequence[Peaks]
    reads: Sequence[float]
    other: Paired | None  # seconds of a chunk on another interpreter and on this one

    @property
    def of_peak(self) -> Spread:
        """Return the share of the multiply-add peak, run by run."""
        sides = zip(self.steps, self.peaks, strict=True)
        return spread([step.of_peak(step.whole, peak) for step, peak in sides])

    @property
    def of_read(self) -> Spread:
        """Return the share of the read bandwidth that its bytes, each once, would be."""
        sides = zip(self.steps, self.reads, strict=True)
        return spread([step.n_bytes / step.wall / rate for step, rate in sides])

    @property
    def peak(self) -> Peaks:
        """Return the median limits."""
        pairs = [peak.pairs for peak in self.peaks if peak.pairs is not None]
        f32 = spread([peak.f32 for peak in self.peaks]).median
        return Peaks(f32, spread(pairs).median if pairs else None)


def bench_prefill(options: Options, chunks: Sequence[int] = CHUNKS) -> BenchReport:
    """Measure each chunk in turn with decode; `options.chunk` and `context` are not used.

    Raises: UsageError for a mode, or a chunk that no program is laid out for; as `run` else.
    """
    check_mode(options.numerics)
    for chunk in chunks:
        check_layout("chunk", chunk)
    if options.versus is not None:
        load(options.versus, any_source=True)  # refused before anything is measured
    with Probe(options.threads) as probe:
        way, threads = probe.choose_read(), probe.threads
        found = [_of_chunk(replace(options, chunk=chunk, context=0), probe) for chunk in chunks]
    rows: list[tuple[str, Spread, str]] = []
    for one in found:
        rows += _rows(one)
    registers = spread([peak.f32 / 1e9 for one in found for peak in one.peaks])
    reading = spread([rate / 1e9 for one in found for rate in one.reads])
    rows += [("multiply-add peak", registers, "GFLOP/s"), ("read bandwidth", reading, "GB/s")]
    limits = [
        Limit(f"chunk {one.tokens}: prefill / decode", one.rates.ratio.median,
              at_least=LEAST_PREFILL[options.numerics])
        for one in found if one.tokens == DEFAULT_CHUNK
    ]  # fmt: skip
    facts = {"chunks": [_facts(one) for one in found], "threads": threads,
             "read_bandwidth": reading.median * 1e9}  # fmt: skip
    definition = _definition(options, way, threads)
    return BenchReport("prefill", definition, rows, limits, facts, _appendix(found))


def _of_chunk(options: Options, probe: Probe) -> OfChunk:
    decode = prepare(options, probe.threads, n_prompt=1, context=0)
    rates, steps, peaks = prefill_beside(options, probe, decode)
    reads = [probe.read() for _ in steps]
    other = None
    if options.versus is not None:
        n_prompt = PREFILL_CHUNKS * options.chunk
        ready = prepare(options, probe.threads, n_prompt=n_prompt, context=0, phase="prefill")
        other = beside_other(options, ready, prefill_once)
    return OfChunk(options.chunk, rates, steps, peaks, reads, other)


def _rows(one: OfChunk) -> list[tuple[str, Spread, str]]:
    name = f"chunk {one.tokens}"
    return [
        (f"{name}: prefill", spread(one.rates.second), "tokens/s"),
        (f"{name}: decode beside it", spread(one.rates.first), "tokens/s"),
        (f"{name}: prefill / decode", one.rates.ratio, "times"),
        (f"{name}: of the multiply-add peak", one.of_peak, "share"),
        (f"{name}: of the read bandwidth", one.of_read, "share"),
        *([] if one.other is None else rows_of_both(name, one.other)),
    ]


def _facts(one: OfChunk) -> dict[str, Any]:
    return {
        "chunk": one.tokens, "tokens_per_s": spread(one.rates.second).median,
        "prefill_over_decode": one.rates.ratio.median, "peak_share": one.of_peak.median,
        "read_share": one.of_read.median, "anatomy": middle(one.steps).as_dict(one.peak),
    }  # fmt: skip


def _definition(options: Options, way: str, threads: int) -> list[str]:
    return [
        f"{options.checkpoint}, mode {options.numerics}, TP 1, {threads} threads, leaves "
        f"{options.leaves}; tokens of a chunk over its time: the last of {PREFILL_CHUNKS} chunks "
        "of a prompt, head on its last position; a run in turn with one of decode at context 0",
        "of the multiply-add peak: products, delta rule and attention at the rate of multiply-adds "
        "in registers, over the time; of the read bandwidth: weights and states once, likewise",
        f"read bandwidth: {way}, 2 MiB pages; all limits measured beside the chunks",
        *([] if options.versus is None else [other_line(options.versus)]),
        machine_line(),
    ]


def _appendix(found: Sequence[OfChunk]) -> list[str]:
    lines: list[str] = []
    for one in found:
        lines += [*([""] if lines else []), f"the chunk of {one.tokens} tokens, of median time:"]
        lines += middle(one.steps).lines(one.peak)
    return lines
