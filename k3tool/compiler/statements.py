"""Coq statements of the rules: what has to be proved of a row before it may fire.

A statement is made of the same row as the egglog rule: for all values and attributes that the
pattern's variables stand for, and all sizes that fit the op table's rows of sizes, each left side
equals its right side and leaves the same in every state that it updates. What an op means is
`proofs/Semantics.v`, written by hand. `where` patterns are left out: statements hold without them.

`python -m k3tool.compiler.statements` writes proofs/gen/Statements.v, `--check` compares it.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from k3tool.compiler.patterns import Rule, Term
from k3tool.compiler.rules import RULES
from k3tool.isa.op_spec import Operand
from k3tool.isa.table import READS_STATE, SPECS, Op
from k3tool.model.operators import SIZES, attr_names, input_operands

PROOFS = Path(__file__).resolve().parents[2] / "proofs"
STATEMENTS = PROOFS / "gen" / "Statements.v"

# What a value is, where it is not one row a token: by the op table's names of operands.
_SORTS = {"blocks": "Stack", "group": "Stack", "route": "Route"}
# Expert matrices are as stored, elements under scales, but for the ops that take them in numbers.
_IN_NUMBERS = {Op.MOE_UP, Op.MOE_DOWN, Op.MOE_DOWN_EACH}
# A token's value is a row an expert, not yet added up.
_BY_EXPERT = {(Op.MOE_COMBINE, "y")}
# A rank's logits beside the other ranks': what the choice of the token is folded from.
_BY_RANK = {(Op.ARGMAX, "logits")}
# What a meaning needs beyond a field: of the arithmetic, or of the run.
_LAWS = {Op.ARGMAX: "ordered", Op.MOE_DOWN_EACH: "0 < ranks", Op.GEMV_REDUCED: "0 < ranks"}
# Shapes of states, which the table of sizes leaves out, in its letters: taps are the last three
# inputs, `s` one matrix a head, the cache a row a position.
_STATES = {"taps": ("3", "C"), "s": ("H", "head_dim", "head_dim"), "cache": ("latent+rope",)}
_WORD = re.compile(r"[A-Za-z_]\w*")
_KEYWORDS = {"in", "at", "fun", "let", "end", "where", "with", "match", "if", "then", "else", "as"}


def theorem_name(rule: Rule) -> str:
    """Return the name of the theorem that a rule needs."""
    return rule.name.replace("-", "_")


def statement(rule: Rule) -> str:
    """Return the definition of the proposition that a rule needs proved."""
    return _Statement(rule).text()


class Sizes(NamedTuple):
    """What a statement assumes of sizes, as Python expressions of its numbers.

    `axes[variable]` are the variable's axes where it occurs, `equal` pairs that must agree,
    `positive` numbers that are not 0, `sorts` what each variable is.
    """

    sorts: dict[str, str]
    axes: list[tuple[str, tuple[str, ...]]]
    equal: list[tuple[str, str]]
    positive: list[str]


def sizes(rule: Rule) -> Sizes:
    """Return the sizes at which a rule's statement says something."""
    made = _Statement(rule)
    made.text()
    return Sizes(made.sorts, made.axes, made.equal, made.positive)


def statements_file(rules: Sequence[Rule] = RULES) -> str:
    """Return the text of proofs/gen/Statements.v."""
    head = (
        "(* Generated from k3tool/compiler/rules.py by k3tool.compiler.statements. *)\n"
        "From Coq Require Import List Arith.\n"
        "From K3 Require Import Arith Lists Semantics.\n\n"
        "Section Statements.\n  Context {A : Arith} {St : Step}.\n"
    )
    return head + "".join(f"\n{statement(rule)}" for rule in rules) + "End Statements.\n"


def operand_sort(op: Op, operand: Operand) -> str:
    """Return what an operand's value is in the proofs: Vec, Mat, Stack, Slots, Quant or Route."""
    if (op, operand.name) in _BY_EXPERT:
        return "Slots"
    if operand.role == "peer" or (op, operand.name) in _BY_RANK:
        return "Stack"
    if operand.role == "weight":
        experts = "Stack" if op in _IN_NUMBERS else "Quant"
        return ("Vec", "Mat", experts)[len(operand_axes(op, operand)) - 1]
    if operand.role == "state":
        return ("Mat", "Mat", "Stack")[len(operand_axes(op, operand)) - 1]
    return _SORTS.get(operand.name, "Mat")


def operand_axes(op: Op, operand: Operand) -> tuple[str, ...]:
    """Return an operand's axis expressions in the letters of the table of sizes; 1 is no axis."""
    if operand.role == "state":
        return _STATES[operand.name.split("_")[0]]
    pairs = dict(word.split(":") for word in SIZES[op].split("->")[0].split())
    return tuple(axis for axis in pairs[operand.name].split(",") if axis != "1")


def _letters(text: str) -> set[str]:
    return set(_WORD.findall(text))


def _python(expression: str) -> str:
    return expression.removesuffix("%nat")


def _identifier(name: str) -> str:
    return f"{name}_" if name in _KEYWORDS else name


@dataclass(slots=True)
class _Statement:
    """One statement in the making: variables, the sizes' letters, what is assumed of them."""

    rule: Rule
    named: dict[str, Term] = field(default_factory=dict)
    sorts: dict[str, str] = field(default_factory=dict)
    letters: list[str] = field(default_factory=list)
    premises: list[str] = field(default_factory=list)
    axes: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    equal: list[tuple[str, str]] = field(default_factory=list)
    positive: list[str] = field(default_factory=list)
    widths: dict[Term, tuple[str, ...] | None] = field(default_factory=dict)

    def text(self) -> str:
        sides = [side for equation in self.rule.equations for side in equation]
        self.named = {t.name: t for side in sides for t in side.subterms() if t.name}
        for side in sides:
            self._sizes(side)
        claims = [f"{self._term(a)} =\n    {self._term(b)}" for a, b in self.rule.equations]
        claims += self._state_claims()
        bound = [f"({_identifier(name)} : {sort})" for name, sort in self.sorts.items()]
        numbers = " ".join(dict.fromkeys(self.letters))
        lines = [f"  (* {self.rule.name} *)"]
        lines.append(f"  Definition stmt_{theorem_name(self.rule)} : Prop :=")
        lines += [f"    forall ({numbers} : nat) {' '.join(bound)},"]
        lines += [f"    {premise} ->" for premise in dict.fromkeys(self.premises)]
        lines.append("    " + " /\\\n    ".join(claims) + ".")
        return "\n".join(lines) + "\n"

    # -- terms ---------------------------------------------------------------------------------

    def _term(self, term: Term | str) -> str:
        if isinstance(term, str):
            return self._term(self.named[term]) if term in self.named else _identifier(term)
        return self._call("sem", term, term.op.name)

    def _call(self, kind: str, term: Term, name: str) -> str:
        attrs = [_identifier(a) if isinstance(a, str) else str(a) for a in term.attrs]
        return f"({kind}_{name} {' '.join([*map(self._term, term.inputs), *attrs])})"

    def _state_claims(self) -> Iterator[str]:
        """Yield that both sides leave the same in each state operand."""
        lefts: dict[str, str] = {}
        rights: dict[str, str] = {}
        for equation in self.rule.equations:
            for side, found in zip(equation, (lefts, rights), strict=True):
                found |= {name: call for term in side.subterms() for name, call in self._next(term)}
        assert set(lefts) == set(rights), f"{self.rule.name}: states {set(lefts) ^ set(rights)}"
        for name, call in lefts.items():
            yield f"{call} =\n    {rights[name]}"

    def _next(self, term: Term) -> Iterator[tuple[str, str]]:
        for operand, item in zip(input_operands(term.op), term.inputs, strict=True):
            updated = operand.role == "state" and term.op not in READS_STATE
            if updated and SPECS[term.op].output.role == "out":
                assert isinstance(item, str), "a state is a variable"
                yield item, self._call("next", term, f"{term.op.name}_{operand.name}")

    # -- sizes ---------------------------------------------------------------------------------

    def _sizes(self, term: Term) -> tuple[str, ...] | None:
        """Assume that a term and those inside fit; return the axes of its result."""
        if term in self.widths:
            return self.widths[term]
        number = len(self.widths)
        self.widths[term] = None
        if term.op in _LAWS:
            self.premises.append(_LAWS[term.op])
        names = dict(zip(attr_names(term.op), term.attrs, strict=True))
        kinds = {param.name: param.kind for param in SPECS[term.op].params}
        for name, value in names.items():
            if isinstance(value, str):
                self._declare(value, "F" if kinds.get(name) == "f32" else "nat")
                if name in _letters(SIZES[term.op]):
                    self.premises.append(f"0 < {_identifier(value)}")
                    self.positive.append(value)
        for operand, item in zip(input_operands(term.op), term.inputs, strict=True):
            axes = [] if term.op is Op.PART else [
                self._expression(axis, number, names) for axis in operand_axes(term.op, operand)
            ]  # fmt: skip
            if isinstance(item, Term):
                for have, axis in zip(self._sizes(item) or (), axes, strict=False):
                    if have != axis:
                        self.premises.append(f"{have} = {axis}")
                        self.equal.append((_python(have), _python(axis)))
            elif item not in self.named:
                self._variable(term.op, operand, item, axes)
        result = SIZES[term.op].split("->")[1].strip()
        if term.op is Op.PART or "|" in result:
            return None
        made = [self._expression(axis, number, names) for axis in result.split(",")]
        self.widths[term] = tuple(made)
        return self.widths[term]

    def _declare(self, name: str, sort: str) -> None:
        assert self.sorts.setdefault(name, sort) == sort, f"{self.rule.name}: {name}: {sort}"

    def _variable(self, op: Op, operand: Operand, name: str, axes: Sequence[str]) -> None:
        sort = operand_sort(op, operand)
        self._declare(name, sort)
        self.axes.append((name, tuple(map(_python, axes))))
        x, sizes = _identifier(name), " ".join(axes)
        if sort == "Vec":
            self.premises.append(f"length {x} = {sizes}")
        elif sort == "Quant":
            self.premises.append(f"quantised {sizes} {x}")
        elif operand.role == "weight" or (operand.role == "state" and len(axes) > 1):
            self.premises.append(f"{'sized' if sort == 'Mat' else 'sized3'} {sizes} {x}")
        elif operand.role == "state":
            self.premises.append(f"wide {sizes} {x}")
        elif sort == "Slots":
            self.premises.append(f"slotted n_tokens {sizes} {x}")
        elif sort == "Route":
            self.premises.append(f"routed n_tokens {sizes} {x}")
        elif sort == "Stack":
            self.premises.append(f"Forall (sized n_tokens {sizes}) {x}")
        else:
            self.premises.append(f"sized n_tokens {sizes} {x}")

    def _expression(self, text: str, number: int, attrs: Mapping[str, str | int]) -> str:
        def word(match: re.Match[str]) -> str:
            letter = match[0]
            if letter in attrs:
                value = attrs[letter]
                return _identifier(value) if isinstance(value, str) else str(value)
            if letter == "tp":
                return "ranks"
            fresh = f"{letter}_{number}"
            self.letters.append(fresh)
            return fresh

        out = _WORD.sub(word, text)
        return out if re.fullmatch(r"\w+", out) else f"({out})%nat"


def main(arguments: Sequence[str]) -> int:
    """Write or check the generated file; return the exit code."""
    text = statements_file()
    if "--check" not in arguments:
        STATEMENTS.write_text(text)
        return 0
    if STATEMENTS.read_text() != text:
        print(f"{STATEMENTS}: not what the rules give; run `make gen`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
