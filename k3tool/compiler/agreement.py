"""Whether the two accounts of what ops mean are one: `proofs/Semantics.v` and `semantics` here.

Theorems are about the first, the falsifier refutes by the second, and both were written by hand. At
drawn sizes and values Coq computes every op, on fractions, and so does Python; the numbers have to
be the same, and so has the shape. Of exp, tanh, sqrt and rounding nothing is assumed:
here they scramble their argument, so that an argument that differs at all shows.

Coq's numbers are committed (`proofs/meanings.json`, written by `make prove`, computed again by
`make proofs`), so that Python is compared with them where Coq is not installed.
"""

import ast
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from k3tool.compiler.semantics import MEANINGS, UPDATES
from k3tool.compiler.semantics.algebra import Algebra
from k3tool.compiler.statements import PROOFS, operand_axes, operand_sort
from k3tool.errors import ArtifactError
from k3tool.isa.op_spec import Operand
from k3tool.isa.table import SPECS, Op
from k3tool.model.expressions import evaluate, letters_of
from k3tool.model.operators import attr_names, input_operands

RECORD = PROOFS / "meanings.json"
DEFINITIONS = ("Arith.v", "Lists.v", "Semantics.v")
DEFINED = re.compile(r"^ *Definition (sem|next)_(\w+)", re.MULTILINE)

# How functions scramble a fraction n/d: ((a n + b d) mod 1009 + 1) / 97, never 0.
_SCRAMBLE = {"exp": (3, 5), "tanh": (7, 11), "sqrt": (13, 17), "round": (19, 23)}
_TINY = Fraction(1, 1000)
_LOW = Fraction(-1000)


class Draw(NamedTuple):
    """What one draw of every op shares: tokens, the head's first token, ranks, positions, pages."""

    tokens: int
    head_from: int
    ranks: int
    positions: int
    page_tokens: int
    head_only: int
    flags: tuple[int, int]  # an op's first and second
    ids: tuple[int, ...]  # of the tokens, in a vocabulary of two at least


DRAWS = (
    Draw(3, 1, 2, 5, 2, 1, (1, 1), (1, 0, 1)),
    Draw(2, 1, 3, 2, 2, 0, (1, 0), (1, 0)),
    Draw(2, 0, 2, 3, 1, 1, (0, 1), (0, 1)),
    Draw(1, 0, 2, 4, 3, 0, (0, 0), (1,)),
)


class Instance(NamedTuple):
    """One op at drawn values: operands in the op table's order, then attributes."""

    draw: int
    op: Op
    operands: tuple[Any, ...]
    attrs: tuple[int | Fraction, ...]

    @property
    def name(self) -> str:
        """How messages and the record call it."""
        return f"{self.op.name} {self.draw}"


def instances(ops: Iterable[Op] = tuple(MEANINGS)) -> Iterator[Instance]:
    """Yield every op that has a meaning at every draw; the same each time."""
    for number, draw in enumerate(DRAWS):
        for op in sorted(ops):
            yield _Dice(random.Random(f"{number} {op.name}"), draw).instance(number, op)


def python_value(
    made: Instance, meaning: Callable[..., Any], algebra: Callable[..., Algebra] = Algebra
) -> list[Any]:
    """Return an instance's value, then its states, fractions as pairs of integers."""
    draw = DRAWS[made.draw]
    scramble = {name: _scramble(*by) for name, by in _SCRAMBLE.items()}
    numbers = algebra(
        scramble["exp"], scramble["tanh"], scramble["sqrt"], scramble["round"], _larger,
        _choose(scramble["exp"]), _above, _TINY, _LOW, draw.ranks, draw.head_from, draw.page_tokens,
        draw.ids,
    )  # fmt: skip
    result = meaning(numbers, *made.operands, *made.attrs)
    parts = result if UPDATES.get(made.op) else (result,)
    return [_plain(part) for part in parts]


def disagreements(
    coq: Mapping[str, Any],
    meanings: Mapping[Op, Callable[..., Any]] = MEANINGS,
    algebra: Callable[..., Algebra] = Algebra,
) -> Iterator[str]:
    """Yield the ops whose meanings differ, each with the draw at which they do."""
    for made in instances(meanings):
        if made.name not in coq:
            yield f"{made.name}: Coq computed nothing"
            continue
        try:
            same = python_value(made, meanings[made.op], algebra) == coq[made.name]
        except (ArithmeticError, ValueError, IndexError, TypeError) as error:
            yield f"{made.name}: {error}"
            continue
        if not same:
            yield f"{made.name}: another value than Coq's"


def undefined() -> list[str]:
    """Return the names that only one of the two accounts defines."""
    found = {f"{kind}_{name}" for kind, name in DEFINED.findall(_definitions())}
    return sorted(found ^ {term for made in instances() for term, _ in _terms(made)})


# -- the record ----------------------------------------------------------------------------------


def record_text(values: Mapping[str, Any]) -> str:
    """Return the text of proofs/meanings.json."""
    rows = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    return f'{{"sources": "{sources_hash()}", "values": {{\n' + ",\n".join(rows) + "\n}}\n"


def read_record(path: Path = RECORD) -> dict[str, Any]:
    """Return what Coq computed.

    Raises: ArtifactError when the record is absent, none, or of other definitions than these.
    """
    hint = "run `make prove` where Coq is installed"
    try:
        data = json.loads(path.read_text())
        sources, values = str(data["sources"]), dict(data["values"])
    except FileNotFoundError:
        raise ArtifactError(str(path), got="absent", need="meanings", hint=hint) from None
    except (ValueError, KeyError, TypeError):
        raise ArtifactError(str(path), got="no record", need="meanings", hint=hint) from None
    if sources != sources_hash():
        raise ArtifactError(str(path), got="of other definitions", need="these", hint=hint)
    return values


def sources_hash() -> str:
    """Return the hash of the definitions in Coq and of what is asked of them."""
    return hashlib.sha256(f"{_definitions()}\0{coq_text()}".encode()).hexdigest()


def _definitions() -> str:
    return "\0".join((PROOFS / name).read_text() for name in DEFINITIONS)


# -- Coq -----------------------------------------------------------------------------------------

_HEAD = """From Coq Require Import List Arith ZArith QArith Qcanon.
From K3 Require Import Arith Lists Semantics.
Import ListNotations.
Set Printing Depth 1000000. Set Printing Width 1000000.
Inductive tree := Num (n d : Z) | Id (n : Z) | Node (l : list tree).
Class Show (T : Type) := show : T -> tree.
#[global] Instance show_qc : Show Qc := fun x => Num (Qnum (this x)) (Zpos (Qden (this x))).
#[global] Instance show_nat : Show nat := fun n => Id (Z.of_nat n).
#[global] Instance show_pair {S T} `{Show S} `{Show T} : Show (S * T) :=
  fun p => Node [show (fst p); show (snd p)].
#[global] Instance show_list {T} `{Show T} : Show (list T) := fun l => Node (map show l).
Definition scramble (a b : Z) (x : Qc) : Qc :=
  Q2Qc (Qmake ((a * Qnum (this x) + b * Zpos (Qden (this x))) mod 1009 + 1) 97).
Definition q (n : Z) (d : positive) : Qc := Q2Qc (Qmake n d).
#[global] Instance fractions : Arith := {|
  F := Qc; f0 := q 0 1; f1 := q 1 1; fadd := Qcplus; fmul := Qcmult; fsub := Qcminus;
  fopp := Qcopp; fdiv := Qcdiv; finv := Qcinv; field_laws := Qcft;
  fleb := fun a b => Qle_bool (this a) (this b);
"""


def coq_text(ops: Iterable[Op] = tuple(MEANINGS)) -> str:
    """Return a file that has Coq compute ops at every draw, one answer each."""
    functions = [f"f{name} := scramble {a} {b};" for name, (a, b) in _SCRAMBLE.items()]
    tiny = f"flow := q ({_LOW}) 1; ftiny := q {_TINY.numerator} {_TINY.denominator} |}}."
    lines = [_HEAD + " ".join([*functions, tiny])]
    for number, draw in enumerate(DRAWS):
        step = f"n_tokens := {draw.tokens}; head_from := {draw.head_from}; ranks := {draw.ranks}"
        step += f"; page_tokens := {draw.page_tokens}"
        step += f"; token_id := fun t => nth t {_coq(list(draw.ids))} 0%nat"
        lines.append(f"Module Draw{number}.")
        lines.append(f"#[local] Instance step : Step := {{| {step} |}}.")
        mine = [made for made in instances(ops) if made.draw == number]
        calls = [call for made in mine for _, call in _terms(made)]
        lines += [f"Eval vm_compute in (let x := {call} in show x)." for call in calls]
        lines.append(f"End Draw{number}.")
    return "\n".join(lines) + "\n"


def coq_values(said: str, ops: Iterable[Op] = tuple(MEANINGS)) -> dict[str, Any]:
    """Return the answers of `coq_text`'s file by instance: the value, then the states.

    Raises: ArtifactError when they are not as many as were asked for.
    """
    answers = [_parse(text) for text in re.findall(r"= (.*?)\s*: tree\b", said, re.DOTALL)]
    wanted = [made.name for made in instances(ops) for _ in _terms(made)]
    if len(answers) != len(wanted):
        raise ArtifactError("meanings", got=f"{len(answers)} answers", need=len(wanted))
    values: dict[str, Any] = {}
    for name, answer in zip(wanted, answers, strict=True):
        values.setdefault(name, []).append(answer)
    return values


def _terms(made: Instance) -> Iterator[tuple[str, str]]:
    """Yield (definition, its application) of an instance: the value, then the states."""
    words = " ".join(_coq(value) for value in (*made.operands, *made.attrs))
    yield f"sem_{made.op.name}", f"sem_{made.op.name} {words}"
    if UPDATES.get(made.op):
        for operand in input_operands(made.op):
            if operand.role == "state":
                name = f"next_{made.op.name}_{operand.name}"
                yield name, f"{name} {words}"


def _coq(value: Any) -> str:
    match value:
        case list():
            return f"[{'; '.join(map(_coq, value))}]"
        case tuple():
            return f"({', '.join(map(_coq, value))})"
        case int():
            return f"{value}%nat"
        case _:
            return f"(q ({value.numerator}) {value.denominator})"


def _parse(text: str) -> Any:
    """Return a printed tree: lists, pairs of integers for fractions, integers for numbers."""
    plain = re.sub(r"%\w+", "", text).replace(";", ",").replace("Node", "")
    plain = re.sub(r"Num \(?(-?\d+)\)? (\d+)", r"[\1, \2]", plain)
    return ast.literal_eval(re.sub(r"Id (\d+)", r"\1", plain))


# -- Python --------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    match value:
        case (int() as expert, Fraction() as weight) if isinstance(value, tuple):  # of a route
            return [expert, _plain(weight)]
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            fraction = Fraction(value)
            return [fraction.numerator, fraction.denominator]


def _scramble(a: int, b: int) -> Callable[[Any], Fraction]:
    def function(x: Any) -> Fraction:
        n, d = Fraction(x).numerator, Fraction(x).denominator
        return Fraction((a * n + b * d) % 1009 + 1, 97)

    return function


def _larger(a: Fraction, b: Fraction) -> Fraction:
    return b if a <= b else a


def _above(a: Fraction, b: Fraction, x: Any, y: Any) -> Any:
    return x if a > b else y


def _choose(exp: Callable[[Any], Fraction]) -> Callable[[int, list[Any], list[Any]], list[int]]:
    def choose(k: int, scores: list[Any], bias: list[Any]) -> list[int]:
        adjusted = [1 / (1 + exp(-s)) + b for s, b in zip(scores, bias, strict=True)]
        return sorted(sorted(range(len(scores)), key=lambda i: (-adjusted[i], i))[:k])

    return choose


# -- instances -----------------------------------------------------------------------------------

_COUNTS = {"top_k": 2, "n_blocks": 2, "index": 1, "E": 4}
_SPARE = 1  # blocks beyond those that an op may look at


class _Dice(NamedTuple):
    rng: random.Random
    draw: Draw

    def instance(self, number: int, op: Op) -> Instance:
        sizes = self._sizes(op)
        operands = tuple(self._operand(op, operand, sizes) for operand in input_operands(op))
        kinds = {param.name: param.kind for param in SPECS[op].params}
        attrs = tuple(
            self._number(1) if kinds.get(name) == "f32" else sizes[name] for name in attr_names(op)
        )
        return Instance(number, op, operands, attrs)

    def _sizes(self, op: Op) -> dict[str, int]:
        """Return a size for every letter and attribute of an op, mostly different ones."""
        sizes = {**_COUNTS, "tp": self.draw.ranks, "head_only": self.draw.head_only}
        axes = [axis for operand in input_operands(op) for axis in operand_axes(op, operand)]
        sizes |= dict(zip(SPECS[op].flags, self.draw.flags, strict=False))
        letters = [letter for axis in axes for letter in letters_of(axis)]
        for letter in dict.fromkeys([*letters, *attr_names(op)]):
            sizes.setdefault(letter, self.rng.choice((2, 3)))
        if "nope" in sizes and sizes.get("rope") == sizes["nope"]:
            sizes["rope"] = 5 - sizes["nope"]  # or one could be taken for the other
        if "head_dim" in sizes and "H" in sizes:
            sizes["C"] = sizes["H"] * sizes["head_dim"]  # channels of a convolution's taps
        if SPECS[op].placement == "partial":
            sizes["K"] = self.draw.ranks * self.rng.choice((1, 2))  # each rank has an equal share
        return sizes

    def _operand(self, op: Op, operand: Operand, sizes: Mapping[str, int]) -> Any:
        axes = operand_axes(op, operand)
        shape = tuple(int(evaluate(axis, sizes)) for axis in axes)
        sort = operand_sort(op, operand)
        if sort == "Quant":
            experts, rows, columns = shape
            return [[self._blocks(columns) for _ in range(rows)] for _ in range(experts)]
        if sort == "Route":
            ids = range(sizes["E"])
            return [
                [(i, self._number(0)) for i in sorted(self.rng.sample(ids, shape[0] // 2))]
                for _ in range(self.draw.tokens)
            ]
        if sort == "Slots":
            return self._values((self.draw.tokens, sizes["top_k"], sizes["R"]))
        if operand.role == "weight" or (operand.role == "state" and len(shape) > 1):
            return self._values(shape)
        if operand.role == "state":
            return self._values((self.draw.positions, *shape))
        if sort == "Stack" and operand.name not in ("blocks", "group"):
            return self._values((self.draw.ranks, self.draw.tokens, *shape))
        if sort == "Stack":
            return self._values((sizes["n_blocks"] + _SPARE, self.draw.tokens, *shape))
        least = int(operand.name == "parts")  # a softmax's sum is a divisor, and never 0
        return self._values((self.draw.tokens, *shape), least)

    def _blocks(self, columns: int) -> list[tuple[Fraction, list[Fraction]]]:
        """Return a row of columns in blocks of two, the last one of what is left, with scales."""
        cuts = [min(2, columns - i) for i in range(0, columns, 2)]
        return [(self._number(1), self._values((n,))) for n in cuts]

    def _values(self, shape: Sequence[int], least: int = 0) -> Any:
        if not shape:
            return self._number(least)
        return [self._values(shape[1:], least) for _ in range(shape[0])]

    def _number(self, least: int) -> Fraction:
        return Fraction(self.rng.randint(least or -5, 5), self.rng.randint(1, 3))
