"""The trace: every slice once, steps that hold their slices, nothing lost in silence."""

import re
from pathlib import Path

import numpy as np
import pytest

from k3tool.errors import UsageError
from k3tool.runtime.ranks import RankGroup
from k3tool.runtime.trace import Trace
from tests.runtime import toy

N_GEN = 6
N_STEPS = 2 + N_GEN - 1  # a prompt of 5 in chunks of 3, then one token a step


def traced(folder: Path, threads: int, capacity: int = 1000, **options: object) -> Trace:
    made = toy.images(toy.toy_isa(), folder, n_gen=N_GEN)
    start = toy.launch(made, n_threads=threads, trace_events=capacity, **options)
    with RankGroup(start) as group:
        assert len(list(group.steps())) == N_STEPS
        return group.trace(0)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_slice_once_and_inside_its_step(tmp_path: Path, threads: int) -> None:
    trace = traced(tmp_path, threads)
    assert trace.n_dropped == 0
    assert len(trace.steps) == N_STEPS
    for step in trace.steps:
        phase = ("decode", "prefill")[step["phase"]]
        entries = toy.toy_isa().streams[phase].queues.entries
        slices = trace.slices[trace.slices["step"] == step["step"]]
        assert sorted(slices["inst"]) == sorted(entries["inst"])
        assert (slices["phase"] == step["phase"]).all()
        assert (slices["start_ns"] >= step["start_ns"]).all()
        assert (slices["end_ns"] <= step["end_ns"]).all()
        assert (slices["start_ns"] <= slices["end_ns"]).all()
    for worker in range(threads):  # one thing at a time
        own = np.sort(trace.slices[trace.slices["worker"] == worker], order="start_ns")
        assert (own["start_ns"][1:] >= own["end_ns"][:-1]).all()


def test_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    whole, part = traced(tmp_path, 1), traced(tmp_path, 1, capacity=10)
    assert len(part.slices) + len(part.steps) == 10
    assert part.n_dropped == len(whole.slices) + len(whole.steps) - 10


def test_a_run_may_begin_late_with_noise_in_its_states(tmp_path: Path) -> None:
    made = toy.images(toy.toy_isa(ctx=512), tmp_path, n_gen=N_GEN)
    last = 512 - 5 - N_GEN + 1
    with RankGroup(toy.launch(made, first_position=last)) as group:
        rows = list(group.steps())
    assert int(rows[-1]["position"][0]) == 511
    with pytest.raises(UsageError, match=re.escape("need 513 positions within the context 512")):
        RankGroup(toy.launch(made, first_position=last + 1))
