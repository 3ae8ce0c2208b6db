"""`k3tool run`: a checkpoint or shards in, tokens out; what is missing in between is built."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from k3tool.atomic import Output, artifact_output, check_outputs, leftovers
from k3tool.progress import silenced
from k3tool.runtime.expert_trace import MAGIC as TRACE_MAGIC
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import Event, Follow, RunResult, run_model
from k3tool.runtime.state_file import SavedState, read_state
from k3tool.text.chat import THINK
from k3tool.text.tokenizer import has_tokenizer
from k3tool.trace.kept import parse_kept
from stages import options as common
from stages.engine_options import engine_options, run_options
from stages.help import Sectioned
from stages.run.answer import Answer, answer_options
from stages.run.batch import answer_batch, batch_options, refuse_beside_batch
from stages.run.plan_only import RATES, plan_only, plan_only_options, refuse_unused
from stages.run.prompt import Given, prompt_options, read_prompt
from stages.run.show import (
    Follower,
    Show,
    TextStream,
    UntilNobodyReads,
    WithRate,
    answer_only,
    origin,
    stream_ids,
    stream_json,
    summary,
)

Say = Callable[[str], None]


def run(
    options: RunOptions,
    logits: Path | None = None,
    on_event: Callable[[Event], None] | None = None,
    say: Say | None = None,
    note: Say | None = None,
    follow: Follow | None = None,
    saved: SavedState | None = None,
) -> RunResult:
    """Run a model; write its logits too where `logits` names a file.

    Raises: as k3tool.runtime.run.run_model; UsageError when an output has no folder.
    """
    named = (options.source, *options.beside, options.isa, options.plan)
    inputs = [path for path in named if path is not None]
    outputs = _outputs(options, logits)
    check_outputs(outputs, inputs)
    if note is not None:
        for left in (left for output in outputs for left in leftovers(output.path)):
            note(f"{left}: left by a process that was killed: it may be removed")
    options = replace(options, logits_output=logits)
    return run_model(options, on_event, say, note, follow=follow, saved=saved)


def _outputs(options: RunOptions, logits: Path | None) -> list[Output]:
    outputs = []
    if options.output is not None:
        outputs.append(artifact_output(options.output, "tokens"))
    if options.expert_trace is not None:
        outputs.append(Output("--expert-trace", options.expert_trace, "trace", TRACE_MAGIC, 0))
    if options.save_state is not None:
        outputs.append(artifact_output(options.save_state, "state", "--save-state"))
    if options.trace_hashes is not None:
        outputs.append(artifact_output(options.trace_hashes, "trace", "--trace-hashes"))
    if logits is not None:  # the archive names its first member behind a header of 30 bytes
        outputs.append(Output("--logits", logits, "archive of logits", b"prefill.npy", 30))
    return outputs


_SECTIONS = {
    "The prompt": "--ids",
    "Many prompts at once": "--batch",
    "The answer": "--gen",
    "Weights, ranks and target": "--shards",
    "Memory": "--memory",
    "The program": "--cache",
    "Foresee, and run nothing": "--plan-only",
    "Records for bench and verify": "--expert-trace",
    "Kept sequences": "--save-state",
    "What is written and printed": "--logits",
}


@click.command("run", cls=Sectioned, sections=_SECTIONS)
@prompt_options()
@batch_options()
@click.option(
    "--gen", type=common.POSITIVE, default=16, show_default=True, help="Tokens to generate."
)
@answer_options()
@engine_options
@click.option("--prefill", type=click.Choice(["prefill", "decode"]), default="prefill",
              show_default=True,
              help="Program that reads the prompt; of decode --chunk is 1.")  # fmt: skip
@plan_only_options()
@click.option(
    "--expert-trace", type=common.PATH, metavar="FILE",
    help="With --memory, so not on a GPU: record which experts were asked for (bench cache replays "
    "it).",
)  # fmt: skip
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
    "--save-state", type=common.PATH, metavar="FILE",
    help="Keep the sequence as it stands at the end (state.h5).",
)  # fmt: skip
@click.option(
    "--load-state", type=common.PATH, metavar="FILE",
    help="Go on from a kept sequence as if it never ended; a prompt comes behind it.",
)  # fmt: skip
@click.option("--logits", type=common.PATH, metavar="OUT.npz", help="Write all logits, float32.")
@common.output("every rank's tokens (tokens.h5)", required=False)
@common.as_json("one event per line: start, token, end; of --batch also finished")
@common.verbose()
def command(as_json: bool, verbose: bool, logits: Path | None, **given: Any) -> None:
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
      k3tool run CKPT --batch requests.jsonl --slots 4 --gen 64
      k3tool run CKPT --load-state chat.h5 --chat --prompt "And a meteor?"
      k3tool run SHARDS --isa isa.h5 --ids 1,2,3 --gen 16 --json -o tokens.h5
      k3tool run SHARDS --memory 32GB --ids 1,2,3 --gen 16
      k3tool run --shards /d0/SHARDS --shards /d1/SHARDS --memory 32GB --ids 1,2
      k3tool run config.json --preset laptop --plan-only --storage-rate 3.2
    """
    rates = [given.pop(name) for name in RATES]
    only, batch, slots = (given.pop(name) for name in ("plan_only", "batch", "slots"))
    refuse_unused(only)
    refuse_beside_batch(batch is not None)
    if only:
        plan_only(given, rates, as_json)
        return
    prompt = Given(**{name: given.pop(name) for name in Given.__slots__})
    answer = Answer(**{name: given.pop(name) for name in Answer.__slots__})
    for loud in ("as_json", "verbose"):
        common.refuse_beside("quiet", beside=loud)
    trace_at = given.pop("trace_at")
    options = run_options(
        given, ids=(), stop_ids=answer.stop_ids(), sampler=answer.sampler(),
        logits=logits is not None, trace_at=None if trace_at is None else parse_kept(trace_at),
    )  # fmt: skip

    def say(text: str) -> None:
        if verbose or (sys.stderr.isatty() and not answer.quiet):
            click.echo(text, err=True)

    def note(text: str) -> None:
        if not answer.quiet:
            click.echo(text, err=True)

    with silenced(answer.quiet):
        if batch is None:
            _generate(options, logits, prompt, answer, as_json, say, note)
        else:
            show = stream_json if as_json else None
            answer_batch(batch, slots, options, answer.stop, say, note, show)


def _generate(
    options: RunOptions, logits: Path | None, given: Given, answer: Answer, as_json: bool,
    say: Say, note: Say,
) -> None:  # fmt: skip
    """Read the prompt, run, and print what was asked for as it comes."""
    follows_on = given.chat or given == Given()  # what comes depends on what was kept
    kept = options.load_state if follows_on else None
    saved = None if kept is None else read_state(kept)
    prompt = read_prompt(given, options, note, saved)
    is_text = answer.is_text(given.ids)
    if prompt.before and answer.show is None and not has_tokenizer(options.source):
        note("token ids are printed: the model's folder has no tokenizer")
        is_text = False
    later: list[str] = []  # behind what refuses the run: that comes alone
    reply = answer.reply(prompt, options, needs_text=is_text, wants_text=as_json, note=later.append)
    follower = Follower(reply, is_chat=prompt.channel is not None)
    show: Show = stream_json if as_json else TextStream() if is_text else stream_ids
    has_thoughts = prompt.channel == THINK and not as_json
    rate = WithRate(show, is_quiet=answer.quiet, has_thoughts=has_thoughts)
    show = answer_only(show) if answer.quiet else rate
    stream = UntilNobodyReads(show, [output.path for output in _outputs(options, logits)])

    def on_event(event: Event) -> None:
        if event["event"] == "start":
            for line in (*later, origin(event)):
                note(line)
        stream(follower.with_text(event))

    options = replace(options, ids=prompt.ids)
    try:
        result = run(options, logits, on_event, say, note, follower.follow, saved)
    finally:
        rate.close()  # however it ends: what is said next has a line of its own
    if stream.error is not None:  # not before files are written
        raise stream.error
    if not as_json:
        note(summary(result))
