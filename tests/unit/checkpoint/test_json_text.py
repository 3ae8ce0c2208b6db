"""JSON of a user's files: what is refused, in which words, and at what cost."""

import json
from typing import Any

import pytest

from k3tool.checkpoint.json_text import (
    MOST_DEPTH,
    MOST_DIGITS,
    json_fault,
    json_kind,
    no_duplicates,
    parse_json,
)
from k3tool.model.config_fields import first_partition_fault


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_control() -> None:
    value = {"a": [1, -2.5, "é\\", None, True, {"b": "\U0001f600"}], "n": 10 ** (MOST_DIGITS - 1)}
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value
    assert parse_json(b"\xef\xbb\xbf{}") == {}
    parse_json(nested(MOST_DEPTH))
    assert parse_json('"\\\\ud800"') == "\\ud800"  # a backslash, then letters


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "a twice"),
        ('[{"x": {"y": 1, "y": 2}}]', "y twice"),
        ("9" * 5000, "a number of 5000 digits"),
        ('{"a": [-%s]}' % ("9" * MOST_DIGITS), f"a number of {MOST_DIGITS + 1} digits"),
        (nested(MOST_DEPTH + 1), f"nested deeper than {MOST_DEPTH}"),
        (nested(990), f"nested deeper than {MOST_DEPTH}"),
        (nested(200_000), f"nested deeper than {MOST_DEPTH}"),
        ('{"a":' * 990 + "1" + "}" * 990, f"nested deeper than {MOST_DEPTH}"),
        ('"\\ud800"', "half of a surrogate pair, \\ud800"),
        ('{"\\uDC00x": 1}', "half of a surrogate pair, \\udc00"),
        (b'{"a": "\xff"}', "no UTF-8 at byte 7"),
        ("{}".encode("utf-16"), "no UTF-8 at byte 0"),
    ],
)
def test_refusals_speak_of_the_file(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        parse_json(text)
    assert words in json_fault(caught.value)
    assert not any(word in json_fault(caught.value) for word in ("sys.", "recursion", "codec"))


def test_kinds_are_json_s() -> None:
    kinds = {"null": None, "boolean": True, "number": 1.5, "text": "x", "list": [], "object": {}}
    assert {json_kind(value) for value in kinds.values()} == {f"a JSON {kind}" for kind in kinds}


class Counted(str):
    """A name that counts how often it is compared."""

    n_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.n_compared += 1
        return str.__eq__(self, other)


class CountedNumber(int):
    """A number that counts how often it is compared."""

    n_compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        CountedNumber.n_compared += 1
        return int.__eq__(self, other)


def test_looking_for_what_stands_twice_takes_one_walk() -> None:
    """A walk over all names for each name took hours of a released index."""
    n = 3000
    pairs: list[tuple[str, Any]] = [(Counted(number), 0) for number in range(n)]
    with pytest.raises(ValueError, match=f"{n - 1} twice"):
        no_duplicates([*pairs, (Counted(n - 1), 0)])
    assert Counted.n_compared < 10 * n
    numbers = [CountedNumber(number) for number in range(1, n + 1)]
    assert first_partition_fault([*numbers, CountedNumber(n)], n) == f"layer {n} twice"
    assert first_partition_fault(numbers[:-1], n) == f"layer {n} in neither"
    assert CountedNumber.n_compared < 10 * n
