"""What `run` prints of a run's events, and its summary for a person."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from k3tool.errors import quoted
from k3tool.progress import TokenRate, rate_form
from k3tool.runtime.run import Event, Reading, RunResult, describe
from k3tool.tables import bytes_text, count_text
from k3tool.text.chat import RESPONSE
from k3tool.text.reply import Part, Reply
from stages.streams import flush_or_stop, silence_stdout

Show = Callable[[Event], None]
_KEPT = "\n\t"  # control characters that a terminal may get from a model


class Follower:
    """Makes text of a run's tokens, says when it stops them, and adds it to their events."""

    def __init__(self, reply: Reply | None, is_chat: bool) -> None:
        """Follow a reply; without one tokens stay ids."""
        self._reply, self._is_chat = reply, is_chat
        self._parts: list[Part] = []

    def follow(self, token: int, is_last: bool) -> str | None:
        """Take a token; return the text that stopped the reply."""
        if self._reply is None:
            return None
        self._parts = self._reply.feed(token, is_last)
        return self._reply.stopped_by

    def with_text(self, event: Event) -> Event:
        """Return a token's or the end's event with its text; in a chat with all channels' too."""
        if self._reply is None or event["event"] not in ("token", "end"):
            return event
        if event["event"] == "end":
            text, channels = self._reply.text, self._reply.channels
        else:
            channels = {name: "" for name, _ in self._parts}
            for name, part in self._parts:
                channels[name] += part
            text = channels.get(RESPONSE if self._is_chat else "", "")
        return event | {"text": text} | ({"channels": channels} if self._is_chat else {})


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
    peak = f"peak memory {bytes_text(result.peak_memory_bytes)} (sum over ranks)"
    count = count_text(len(result.tokens), "token")
    rates += _reading(result.reading, result.folders)
    return f"{count} ({_reason(result)}), " + ", ".join([*rates, peak, ranks])


def _reason(result: RunResult) -> str:
    if result.stop is None:
        return result.reason
    by = f"id {result.stop}" if isinstance(result.stop, int) else quoted(result.stop)
    return f"{result.reason} at {by}"


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


# -- stdout --------------------------------------------------------------------------------------


def stream_ids(event: Event) -> None:
    """Print ids as they come, on one line."""
    if event["event"] == "token":
        click.echo((" " if event["step"] else "") + str(event["id"]), nl=False)
        flush_or_stop()
    elif event["event"] == "end":
        click.echo()


def stream_json(event: Event) -> None:
    """Print an event as a line of JSON."""
    click.echo(describe(event))
    flush_or_stop()


class TextStream:
    """Prints the answer's characters as they come; what is thought before it goes to stderr."""

    def __init__(self) -> None:
        """Begin at the start of a line."""
        self._in_thought = False  # in the middle of a line on stderr

    def __call__(self, event: Event) -> None:
        """Take an event with text."""
        if event["event"] == "token":
            for name, part in event.get("channels", {}).items():
                if name != RESPONSE and part:
                    _write(part, is_answer=False)
                    self._in_thought = not part.endswith("\n")
            if event["text"]:
                self._end_thought()
                _write(event["text"], is_answer=True)
        elif event["event"] == "end":
            self._end_thought()
            click.echo()

    def _end_thought(self) -> None:
        if self._in_thought:
            click.echo(err=True)
        self._in_thought = False


def answer_only(show: Show) -> Show:
    """Return `show` of text without what is thought before the answer."""
    return lambda event: show({key: event[key] for key in event if key != "channels"})


def _write(text: str, *, is_answer: bool) -> None:
    stream = sys.stdout if is_answer else sys.stderr
    click.echo(_tame(text) if stream.isatty() else text, nl=False, err=not is_answer)
    if is_answer:
        flush_or_stop()


def _tame(text: str) -> str:
    """Return text without the control characters by which it could rule a terminal."""
    return "".join(
        "\ufffd" if c not in _KEPT and (c < " " or "\x7f" <= c < "\xa0") else c for c in text
    )


class WithRate:
    """A `show` with tokens per second on stderr while they come, where that is a terminal: on a
    line of their own, or, where text comes on the same terminal, in its title.
    """

    def __init__(self, show: Show, *, is_quiet: bool, has_thoughts: bool) -> None:
        """Show events; `has_thoughts` is whether they too are written to stderr."""
        is_shared = has_thoughts or _is_one_terminal()
        form = None if is_quiet else rate_form(shares_terminal=is_shared)
        self._show = show
        self._rate = None if form is None else TokenRate(form)

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if event["event"] == "end":
            self.close()
        self._show(event)
        if event["event"] == "token" and self._rate is not None:
            self._rate.token()

    def close(self) -> None:
        """Take the rate away, however the run has ended."""
        if self._rate is not None:
            self._rate.close()


def _is_one_terminal() -> bool:
    """Return whether stdout and stderr are the same terminal."""
    return sys.stdout.isatty() and os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())


class UntilNobodyReads:
    """A `show` that goes on in silence when stdout takes nothing more, where files were asked for
    too: those are written whether somebody reads or not.

    `error` is what stdout said, None where its reader has merely gone, or it was closed from the
    start.
    """

    def __init__(self, show: Show, outputs: Sequence[Path | None]) -> None:
        """Show events; with no output every error is the caller's."""
        self._show, self._has_outputs = show, any(outputs)
        self._is_reading = True
        self.error: OSError | None = None

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if not self._is_reading:
            return
        try:
            self._show(event)
        except OSError as error:
            if not self._has_outputs:
                raise
            self._is_reading = False
            if error.errno not in (errno.EPIPE, errno.EBADF):
                self.error = error
            silence_stdout()
