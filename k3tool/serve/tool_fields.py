"""Tools in a body of /v1/chat/completions: declared, called, answered; read strictly.

What nothing here would hold the model to (`strict`, a choice that forces or forbids a call, one
call at a time) is refused: an answer that does not keep it would be another answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from k3tool.errors import UsageError, quoted
from k3tool.text.chat import Message
from k3tool.text.tools import Call

MOST_TOOLS = 1024
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})


def read_tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the tools that a body declares, as they stand in it. Raises: UsageError by name."""
    tools = [] if body.get("tools") is None else body["tools"]
    if not isinstance(tools, list):
        raise UsageError("tools", got=quoted(tools), need="a list of tools")
    if len(tools) > MOST_TOOLS:
        raise UsageError("tools", got=f"{len(tools)} of them", need=f"at most {MOST_TOOLS}")
    names: set[str] = set()
    for nth, tool in enumerate(tools):
        name = _tool(f"tools[{nth}]", tool)
        if name in names:
            raise UsageError(f"tools[{nth}].function.name", got=quoted(name), need="one of its own")
        names.add(name)
    if tools:
        _require_free_choice(body)
    return tuple(tools)


def _tool(where: str, tool: Any) -> str:
    """Check a tool and return its name."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or set(tool) - _TOOL:
        need = '{"type": "function", "function": {"name", "description", "parameters"}}'
        raise UsageError(where, got=quoted(tool), need=need)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise UsageError(f"{where}.function", got=quoted(function), need="an object with a name")
    unknown = sorted(set(function) - _FUNCTION)
    if unknown:
        raise UsageError(f"{where}.function.{unknown[0]}", got="a field that is not known here",
                         need=", ".join(sorted(_FUNCTION)))  # fmt: skip
    if function.get("strict") not in (None, False):
        need = "false: nothing holds the model to a schema"
        raise UsageError(f"{where}.function.strict", got=quoted(function["strict"]), need=need)
    for key, kind in (("description", str), ("parameters", dict)):
        if function.get(key) is not None and not isinstance(function[key], kind):
            need = "text" if kind is str else "a JSON schema"
            raise UsageError(f"{where}.function.{key}", got=quoted(function[key]), need=need)
    return _name(f"{where}.function.name", function.get("name"))


_TOOL = frozenset({"type", "function"})


def _name(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(where, got=quoted(value), need="a name")
    return value


def _require_free_choice(body: Mapping[str, Any]) -> None:
    for name, allowed in (("tool_choice", "auto"), ("parallel_tool_calls", True)):
        if body.get(name) not in (None, allowed):
            need = f"{quoted(allowed)}: nothing would hold the model to another"
            raise UsageError(name, got=quoted(body[name]), need=need)


# -- messages ----------------------------------------------------------------------------------


def read_calls(where: str, value: Any) -> tuple[Call, ...]:
    """Return the calls of an assistant's message. Raises: UsageError by name."""
    if not isinstance(value, list):
        raise UsageError(where, got=quoted(value), need="a list of calls")
    calls: list[Call] = []
    for nth, call in enumerate(value):
        at = f"{where}[{nth}]"
        is_call = isinstance(call, dict) and call.get("type", "function") == "function"
        function = call.get("function") if is_call else None
        if not isinstance(function, dict):
            need = '{"id", "type": "function", "function": {"name", "arguments"}}'
            raise UsageError(at, got=quoted(call), need=need)
        arguments = function.get("arguments", "")
        if not isinstance(arguments, str):
            need = "a JSON object as text"
            raise UsageError(f"{at}.function.arguments", got=quoted(arguments), need=need)
        name = _name(f"{at}.function.name", function.get("name"))
        call_id = _name(f"{at}.id", call.get("id"))
        if call_id in {one.id for one in calls}:
            raise UsageError(f"{at}.id", got=quoted(call_id), need="one of its own")
        calls.append(Call(name, arguments, call_id))
    return tuple(calls)


def answered(messages: Sequence[Message], ids: Mapping[int, str]) -> tuple[Message, ...]:
    """Return messages with answers of tools in the order of the calls they belong to.

    `ids` has for the number of each tool's message the call that it answers.
    Raises: UsageError for an answer to no call, and for a call that has none.
    """
    made: list[Message] = []
    calls: tuple[Call, ...] = ()
    waiting: dict[str, Message | None] = {}
    for nth, message in enumerate(messages):
        if nth in ids:
            if ids[nth] not in waiting or waiting[ids[nth]] is not None:
                need = "a call of the assistant before it, that no other message answers"
                raise UsageError(f"messages[{nth}].tool_call_id", got=quoted(ids[nth]), need=need)
            waiting[ids[nth]] = message
            continue
        made += _in_order(calls, waiting, f"messages[{nth}]")
        made.append(message)
        calls, waiting = message.calls, {call.id: None for call in message.calls}
    return (*made, *_in_order(calls, waiting, f"messages[{len(messages)}]"))


def _in_order(
    calls: Sequence[Call], found: Mapping[str, Message | None], where: str
) -> list[Message]:
    made: list[Message] = []
    for number, call in enumerate(calls, 1):
        answer = found[call.id]
        if answer is None:
            got = f"no answer to the call {quoted(call.id)}"
            raise UsageError(where, got=got, need="a message of the role tool")
        made.append(replace(answer, answers=(call.name, number)))
    return made
