"""Attention's bound and its part of it: what is counted, and which side of the machine bounds."""

import numpy as np
import pytest

from k3tool.bench.anatomy import Anatomy, OpShare
from k3tool.bench.attention import Work, attention_seconds, attention_shares, attention_work
from k3tool.bench.decode import with_attention
from k3tool.bench.frame import BenchReport, Paired, spread
from k3tool.isa.columns import empty_packets
from k3tool.isa.table import SPECS, Op
from k3tool.model.operators import PART_EXTRA

LATENT, ROPE, HEADS, PAGES, POSITION = 512, 64, 12, 5, 999
WORK = Work(1000 * (LATENT + ROPE) * 4, 2 * HEADS * 1000 * (2 * LATENT + ROPE))


def packets(op: Op) -> np.ndarray:
    rows = empty_packets(2)
    rows["op"] = [int(Op.ADD), int(op)]
    spec = SPECS[op]
    for name, value in (("latent", LATENT), ("rope", ROPE)):
        rows["params"][1][[p.name for p in spec.params].index(name)] = value
    rows["n_units"][1] = PAGES if spec.unit == "page" else HEADS
    rows["unit_cols"][1] = HEADS * (LATENT + PART_EXTRA) if spec.unit == "page" else LATENT
    return rows


@pytest.mark.parametrize("op", [Op.MLA_ATTEND, Op.MLA_HEADS, Op.MLA_PAGES])
def test_every_form_of_attention_has_the_same_work(op: Op) -> None:
    assert attention_work(packets(op), POSITION) == WORK
    assert attention_work(packets(op)[:1], POSITION) == Work(0, 0), "none without it"


def token(seconds: float) -> Anatomy:
    ops = (OpShare("MLA_PAGES", 1, 0, seconds), OpShare("MLA_MERGE", 1, 0, seconds),
           OpShare("ADD", 1, 0, 9.0))  # fmt: skip
    return Anatomy(ops, 0.0, 0.0, 4.0, 2, 0)


def test_the_smaller_side_bounds() -> None:
    assert WORK.bound(1.0, 1e30) == 1.0, "reading"
    assert WORK.bound(1e30, float(WORK.operations)) == WORK.n_bytes, "multiply-adds"
    assert attention_seconds(token(0.5)) == 0.5, "two workers, two ops"
    shares = attention_shares(WORK, [token(2.0)], [1e30], [float(WORK.operations)])
    assert shares == [0.5], "two seconds where one would do"


@pytest.mark.parametrize(("context", "limits"), [(1000, 0), (32_000, 1)])
def test_a_long_context_has_a_bar(context: int, limits: int) -> None:
    report = BenchReport("decode", ["what", "machine"], [("x", spread([1.0]), "")])
    reading = Paired([1e30], [1.0])
    for seconds, held in ((1.9, True), (2.1, False)):
        peaks = [float(WORK.operations)]
        made = with_attention(report, context, WORK, [token(seconds)], reading, peaks)
        assert [limit.is_held for limit in made.limits] == [held] * limits
        assert made.facts["attention_share"] == pytest.approx(1 / seconds)
        assert made.definition[-1] == "machine"
    assert with_attention(report, context, Work(0, 0), [], reading, []) is report
