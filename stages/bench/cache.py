"""`k3tool bench cache`: what a cache of experts would save, by size and policy, from a trace."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3tool.errors import UsageError
from k3tool.tables import Column, Table, bytes_text
from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.cache import Replay
    from k3tool.runtime.expert_trace import ExpertTrace


@dataclass(frozen=True, slots=True)
class Options:
    """A trace and the sizes to replay it with, in slots; none: steps up to all experts."""

    trace: Path
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What each size gives, and the hits of the run that was traced."""

    trace: "ExpertTrace"
    steps: int
    recorded_hits: int
    replays: "list[Replay]"


def run(options: Options) -> Result:
    """Replay. Raises: ArtifactError for the trace; UsageError for a size below one fetch."""
    import numpy as np

    from k3tool.bench.cache import replay, requests_of
    from k3tool.runtime.expert_trace import read_expert_trace

    trace = read_expert_trace(options.trace)
    least = max(map(len, requests_of(trace)))
    for slots in options.slots:
        if slots < least:
            raise UsageError("--slots", got=slots, need=f"at least {least}, one step's of a layer")
    sizes = options.slots or tuple(
        sorted({max(least, trace.n_experts * part // 8) for part in range(9)} | {trace.slots})
    )
    steps = len(np.unique(trace.events["step"]))
    hits = int(trace.events["is_hit"].sum())
    return Result(trace, steps, hits, [replay(trace, slots) for slots in sizes])


def lines(result: Result) -> Iterator[str]:
    """Yield what a person reads."""
    trace = result.trace
    yield (
        f"{len(trace.events)} experts asked for in {result.steps} steps, {result.recorded_hits} "
        f"found by the run ({trace.slots} slots of {bytes_text(trace.expert_bytes)})"
    )
    yield "hits from an empty cache on, and bytes a step with all weights that are streamed;"
    yield "last: the same memory spent on the trunk, with slots for one step only"
    rows = []
    for one in result.replays:
        shares = [f"{100 * one.hits[name] / one.asked:.1f} %" for name in one.hits]
        read = [bytes_text(one.bytes_per_step[name]) for name in ("lru", "optimal")]
        size = bytes_text(one.slots * trace.expert_bytes)
        rows.append([str(one.slots), size, *shares, *read, bytes_text(one.trunk_bytes_per_step)])
    titles = ("slots", "memory", "LRU", "LFU", "optimal", "LRU a step", "optimal a step", "trunk")
    yield from Table([Column(title) for title in titles], rows).text_lines()


@click.command("cache")
@click.argument("trace", type=common.PATH)
@click.option("--slots", type=click.IntRange(min=1), multiple=True, callback=shared.distinct,
              help="A size to replay; may be given more than once.")  # fmt: skip
@shared.baseline_option("")
@common.as_json()
def command(as_json: bool, trace: Path, slots: tuple[int, ...], baseline: Path | None) -> None:
    """Replay a trace of experts against caches of many sizes.

    TRACE is what `run --memory SIZE --expert-trace TRACE` wrote; it is replayed under several
    policies.

    \b
    Example:
      k3tool bench cache experts.trace --slots 256 --slots 1024
    """

    def counted() -> tuple[dict[str, object], Iterator[str]]:
        result = run(Options(trace, slots))
        return cache_data(result), lines(result)

    shared.count("cache", counted, as_json=as_json, baseline=baseline)


def cache_data(result: Result) -> dict[str, object]:
    """Return what `--json` prints."""
    return {
        "steps": result.steps,
        "recorded_hits": result.recorded_hits,
        "recorded_slots": result.trace.slots,
        "expert_bytes": result.trace.expert_bytes,
        "replays": [_whole(one) for one in result.replays],
    }


def _whole(one: "Replay") -> dict[str, object]:
    """Return a replay as plain values, with whole bytes: of a step they are a mean."""
    return asdict(one) | {
        "bytes_per_step": {name: round(n_bytes) for name, n_bytes in one.bytes_per_step.items()},
        "trunk_bytes_per_step": round(one.trunk_bytes_per_step),
    }
