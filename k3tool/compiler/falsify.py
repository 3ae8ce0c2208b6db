"""An SMT falsifier: wrong rules have counterexamples at small sizes. For development; needs z3.

Both sides of a rule are put through `algebra` with symbols, at sizes of two or three, functions
uninterpreted. A value and an interpretation under which they differ refute the rule. That none is
found proves nothing at other sizes: that is what the theorems are for.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import z3

from k3tool.compiler.patterns import Rule, Term
from k3tool.compiler.semantics import MEANINGS, UPDATES
from k3tool.compiler.semantics.algebra import Algebra, Number, Vec
from k3tool.compiler.statements import Sizes, sizes
from k3tool.isa.table import SPECS
from k3tool.model.expressions import evaluate, letters_of
from k3tool.model.operators import attr_names, input_operands

TOKENS, RANKS, EXPERTS, POSITIONS = 2, 2, 4, 3
IDS = (1, 0)  # of the tokens
LOW = -(10**9)  # below every number that an example has
TIMEOUT_MS = 5000
GUESSES = 8  # random values tried where the solver does not decide


class Verdict(NamedTuple):
    """What was found of two sides: equal at these sizes, refuted by an example, or undecided."""

    outcome: Literal["equal", "refuted", "undecided"]
    detail: str


def falsify(rule: Rule) -> Verdict:
    """Look for a counterexample to a rule, at equal and at unequal sizes."""
    fits = sizes(rule)
    unequal = len(set(fits.positive)) > 1
    solved = [_solve_sizes(fits, distinct) for distinct in ((False, True) if unequal else (False,))]
    verdict = Verdict("undecided", "no sizes fit")
    names = [name for name in ("head",) if name in fits.sorts] + _flags(rule)
    for numbers in (numbers for numbers in solved if numbers is not None):
        for chosen in itertools.product((0, 1), repeat=len(names)):
            verdict = _falsify_at(rule, numbers | dict(zip(names, chosen, strict=True)))
            if verdict.outcome != "equal":
                return verdict
    return verdict


def _flags(rule: Rule) -> list[str]:
    """Return the variables of a rule that are flags: where its values round, each way tried."""
    found = []
    for term in (t for e in rule.equations for side in e for t in side.subterms()):
        pairs = zip(attr_names(term.op), term.attrs, strict=True)
        found += [v for name, v in pairs if name in SPECS[term.op].flags and isinstance(v, str)]
    return list(dict.fromkeys(found))


def compare(left: Sequence[Any], right: Sequence[Any]) -> Verdict:
    """Compare two lists of expressions, one by one."""
    if len(left) != len(right):
        return Verdict("refuted", f"{len(left)} numbers on the left, {len(right)} on the right")
    undecided = 0
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        outcome, example = _differ(z3.simplify(_term(a)), z3.simplify(_term(b)))
        if outcome == "refuted":
            return Verdict("refuted", f"number {index} differs for {example}")
        undecided += outcome == "undecided"
    if undecided:
        return Verdict("undecided", f"{undecided} of {len(left)} numbers")
    return Verdict("equal", f"{len(left)} numbers")


def symbols(name: str, shape: Sequence[int]) -> Any:
    """Return nested lists of fresh symbols."""
    if not shape:
        return z3.Real(name)
    return [symbols(f"{name}{i}", shape[1:]) for i in range(shape[0])]


def algebra() -> Algebra:
    """Return the algebra in which functions are uninterpreted."""
    real = z3.RealSort()
    one = {name: z3.Function(name, real, real) for name in ("exp", "tanh", "sqrt", "round")}
    larger = z3.Function("larger", real, real, real)
    choose = _Choice().ids
    functions = (one["exp"], one["tanh"], one["sqrt"], one["round"])
    low = z3.RealVal(LOW)
    return Algebra(*functions, larger, choose, _above, z3.Real("tiny"), low, RANKS, token_ids=IDS)


def _above(a: Number, b: Number, x: Number, y: Number) -> Any:
    return z3.If(_term(a) > _term(b), _term(x), _term(y))


def function(name: str) -> Any:
    """Return an uninterpreted function of one number: a rounding, say."""
    return z3.Function(name, z3.RealSort(), z3.RealSort())


@dataclass(slots=True)
class _Choice:
    """Stands for any choice of experts: the same ids for the same arguments, else others."""

    made: dict[str, int] = field(default_factory=dict)

    def ids(self, k: int, scores: Vec, bias: Vec) -> list[int]:
        """Return k ids, ascending."""
        number = self.made.setdefault(f"{k} {scores} {bias}", len(self.made))
        sets = list(itertools.combinations(range(len(scores)), k))
        return list(sets[number % len(sets)])


# -- sizes -----------------------------------------------------------------------------------------


def _solve_sizes(fits: Sizes, distinct: bool) -> dict[str, int] | None:
    """Return numbers for attributes and letters that fit, near 2; `distinct`: heads' unequal."""
    names: dict[str, Any] = {"ranks": z3.IntVal(RANKS)}

    def value(text: str) -> Any:
        for name in letters_of(text):
            names.setdefault(name, z3.Int(name))
        return evaluate(text, names)

    solver = z3.Optimize()
    first: dict[str, tuple[str, ...]] = {}
    for variable, axes in fits.axes:
        for a, b in zip(axes, first.setdefault(variable, axes), strict=True):
            solver.add(value(a) == value(b))
    solver.add(*(value(a) == value(b) for a, b in fits.equal))
    for name in fits.positive:
        value(name)
    free = [x for name, x in names.items() if name != "ranks"]
    solver.add(*(x >= 1 for x in free))
    if distinct:
        solver.add(z3.Distinct(*(names[name] for name in dict.fromkeys(fits.positive))))
    target = {name: EXPERTS if name.startswith("E_") else 2 for name in names}
    away = [z3.If(x >= target[n], x - target[n], target[n] - x) for n, x in names.items()]
    solver.minimize(z3.Sum(*away, z3.IntVal(0)))
    if solver.check() != z3.sat:
        return None
    model = solver.model()
    return {n: model.eval(x, model_completion=True).as_long() for n, x in names.items()}


# -- sides -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Side:
    """Evaluates terms of one side; states that its ops leave are kept by variable."""

    algebra: Algebra
    values: Mapping[str, Any]
    named: dict[str, Term]
    states: dict[str, Any] = field(default_factory=dict)
    done: dict[Term, Any] = field(default_factory=dict)

    def value(self, term: Term | str) -> Any:
        if isinstance(term, str):
            return self.value(self.named[term]) if term in self.named else self.values[term]
        if term not in self.done:
            self.done[term] = self._apply(term)
        return self.done[term]

    def _apply(self, term: Term) -> Any:
        inputs = [self.value(item) for item in term.inputs]
        attrs = [self.values[a] if isinstance(a, str) else a for a in term.attrs]
        result = MEANINGS[term.op](self.algebra, *inputs, *attrs)
        if not UPDATES.get(term.op):
            return result
        pairs = zip(input_operands(term.op), term.inputs, strict=True)
        states = [str(item) for operand, item in pairs if operand.role == "state"]
        value, *after = result
        self.states |= dict(zip(states, after, strict=True))
        return value


def _falsify_at(rule: Rule, numbers: Mapping[str, int]) -> Verdict:
    values = _bind(rule, numbers)
    lefts = [equation.left for equation in rule.equations]
    rights = [equation.right for equation in rule.equations]
    named = {t.name: t for side in (*lefts, *rights) for t in side.subterms() if t.name}
    flat, one = [], algebra()  # of both sides, so that a choice is one function
    for terms in (lefts, rights):
        side = _Side(one, values, named)
        results = [side.value(term) for term in terms]
        flat.append([*_flat(results), *_flat([side.states[name] for name in sorted(side.states)])])
    return compare(*flat)


def _bind(rule: Rule, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return a value for each of a rule's variables: symbols of the sizes that fit, and numbers."""
    fits, out = sizes(rule), {}
    shapes = {
        name: tuple(int(evaluate(axis, numbers)) for axis in axes) for name, axes in fits.axes
    }
    for name, sort in fits.sorts.items():
        if sort == "nat":
            out[name] = numbers.get(name, 2)  # a count that no size depends on: blocks
        elif sort == "F":
            out[name] = z3.Real(name)
        else:
            out[name] = _variable(rule, name, sort, shapes[name])
    return out


def _variable(rule: Rule, name: str, sort: str, shape: tuple[int, ...]) -> Any:
    roles = {
        operand.role
        for equation in rule.equations
        for side in equation
        for term in side.subterms()
        for operand, item in zip(SPECS[term.op].operands, term.inputs, strict=False)
        if item == name
    }
    if sort == "Route":
        return [
            [(i, z3.Real(f"{name}{t}{i}")) for i in range(shape[0] // 2)] for t in range(TOKENS)
        ]
    if sort == "Quant":
        return _quantised(name, shape)
    if sort == "Slots":  # of two experts, as a count that sizes leave free is
        return symbols(name, (TOKENS, 2, shape[0] // 2))
    if sort == "Vec" or roles & {"weight"} or (roles & {"state"} and len(shape) > 1):
        return symbols(name, shape)
    if roles & {"state"}:
        return symbols(name, (POSITIONS, *shape))
    if sort == "Stack":  # of ranks or of blocks
        return symbols(name, (RANKS, TOKENS, *shape))
    return symbols(name, (TOKENS, *shape))


def _quantised(name: str, shape: tuple[int, ...]) -> Any:
    """Return expert matrices of symbols: each row a block of one column, and one of the others."""
    experts, rows, columns = shape
    cuts = [(0, 1), (1, columns)] if columns > 1 else [(0, columns)]
    numbers, scales = symbols(name, shape), symbols(f"{name}_scale", (experts, rows, len(cuts)))
    return [
        [
            [(s, row[a:b]) for s, (a, b) in zip(by, cuts, strict=True)]
            for row, by in zip(*pair, strict=True)
        ]
        for pair in zip(numbers, scales, strict=True)
    ]


def _flat(value: Any) -> Iterator[Number]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


# -- expressions -----------------------------------------------------------------------------------


def _term(value: Number) -> Any:
    return value if isinstance(value, z3.ExprRef) else z3.RealVal(value)


def _differ(a: Any, b: Any) -> tuple[Literal["equal", "refuted", "undecided"], str]:
    if a.eq(b):
        return "equal", ""
    parts = [*_parts(a), *_parts(b)]
    leaves = sorted({str(x): x for x in parts if _is_symbol(x)}.items())
    # What a quotient by zero is nobody says: an example that needs one is none.
    nonzero = [x.arg(1) != 0 for x in parts if z3.is_div(x)]
    dice = random.Random(1)
    for guess in range(GUESSES + 1):
        solver = z3.Solver()
        solver.set("timeout", TIMEOUT_MS)
        if guess < GUESSES:  # fixed values first: what is left is linear in the functions' values
            fixed = [(x, z3.RealVal(dice.randint(1, 7))) for _, x in leaves]
            solver.add(*(z3.substitute(x, *fixed) for x in (a != b, *nonzero)))
        else:
            fixed = []
            solver.add(a != b, *nonzero)
        found = solver.check()
        if found == z3.sat:
            values = ", ".join(f"{x} = {v}" for x, v in fixed[:8])
            return "refuted", f"{values}; {str(solver.model())[:200]}"
        if found == z3.unsat and not fixed:
            return "equal", ""
    return "undecided", ""


def _is_symbol(term: Any) -> bool:
    return bool(z3.is_const(term)) and term.decl().kind() == z3.Z3_OP_UNINTERPRETED


def _parts(term: Any) -> Iterator[Any]:
    """Yield an expression and those inside it, shared ones once."""
    seen, stack = set(), [term]
    while stack:
        top = stack.pop()
        if top.get_id() in seen:
            continue
        seen.add(top.get_id())
        yield top
        stack.extend(top.children())
