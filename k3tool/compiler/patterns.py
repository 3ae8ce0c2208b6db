"""What a rewrite rule is made of: terms, read from text, and the equations between them.

Pattern syntax: `(OP operand... :attribute value...)`, operands in the op table's order. A name is a
variable: the same name twice means the same value. `name@(OP ...)` names a matched term. Conditions
are shared variables: the SiTU rule needs the gate of its cap and of its sigmoid to be one value. A
flag that is left out is 0, so such a rule never fires where a value rounds.

A row may rewrite several values at once (parallel linears become parts of one group), and its right
sides may hold ops inside ops: the inner ones are new values that no node of the built graph stands
for. `where` are patterns that must match too but are not rewritten; they pin an order where any
permutation of the roots would match.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from k3tool.isa.table import SPECS, Op
from k3tool.model.operators import attr_names, input_operands


@dataclass(frozen=True, slots=True)
class Term:
    """A pattern: an op, its operands (terms or variables), its attributes (variables, numbers)."""

    op: Op
    inputs: tuple["Term | str", ...]
    attrs: tuple[str | int, ...]  # in the order of attr_names(op)
    name: str = ""  # variable that holds the matched value, if the right side needs it

    def subterms(self) -> Iterator["Term"]:
        """Yield this term and all terms inside it, outermost first."""
        yield self
        for term in self.inputs:
            if isinstance(term, Term):
                yield from term.subterms()

    def value_variables(self) -> list[str]:
        """Return the variables that stand for graph values, each once, in order of appearance."""
        found = [self.name] if self.name else []
        for item in self.inputs:
            found += [item] if isinstance(item, str) else item.value_variables()
        return list(dict.fromkeys(found))

    def attr_variables(self) -> list[str]:
        """Return the variables that stand for attributes, each once, in order of appearance."""
        found: list[str] = []
        for item in self.inputs:
            found += item.attr_variables() if isinstance(item, Term) else []
        found += [attr for attr in self.attrs if isinstance(attr, str)]
        return list(dict.fromkeys(found))


class Equation(NamedTuple):
    """One value that a rule rewrites: what it is made by, and what else makes it."""

    left: Term
    right: Term


@dataclass(frozen=True, slots=True)
class Rule:
    """One rewrite, of one or more values at once."""

    name: str
    equations: tuple[Equation, ...]
    where: tuple[Term, ...] = ()

    @property
    def left(self) -> Term:
        """Return the left side of a rule that rewrites one value."""
        (equation,) = self.equations
        return equation.left

    @property
    def right(self) -> Term:
        """Return the right side of a rule that rewrites one value."""
        (equation,) = self.equations
        return equation.right

    def premises(self) -> tuple[Term, ...]:
        """Return everything that has to match."""
        return tuple(equation.left for equation in self.equations) + self.where

    def value_variables(self) -> list[str]:
        """Return the variables of all premises that stand for graph values, each once."""
        return list(dict.fromkeys(v for term in self.premises() for v in term.value_variables()))

    def attr_variables(self) -> list[str]:
        """Return the variables of all premises that stand for attributes, each once."""
        return list(dict.fromkeys(v for term in self.premises() for v in term.attr_variables()))

    @property
    def is_lowering(self) -> bool:
        """Return whether it rewrites what no instruction computes: no plan is without it."""
        return not all(
            SPECS[t.op].is_emitted for equation in self.equations for t in equation.left.subterms()
        )

    def made_ops(self) -> set[Op]:
        """Return the ops on right sides."""
        return {term.op for equation in self.equations for term in equation.right.subterms()}


_TOKEN = re.compile(r"[()]|[^\s()]+")


def parse_term(text: str) -> Term:
    """Return the term of a pattern's text; a malformed one is our bug (AssertionError)."""
    tokens = _TOKEN.findall(text)
    term, rest = _parse(tokens)
    assert not rest, text
    assert isinstance(term, Term), text
    return term


def _parse(tokens: list[str]) -> tuple[Term | str, list[str]]:
    head, rest = tokens[0], tokens[1:]
    if not head.endswith("@") and head != "(":
        return head, rest
    name = ""
    if head != "(":
        name, rest = head[:-1], rest[1:]
    op, rest = Op[rest[0]], rest[1:]
    inputs: list[Term | str] = []
    attrs: dict[str, str | int] = dict.fromkeys(SPECS[op].flags, 0)
    while rest[0] != ")":
        if rest[0].startswith(":"):
            key, value = rest[0][1:], rest[1]
            attrs[key] = int(value) if value.isdigit() else value
            rest = rest[2:]
        else:
            term, rest = _parse(rest)
            inputs.append(term)
    assert len(inputs) == len(input_operands(op)), f"{op.name}: {len(inputs)} operands"
    assert set(attrs) == set(attr_names(op)), f"{op.name}: attributes {sorted(attrs)}"
    return Term(op, tuple(inputs), tuple(attrs[key] for key in attr_names(op)), name), rest[1:]


def make_rule(name: str, *equations: tuple[str, str], where: tuple[str, ...] = ()) -> Rule:
    """Return a rule of its text; one that invents a variable is our bug (AssertionError)."""
    pairs = tuple(Equation(parse_term(left), parse_term(right)) for left, right in equations)
    rule = Rule(name, pairs, tuple(map(parse_term, where)))
    known = {*rule.value_variables(), *rule.attr_variables()}
    for _, right in pairs:
        needed = {*right.value_variables(), *right.attr_variables()}
        assert needed <= known, f"{name}: {sorted(needed - known)} only on the right"
    return rule
