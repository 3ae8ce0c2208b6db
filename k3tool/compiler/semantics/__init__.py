"""The meaning of ops over any algebra, on lists: what the falsifier puts symbols through.

The same definitions as `proofs/Semantics.v`, in Python: a value is a list of rows (tokens), a
stack a list of those; numbers are whatever the algebra's functions take. Run on floats they are
compared with the reference; run on symbols, the two sides of a rule become two expressions; run on
fractions they are compared with what Coq computes (`k3tool.compiler.agreement`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from k3tool.compiler.semantics import attention, dense, experts, heads
from k3tool.isa.table import Op

# Each takes operands in the op table's order, then attributes, and gives the value; one that
# updates states gives the value and then the states, in the operands' order.
MEANINGS: Mapping[Op, Callable[..., Any]] = {
    **dense.MEANINGS, **heads.MEANINGS, **attention.MEANINGS, **experts.MEANINGS,
}  # fmt: skip
# Ops whose second and further results are their states'.
UPDATES: Mapping[Op, int] = {
    Op.SHORT_CONV: 1, Op.CONV_SILU: 1, Op.KDA_STEP: 1, Op.KDA_CORE: 1, Op.KDA_HEADS: 4,
}  # fmt: skip
