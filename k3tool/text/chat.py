"""The model's message format: a conversation to token ids, and answers back to channels.

    open tag   <|open|> name ( key=" value ")* <|sep|>     close tag   <|close|> name <|sep|>
    message    open(message, role[, name]) body close(message) <|end_of_msg|>

The words with bars are control tokens, by id. Every other piece (name, ` key`, `="`, value, `"`,
body) is encoded by itself, so no token crosses two of them, and no body can end a message. An
assistant's body is a think channel and a response channel, and behind them its calls of tools
(k3tool.text.tools); the prompt ends with the next message and its first channel open. Images have
forms of their own that are not written here.
Source: k3_spec E.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from k3tool.checkpoint.json_text import json_fault, json_kind, parse_json
from k3tool.errors import UsageError, quoted
from k3tool.text.tokenizer import Room, Tokenizer
from k3tool.text.tools import ARGUMENT, CALL, RAW, TOOLS, Call, Tag, arguments_of

OPEN, CLOSE, SEP, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MESSAGE, THINK, RESPONSE = "message", "think", "response"
EFFORTS = ("low", "high", "max")  # what the model takes; its own sentence names one more
NO_THINKING = "off"
DEFAULT_EFFORT = "max"  # of the release's own processor
# The model was trained on this sentence: a constant of the protocol.
_EFFORT_BODY = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    `reasoning` is an assistant's, what its think channel held, and so are `calls`. `answers` is a
    tool's (role `tool`): which tool, and which call of the message before it, from 1.
    """

    role: str
    content: str
    reasoning: str = ""
    name: str | None = None
    calls: tuple[Call, ...] = ()
    answers: tuple[str, int] | None = None


class Control(NamedTuple):
    """A control token as a piece of a conversation; any other piece is text."""

    name: str


class Kept(NamedTuple):
    """How a conversation stands where a kept sequence ends: tags that are open, outermost first."""

    open_tags: tuple[str, ...]
    is_in_tag: bool  # cut between a tag's first word and its end
    is_thinking: bool


Piece = Control | str


def chat_ids(
    tokenizer: Tokenizer, messages: Sequence[Message], effort: str = DEFAULT_EFFORT,
    kept: Kept | None = None, room: Room | None = None, tools: str | None = None,
) -> list[int]:  # fmt: skip
    """Return the ids of a conversation up to the assistant's next channel.

    `effort` is one of EFFORTS, or NO_THINKING: then there is no think channel anywhere. `tools` is
    their declaration (k3tool.text.tools). Behind a `kept` conversation, which has said its effort,
    come the new messages alone.
    Raises: ArtifactError where the tokenizer lacks one of the format's control tokens; UsageError
    for texts that are more tokens than `room`.
    """
    ids: list[int] = []
    behind = pieces(messages, effort, tools) if kept is None else _pieces_behind(kept, messages)
    for piece in behind:
        if isinstance(piece, Control):
            ids.append(tokenizer.control_id(piece.name))
        else:
            left = None if room is None else room._replace(n_before=room.n_before + len(ids))
            ids += tokenizer.encode(piece, left)
    return ids


def pieces(messages: Sequence[Message], effort: str, tools: str | None = None) -> Iterator[Piece]:
    """Yield a conversation piece by piece. Raises: UsageError for an effort that is none."""
    if effort not in (*EFFORTS, NO_THINKING):
        need = " or ".join((*EFFORTS, NO_THINKING))
        raise UsageError("--thinking", got=quoted(effort), need=need)
    is_thinking = effort != NO_THINKING
    if tools is not None:
        yield from _open(MESSAGE, role="system", type="tool-declare")
        yield tools
        yield from _end()
    if is_thinking:
        yield from _open(MESSAGE, role="system", type="thinking-effort")
        yield _EFFORT_BODY.format(effort)
        yield from _end()
    yield from _messages(messages, is_thinking)


def _pieces_behind(kept: Kept, messages: Sequence[Message]) -> Iterator[Piece]:
    """Yield what comes behind a kept conversation: an answer that was cut is closed first."""
    if kept.is_in_tag:
        yield Control(SEP)
    for tag in reversed(kept.open_tags):
        yield from _close(tag)
    if kept.open_tags:
        yield Control(END_OF_MESSAGE)
    yield from _messages(messages, kept.is_thinking)


def _messages(messages: Sequence[Message], is_thinking: bool) -> Iterator[Piece]:
    for message in messages:
        yield from _open(MESSAGE, **_attributes(message))
        if message.role == "assistant":
            if is_thinking:
                yield from _channel(THINK, message.reasoning)
            yield from _channel(RESPONSE, message.content)
            yield from _calls(message.calls)
        else:
            yield message.content
        yield from _end()
    yield from _open(MESSAGE, role="assistant")
    yield from _open(THINK if is_thinking else RESPONSE)


def _attributes(message: Message) -> dict[str, str]:
    found = {"role": message.role}
    if message.answers is not None:
        found |= {"tool": message.answers[0], "index": str(message.answers[1])}
    return found if message.name is None else found | {"name": message.name}


def _calls(calls: Sequence[Call]) -> Iterator[Piece]:
    """Yield an assistant's calls; an empty value has no piece."""
    if not calls:
        return
    yield from _open(TOOLS)
    for number, call in enumerate(calls, 1):
        yield from _open(CALL, tool=call.name, index=str(number))
        found = arguments_of(call.arguments)
        if found is None:
            yield from _channel(RAW, call.arguments, type="object")
        for argument in found or ():
            yield from _channel(ARGUMENT, argument.text, key=argument.key, type=argument.kind)
        yield from _close(CALL)
    yield from _close(TOOLS)


def first_channel(effort: str, kept: Kept | None = None) -> str:
    """Return the channel that an answer begins in."""
    is_thinking = effort != NO_THINKING if kept is None else kept.is_thinking
    return THINK if is_thinking else RESPONSE


def _open(tag: str, **attributes: str) -> Iterator[Piece]:
    yield Control(OPEN)
    yield tag
    for key, value in attributes.items():
        yield f" {key}"
        yield '="'
        yield value.replace("&", "&amp;").replace('"', "&quot;")
        yield '"'
    yield Control(SEP)


def _close(tag: str) -> Iterator[Piece]:
    yield from (Control(CLOSE), tag, Control(SEP))


def _end() -> Iterator[Piece]:
    yield from _close(MESSAGE)
    yield Control(END_OF_MESSAGE)


def _channel(tag: str, body: str, **attributes: str) -> Iterator[Piece]:
    yield from _open(tag, **attributes)
    yield body
    yield from _close(tag)


# -- answers -----------------------------------------------------------------------------------


class ChannelReader:
    """Say of each token of an answer which channel its bytes belong to.

    A tag's own words belong to none. A channel that closes leaves the one around it, "" where there
    is none; what a model says there is no answer.
    """

    def __init__(self, tokenizer: Tokenizer, first: str = THINK) -> None:
        """Begin inside `first`, which the prompt has opened; "" where nothing is open."""
        self._tokenizer = tokenizer
        self._open: list[str] = [first] if first else []
        self._seen: set[str] = set()
        self._tag: bytes | None = None  # the words of a tag so far
        self._is_closing = False
        self.ended: Tag | None = None  # the tag that the last token ended

    @property
    def channel(self) -> str:
        """Return the channel that the next text belongs to."""
        return self._open[-1] if self._open else ""

    @property
    def kept(self) -> Kept | None:
        """Return how a conversation stands now; None where none has begun."""
        if MESSAGE not in self._seen:
            return None
        return Kept(tuple(self._open), self._tag is not None, THINK in self._seen)

    def feed(self, token: int) -> tuple[str, bytes]:
        """Take a token; return its channel and its bytes in it, none for a part of a tag."""
        name, self.ended = self._tokenizer.control_tokens.get(token), None
        if name == END_OF_MESSAGE:
            self._open, self._tag = [], None
        elif name in (OPEN, CLOSE):
            self._tag, self._is_closing = b"", name == CLOSE
        elif name == SEP and self._tag is not None:
            self._end_tag(self._tag)
            self._tag = None
        elif name is None and self._tag is not None:
            self._tag += self._tokenizer.token_bytes(token)
        elif name is None:
            return self.channel, self._tokenizer.token_bytes(token)
        return self.channel, b""

    def _end_tag(self, words: bytes) -> None:
        text = words.decode("utf-8", "replace")
        tag = text.split(" ")[0]
        values = {key: unescaped(value) for key, value in _ATTRIBUTE.findall(text)}
        self.ended = Tag(tag, values, self._is_closing, tuple(self._open))
        if not self._is_closing:
            self._open.append(tag)
            self._seen.add(tag)
        elif tag in self._open:
            while self._open.pop() != tag:
                pass  # what was left open inside ends with it


def kept_conversation(tokenizer: Tokenizer, ids: Iterable[int]) -> Kept | None:
    """Return how the conversation in a sequence stands at its end; None where it holds none."""
    reader = ChannelReader(tokenizer, "")
    for token in ids:
        reader.feed(token)
    return reader.kept


def last_message(tokenizer: Tokenizer, ids: Sequence[int]) -> Sequence[int]:
    """Return what stands behind the last message that has ended."""
    end = tokenizer.control_id(END_OF_MESSAGE)
    return next((ids[at + 1 :] for at in range(len(ids) - 1, -1, -1) if ids[at] == end), ids)


_ATTRIBUTE = re.compile(r' ([^ ="]+)="([^"]*)"')


def unescaped(value: str) -> str:
    """Return an attribute's value as it was before it was written."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


# -- conversations from outside ----------------------------------------------------------------


def read_history(path: Path, raw: bytes) -> list[Message]:
    """Return the messages of a file with one JSON object a line.

    Raises: UsageError naming the line.
    """
    messages = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            where = f"--history: {path}: line {number}"
            try:
                value = parse_json(line)
            except ValueError as error:
                got = f"invalid JSON ({json_fault(error)})"
                raise UsageError(where, got=got, need="a message as JSON") from None
            messages.append(message_of(value, where))
    if not messages:
        raise UsageError(f"--history: {path}", got="no message", need="one a line")
    return messages


def message_of(value: Any, where: str) -> Message:
    """Return a message of `role`, `content` and, where they are, `reasoning` and `name`.

    Raises: UsageError naming the field.
    """
    if not isinstance(value, dict):
        raise UsageError(where, got=json_kind(value), need="a JSON object")
    fields = {"reasoning" if key == "reasoning_content" else key: value[key] for key in value}
    unknown = sorted(set(fields) - {"role", "content", "reasoning", "name"})
    if unknown:
        need = "role, content, reasoning or name (tools: k3tool serve)"
        raise UsageError(where, got=f"a field {quoted(unknown[0])}", need=need)
    if fields.get("role") not in ROLES:
        raise UsageError(f"{where}: role", got=quoted(fields.get("role")), need=" or ".join(ROLES))
    if not isinstance(fields.get("content"), str):
        raise UsageError(f"{where}: content", got=quoted(fields.get("content")), need="text")
    for key in ("reasoning", "name"):
        if fields.get(key) is not None and not isinstance(fields[key], str):
            raise UsageError(f"{where}: {key}", got=quoted(fields[key]), need="text")
    if fields.get("reasoning") and fields["role"] != "assistant":
        raise UsageError(f"{where}: reasoning", got=f"a {fields['role']}'s", need="an assistant's")
    return Message(
        fields["role"], fields["content"], fields.get("reasoning") or "", fields.get("name")
    )
