"""Expressions of sizes: what they are worth, and that nothing else is one."""

import pytest

from k3tool.model.expressions import evaluate, letters_of
from k3tool.model.operators import SIZES


def test_sums_and_products_bind_as_usual() -> None:
    letters = {"H": 3, "nope": 5, "v": 7}
    assert evaluate("H*(nope+v)", letters) == 36
    assert evaluate("H*nope+v", letters) == 22
    assert evaluate("65536*H+1", letters) == 196609
    assert letters_of("H*(nope+v)+H") == ("H", "nope", "v")


def test_any_numbers_will_do() -> None:
    assert evaluate("a*b+a", {"a": 0.5, "b": 2.0}) == 1.5


@pytest.mark.parametrize(
    "text",
    ["", "a-b", "a/b", "a**b", "f(a)", "a.b", "a[0]", "1.5", "True", "'x'", "a if b else a", "a b",
     "__import__('os')", "lambda: 1", "-a", "a;b", "(a, b)"],
)  # fmt: skip
def test_nothing_else_is_an_expression(text: str) -> None:
    with pytest.raises(ValueError, match="no sum or product"):
        evaluate(text, {"a": 1, "b": 2})


def test_a_letter_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError):
        evaluate("a*b", {"a": 1})


def test_every_row_of_sizes_is_made_of_expressions() -> None:
    seen = 0
    for row in SIZES.values():
        left, right = row.split("->")
        axes = [axis for word in left.split() for axis in word.split(":")[1].split(",")]
        for axis in [*axes, *right.strip().replace(",", "|").split("|")]:
            seen += evaluate(axis, dict.fromkeys(letters_of(axis), 1)) >= 1
    assert seen > 100
