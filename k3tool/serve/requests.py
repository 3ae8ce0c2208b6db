"""What a client may ask for: bodies of completions and chat completions, read strictly.

A field is taken, is accepted at the value that changes nothing, says nothing to an engine, or is
refused by name: one that is dropped in silence gives an answer to another question. Names and
meanings are those of OpenAI's public API reference; `top_k`, `ignore_eos` and `stop_token_ids` are
what engines commonly add to it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3tool.checkpoint.json_text import json_fault, json_kind, parse_json
from k3tool.errors import UsageError, quoted
from k3tool.model.config_fields import MOST_ID
from k3tool.runtime.sampling import MOST_TEMPERATURE
from k3tool.serve.tool_fields import answered, read_calls, read_tools
from k3tool.text.chat import DEFAULT_EFFORT, EFFORTS, NO_THINKING, Message
from k3tool.text.tools import declaration

MOST_STOPS = 16
MOST_CHOICES = 128
MOST_PROMPTS = 2048
MOST_SEED = 2**64 - 1
MOST_BRACKETS = 1 << 20  # of a body, in its texts as well

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """How to generate, whatever is asked about. `max_tokens` None: as many as the context holds.

    `seed` None: one is drawn. `model` is a name to compare with the served one.
    """

    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """Prompts to go on from, each `n` times."""

    ask: Ask
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """A conversation to answer; `effort` is how much to think first, of k3tool.text.chat.

    `tools` is the declaration of those that the model may call, None where there are none.
    """

    ask: Ask
    messages: tuple[Message, ...]
    effort: str = DEFAULT_EFFORT
    tools: str | None = None


# -- fields ------------------------------------------------------------------------------------


def _refuse(name: str, got: object, need: str) -> UsageError:
    return UsageError(name, got=quoted(got), need=need)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _temperature(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 <= value <= MOST_TEMPERATURE:
        raise _refuse(name, value, f"a number from 0 (greedy) to {MOST_TEMPERATURE:g}")
    return float(value)


def _top_p(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 < value <= 1:
        raise _refuse(name, value, "a number above 0, at most 1")
    return float(value)


def _count(low: int, high: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _refuse(name, value, f"a whole number from {low} to {high}")
        return value

    return read


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(name, value, "text")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "true or false")
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise _refuse(name, value, "text, or a list of texts, none empty")
    if len(found) > MOST_STOPS:
        raise UsageError(name, got=f"{len(found)} texts", need=f"at most {MOST_STOPS}")
    return tuple(found)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i <= MOST_ID for i in value):
        raise _refuse(name, value, f"a list of token ids up to {MOST_ID}")
    return tuple(value)


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict) or set(value) - {"include_usage", "include_obfuscation"}:
        raise _refuse(name, value, '{"include_usage": true or false}')
    return _flag(f"{name}.include_usage", value.get("include_usage", False))


# Name in a body -> field of Ask and its reader. A null is as if the field were not there.
_READ: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "model": ("model", _text),
    "max_tokens": ("max_tokens", _count(1, MOST_ID)),
    "temperature": ("temperature", _temperature),
    "top_p": ("top_p", _top_p),
    "top_k": ("top_k", _count(0, MOST_ID)),
    "seed": ("seed", _count(0, MOST_SEED)),
    "stop": ("stop", _stops),
    "stop_token_ids": ("stop_ids", _ids),
    "ignore_eos": ("ignore_eos", _flag),
    "n": ("n", _count(1, MOST_CHOICES)),
    "stream": ("stream", _flag),
    "stream_options": ("include_usage", _stream_options),
}
_CHAT_READ = _READ | {"max_completion_tokens": _READ["max_tokens"]}
_EFFORTS = {effort: effort for effort in EFFORTS} | {"none": NO_THINKING}

# Accepted at the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},),
    "best_of": (1,), "echo": (False,), "suffix": ("",),
    "logprobs": (False,), "top_logprobs": (0,),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
    "verbosity": ("medium",), "audio": (), "web_search_options": (), "moderation": (),
}  # fmt: skip
# Of the client's account, or of speed alone: nothing that would make another answer.
_SILENT = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "prediction",
})  # fmt: skip


def _is_same(value: Any, kept: Any) -> bool:
    """Whether two JSON values are one; Python also takes true for 1."""
    return isinstance(value, bool) is isinstance(kept, bool) and bool(value == kept)


def _read(body: Mapping[str, Any], taken: Mapping[str, Any], own: frozenset[str]) -> Ask:
    """Read all fields but a kind's `own`. Raises: UsageError naming the field."""
    found: dict[str, Any] = {}
    for name, value in body.items():
        if name in own or name in _SILENT or value is None:
            continue
        if name in taken:
            field, read = taken[name]
            if field in found:
                raise UsageError(name, got="also max_tokens", need="one of the two")
            found[field] = read(name, value)
        elif name not in _NEUTRAL:
            raise UsageError(name, got="a field that is not known here", need="a known one")
        elif not any(_is_same(value, kept) for kept in _NEUTRAL[name]):
            allowed = " or ".join(quoted(kept) for kept in _NEUTRAL[name] or (None,))
            raise _refuse(name, value, f"{allowed}: nothing else is served")
    if "model" not in found:
        raise UsageError("model", got="none", need="the served model's name (GET /v1/models)")
    if "include_usage" in found and not found.get("stream"):
        raise UsageError("stream_options", got="no stream", need='"stream": true with it')
    return Ask(**found)


def read_body(raw: bytes) -> dict[str, Any]:
    """Return a body's JSON object. Raises: UsageError in words."""
    # Python holds every thread up while it builds a value: millions of lists take it many seconds.
    n_brackets = raw.count(b"[") + raw.count(b"{")
    if n_brackets > MOST_BRACKETS:
        raise UsageError("body", got=f"{n_brackets} brackets", need=f"at most {MOST_BRACKETS}")
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise UsageError("body", got=f"invalid JSON ({json_fault(error)})", need="JSON") from None
    if not isinstance(value, dict):
        raise UsageError("body", got=json_kind(value), need="a JSON object")
    return value


# -- the two kinds -----------------------------------------------------------------------------


def read_completion(body: Mapping[str, Any]) -> CompletionAsk:
    """Read a body of /v1/completions. Raises: UsageError naming the field."""
    ask = _read(body, _READ, frozenset({"prompt"}))
    return CompletionAsk(ask, _prompts(body.get("prompt")))


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Return one prompt, or several: text, token ids, or lists of either."""
    need = "text, token ids, or a list of them; none empty"
    if isinstance(value, str) and value:
        return (value,)
    if not isinstance(value, list) or not value:
        raise _refuse("prompt", value, need)
    if len(value) > MOST_PROMPTS and not isinstance(value[0], int):
        raise UsageError("prompt", got=f"{len(value)} of them", need=f"at most {MOST_PROMPTS}")
    if isinstance(value[0], int):
        return (_ids("prompt", value),)
    if all(isinstance(one, str) and one for one in value):
        return tuple(value)
    if all(isinstance(one, list) and one for one in value):
        return tuple(_ids(f"prompt[{nth}]", one) for nth, one in enumerate(value))
    raise _refuse("prompt", value, need)


def read_chat(body: Mapping[str, Any]) -> ChatAsk:
    """Read a body of /v1/chat/completions. Raises: UsageError naming the field."""
    tools = read_tools(body)
    own = {"messages", "reasoning_effort"} | (_TOOL_FIELDS if tools else set())
    ask = _read(body, _CHAT_READ, frozenset(own))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refuse("messages", messages, "a list of at least one message")
    effort = body.get("reasoning_effort")
    if effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        raise _refuse("reasoning_effort", effort, " or ".join(_EFFORTS))
    read = tuple(_message(*pair) for pair in enumerate(messages))
    return ChatAsk(
        ask, answered(read, _answered_ids(messages)),
        DEFAULT_EFFORT if effort is None else _EFFORTS[effort],
        declaration(tools) if tools else None,
    )  # fmt: skip


def _answered_ids(messages: list[Any]) -> dict[int, str]:
    """Return which call each message of a tool answers, by the message's number."""
    return {
        nth: _text(f"messages[{nth}].tool_call_id", value.get("tool_call_id"))
        for nth, value in enumerate(messages)
        if value["role"] == "tool"
    }


_ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool",
}  # fmt: skip
_MESSAGE_FIELDS = {"role", "content", "name", "reasoning_content", "refusal"}
_FIELDS_OF = {"assistant": {"tool_calls"}, "tool": {"tool_call_id"}}
_TOOL_FIELDS = {"tools", "tool_choice", "parallel_tool_calls"}


def _message(nth: int, value: Any) -> Message:
    """Return a message as the model's format has it."""
    name = f"messages[{nth}]"
    if not isinstance(value, dict):
        raise _refuse(name, value, "an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _refuse(f"{name}.role", role, ", ".join(_ROLES))
    for field in value:
        known = field in _MESSAGE_FIELDS or field in _FIELDS_OF.get(role, ())
        if not known and value[field] not in (None, []):
            raise UsageError(f"{name}.{field}", got="a field that is not served", need="none")
    reasoning, who = value.get("reasoning_content"), value.get("name")
    if reasoning is not None and role != "assistant":
        raise UsageError(f"{name}.reasoning_content", got=role, need="it of an assistant only")
    calls = read_calls(f"{name}.tool_calls", value.get("tool_calls") or [])
    content = "" if calls and value.get("content") is None else value.get("content")
    return Message(
        _ROLES[role],
        _content(f"{name}.content", content),
        "" if reasoning is None else _text(f"{name}.reasoning_content", reasoning),
        None if who is None or role == "tool" else _text(f"{name}.name", who),
        calls,
    )


def _content(name: str, value: Any) -> str:
    """Return a message's text: as it is, or the text of its parts one behind the other."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _refuse(name, value, "text, or a list of parts of type text")
    for nth, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _refuse(f"{name}[{nth}]", part, 'a part {"type": "text", "text": ...}')
        _text(f"{name}[{nth}].text", part.get("text"))
    return "".join(part["text"] for part in value)
