"""Rules that move, drop or add a rounding point, and what they would be without rounding.

Each pair is (what is wrong, the same where nothing rounds): the first must be refuted and has no
theorem, the second is right, so it is the rounding that refutes the first.
"""

from k3tool.compiler.patterns import Rule, make_rule

_CASES = {
    "reassociates-across-a-rounding": (
        "(ADD (ADD a b {r}) c {r})", "(ADD a (ADD b c {r}) {r})",
    ),
    "drops-the-inner-rounding": (
        "(ADD (ADD a b {r}) c {r})", "(ADD (ADD a b) c {r})",
    ),
    "rounds-a-sum-of-experts-once-less": (
        "(MOE_COMBINE (MOE_DOWN_EACH x route w2 :top_k k) route :top_k k {r})",
        "(ALL_REDUCE (MOE_DOWN x route w2 :top_k k))",
    ),
    "rounds-a-product-once-less": (
        "(GEMV_REDUCED x w {r})", "(ALL_REDUCE (GEMV_BF16_BLOCKS x w))",
    ),
    "rounds-what-was-not": (
        "(ADD residual (ALL_REDUCE x))", "(ALL_REDUCE_ADD residual x {r})",
    ),
    "rounds-the-product-for-its-gate": (
        "(MUL (HEAD_RMSNORM o norm :eps eps) (SIGMOID gate {r}))",
        "(KDA_GATED_NORM o norm gate :eps eps {r})",
    ),
    "norms-without-rounding": (
        "(GEMV_BF16 (RMSNORM x norm :eps eps {r}) w :head_only 0 {r})",
        "(NORM_GEMV_BF16 x norm w :eps eps :head_only 0 {r})",
    ),
}  # fmt: skip


def _rule(name: str, rounding: str) -> Rule:
    left, right = (side.replace(" {r}", rounding) for side in _CASES[name])
    return make_rule(name if rounding else f"{name}-unrounded", (left, right))


ROUNDING: tuple[Rule, ...] = tuple(_rule(name, " :round 1") for name in _CASES)
UNROUNDED: tuple[Rule, ...] = tuple(_rule(name, "") for name in _CASES)
