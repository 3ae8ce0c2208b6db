"""`k3tool run`: a checkpoint or shards in, tokens out; what is missing in between is built."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from k3tool.atomic import Output, artifact_output, atomic_path, check_outputs
from k3tool.runtime.interpreter import LEAVES
from k3tool.runtime.options import RunOptions, parse_ids
from k3tool.runtime.run import Event, RunResult, describe, run_model
from k3tool.tables import count_text
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
    inputs = [path for path in (options.source, options.isa, options.plan) if path is not None]
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
    return f"{count} ({result.reason}), " + ", ".join([*rates, peak, ranks])


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
    """Return `show`, which goes on in silence when the reader of stdout has gone but files were
    asked for too: those are written whether somebody reads or not.
    """
    if not any(outputs):
        return show
    reading = True

    def show_or_not(event: Event) -> None:
        nonlocal reading
        try:
            if reading:
                show(event)
        except BrokenPipeError:
            reading = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return show_or_not


_POSITIVE = click.IntRange(min=1)


@click.command("run")
@click.argument("source", type=common.PATH)
@click.option("--ids", required=True, metavar="1,2,3", help="The prompt, as token ids.")
@click.option("--gen", type=_POSITIVE, default=16, show_default=True, help="Tokens to generate.")
@common.tp()
@click.option("--threads", type=_POSITIVE, metavar="N",
              help="Threads per rank. Default: cores / ranks.")
@click.option("--chunk", type=_POSITIVE, help=f"Prompt tokens in a step. Default: {DEFAULT_CHUNK}.")
@click.option("--ctx", type=_POSITIVE,
              help=f"Positions to compile for. Default: {DEFAULT_CONTEXT}, or what the run needs.")
@click.option("--workgroups", type=_POSITIVE,
              help=f"Workgroups of the program. Default: {get_target('cpu').workgroups}.")
@common.numerics(default=None)
@click.option("--leaves", type=click.Choice(LEAVES), default="auto", show_default=True,
              help="Instruction set of the op bodies; the bits are the same.")  # fmt: skip
@click.option("--prefill", type=click.Choice(["prefill", "decode"]), default="prefill",
              show_default=True, help="Program that reads the prompt.")  # fmt: skip
@click.option("--cache", type=common.PATH, help="Where missing stages are built. Default: "
              "$XDG_CACHE_HOME/k3tool, or ~/.cache/k3tool.")
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
    """
    options = RunOptions(
        ids=parse_ids(given.pop("ids")),
        deadline_seconds=given.pop("deadline"),
        logits=logits is not None,
        **given,
    )

    def say(text: str) -> None:
        if verbose or sys.stderr.isatty():
            click.echo(text, err=True)

    def note(text: str) -> None:
        click.echo(text, err=True)

    stream = _until_nobody_reads(
        _stream_json if as_json else _stream_ids, (logits, options.output)
    )

    def on_event(event: Event) -> None:
        if event["event"] == "start":
            note(origin(event))
        stream(event)

    result = run(options, logits, on_event, say, note)
    if not as_json:
        click.echo(summary(result), err=True)
