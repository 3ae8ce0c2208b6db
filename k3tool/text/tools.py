"""Tools in the message format: what is declared, what an assistant called, what came back.

    declared   message(role="system" type="tool-declare"), a JSON list behind a sentence
    called     open(tools) { open(call, tool, index)
                   { open(argument, key, type) value close(argument) }* close(call) }* close(tools)
    came back  message(role="tool", tool, index), in the order of the calls

`index` counts from 1. A value is text for the type `string`, else a JSON literal; arguments that
are no JSON object stand as they are in open(json, type="object"). Nothing makes a model call a
tool, or keeps it from it: that would need a grammar over its tokens.
Source: k3_spec E.
"""

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from k3tool.checkpoint.json_text import parse_json

TOOLS, CALL, ARGUMENT, RAW = "tools", "call", "argument", "json"
_WHITE = " \t\r\n"
# The model was trained on this sentence: a constant of the protocol.
_DECLARED = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` is the JSON that a client reads and sends back."""

    name: str
    arguments: str
    id: str = ""


def declaration(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the body of the message that declares tools: compact JSON with sorted keys."""
    text = json.dumps(tools, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return _DECLARED.format(text)


class Argument(NamedTuple):
    """One argument as the format has it; `kind` is the JSON type of its value."""

    key: str
    kind: str
    text: str


def arguments_of(text: str) -> list[Argument] | None:
    """Return a JSON object's members, values as they are written; None for any other text.

    Writing a value anew would change what the model said: 1e2 stays 1e2.
    """
    if not text.strip(_WHITE):
        return []
    try:
        if not isinstance(parse_json(text.encode()), dict):
            return None
        return list(_members(text))
    except ValueError:
        return None


def _members(text: str) -> Iterator[Argument]:
    """Yield the members of an object that is known to be one."""
    decoder = json.JSONDecoder()

    def after(at: int) -> int:
        while text[at] in _WHITE:
            at += 1
        return at

    at = after(text.index("{") + 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        begin = after(after(at) + 1)  # behind the colon
        value, end = decoder.raw_decode(text, begin)
        yield Argument(key, _kind(value), value if isinstance(value, str) else text[begin:end])
        at = after(end)
        if text[at] == ",":
            at = after(at + 1)


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", str: "string", dict: "object", list: "array"}
    return "null" if value is None else kinds.get(type(value), "number")


# -- answers -----------------------------------------------------------------------------------


class Tag(NamedTuple):
    """A tag that an answer has just ended; `around` are the tags that were open before it."""

    name: str
    attributes: Mapping[str, str]
    is_closing: bool
    around: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallPart:
    """What is new of the `number`-th call (from 0): its id and name with the first part."""

    number: int
    id: str
    name: str
    arguments: str


class CallReader:
    """Make calls of an answer's tags and of the text between them, an argument at a time."""

    def __init__(self) -> None:
        """Begin with no call."""
        self.n_calls = 0
        self._is_open = False
        self._n_arguments = 0
        self._is_raw = False
        self._key: tuple[str, str] | None = None  # key and type of the argument that is open
        self._value: list[str] = []

    def feed(self, texts: Iterable[str], tag: Tag | None) -> list[CallPart]:
        """Take texts inside arguments and the tag behind them; return what is new."""
        self._value += texts
        parts = [] if tag is None else list(self._ended(tag))
        if tag is not None:
            self._value = []
        return parts

    def _ended(self, tag: Tag) -> Iterator[CallPart]:
        if not tag.is_closing:
            if tag.name == CALL and tag.around == (TOOLS,):
                yield from self._close()
                yield self._begin(tag.attributes.get("tool", ""))
            elif tag.name == ARGUMENT and tag.around == (TOOLS, CALL):
                self._key = tag.attributes.get("key", ""), tag.attributes.get("type", "")
            elif tag.name == RAW and tag.around == (TOOLS, CALL):
                self._is_raw = True
        elif tag.name == ARGUMENT and self._is_open and self._key is not None:
            yield self._more(self._argument(*self._key))
            self._key = None
        elif tag.name == RAW and self._is_open and self._is_raw:
            yield self._more("".join(self._value))
        elif tag.name != ARGUMENT and tag.name != RAW and tag.name in (*tag.around, "message"):
            yield from self._close()

    def _begin(self, name: str) -> CallPart:
        self.n_calls += 1
        self._is_open, self._n_arguments, self._is_raw, self._key = True, 0, False, None
        return CallPart(self.n_calls - 1, f"call_{uuid.uuid4().hex}", name, "")

    def _more(self, arguments: str) -> CallPart:
        return CallPart(self.n_calls - 1, "", "", arguments)

    def _argument(self, key: str, kind: str) -> str:
        """Return a member of the object; a value that is no JSON stays as it is, to be seen."""
        self._n_arguments += 1
        value = "".join(self._value)
        text = json.dumps(value, ensure_ascii=False) if kind == "string" else value
        before = "{" if self._n_arguments == 1 else ", "
        return f"{before}{json.dumps(key, ensure_ascii=False)}: {text}"

    def _close(self) -> Iterator[CallPart]:
        if self._is_open and not self._is_raw:
            yield self._more("}" if self._n_arguments else "{}")
        self._is_open = False
