"""The falsifier: real rules stand, wrong rules fall, and its meanings are the reference's."""

import inspect
import math
from typing import Any

import numpy as np
import pytest

from k3tool.compiler.patterns import Rule
from k3tool.compiler.rules import RULES
from k3tool.compiler.semantics import MEANINGS
from k3tool.compiler.semantics.algebra import Algebra
from k3tool.compiler.theorems import read_stamp, require_theorems
from k3tool.errors import ArtifactError
from k3tool.isa.table import Op
from k3tool.model.operators import attr_names
from k3tool.ref.formats import Step
from k3tool.ref.ops import REFERENCE
from tests.proofs.rounding_rules import ROUNDING, UNROUNDED
from tests.proofs.wrong_rules import WRONG_RULES

pytest.importorskip("z3", reason="NOT RUN: z3-solver is not installed")

from k3tool.compiler.falsify import algebra, compare, falsify, function, symbols


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_no_rule_has_a_counterexample(rule: Rule) -> None:
    verdict = falsify(rule)
    assert verdict.outcome == "equal", verdict


@pytest.mark.parametrize("rule", [*WRONG_RULES, *ROUNDING], ids=lambda rule: rule.name)
def test_a_wrong_rule_has_a_counterexample(rule: Rule) -> None:
    verdict = falsify(rule)
    assert verdict.outcome == "refuted", verdict


@pytest.mark.parametrize("rule", [*WRONG_RULES, *ROUNDING], ids=lambda rule: rule.name)
def test_a_wrong_rule_cannot_fire(rule: Rule) -> None:
    with pytest.raises(ArtifactError, match=f"rule {rule.name}: .*no proved theorem"):
        require_theorems((*RULES, rule), read_stamp())


@pytest.mark.parametrize("rule", UNROUNDED, ids=lambda rule: rule.name)
def test_it_is_the_rounding_that_refutes_it(rule: Rule) -> None:
    """The control: the same rules, where nothing rounds, have no counterexample."""
    assert falsify(rule).outcome == "equal"


def test_a_rounding_point_may_not_move() -> None:
    a, b, c = symbols("v", (3,))
    rounded = function("round")
    chain = rounded(rounded(a + b) + c)
    assert compare([chain], [rounded(a + rounded(b + c))]).outcome == "refuted"
    assert compare([chain], [rounded((a + b) + c)]).outcome == "refuted", "nor be dropped"
    assert compare([chain], [rounded(rounded(b + a) + c)]).outcome == "equal", "the control"
    assert compare([(a + b) + c], [a + (b + c)]).outcome == "equal", "without rounding it may"


def test_a_quotient_by_zero_is_no_counterexample() -> None:
    a, b = symbols("v", (2,))
    assert compare([a / b], [a / b * b / b]).outcome == "equal"
    assert compare([a / b], [a / b * b]).outcome == "refuted"


def test_every_op_of_a_rule_has_a_meaning() -> None:
    sides = [side for rule in RULES for equation in rule.equations for side in equation]
    assert {term.op for side in sides for term in side.subterms()} <= set(MEANINGS)


# -- the falsifier's meanings are the reference's --------------------------------------------------

T, H, D, K, R, E, TOP = 3, 2, 4, 8, 5, 5, 2
NOPE, ROPE, LATENT, V = 3, 2, 4, 3
W = H * D
EXTRA = 16


def choose(k: int, scores: list[float], bias: list[float]) -> list[int]:
    adjusted = [1 / (1 + math.exp(-s)) + b for s, b in zip(scores, bias, strict=True)]
    return sorted(sorted(range(len(scores)), key=lambda i: (-adjusted[i], i))[:k])


def above(a: float, b: float, x: float, y: float) -> float:
    return x if a > b else y


FLOATS = Algebra(math.exp, math.tanh, math.sqrt, lambda x: x, max, choose, above, 1e-20, -math.inf)


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.normal(0, 0.7, shape) for shape in shapes]


ROWS, WIDE, TAPS, STATE = (T, K), (T, W), (3, W), (H, D, D)
HEADS = {"l2_eps": 1e-6, "q_scale": 0.5, "lower_bound": -5.0, "head_dim": D}
MLA = {"nope": NOPE, "rope": ROPE, "latent": LATENT, "v": V}
KV_B, CACHE = (H * (NOPE + V), LATENT), (T, LATENT + ROPE)
MIX = [ROWS, (T, K + EXTRA), (K,), (K,), (K,)]
NORMS = {"eps": 1e-5, "norm_eps": 1e-6}
BETAS = {"beta": 4.0, "linear_beta": 25.0}
CASES: dict[Op, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    Op.GEMV_BF16: ([ROWS, (R, K)], {"head_only": 0}),
    Op.NORM_GEMV_BF16: ([ROWS, (K,), (R, K)], {"eps": 1e-5, "head_only": 0}),
    Op.GLU_BF16: ([ROWS, (R, K), (R, K)], BETAS),
    Op.RMSNORM: ([ROWS, (K,)], {"eps": 1e-5}),
    Op.ATTN_RES: ([ROWS, (3, T, K), (K,), (K,)], {"n_blocks": 2, "eps": 1e-5}),
    Op.ATTN_RES_NORM: ([ROWS, (3, T, K), (K,), (K,), (K,)], {"n_blocks": 2, **NORMS}),
    Op.ATTN_PART: ([(3, T, K), (K,), (K,)], {"n_blocks": 2, "eps": 1e-5}),
    Op.MIX_LINEARS_3: ([*MIX, (R, K), (2, K), (3, K)], NORMS),
    Op.SILU: ([ROWS], {}),
    Op.SOFTCAP: ([ROWS], {"beta": 4.0}),
    Op.SITU: ([ROWS, ROWS], BETAS),
    Op.SCALE: ([ROWS], {"factor": 0.3}),
    Op.L2NORM: ([WIDE], {"eps": 1e-6, "head_dim": D}),
    Op.HEAD_RMSNORM: ([WIDE, (D,)], {"eps": 1e-5}),
    Op.SHORT_CONV: ([WIDE, (W, 4), TAPS], {}),
    Op.CONV_SILU: ([WIDE, (W, 4), TAPS], {}),
    Op.KDA_DECAY: ([WIDE, (H,), (W,)], {"lower_bound": -5.0, "head_dim": D}),
    Op.KDA_STEP: ([WIDE, WIDE, WIDE, WIDE, (T, H), STATE], {"head_dim": D}),
    Op.KDA_CORE: ([WIDE, WIDE, WIDE, WIDE, (T, H), (H,), (W,), STATE], HEADS),
    Op.KDA_GATED_NORM: ([WIDE, (D,), WIDE], {"eps": 1e-5}),
    Op.KDA_HEADS: (
        [WIDE, WIDE, WIDE, (T, R), (T, H), WIDE, (W, 4), (W, 4), (W, 4), (W, R), (H,), (W,), (D,),
         TAPS, TAPS, TAPS, STATE],
        {**HEADS, "eps": 1e-5},
    ),
    Op.MLA_QLAT: ([(T, H * (NOPE + ROPE)), KV_B], MLA),
    Op.MLA_ATTEND: (
        [(T, H * (LATENT + ROPE)), CACHE],
        {"latent": LATENT, "rope": ROPE, "scale": 0.4, "pages": 1},
    ),
    Op.MLA_UV: ([(T, H * LATENT), KV_B], {"nope": NOPE, "v": V, "latent": LATENT}),
    Op.MLA_UV_GATE: (
        [(T, H * LATENT), KV_B, (T, H * V)], {"nope": NOPE, "v": V, "latent": LATENT},
    ),
    Op.MLA_HEADS: ([(T, H * (NOPE + ROPE)), KV_B, CACHE, (T, H * V)], {**MLA, "scale": 0.4}),
    Op.MLA_QUERY: (
        [ROWS, (K,), (H * (NOPE + ROPE), K), KV_B],
        {"eps": 1e-5, "nope": NOPE, "rope": ROPE, "latent": LATENT, "v": V},
    ),
    Op.REDUCE_GATHER_ADD: ([WIDE, (2, T, D), (2, T, W)], {}),
}  # fmt: skip


@pytest.mark.parametrize("op", CASES, ids=lambda op: op.name)
def test_a_meaning_is_the_references(op: Op) -> None:
    shapes, attrs = CASES[op]
    values = arrays(*shapes)
    accepted = inspect.signature(REFERENCE[op]).parameters
    # Position 1, so that states are read; position 0 where a cache holds this step's tokens alone.
    position = 0 if op in (Op.MLA_ATTEND, Op.MLA_HEADS) else 1
    context = {"unit_cols": D, "step": Step(np.zeros(T, np.int64), position)}
    given = {k: v for k, v in {**attrs, **context}.items() if k in accepted}
    want = REFERENCE[op](*values, **given)
    numbers = [attrs.get(name, 0) for name in attr_names(op)]
    got = MEANINGS[op](FLOATS, *(v.tolist() for v in values), *numbers)
    np.testing.assert_allclose(flat(got), flat(want), rtol=1e-12, atol=1e-14)


def flat(value: Any) -> np.ndarray:
    if isinstance(value, tuple | list):
        return np.concatenate([flat(x) for x in value])
    return np.ravel(np.asarray(value, dtype=np.float64))


def test_experts_are_the_references() -> None:
    z, scores, bias, w1, w3, x, w2 = arrays(
        ROWS, (T, E), (E,), (E, R, K), (E, R, K), (T, TOP * K), (E, R, K)
    )
    lists = {name: v.tolist() for name, v in locals().items()}
    lists |= {
        name: [[[(1.0, row)] for row in e] for e in lists[name]] for name in ("w1", "w3", "w2")
    }
    got = MEANINGS[Op.MOE_GLU_TOPK](
        FLOATS, *(lists[name] for name in ("z", "scores", "bias", "w1", "w3")), TOP, 4.0, 25.0, 0
    )
    want = REFERENCE[Op.MOE_GLU_TOPK](
        z, scores, bias, list(w1), list(w3), top_k=TOP, beta=4.0, linear_beta=25.0
    )
    np.testing.assert_allclose(got, want, rtol=1e-12)
    got = MEANINGS[Op.MOE_DOWN_TOPK](
        FLOATS, lists["x"], lists["scores"], lists["bias"], lists["w2"], TOP, 2.5, 0
    )
    want = REFERENCE[Op.MOE_DOWN_TOPK](x, scores, bias, list(w2), top_k=TOP, scale=2.5)
    np.testing.assert_allclose(np.sum(got, axis=0), want, rtol=1e-12)


def test_stored_experts_are_the_references() -> None:
    """One block of scale 1 a row: the numbers are the elements."""
    z, w, x, w2 = arrays(ROWS, (E, R, K), (T, TOP * K), (E, R, K))
    route = np.array([[0, 2, 0.3, 0.7], [1, 4, 0.5, 0.5], [2, 3, 0.1, 0.9]])
    pairs = [[(int(row[i]), row[TOP + i]) for i in range(TOP)] for row in route]
    stored, stored2 = ([[[(1.0, row)] for row in e] for e in m.tolist()] for m in (w, w2))
    got = MEANINGS[Op.MOE_UP_MXFP4](FLOATS, z.tolist(), pairs, stored, TOP, 0)
    np.testing.assert_allclose(got, REFERENCE[Op.MOE_UP](z, route, list(w)), rtol=1e-12)
    got = MEANINGS[Op.MOE_DOWN_MXFP4](FLOATS, x.tolist(), pairs, stored2, TOP, 0)
    want = REFERENCE[Op.MOE_DOWN](x, route, list(w2))
    np.testing.assert_allclose(np.sum(got, axis=0), want, rtol=1e-12)
    each = MEANINGS[Op.MOE_DOWN_EACH](FLOATS, x.tolist(), pairs, w2.tolist(), TOP, 0)
    flat = REFERENCE[Op.MOE_DOWN_EACH](x, route, list(w2))
    np.testing.assert_allclose(np.reshape(each, flat.shape), flat, rtol=1e-12)
    got = MEANINGS[Op.MOE_COMBINE](FLOATS, each, pairs, TOP, 0)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    np.testing.assert_allclose(REFERENCE[Op.MOE_COMBINE](flat, route), want, rtol=1e-12)


def test_the_choice_is_the_references() -> None:
    (logits,) = arrays((T, 2 * K))
    logits[1, 3] = logits[1, K + 2] = 9.0  # a tie across ranks: the lower index
    shares = logits.reshape(T, 2, K).transpose(1, 0, 2)
    want = REFERENCE[Op.ARGMAX_ALL](logits)
    assert want[1, 1] == 3
    candidates = MEANINGS[Op.ARGMAX](FLOATS, shares.tolist())
    np.testing.assert_array_equal(MEANINGS[Op.ARGMAX_FOLD](FLOATS, candidates), want)
    np.testing.assert_array_equal(MEANINGS[Op.ARGMAX_ALL](FLOATS, logits.tolist()), want)
    ranks = [REFERENCE[Op.ARGMAX](share, vocab_base=r * K) for r, share in enumerate(shares)]
    np.testing.assert_array_equal(candidates, ranks)


def test_the_algebra_of_symbols_has_every_function_free() -> None:
    one = algebra()
    (x,) = symbols("x", (1,))
    assert compare([one.exp(x)], [one.tanh(x)]).outcome == "refuted"
