"""What stands in a message: values as a user reads them, never as Python writes them."""

import pytest

from k3tool.errors import K3Error, listed, quoted, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a text", "a text"),
        (8, "8"),
        (1e-5, "1e-05"),
        (None, "null"),
        (True, "true"),
        ([], "none"),
        (["decode"], "decode"),
        ((3, 4), "3, 4"),
        ({"b", "a"}, "a, b"),
        ({"mode": "f32", "version": 3, "off": None}, "mode f32, version 3, off null"),
    ],
)
def test_a_field_is_shown_without_literals(value: object, text: str) -> None:
    assert shown(value) == text
    assert K3Error("x", got=value, need=value).text() == f"x: got {text}, need {text}"


def test_a_list_in_a_sentence() -> None:
    assert f"one of {listed([1, 2, 4])}" == "one of 1, 2, 4"
    assert listed(number for number in ()) == "none"


def test_what_a_file_holds_is_quoted_and_cut() -> None:
    assert quoted("a\nb") == '"a\\nb"'
    assert quoted([1, "two", None]) == '[1, "two", null]'
    assert len(quoted("9" * 5000)) == 60
    assert quoted(list(range(100))).endswith("...")
    assert quoted(object()).startswith('"<object')  # nothing that a test can hold is refused


@pytest.mark.parametrize("value", [["decode"], {"a": 1}, None, (None, 2), b"PK"])
def test_a_literal_inside_a_text_fails_a_test(value: object) -> None:
    """The control of what conftest does with every message that tests provoke."""
    with pytest.raises(AssertionError):
        K3Error("x", got=f"a {value}", need="words")
