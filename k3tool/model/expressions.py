"""Sums and products of sizes, as the table of sizes writes them: `H*(nope+v)`, `R0+65536*R1`.

An expression is parsed once, into a function of its letters. Any numbers that add and multiply will
do: integers of a graph, or a solver's terms. Nothing else is an expression: Python's own evaluator
would run whatever text it is given.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

_Evaluator = Callable[[Mapping[str, Any]], Any]
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
}


def evaluate(text: str, letters: Mapping[str, Any]) -> Any:
    """Return an expression's value. Raises: as `parsed`; KeyError for a letter without a value."""
    return parsed(text)(letters)


@cache
def letters_of(text: str) -> tuple[str, ...]:
    """Return the letters of an expression, sorted, each once."""
    tree = ast.walk(ast.parse(text, mode="eval"))
    return tuple(sorted({node.id for node in tree if isinstance(node, ast.Name)}))


@cache
def parsed(text: str) -> _Evaluator:
    """Return an expression as a function of its letters' values.

    Raises: ValueError for anything but sums and products of names and whole numbers.
    """
    try:
        return _function(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError):
        raise ValueError(f"{text!r} is no sum or product of sizes") from None


def _function(node: ast.expr) -> _Evaluator:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return lambda _: number
        case ast.Name(id=name):
            return lambda letters: letters[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b, combine = _function(left), _function(right), _OPERATORS[type(op)]
            return lambda letters: combine(a(letters), b(letters))
        case _:
            raise TypeError(ast.dump(node))
