"""Random stalls in every rank change nothing, and what would be drift is seen."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3tool.bench.long_run import Asked, bench_long, drift
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import run_model


@pytest.mark.parametrize("tp", [2, 8])
def test_stalls_change_nothing(oracle: Callable[[str], Path], tmp_path: Path, tp: int) -> None:
    report = bench_long(Asked(oracle("tiny_tp8"), tp, 24, cache=tmp_path))
    assert report.limits[0].is_held, report.lines()
    assert len(report.facts["memory_bytes"]) == 24


def test_a_rank_that_drifts_is_seen(oracle: Callable[[str], Path], tmp_path: Path) -> None:
    asked = RunOptions(oracle("tiny_tp8"), (1, 2, 3), 6, tp=1, cache=tmp_path, ignore_eos=True)
    alone, many = run_model(asked), run_model(replace(asked, tp=2))
    assert drift(alone, many) is None
    spoilt = many.records[1].copy()
    spoilt["best"][4] += 1
    assert drift(alone, replace(many, records=(many.records[0], spoilt))) == 4
    short = many.records[1][:5]
    assert drift(alone, replace(many, records=(many.records[0], short))) == 5
