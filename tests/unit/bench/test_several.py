"""Several sequences against one: what is timed is steps of so many tokens, on the engine itself."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from k3tool.bench.frame import BenchReport, Paired
from k3tool.bench.several import decode_several, with_several
from k3tool.runtime.engine import StepResult, StepToken
from k3tool.runtime.ranks import RankGroup


def test_steps_of_n_tokens_behind_a_context(
    oracle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []  # slots, first position
    step = RankGroup.step

    def look(
        group: RankGroup, tokens: Sequence[StepToken], n_wanted: int, wants_logits: bool = False
    ) -> StepResult:
        assert n_wanted == len(tokens) == group.n_slots
        assert sorted(token.slot for token in tokens) == list(range(group.n_slots))
        seen.append((group.n_slots, tokens[0].position))
        return step(group, tokens, n_wanted, wants_logits)

    monkeypatch.setattr(RankGroup, "step", look)
    found = decode_several(
        oracle("tiny_tp8"), 3, context=300, tokens=2, repeats=2, threads=1, numerics="f32",
        leaves="auto", cache=tmp_path,
    )  # fmt: skip
    assert len(found.first) == len(found.second) == 2
    assert all(rate > 0 for rate in found.first + found.second)
    for n_slots in (1, 3):
        assert [at for n, at in seen if n == n_slots] == list(range(300, 306))


def test_the_report_says_both_and_their_ratio() -> None:
    report = with_several(BenchReport("decode", ["what", "where"], []), 4, Paired([2, 2], [6, 7]))
    assert [row[1].median for row in report.rows] == [2, 6.5, 3.25]
    assert report.facts["batch_over_one"] == 3.25
    assert report.definition[-1] == "where"
