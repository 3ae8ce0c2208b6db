"""`k3tool run`: a checkpoint or shards in, tokens out; what is missing in between is built."""

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from k3tool.artifact import canonical_json
from k3tool.atomic import Output, artifact_output, atomic_path, check_outputs
from k3tool.errors import UsageError
from k3tool.runtime.budget import PRESETS
from k3tool.runtime.copying import CHOICES
from k3tool.runtime.expert_trace import MAGIC as TRACE_MAGIC
from k3tool.runtime.foresee import Foreseen, foresee, measured_rates, preset_bytes
from k3tool.runtime.interpreter import LEAVES
from k3tool.runtime.options import RunOptions, parse_ids, parse_size
from k3tool.runtime.run import Event, Reading, RunResult, describe, run_model
from k3tool.tables import bytes_text, count_text
from k3tool.targets import DEFAULT_CHUNK, DEFAULT_CONTEXT, get_target
from stages import options as common

Say = Callable[[str], None]


def run(
    options: RunOptions,
    logits: Path | None = None,
    on_event: Callable[[Event], None] | None = None,
    say: Say | None = None,
    note: Say | None = None,
) -> RunResult:
    """Run a model; write its logits too where `logits` names a file.

    Raises: as k3tool.runtime.run.run_model; UsageError when an output has no folder.
    """
    named = (options.source, *options.beside, options.isa, options.plan)
    inputs = [path for path in named if path is not None]
    check_outputs(_outputs(options, logits), inputs)
    result = run_model(options, on_event, say, note)
    if logits is not None:
        assert result.prefill is not None
        assert result.steps is not None
        with atomic_path(logits) as temporary, temporary.open("wb") as file:
            np.savez(file, prefill=result.prefill, steps=result.steps)
    return result


def _outputs(options: RunOptions, logits: Path | None) -> list[Output]:
    outputs = []
    if options.output is not None:
        outputs.append(artifact_output(options.output, "tokens"))
    if options.expert_trace is not None:
        outputs.append(Output("--expert-trace", options.expert_trace, "trace", TRACE_MAGIC, 0))
    if logits is not None:  # the archive names its first member behind a header of 30 bytes
        outputs.append(Output("--logits", logits, "archive of logits", b"prefill.npy", 30))
    return outputs


def summary(result: RunResult) -> str:
    """Return what a person wants to know at the end."""
    rates = [
        f"{name} {rate:.1f} tokens/s"
        for name, rate in (
            ("prefill", result.prefill_tokens_per_second),
            ("decode", result.decode_tokens_per_second),
        )
        if rate is not None
    ]
    ranks = "1 rank" if result.tp == 1 else f"{result.tp} ranks identical"
    peak = f"peak memory {result.peak_memory_bytes / 1e6:.1f} MB (sum over ranks)"
    count = count_text(len(result.tokens), "token")
    rates += _reading(result.reading, result.folders)
    return f"{count} ({result.reason}), " + ", ".join([*rates, peak, ranks])


def _reading(found: Reading | None, folders: Sequence[str]) -> list[str]:
    """Return what was read under a memory budget, in words."""
    if found is None:
        return []
    asked = found.hits + found.misses
    share = f", {found.hits} of {asked} experts from the cache" if asked else ""
    around = "" if found.is_direct else " through the page cache"
    parts = [
        f"{bytes_text(n_bytes)} from {folder}"
        for folder, n_bytes in zip(folders, found.folder_bytes, strict=True)
    ]
    split = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    return [f"read {bytes_text(found.n_bytes)}{split}{around}{share}"]


def origin(event: Event) -> str:
    """Return what the start event says of where program and weights came from."""
    cache = f" (cache {event['cache']})" if event["cache"] else ""
    return f"program {event['program']}, weights {event['weights']}{cache}"


def _stream_ids(event: Event) -> None:
    """Print ids as they come, on one line."""
    if event["event"] == "token":
        click.echo((" " if event["step"] else "") + str(event["id"]), nl=False)
        sys.stdout.flush()
    elif event["event"] == "end":
        click.echo()


def _stream_json(event: Event) -> None:
    click.echo(describe(event))
    sys.stdout.flush()


def _until_nobody_reads(
    show: Callable[[Event], None], outputs: Sequence[Path | None]
) -> Callable[[Event], None]:
    """Return `show`, which goes on in silence when stdout's reader has gone, or it was closed from
    the start, but files were asked for too: those are written whether somebody reads or not.
    """
    if not any(outputs):
        return show
    reading = True

    def show_or_not(event: Event) -> None:
        nonlocal reading
        try:
            if reading:
                show(event)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EBADF):
                raise
            reading = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return show_or_not


# -- what a budget is spent on -------------------------------------------------------------------


def memory_of(size: str | None, preset: str | None) -> int | None:
    """Return the bytes of `--memory` or `--preset`. Raises: UsageError for both, or no size."""
    if size is not None and preset is not None:
        raise UsageError("--preset", got="also --memory", need="one of the two")
    if preset is not None:
        return preset_bytes(preset)
    return None if size is None else parse_size(size)


def plan_only(
    folders: Sequence[Path], memory: int | None, rates: Sequence[float | None],
    asked: Mapping[str, Any], as_json: bool,
) -> None:  # fmt: skip
    """Print how a budget is spent. Raises: UsageError without one; TargetError below the least."""
    if memory is None:
        raise UsageError("--plan-only", got="no budget", need="--memory or --preset")
    storage, memory_rate = map(_from_gb, rates)
    foreseen = foresee(
        folders[0], memory, **asked, storage_rate=storage, memory_rate=memory_rate,
        measure=measured_rates, beside=folders[1:],
    )  # fmt: skip
    if as_json:
        click.echo(canonical_json(asdict(foreseen) | {"seconds": foreseen.seconds}))
        return
    for line in foreseen_lines(foreseen):
        click.echo(line)


_RATES = ("storage_rate", "memory_rate")
_PLANNED = ("tp", "chunk", "ctx", "workgroups")  # and numerics, which has a default of its own


def _refuse_unused(only: bool) -> None:
    """Refuse options that would be dropped in silence: a run's with --plan-only, its own without.

    Raises: UsageError naming the first.
    """
    given = common.given_names()
    said = {*_PLANNED, *_RATES, "shards", "numerics", "memory", "preset", "plan_only", "as_json"}
    said.add("verbose")
    unused = [name for name in given if (name not in said if only else name in _RATES)]
    for name in unused[:1]:
        got, need = "also --plan-only", "one of the two: it runs nothing"
        if not only:
            got, need = "no --plan-only", "both: a run measures nothing by it"
        raise UsageError(given[name], got=got, need=need)


def _from_gb(rate: float | None) -> float | None:
    return None if rate is None else rate * 1e9


def foreseen_lines(found: Foreseen) -> Iterator[str]:
    """Yield a budget's split as a person reads it; bytes are one rank's unless it says so."""
    p = found.prediction
    ranks = f"{count_text(p.ranks, 'rank')} and the driver"
    yield f"budget            {bytes_text(found.memory_bytes)} for {ranks}"
    yield f"predicted peak    {bytes_text(p.peak_bytes)} of all of them"
    yield (
        f"pinned            {bytes_text(p.pinned_bytes)} in "
        f"{count_text(p.pinned_tensors, 'tensor')}, read once"
    )
    if p.streamed_tensors:
        yield (
            f"streamed          {bytes_text(p.streamed_bytes)} in "
            f"{count_text(p.streamed_tensors, 'tensor')} a token, through a ring of "
            f"{bytes_text(p.ring_bytes)}: {100 / p.ring_turns:.0f} % of it read ahead"
        )
    yield (
        f"expert slots      {p.expert_slots} of {p.experts}, {bytes_text(p.cache_bytes)}; "
        f"prompt in steps of {count_text(p.chunk, 'token')}"
    )
    yield f"everything else   {bytes_text(p.other_bytes)}: state, activations, the process"
    yield (
        f"bytes a token     storage {bytes_text(p.storage_bytes_per_token)} at most, "
        f"memory {bytes_text(p.memory_bytes_per_token)} (full context)"
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


# -- the command ---------------------------------------------------------------------------------


@click.command("run")
@click.argument("source", type=common.PATH, required=False)
@common.shards()
@click.option("--ids", metavar="1,2,3", help="The prompt, as token ids.")
@click.option(
    "--gen", type=common.POSITIVE, default=16, show_default=True, help="Tokens to generate."
)
@common.tp()
@click.option(
    "--threads", type=common.POSITIVE, metavar="N", help="Threads per rank. Default: cores / ranks."
)
@click.option(
    "--chunk", type=common.POSITIVE, help=f"Prompt tokens in a step. Default: {DEFAULT_CHUNK}."
)
@click.option(
    "--ctx",
    type=common.POSITIVE,
    help=f"Positions to compile for. Default: {DEFAULT_CONTEXT}, or what the run needs.",
)
@click.option(
    "--workgroups",
    type=common.POSITIVE,
    help=f"Workgroups of the program. Default: {get_target('cpu').workgroups}; on a GPU its units, "
    "shared out among the ranks.",
)
@click.option("--target", default="cpu", show_default=True, help="What to run on.")
@common.numerics(default=None)
@click.option("--leaves", type=click.Choice(LEAVES), default="auto", show_default=True,
              help="Instruction set of the op bodies; the bits are the same.")  # fmt: skip
@click.option("--prefill", type=click.Choice(["prefill", "decode"]), default="prefill",
              show_default=True, help="Program that reads the prompt.")  # fmt: skip
@click.option("--weights", type=click.Choice(CHOICES), default="auto", show_default=True,
              help="Read them into memory first, or use them as files are mapped; auto copies "
              "for a long run where there is room.")  # fmt: skip
@click.option(
    "--memory",
    metavar="SIZE",
    help="Run in this much memory (8GB), ranks and driver "
    "together; weights that do not fit are read as they are needed.",
)
@click.option(
    "--preset",
    type=click.Choice([*PRESETS, "auto"]),
    help="A --memory by name; auto is what this machine's limits leave.",
)
@click.option(
    "--plan-only",
    is_flag=True,
    help="Say how --memory would be spent and what a token would take; run nothing.",
)
@click.option(
    "--storage-rate",
    type=float,
    metavar="GB/s",
    help="For --plan-only: the device's, instead of measuring it.",
)
@click.option(
    "--memory-rate",
    type=float,
    metavar="GB/s",
    help="For --plan-only: memory's, instead of measuring it.",
)
@click.option(
    "--expert-trace",
    type=common.PATH,
    metavar="FILE",
    help="With --memory: record which experts were asked for (bench cache replays it).",
)
@click.option(
    "--cache",
    type=common.PATH,
    help="Where missing stages are built. Default: $XDG_CACHE_HOME/k3tool, or ~/.cache/k3tool.",
)
@click.option("--isa", type=common.PATH, help="Run these streams (isa.h5).")
@click.option("--plan", type=common.PATH, help="Emit and run this plan (plan.h5).")
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the model's end tokens.")
@click.option("--deadline", type=float, default=60.0, show_default=True, metavar="SECONDS",
              help="Stop when no rank has got anywhere for so long.")  # fmt: skip
@click.option("--logits", type=common.PATH, metavar="OUT.npz", help="Write all logits, float32.")
@common.output("every rank's tokens (tokens.h5)", required=False)
@common.as_json("one event per line: start, token, end")
@common.verbose()
def command(as_json: bool, verbose: bool, logits: Path | None, **given: Any) -> None:
    """Generate tokens on this machine, with N ranks as N processes.

    SOURCE is a checkpoint folder or a shards folder. What is missing (shards, which are a second
    copy of the weights; plan and streams) is built into the cache and used again when its inputs
    are the same; stderr and the start event say which. Without --tp the degree is that of the
    shards, of --plan or --isa, or 1. Token ids go to stdout as they come, progress to stderr.

    \b
    Example:
      k3tool run CKPT --ids 1,2,3 --gen 16 --tp 8
      k3tool run SHARDS --isa isa.h5 --ids 1,2,3 --gen 16 --json -o tokens.h5
      k3tool run SHARDS --memory 32GB --ids 1,2,3 --gen 16
      k3tool run --shards /disk0/SHARDS --shards /disk1/SHARDS --memory 32GB --ids 1,2,3
      k3tool run config.json --preset laptop --plan-only --storage-rate 3.2
    """
    folders = common.folders_of(given.pop("source"), given.pop("shards"))
    memory = memory_of(given.pop("memory"), given.pop("preset"))
    rates = [given.pop(name) for name in _RATES]
    only = given.pop("plan_only")
    _refuse_unused(only)
    if only:
        asked = {name: given[name] for name in _PLANNED} | {"numerics": given["numerics"] or "f32"}
        plan_only(folders, memory, rates, asked, as_json)
        return
    if given["ids"] is None:
        raise UsageError("--ids", got="none", need="token ids such as 1,2,3")
    options = RunOptions(
        source=folders[0],
        beside=folders[1:],
        ids=parse_ids(given.pop("ids")),
        deadline_seconds=given.pop("deadline"),
        logits=logits is not None,
        memory_bytes=memory,
        **given,
    )

    def say(text: str) -> None:
        if verbose or sys.stderr.isatty():
            click.echo(text, err=True)

    def note(text: str) -> None:
        click.echo(text, err=True)

    stream = _until_nobody_reads(_stream_json if as_json else _stream_ids, (logits, options.output))

    def on_event(event: Event) -> None:
        if event["event"] == "start":
            note(origin(event))
        stream(event)

    result = run(options, logits, on_event, say, note)
    if not as_json:
        click.echo(summary(result), err=True)
