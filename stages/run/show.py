"""What `run` prints of a run's events, and its summary for a person."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from k3tool.runtime.run import Event, Reading, RunResult, describe
from k3tool.tables import bytes_text, count_text


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


def stream_ids(event: Event) -> None:
    """Print ids as they come, on one line."""
    if event["event"] == "token":
        click.echo((" " if event["step"] else "") + str(event["id"]), nl=False)
        sys.stdout.flush()
    elif event["event"] == "end":
        click.echo()


def stream_json(event: Event) -> None:
    """Print an event as a line of JSON."""
    click.echo(describe(event))
    sys.stdout.flush()


def until_nobody_reads(
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
