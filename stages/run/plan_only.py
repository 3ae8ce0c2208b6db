"""What `run --plan-only` prints: how a budget would be spent, and what a token would take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from k3tool.canonical import canonical_json
from k3tool.errors import UsageError, excluded, incomplete
from k3tool.progress import waiting
from k3tool.runtime.foresee import Foreseen, foresee, measured_rates
from k3tool.tables import bytes_text, count_text, need_text
from stages import options as common
from stages.engine_options import memory_of


def plan_only_options() -> common.Decorator:
    """Return --plan-only and its own options."""
    return common.together(
        click.option(
            "--plan-only", is_flag=True,
            help="Say how --memory would be spent and what a token would take; run nothing. Takes "
            "what is said of weights, memory and program, --json and --verbose; no other option.",
        ),
        click.option(
            "--storage-rate", type=float, metavar="GB/s",
            help="For --plan-only: the device's, instead of measuring it.",
        ),
        click.option(
            "--memory-rate", type=float, metavar="GB/s",
            help="For --plan-only: memory's, instead of measuring it.",
        ),
    )  # fmt: skip


def plan_only(given: Mapping[str, Any], rates: Sequence[float | None], as_json: bool) -> None:
    """Print how a budget is spent. Raises: UsageError without one; TargetError below the least."""
    folders = common.folders_of(given["source"], given["shards"])
    memory = memory_of(given["memory"], given["preset"])
    if memory is None:
        raise UsageError("--plan-only", got="no budget", need="--memory or --preset")
    storage, memory_rate = map(_from_gb, rates)
    asked = {name: given[name] for name in _PLANNED} | {"numerics": given["numerics"] or "f32"}
    with waiting("fitting the budget"):
        foreseen = foresee(
            folders[0], memory, **asked, storage_rate=storage, memory_rate=memory_rate,
            measure=measured_rates, beside=folders[1:],
        )  # fmt: skip
    if as_json:
        click.echo(canonical_json(foreseen_as_dict(foreseen)))
        return
    for line in foreseen_lines(foreseen):
        click.echo(line)


def _minimum(found: Foreseen) -> str:
    """Return the least budget, the step that sets it and what the other one takes."""
    running, before = need_text(found.least_running_bytes), need_text(found.before_ranks_bytes)
    if found.least[1] == "running":
        return f"{running}, for running; {found.before_ranks} takes {before}"
    return f"{before}, for {found.before_ranks}; running takes {running}"


RATES = ("storage_rate", "memory_rate")
_PLANNED = ("tp", "chunk", "ctx", "workgroups")  # and numerics, which has a default of its own


def refuse_unused(only: bool) -> None:
    """Refuse options that would be dropped in silence: a run's with --plan-only, its own without.

    Raises: UsageError naming the first.
    """
    given = common.given_names()
    said = {*_PLANNED, *RATES, "shards", "numerics", "memory", "preset", "plan_only", "as_json"}
    said.add("verbose")
    unused = [name for name in given if (name not in said if only else name in RATES)]
    for name in unused[:1]:
        if only:
            raise excluded(given[name], "--plan-only", "it runs nothing")
        raise incomplete(given[name], "--plan-only", "a run measures nothing by it")


def _from_gb(rate: float | None) -> float | None:
    return None if rate is None else rate * 1e9


def foreseen_as_dict(found: Foreseen) -> dict[str, Any]:
    """Return a budget's split as plain values for `--json`."""
    least_bytes, step = found.least
    return asdict(found) | {
        "least_bytes": least_bytes, "least_set_by": step, "seconds": found.seconds,
    }  # fmt: skip


def foreseen_lines(found: Foreseen) -> Iterator[str]:
    """Yield a budget's split as a person reads it; of several ranks, bytes of each say so."""
    p = found.prediction
    of_one = " a rank" if p.ranks > 1 else ""
    ranks = f"{count_text(p.ranks, 'rank')} and the driver"
    yield f"budget            {bytes_text(found.memory_bytes)} for {ranks}"
    yield f"minimum           {_minimum(found)}"
    times = "" if p.ranks == 1 else f"{p.ranks} times "
    parts = f"{times}the next lines, and the driver"
    yield f"predicted peak    {bytes_text(p.peak_bytes)} while it runs: {parts}"
    yield (
        f"pinned            {bytes_text(p.pinned_room_bytes)}{of_one} for "
        f"{bytes_text(p.pinned_bytes)} in {count_text(p.pinned_tensors, 'tensor')}, read once"
    )
    if p.streamed_tensors:
        yield (
            f"ring              {bytes_text(p.ring_room_bytes)}{of_one}, through which a token "
            f"streams {bytes_text(p.streamed_bytes)} in "
            f"{count_text(p.streamed_tensors, 'tensor')}: {100 / p.ring_turns:.0f} % of it read "
            "ahead"
        )
    yield (
        f"expert slots      {bytes_text(p.cache_room_bytes)}{of_one} for {p.expert_slots} of "
        f"{p.experts}; prompt in steps of {count_text(p.chunk, 'token')}"
    )
    yield f"everything else   {bytes_text(p.other_bytes)}{of_one}: state, activations, the process"
    yield f"the driver        {bytes_text(p.driver_bytes)}: Python, NumPy, the tensors' names"
    yield (
        f"bytes a token     storage {bytes_text(p.storage_bytes_per_token)}{of_one} at most, "
        f"memory {bytes_text(p.memory_bytes_per_token)}{of_one} (full context)"
    )
    for name, rate in (("storage", found.storage_rate), ("memory", found.memory_rate)):
        unknown = "unknown: give it, or a checkpoint with data"
        text = unknown if rate is None else f"{rate / 1e9:.2f} GB/s"
        yield f"{name + ' rate':17} {text}"
    for path, each, n_bytes in found.folders:
        yield f"{'from a folder':17} {bytes_text(n_bytes)} a token at {each / 1e9:.2f} GB/s: {path}"
    if found.seconds is not None:
        best, worst = found.seconds
        yield f"seconds a token   {best:.3g} with all reading overlapped, {worst:.3g} with none"
