"""What `run` is asked to go on from: token ids, text, or a conversation; exactly one of them."""

import io
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from k3tool.checkpoint.regular_file import MOST_BYTES, read_regular
from k3tool.errors import ArtifactError, UsageError
from k3tool.model.config import K3Config
from k3tool.runtime.cache import default_cache
from k3tool.runtime.options import parse_ids
from k3tool.runtime.state_file import SavedState
from k3tool.text.chat import (
    DEFAULT_EFFORT,
    EFFORTS,
    NO_THINKING,
    Message,
    chat_ids,
    first_channel,
    kept_conversation,
    last_message,
    read_history,
)
from k3tool.text.tokenizer import Tokenizer, open_tokenizer
from stages import options as common

Say = Callable[[str], None]
_SOURCES = {"ids": "--ids", "prompt": "--prompt", "prompt_file": "--prompt-file"}
_OF_CHAT = {"system": "--system", "thinking": "--thinking", "history": "--history"}
_TEXT = "--prompt, --prompt-file, or piped into stdin"
_NEED = f"token ids (--ids 1,2,3), a text ({_TEXT})"
_NEED_MESSAGE = f"a message ({_TEXT}), or a --history that ends with a user's"


@dataclass(frozen=True, slots=True)
class Given:
    """The options that make a prompt, as they were given."""

    ids: str | None = None
    prompt: str | None = None
    prompt_file: Path | None = None
    chat: bool = False
    system: str | None = None
    thinking: str | None = None
    history: Path | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids to go on from. `channel` is the one that a conversation leaves open."""

    ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None
    channel: str | None = None
    before: tuple[int, ...] = ()  # of an answer that goes on, what an earlier run has said


def prompt_options() -> common.Decorator:
    """Return the options of Given."""
    options = (
        click.option("--ids", metavar="1,2,3", help="The prompt, as token ids."),
        click.option("--prompt", metavar="TEXT", help="The prompt, as text."),
        click.option(
            "--prompt-file", type=common.PATH, metavar="FILE",
            help="The prompt, as the bytes of a file. Without any of these: what is piped in.",
        ),
        click.option("--chat", is_flag=True, help="Make the prompt a message of a conversation."),
        click.option("--system", metavar="TEXT", help="With --chat: a system message in front."),
        click.option(
            "--thinking", type=click.Choice([*EFFORTS, NO_THINKING]),
            help=f"With --chat: how much to think before the answer. Default: {DEFAULT_EFFORT}.",
        ),
        click.option(
            "--history", type=common.PATH, metavar="FILE.jsonl",
            help="With --chat: the messages so far, one JSON object a line (role, content).",
        ),
    )  # fmt: skip

    def decorate(command: Callable[..., object]) -> Callable[..., object]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def read_prompt(
    given: Given, folder: Path, cache: Path | None, note: Say, saved: SavedState | None = None
) -> Prompt:
    """Return the prompt, before any weight is read; `note` hears when stdin is waited for.

    It comes behind what is `saved`, and may then be none.
    Raises: UsageError for none, for two, and for an empty one; ArtifactError for files.
    """
    _check_together(given)
    if saved is not None and given == Given():
        return Prompt((), before=saved.ids[-saved.n_generated :])
    if given.ids is not None:
        return Prompt(parse_ids(given.ids))
    if given.chat:
        return _message(given, folder, cache, note, saved)
    data = _text(given, note)
    tokenizer = tokenizer_of(folder, cache)
    ids = tokenizer.encode_bytes(data)
    tokenizer.release()
    return Prompt(tuple(ids), tokenizer)


def _message(
    given: Given, folder: Path, cache: Path | None, note: Say, saved: SavedState | None
) -> Prompt:
    """Return a conversation up to the answer, or, of a kept one, the answer that goes on."""
    goes_on = saved is not None and given == Given(chat=True)  # no message
    messages = [] if goes_on else _conversation(given, note)
    tokenizer = tokenizer_of(folder, cache)
    kept = None if saved is None else kept_conversation(tokenizer, saved.ids)
    if kept is not None and given.thinking is not None:
        need = "one of them: a kept conversation has said it"
        raise UsageError("--thinking", got="also --load-state", need=need)
    if saved is not None and goes_on:
        if kept is None or not kept.open_tags:
            got = "no message" if kept is None else "an answer that has ended"
            need = "a message (--prompt, --prompt-file), or an answer to go on with"
            raise UsageError("--chat: --load-state", got=got, need=need)
        before = tuple(last_message(tokenizer, saved.ids))
        return Prompt((), tokenizer, kept.open_tags[-1], before)
    effort = given.thinking or DEFAULT_EFFORT
    ids = chat_ids(tokenizer, messages, effort, kept)
    tokenizer.release()
    return Prompt(tuple(ids), tokenizer, first_channel(effort, kept))


def tokenizer_of(folder: Path, cache: Path | None) -> Tokenizer:
    """Open a model's tokenizer. Raises: ArtifactError."""
    config = K3Config.load(folder / "config.json")
    return open_tokenizer(folder, config.vocab_size, cache or default_cache())


def _check_together(given: Given) -> None:
    several = [option for name, option in _SOURCES.items() if getattr(given, name) is not None]
    if len(several) > 1:
        raise UsageError(several[1], got=f"also {several[0]}", need="one of them")
    if given.chat and given.ids is not None:
        raise UsageError("--chat", got="also --ids", need="one of them: ids are given as they are")
    for name, option in _OF_CHAT.items():
        if getattr(given, name) is not None and not given.chat:
            raise UsageError(option, got="no --chat", need="both")


def _conversation(given: Given, note: Say) -> list[Message]:
    messages = [] if given.system is None else [Message("system", given.system)]
    if given.history is not None:
        messages += read_history(given.history, read_file("--history", given.history))
    is_asked = given.history is not None and messages[-1].role == "user"
    if is_asked and given.prompt is None and given.prompt_file is None:
        return messages
    data = _text(given, note)
    # What is no UTF-8 stays the bytes it is: surrogates, which the tokenizer knows.
    return [*messages, Message("user", data.decode("utf-8", "surrogateescape"))]


def _text(given: Given, note: Say) -> bytes:
    """Return the bytes of the text that was given or is piped in."""
    if given.prompt is not None:
        option, data = "--prompt", os.fsencode(given.prompt)
    elif given.prompt_file is not None:
        option, data = "--prompt-file", read_file("--prompt-file", given.prompt_file)
    elif _is_piped():
        note("reading the prompt from stdin")
        option, data = "stdin", sys.stdin.buffer.read(MOST_BYTES + 1)
    else:
        raise UsageError("prompt", got="none", need=_NEED_MESSAGE if given.chat else _NEED)
    if not 0 < len(data) <= MOST_BYTES:
        got = f"more than {MOST_BYTES} bytes" if data else "an empty text"
        raise UsageError(option, got=got, need=f"1 to {MOST_BYTES} bytes")
    return data


def read_file(option: str, path: Path) -> bytes:
    """Return a file's bytes. Raises: ArtifactError naming the option."""
    try:
        return read_regular(path, "a file", is_fetched=False)
    except ArtifactError as error:
        place = f"{option}: {error.object}"
        raise ArtifactError(place, got=error.got, need=error.need, hint=error.hint) from None


def _is_piped() -> bool:
    """Return whether stdin holds something that was meant for us: no terminal, no null device."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, io.UnsupportedOperation):
        return False  # closed, or a test's
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
