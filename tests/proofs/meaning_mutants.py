"""Every small slip that could be made in Python's account of what ops mean.

A mutant is the source of `k3tool/compiler/semantics` with one node altered: an operator, a
constant, a function, a name for a neighbouring one, a bound of a slice. The files are executed as
one module, so that a slip in a shared helper reaches every op.
"""

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from k3tool.compiler import semantics
from k3tool.isa.table import Op

FOLDER = Path(semantics.__file__).parent
FILES = ("algebra", "dense", "heads", "attention", "experts")

_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.GtE: ast.Lt, ast.Or: ast.And,
}  # fmt: skip
_FUNCTIONS = {"sigmoid": "exp", "exp": "sqrt", "sqrt": "exp", "tanh": "exp"}
# What may be taken for what, where a definition has both.
_NEIGHBOURS = {
    "q": "k", "k": "q", "gate": "up", "g": "u", "u": "g", "up": "gate", "beta": "linear",
    "linear": "beta", "eps": "norm_eps", "norm_eps": "eps", "rn": "rp", "rp": "norm", "w1": "w3",
    "w3": "w1", "bias": "scores", "scale": "eps", "tq": "tk", "tk": "tv", "tv": "tq", "cq": "ck",
    "ck": "cv", "cv": "cq", "prefix": "part", "nope": "rope", "rope": "nope", "latent": "rope",
    "v": "k", "kept": "k", "decayed": "state", "eps2": "scale", "norm": "gate", "o": "v",
}  # fmt: skip


class Account(NamedTuple):
    """What a module says: the table of meanings and the class of algebras."""

    meanings: Mapping[Op, Callable[..., Any]]
    algebra: Callable[..., Any]


def whole() -> list[ast.stmt]:
    """Return the statements of all files, but for their imports of each other."""
    found = [node for name in FILES for node in ast.parse((FOLDER / f"{name}.py").read_text()).body]
    return [node for node in found if not _is_import(node)]


def account(body: list[ast.stmt]) -> Account:
    """Execute statements; each file's table is collected before the next file's replaces it."""
    space: dict[str, Any] = {"__name__": semantics.__name__}
    meanings: dict[Op, Callable[..., Any]] = {}
    for node in body:
        exec(compile(ast.fix_missing_locations(ast.Module([node], [])), "<mutant>", "exec"), space)
        meanings |= space.pop("MEANINGS", {})
    return Account(meanings, space["Algebra"])


def mutants() -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield every mutant, named by its definition and how that is altered."""
    body = whole()
    for place, statement in enumerate(body):
        names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
        names |= {n.arg for n in ast.walk(statement) if isinstance(n, ast.arg)}
        for site, node in enumerate(ast.walk(statement)):
            for nth in range(len(list(_changes(node, names)))):
                altered = copy.deepcopy(statement)
                target = list(ast.walk(altered))[site]
                list(_changes(target, names))[nth]()
                where = getattr(statement, "name", "MEANINGS")
                label = f"{where}: {ast.unparse(node)} -> {ast.unparse(target)}"
                yield label, [*body[:place], altered, *body[place + 1 :]]


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and "semantics" in (node.module or "")


def _changes(node: ast.AST, names: set[str]) -> Iterator[Callable[[], None]]:
    """Yield functions that alter a node in place, each in one way."""
    match node:
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            yield lambda: setattr(node, "op", _OPERATORS[type(op)]())
        case ast.Compare(ops=[op]) if type(op) in _OPERATORS:
            yield lambda: setattr(node, "ops", [_OPERATORS[type(op)]()])
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield lambda: setattr(node, "value", value + 1)
        case ast.Name(id=name, ctx=ast.Load()) if _NEIGHBOURS.get(name) in names:
            yield lambda: setattr(node, "id", _NEIGHBOURS[name])
        case ast.Attribute(attr=name) if name in _FUNCTIONS:
            yield lambda: setattr(node, "attr", _FUNCTIONS[name])
        case ast.Slice(lower=lower, upper=upper):
            if lower is not None:
                yield lambda: setattr(node, "lower", None)
            if upper is not None:
                yield lambda: setattr(node, "upper", None)
