"""The JSON that a client gets: names and shapes of OpenAI's public API reference."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3tool.errors import printable
from k3tool.text.tools import CallPart

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a prompt, and of all that was generated from it."""

    prompt: int
    generated: int

    def as_json(self) -> Json:
        """Return it as a client reads it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
        }


@dataclass(slots=True)
class Choice:
    """One answer so far: its text, what was thought before it, its calls, and why it ended."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None  # the stop text or end id, where one ended it

    def add(self, new: "Choice") -> None:
        """Take what is new."""
        self.text += new.text
        self.reasoning += new.reasoning
        self.calls += new.calls
        self.token_ids += new.token_ids
        self.finish, self.stop = new.finish, new.stop


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer says: its id, when it was made, who made it.

    `fingerprint` is of weights and program: the same one, seed and prompt give the same tokens.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    is_chat: bool

    def object(self, kind: str, choices: Sequence[Json], usage: Json | None) -> Json:
        """Return an object of the answer around its choices."""
        found: Json = {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": list(choices),
        }  # fmt: skip
        if usage is not None:
            found["usage"] = usage
        return found

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """Return the answer in one object."""
        rows = []
        for index, choice in enumerate(choices):
            row = _row(index, choice)
            row["stop_reason"] = choice.stop
            if self.is_chat:
                row["message"] = _message(choice)
            else:
                row |= {"text": choice.text, "token_ids": choice.token_ids}
            rows.append(row)
        return self.object(self._kind(), rows, usage.as_json())

    def part(self, index: int, new: Choice, *, is_first: bool = False) -> Json:
        """Return a chunk with what is new in one choice."""
        row = _row(index, new)
        if new.finish is not None:
            row["stop_reason"] = new.stop
        if self.is_chat:
            delta: Json = {"role": "assistant"} if is_first else {}
            delta |= {"content": new.text} if new.text or is_first else {}
            delta |= {"reasoning_content": new.reasoning} if new.reasoning else {}
            row["delta"] = delta | ({"tool_calls": _deltas(new.calls)} if new.calls else {})
        else:
            row |= {"text": new.text, "token_ids": new.token_ids}
        return self.object(self._kind(".chunk" if self.is_chat else ""), [row], None)

    def last(self, usage: Usage) -> Json:
        """Return the chunk that only says how many tokens there were."""
        return self.object(self._kind(".chunk" if self.is_chat else ""), [], usage.as_json())

    def _kind(self, suffix: str = "") -> str:
        return ("chat.completion" if self.is_chat else "text_completion") + suffix


def _row(index: int, choice: Choice) -> Json:
    return {"index": index, "finish_reason": choice.finish, "logprobs": None}


def _message(choice: Choice) -> Json:
    made: Json = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        made["reasoning_content"] = choice.reasoning
    if choice.calls:
        calls: dict[int, Json] = {}
        for part in choice.calls:
            whole = calls.setdefault(part.number, _call(part))
            whole["function"]["arguments"] += part.arguments
        made |= {"content": choice.text or None, "tool_calls": list(calls.values())}
    return made


def _call(part: CallPart) -> Json:
    function = {"name": part.name, "arguments": ""}
    return {"id": part.id, "type": "function", "function": function}


def _deltas(parts: Sequence[CallPart]) -> list[Json]:
    rows: list[Json] = []
    for part in parts:
        row = _call(part) if part.id else {"function": {}}
        row["function"]["arguments"] = part.arguments
        rows.append({"index": part.number} | row)
    return rows


def error_json(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """Return an error as a client reads it."""
    text = printable("; ".join(line.strip() for line in message.splitlines()))  # hints are lines
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def model_json(name: str, created: int, context: int) -> Json:
    """Return the served model's entry."""
    return {
        "id": name, "object": "model", "created": created, "owned_by": "k3tool",
        "max_model_len": context,
    }  # fmt: skip


def event(data: Mapping[str, Any] | str) -> bytes:
    """Return one server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return b"data: " + text.encode() + b"\n\n"
