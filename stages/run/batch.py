"""`run --batch FILE`: many prompts over one engine, each answered as it would be alone."""

from dataclasses import replace
from pathlib import Path

import click

from k3tool.canonical import canonical_json
from k3tool.errors import ArtifactError, excluded, incomplete
from k3tool.model.config import K3Config
from k3tool.runtime.batch import run_batch
from k3tool.runtime.batch_file import BatchLine, check_lines, read_batch
from k3tool.runtime.options import RunOptions
from k3tool.runtime.prepare import prepare
from k3tool.runtime.run import Event, Follow
from k3tool.runtime.stop_ids import stop_ids
from k3tool.tables import bytes_text, count_text
from k3tool.targets import MOST
from k3tool.text.reply import Reply
from k3tool.text.tokenizer import Tokenizer, has_tokenizer
from stages import options as common
from stages.run.prompt import Say, read_file, room_of, tokenizer_of
from stages.run.show import Show, origin
from stages.streams import flush_or_stop

MOST_SLOTS = 8  # unless asked for more: each holds a context of its own in memory
# What says how one run is read, kept or shown has no meaning for many.
_OF_ONE_RUN = (
    "ids", "prompt", "prompt_file", "chat", "system", "thinking", "history", "prefill", "show",
    "expert_trace", "trace_hashes", "trace_at", "logits", "output", "save_state", "load_state",
)  # fmt: skip


def batch_options() -> common.Decorator:
    """Return the options that this module reads."""
    return common.together(
        click.option(
            "--batch", type=common.PATH, metavar="FILE.jsonl",
            help="Answer every request of a file, a JSON object a line: ids or prompt, and id, "
            "gen, stop_ids, stop, temperature, top_p, top_k, seed where they are its own. Not with "
            "what one run has: --ids, --prompt, --prompt-file, --chat, --system, --thinking, "
            "--history, --prefill, --show, --expert-trace, --trace-hashes, --trace-at, --logits, "
            "-o, --save-state, --load-state.",
        ),
        click.option(
            "--slots", type=common.POSITIVE, metavar="N",
            help="With --batch: sequences at once; more wait for a free slot. Default: as many as "
            f"there are, at most {MOST_SLOTS}.",
        ),
    )  # fmt: skip


def refuse_beside_batch(is_batch: bool) -> None:
    """Refuse what would be dropped in silence: one run's options with --batch, --slots without.

    Raises: UsageError naming the first.
    """
    given = common.given_names()
    if not is_batch and "slots" in given:
        raise incomplete("--slots", "--batch", "one run is one sequence")
    for name in _OF_ONE_RUN if is_batch else ():
        if name in given:
            raise excluded(given[name], "--batch")


def answer_batch(
    path: Path, slots: int | None, options: RunOptions, stops: tuple[str, ...], say: Say, note: Say,
    show: Show | None,
) -> None:  # fmt: skip
    """Answer all requests: a line of JSON each as it is finished, or every event to `show`.

    `options` are the engine's, and each line's where it has none of its own.
    Raises: UsageError naming the line, before any weight is read.
    """
    folder = options.source
    defaults = BatchLine(
        "", "", (), options.gen, stop_ids=options.stop_ids, stops=stops, sampler=options.sampler
    )
    lines = read_batch(read_file("--batch", path, note), str(path), defaults)
    tokenizer = _tokenizer(lines, options, note)
    config = K3Config.load(folder / "config.json")
    most = config.max_position_embeddings
    lines = [_with_ids(line, tokenizer, options, most) for line in lines]
    check_lines(lines, config.vocab_size, options.ctx or most)
    asked = replace(
        options,
        ids=(),
        gen=max(len(line.ids) + line.gen for line in lines),
        batch=_slots(slots, options, len(lines)),
    )
    draws = any(not line.sampler.is_greedy for line in lines)
    job = prepare(asked, say, note, is_engine=True, logits_rows=MOST["batch"] if draws else 0)
    ends = () if options.ignore_eos else stop_ids(job.source.path, job.source.config)
    texts = _Texts(tokenizer)

    def on_event(event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            n_prompt = sum(len(line.ids) for line in lines)
            event = event | {"gen": options.gen, "prompt_tokens": n_prompt}  # not the engine's own
            note(origin(event))
        event = texts.beside(event)
        if show is not None:
            show(event)
        elif kind == "finished":
            click.echo(canonical_json({k: event[k] for k in event if k != "event"}))
            flush_or_stop()
        elif kind == "end":
            note(summary(event))

    run_batch(job, lines, ends, texts.follow_of, on_event, say)


class _Texts:
    """What each request has said so far, as text; without a tokenizer nothing."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._replies: dict[str | int, Reply] = {}
        self._parts: dict[str | int, str] = {}  # what the last token added

    def follow_of(self, line: BatchLine) -> Follow | None:
        """Return what reads a request's tokens as they come, and says when a text stops it."""
        if self._tokenizer is None:
            return None
        reply = self._replies[line.name] = Reply(self._tokenizer, line.stops)

        def follow(token: int, is_last: bool) -> str | None:
            self._parts[line.name] = "".join(part.text for part in reply.feed(token, is_last))
            return reply.stopped_by

        return follow

    def beside(self, event: Event) -> Event:
        """Return an event of a request with its text: of a token what it added, else all of it."""
        name = event.get("request")
        if name not in self._replies:
            return event
        is_token = event["event"] == "token"
        return event | {"text": self._parts[name] if is_token else self._replies[name].text}


def summary(event: Event) -> str:
    """Return what a person wants to know at the end."""
    rate, peak = event["tokens_per_second"], bytes_text(event["peak_memory_bytes"])
    return (
        f"{count_text(event['requests'], 'request')}, {count_text(event['tokens'], 'token')} in "
        f"{count_text(event['steps'], 'step')}, {rate:.1f} tokens/s, peak memory {peak} "
        "(sum over ranks)"
    )


def _slots(slots: int | None, options: RunOptions, n_lines: int) -> int | None:
    """Return the slots of the program; of a given one None lets it have what it has."""
    if slots is not None or options.isa is not None or options.plan is not None:
        return slots
    return min(n_lines, MOST_SLOTS)


def _tokenizer(lines: list[BatchLine], options: RunOptions, note: Say) -> Tokenizer | None:
    """Return the model's tokenizer, None where it has none and nobody needs one."""
    folder = options.source
    if any(line.text is not None or line.stops for line in lines):
        return tokenizer_of(folder, options.cache)
    if not has_tokenizer(folder):
        return None
    try:
        return tokenizer_of(folder, options.cache)
    except ArtifactError as error:
        note(f"no text beside ids: {error.text()}")
        return None


def _with_ids(
    line: BatchLine, tokenizer: Tokenizer | None, options: RunOptions, most: int
) -> BatchLine:
    if line.text is None:
        return line
    assert tokenizer is not None
    # What is no UTF-8 cannot stand in JSON, so the text is whole characters.
    room = room_of(options, most, f"{line.where}: prompt", line.gen)
    return replace(line, ids=tuple(tokenizer.encode_bytes(line.text.encode(), room)))
