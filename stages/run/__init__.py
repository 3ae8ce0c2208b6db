"""`k3tool run`: a checkpoint or shards in, tokens out; what is missing in between is built."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from k3tool.atomic import Output, artifact_output, atomic_path, check_outputs
from k3tool.errors import UsageError
from k3tool.runtime.budget import PRESETS
from k3tool.runtime.copying import CHOICES
from k3tool.runtime.expert_trace import MAGIC as TRACE_MAGIC
from k3tool.runtime.interpreter import LEAVES
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import Event, Follow, RunResult, run_model
from k3tool.targets import DEFAULT_CHUNK, DEFAULT_CONTEXT, get_target
from k3tool.trace.kept import parse_kept
from stages import options as common
from stages.run.answer import (
    SAMPLING,
    TEXT,
    answer_options,
    reply_of,
    sampler_of,
    shown_as,
    stop_ids_of,
)
from stages.run.plan_only import PLANNED, RATES, memory_of, plan_only, refuse_unused
from stages.run.prompt import Given, prompt_options, read_prompt
from stages.run.show import (
    Follower,
    Show,
    TextStream,
    answer_only,
    origin,
    stream_ids,
    stream_json,
    summary,
    until_nobody_reads,
    with_rate,
)

Say = Callable[[str], None]


def run(
    options: RunOptions,
    logits: Path | None = None,
    on_event: Callable[[Event], None] | None = None,
    say: Say | None = None,
    note: Say | None = None,
    follow: Follow | None = None,
) -> RunResult:
    """Run a model; write its logits too where `logits` names a file.

    Raises: as k3tool.runtime.run.run_model; UsageError when an output has no folder.
    """
    named = (options.source, *options.beside, options.isa, options.plan)
    inputs = [path for path in named if path is not None]
    check_outputs(_outputs(options, logits), inputs)
    result = run_model(options, on_event, say, note, follow=follow)
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
    if options.trace_hashes is not None:
        outputs.append(artifact_output(options.trace_hashes, "trace", "--trace-hashes"))
    if logits is not None:  # the archive names its first member behind a header of 30 bytes
        outputs.append(Output("--logits", logits, "archive of logits", b"prefill.npy", 30))
    return outputs


@click.command("run")
@click.argument("source", type=common.PATH, required=False)
@common.shards()
@prompt_options()
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
    "--trace-hashes", type=common.PATH, metavar="FILE",
    help="Record a hash of what every slice of every op wrote (verify trace compares two).",
)  # fmt: skip
@click.option(
    "--trace-at", metavar="POSITIONS[:LAYERS]",
    help="With --trace-hashes: keep the values themselves at these positions, such as 5, 0-7 or "
    "5:0,3-6.",
)  # fmt: skip
@click.option(
    "--cache",
    type=common.PATH,
    help="Where missing stages are built. Default: $XDG_CACHE_HOME/k3tool, or ~/.cache/k3tool.",
)
@click.option("--isa", type=common.PATH, help="Run these streams (isa.h5).")
@click.option("--plan", type=common.PATH, help="Emit and run this plan (plan.h5).")
@answer_options()
@click.option("--deadline", type=float, default=60.0, show_default=True, metavar="SECONDS",
              help="Stop when no rank has got anywhere for so long.")  # fmt: skip
@click.option("--logits", type=common.PATH, metavar="OUT.npz", help="Write all logits, float32.")
@common.output("every rank's tokens (tokens.h5)", required=False)
@common.as_json("one event per line: start, token, end")
@common.verbose()
def command(as_json: bool, verbose: bool, quiet: bool, logits: Path | None, **given: Any) -> None:
    """Generate tokens on this machine, with N ranks as N processes.

    SOURCE is a checkpoint folder or a shards folder. What is missing (shards, which are a second
    copy of the weights; plan and streams) is built into the cache and used again when its inputs
    are the same; stderr and the start event say which. Without --tp the degree is that of the
    shards, of --plan or --isa, or 1. The answer goes to stdout as it comes, text for text and ids
    for ids; progress, and what --chat thinks before its answer, to stderr.

    \b
    Example:
      k3tool run CKPT --prompt "Once upon a time" --gen 64
      k3tool run CKPT --chat --prompt "What is a comet?" --gen 512 --thinking low
      k3tool run CKPT --ids 1,2,3 --gen 16 --tp 8
      k3tool run SHARDS --isa isa.h5 --ids 1,2,3 --gen 16 --json -o tokens.h5
      k3tool run SHARDS --memory 32GB --ids 1,2,3 --gen 16
      k3tool run --shards /disk0/SHARDS --shards /disk1/SHARDS --memory 32GB --ids 1,2,3
      k3tool run config.json --preset laptop --plan-only --storage-rate 3.2
    """
    folders = common.folders_of(given.pop("source"), given.pop("shards"))
    memory = memory_of(given.pop("memory"), given.pop("preset"))
    rates = [given.pop(name) for name in RATES]
    only = given.pop("plan_only")
    refuse_unused(only)
    if only:
        asked = {name: given[name] for name in PLANNED} | {"numerics": given["numerics"] or "f32"}
        plan_only(folders, memory, rates, asked, as_json)
        return
    prompt_given = Given(**{name: given.pop(name) for name in Given.__slots__})
    drawn = {name: given.pop(name) for name in SAMPLING}
    stops, form = given.pop("stop"), shown_as(given.pop("show"), prompt_given.ids)
    if quiet and (as_json or verbose):
        raise UsageError("--quiet", got="also --json or --verbose", need="one of them")
    trace_at = given.pop("trace_at")
    options = RunOptions(
        source=folders[0],
        trace_at=None if trace_at is None else parse_kept(trace_at),
        beside=folders[1:],
        ids=(),
        stop_ids=stop_ids_of(given.pop("stop_id")),
        sampler=sampler_of(drawn),
        deadline_seconds=given.pop("deadline"),
        logits=logits is not None,
        memory_bytes=memory,
        **given,
    )

    def say(text: str) -> None:
        if verbose or (sys.stderr.isatty() and not quiet):
            click.echo(text, err=True)

    def note(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    prompt = read_prompt(prompt_given, folders[0], options.cache, note)
    reply = reply_of(
        prompt, folders[0], options.cache, stops,
        needs_text=form == TEXT, wants_text=as_json, note=note,
    )  # fmt: skip
    follower = Follower(reply, is_chat=prompt.channel is not None)
    show: Show = stream_json if as_json else TextStream() if form == TEXT else stream_ids
    if quiet:
        show = answer_only(show)
    elif not as_json:
        show = with_rate(show)
    stream = until_nobody_reads(show, (logits, options.output))

    def on_event(event: Event) -> None:
        if event["event"] == "start":
            note(origin(event))
        stream(follower.with_text(event))

    options = replace(options, ids=prompt.ids)
    result = run(options, logits, on_event, say, note, follower.follow)
    if not as_json:
        note(summary(result))
