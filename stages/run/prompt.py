"""What `run` is asked to go on from: token ids, text, or a conversation; exactly one of them."""

import fcntl
import io
import os
import stat
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from k3tool.checkpoint.regular_file import MOST_BYTES, read_regular
from k3tool.errors import ArtifactError, UsageError, excluded, incomplete
from k3tool.model.config import K3Config
from k3tool.runtime.cache import default_cache
from k3tool.runtime.options import RunOptions, parse_ids
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
from k3tool.text.tokenizer import Room, Tokenizer, open_tokenizer
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
    return common.together(
        click.option(
            "--ids", metavar="1,2,3",
            help="The prompt, as token ids; without --chat.",
        ),
        click.option("--prompt", metavar="TEXT", help="The prompt, as text; in place of --ids."),
        click.option(
            "--prompt-file", type=common.PATH, metavar="FILE",
            help="The prompt, as the bytes of a file or pipe; in place of --ids and --prompt. "
            "Without any of these: piped text.",
        ),
        click.option("--chat", is_flag=True, help="Make the prompt a message of a conversation."),
        click.option("--system", metavar="TEXT", help="With --chat: a system message in front."),
        click.option(
            "--thinking", type=click.Choice([*EFFORTS, NO_THINKING]),
            help="With --chat: how much to think before the answer; a --load-state of a "
            f"conversation has said it. Default: {DEFAULT_EFFORT}.",
        ),
        click.option(
            "--history", type=common.PATH, metavar="FILE.jsonl",
            help="With --chat: the messages so far, one JSON object a line (role, content).",
        ),
    )  # fmt: skip


def read_prompt(
    given: Given, options: RunOptions, note: Say, saved: SavedState | None = None
) -> Prompt:
    """Return the prompt, before any weight is read; `note` hears when a pipe is waited for.

    It comes behind what is `saved`, and may then be none.
    Raises: UsageError for none, for two, for an empty one, and for one that is longer than the
    model reads; ArtifactError for files.
    """
    _check_together(given)
    if saved is not None and given == Given():
        _note_unread(note)
        return Prompt((), before=saved.ids[-saved.n_generated :])
    if given.ids is not None:
        return Prompt(parse_ids(given.ids))
    if given.chat:
        return _message(given, options, note, saved)
    name, data = _text(given, note)
    tokenizer = tokenizer_of(options.source, options.cache)
    ids = tokenizer.encode_bytes(data, room_of(options, _positions(options), name, options.gen))
    tokenizer.release()
    return Prompt(tuple(ids), tokenizer)


def room_of(options: RunOptions, most: int, name: str, gen: int, n_before: int = 0) -> Room:
    """Return the tokens of a prompt beside `gen` that are generated and `n_before` that are kept;
    `most` are the model's positions.

    Where not even those fit, it is all there is: the refusal is of them, not of the text.
    """
    limit, who = most, "max_position_embeddings"
    if options.ctx is not None and options.ctx < most:
        limit, who = options.ctx, "--ctx"
    hint, left = "generate fewer, or shorten the prompt", limit - gen - n_before
    if left < 1:
        return Room(limit, name, f"{limit} tokens ({who})", hint)
    words = f"{left} tokens beside {gen} to generate"
    words += f" and {n_before} that are kept" if n_before else ""
    return Room(left, name, f"{words} ({who} = {limit})", hint)


def _message(given: Given, options: RunOptions, note: Say, saved: SavedState | None) -> Prompt:
    """Return a conversation up to the answer, or, of a kept one, the answer that goes on."""
    goes_on = saved is not None and given == Given(chat=True)  # no message
    messages = [] if goes_on else _conversation(given, note)
    if goes_on:
        _note_unread(note)
    tokenizer = tokenizer_of(options.source, options.cache)
    kept = None if saved is None else kept_conversation(tokenizer, saved.ids)
    if kept is not None and given.thinking is not None:
        raise excluded("--thinking", "--load-state", "a kept conversation has said it")
    if saved is not None and goes_on:
        if kept is None or not kept.open_tags:
            got = "no message" if kept is None else "an answer that has ended"
            need = "a message (--prompt, --prompt-file), or an answer to go on with"
            raise UsageError("--chat: --load-state", got=got, need=need)
        before = tuple(last_message(tokenizer, saved.ids))
        return Prompt((), tokenizer, kept.open_tags[-1], before)
    effort = given.thinking or DEFAULT_EFFORT
    n_before = 0 if saved is None else len(saved.ids)
    room = room_of(options, _positions(options), "--chat", options.gen, n_before)
    ids = chat_ids(tokenizer, messages, effort, kept, room)
    tokenizer.release()
    return Prompt(tuple(ids), tokenizer, first_channel(effort, kept))


def _positions(options: RunOptions) -> int:
    return K3Config.load(options.source / "config.json").max_position_embeddings


def tokenizer_of(folder: Path, cache: Path | None) -> Tokenizer:
    """Open a model's tokenizer. Raises: ArtifactError."""
    config = K3Config.load(folder / "config.json")
    return open_tokenizer(folder, config.vocab_size, cache or default_cache())


def _check_together(given: Given) -> None:
    several = [option for name, option in _SOURCES.items() if getattr(given, name) is not None]
    if len(several) > 1:
        raise excluded(several[1], several[0])
    if given.chat and given.ids is not None:
        raise excluded("--chat", "--ids", "ids are given as they are")
    for name, option in _OF_CHAT.items():
        if getattr(given, name) is not None and not given.chat:
            raise incomplete(option, "--chat")


def _conversation(given: Given, note: Say) -> list[Message]:
    messages = [] if given.system is None else [Message("system", given.system)]
    if given.history is not None:
        messages += read_history(given.history, read_file("--history", given.history, note))
    is_asked = given.history is not None and messages[-1].role == "user"
    if is_asked and given.prompt is None and given.prompt_file is None:
        return messages
    _, data = _text(given, note)
    # What is no UTF-8 stays the bytes it is: surrogates, which the tokenizer knows.
    return [*messages, Message("user", data.decode("utf-8", "surrogateescape"))]


def _text(given: Given, note: Say) -> tuple[str, bytes]:
    """Return the bytes of the text that was given or is piped in, and the name of where."""
    if given.prompt is not None:
        option, data = "--prompt", os.fsencode(given.prompt)
    elif given.prompt_file is not None:
        option, data = "--prompt-file", read_file("--prompt-file", given.prompt_file, note)
    elif _is_piped():
        note("reading the prompt from stdin")
        option, data = "stdin", sys.stdin.buffer.read(MOST_BYTES + 1)
    else:
        raise UsageError("prompt", got="none", need=_NEED_MESSAGE if given.chat else _NEED)
    if not 0 < len(data) <= MOST_BYTES:
        got = f"more than {MOST_BYTES} bytes" if data else "an empty text"
        raise UsageError(option, got=got, need=f"1 to {MOST_BYTES} bytes")
    return option, data


def read_file(option: str, path: Path, note: Say) -> bytes:
    """Return the bytes of a file, or of a pipe such as /dev/stdin or a shell's `<(command)`.

    Raises: ArtifactError naming the option.
    """
    if path.is_fifo():
        note(f"reading {option} from {path}, a pipe")
        try:
            with path.open("rb") as file:
                return file.read(MOST_BYTES + 1)
        except OSError as error:
            got = (error.strerror or str(error)).lower()
            raise ArtifactError(f"{option}: {path}", got=got, need="a pipe to read") from None
    try:
        return read_regular(path, "a file", is_fetched=False)
    except ArtifactError as error:
        place, hint = f"{option}: {error.object}", error.hint
        if path.exists() and not path.is_file() and not path.is_dir():
            hint = f"through a pipe: cat {path} | k3tool run ... {option} /dev/stdin"
        raise ArtifactError(place, got=error.got, need=error.need, hint=hint) from None


def _note_unread(note: Say) -> None:
    if _holds_text():
        note("stdin is not read: the kept sequence goes on (--prompt-file /dev/stdin reads it)")


def _holds_text() -> bool:
    """Return whether something is piped in that nobody has read, as far as can be seen now."""
    if not _is_piped():
        return False
    stdin = sys.stdin.fileno()
    if stat.S_ISREG(os.fstat(stdin).st_mode):
        return os.lseek(stdin, 0, os.SEEK_CUR) < os.fstat(stdin).st_size
    waiting = fcntl.ioctl(stdin, termios.FIONREAD, bytes(4))
    return int.from_bytes(waiting, sys.byteorder) > 0


def _is_piped() -> bool:
    """Return whether stdin holds something that was meant for us: no terminal, no null device."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, io.UnsupportedOperation):
        return False  # closed, or a test's
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
