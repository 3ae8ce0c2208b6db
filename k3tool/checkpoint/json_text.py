"""JSON that a user gives, read strictly: what two readers could take for two things is refused.

A key that stands twice, half of a surrogate pair and deep nesting are read by one library and not
by another, or read differently. Faults are named in words: a decoder's own speak of Python.
"""

import json
from typing import Any

MOST_DEPTH = 128  # the stock reader of headers stops there; Python's own limit moves with the stack
TOO_DEEP = f"lists or objects nested deeper than {MOST_DEPTH}"
MOST_DIGITS = 40  # a count of bytes has 20; Python refuses to print one of more than 4300
_KINDS = {dict: "object", list: "list", str: "text", bool: "boolean", type(None): "null"}


def parse_json(raw: bytes | str) -> Any:
    """Return the value of a JSON text. Raises: ValueError saying in words what is wrong."""
    text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")
    try:
        value = json.loads(text, object_pairs_hook=no_duplicates, parse_int=_integer)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    _check_depth(value)
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value)
    return value


def json_fault(error: ValueError) -> str:
    """Return in words why bytes are no JSON."""
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start}"
    return str(error)


def json_kind(value: object) -> str:
    """Return what kind of JSON value a value is: `a JSON list`."""
    return f"a JSON {_KINDS.get(type(value), 'number')}"


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object's dict. Raises: ValueError naming a key that stands twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name} twice")
            seen.add(name)
    return values


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for item in level:
            inside = item.values() if isinstance(item, dict) else item
            if isinstance(item, dict | list):
                below += [each for each in inside if isinstance(each, dict | list)]
        if not below:
            return
        level = below
    raise ValueError(TOO_DEEP)


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise ValueError(f"half of a surrogate pair, {half}") from None
