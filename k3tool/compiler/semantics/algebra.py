"""What ops compute with: numbers of any algebra, in rows, matrices and stacks that are lists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Number = Any  # float, Fraction or a solver's term
Vec = list[Number]
Mat = list[Vec]
Stack = list[Mat]
Quant = list[list[list[tuple[Number, Vec]]]]  # expert, row, block: a scale and its elements


@dataclass(frozen=True, slots=True)
class Algebra:
    """Functions that nothing is assumed about, and what a run decides.

    `round` is what mode bf16 does to a value at a rounding point, which an op's flag switches on.
    `choose(k, scores, bias)` returns the ids of experts, ascending. `above(a, b, x, y)` is x where
    a > b, else y; `low` is below every number. `ranks` share row-parallel products; head-only
    linears compute tokens from `head_from` on; latent attention takes `page_tokens` positions at a
    time; `token_ids` are the step's.
    """

    exp: Callable[[Number], Number]
    tanh: Callable[[Number], Number]
    sqrt: Callable[[Number], Number]
    round: Callable[[Number], Number]
    largest: Callable[[Number, Number], Number]
    choose: Callable[[int, Vec, Vec], list[int]]
    above: Callable[[Number, Number, Number, Number], Number]
    tiny: Number
    low: Number
    ranks: int = 2
    head_from: int = 1
    page_tokens: int = 2
    token_ids: Sequence[int] = ()

    def rnd(self, flag: int, x: Number) -> Number:
        """Return a number behind a rounding point."""
        return self.round(x) if flag else x

    def sigmoid(self, x: Number) -> Number:
        """Return 1 / (1 + exp(-x))."""
        return 1 / (1 + self.exp(-x))

    def softcap(self, beta: Number, x: Number) -> Number:
        """Return beta tanh(x / beta)."""
        return beta * self.tanh(x / beta)

    def situ(self, beta: Number, linear: Number, gate: Number, up: Number) -> Number:
        """Return the gated product of SiTU: the sigmoid takes the gate as it is, not capped."""
        return self.softcap(beta, gate) * self.sigmoid(gate) * self.softcap(linear, up)


def total(row: Vec) -> Number:
    """Return the sum of a row, from the right, as the proofs' fold does."""
    out: Number = 0
    for x in reversed(row):
        out = x + out
    return out


def dot(w: Vec, x: Vec) -> Number:
    """Return the product of two rows."""
    return total([a * b for a, b in zip(w, x, strict=True)])


def numbers(w: Quant) -> Stack:
    """Return expert matrices in numbers: every element times its block's scale."""
    return [[[s * x for s, block in row for x in block] for row in expert] for expert in w]


def matvec(a: Algebra, rd: int, w: Mat, x: Vec) -> Vec:
    """Return a row's product with every row of a matrix, rounded if flagged."""
    return [a.rnd(rd, dot(row, x)) for row in w]


def mix(width: int, ks: Vec, rows: Mat) -> Vec:
    """Return the sum of k_i times row i."""
    return [total([k * row[i] for k, row in zip(ks, rows, strict=True)]) for i in range(width)]


def chunks(d: int, row: list[Any]) -> list[Any]:
    """Return a row's runs of d."""
    return [row[i : i + d] for i in range(0, len(row), d)]


def share(a: Algebra, r: int, row: Vec) -> Vec:
    """Return one rank's part of a row."""
    found: Vec = chunks(len(row) // a.ranks, row)[r]
    return found


def rows_of(*values: Mat) -> list[Any]:
    """Return values token by token."""
    return list(zip(*values, strict=True))


def each(f: Callable[..., Number], *values: Mat) -> Mat:
    """Return a function of every number."""
    return [[f(*xs) for xs in zip(*rows, strict=True)] for rows in rows_of(*values)]


def mean_inv(a: Algebra, eps: Number, x: Vec) -> Number:
    """Return 1 / sqrt(mean of squares + eps)."""
    return 1 / a.sqrt(total([v * v for v in x]) / len(x) + eps)


def rms(a: Algebra, rd: int, x: Vec, norm: Vec, eps: Number) -> Vec:
    """Return a normed row: the value may round, and again after its weight."""
    inv = mean_inv(a, eps, x)
    return [a.rnd(rd, a.rnd(rd, v * inv) * g) for v, g in zip(x, norm, strict=True)]


def largest_of(a: Algebra, row: Vec) -> Number:
    """Return a row's largest number."""
    out = row[0]
    for x in row[1:]:
        out = a.largest(out, x)
    return out


def glu(a: Algebra, x: Mat, gate: Mat, up: Mat, beta: Number, linear: Number, rd: int) -> Mat:
    """Return the gated product of two linears of one value; all three may round."""
    out: Mat = []
    for r in x:
        pairs = rows_of(matvec(a, rd, gate, r), matvec(a, rd, up, r))
        out.append([a.rnd(rd, a.situ(beta, linear, g, u)) for g, u in pairs])
    return out


def plus(a: Algebra, rd: int, x: Mat, y: Mat) -> Mat:
    """Return a sum, rounded if flagged."""
    return each(lambda u, v: a.rnd(rd, u + v), x, y)
