"""A trace of experts says what the cache did; a replay agrees, and a full disk ends no run."""

import dataclasses
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.bench.cache import POLICIES, replay, requests_of
from k3tool.errors import ArtifactError, K3Error, UsageError
from k3tool.runtime import budget
from k3tool.runtime import run as run_module
from k3tool.runtime.expert_trace import EVENT_DTYPE, ExpertTrace, TraceFile, read_expert_trace
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import run_model

MEMORY = 153_500_000


@pytest.fixture
def asked(
    oracle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunOptions:
    monkeypatch.setattr(budget, "COMPILE_BYTES", 0)  # which is more than so small a model needs
    return RunOptions(
        oracle("tiny_tp8"), (5, 9, 2), 8, cache=tmp_path, ignore_eos=True, memory_bytes=MEMORY,
        expert_trace=tmp_path / "experts.trace",
    )  # fmt: skip


def test_a_replay_has_the_hits_that_the_run_had(asked: RunOptions) -> None:
    result = run_model(asked)
    assert asked.expert_trace is not None
    trace = read_expert_trace(asked.expert_trace)
    assert result.reading is not None
    assert len(trace.events) == result.reading.hits + result.reading.misses
    assert int(trace.events["is_hit"].sum()) == result.reading.hits
    assert replay(trace, trace.slots).hits["lru"] == result.reading.hits


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT RUN: no /dev/full")
def test_a_full_disk_ends_the_trace_and_not_the_run(
    asked: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(TraceFile):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            assert self.descriptor is not None
            os.dup2(os.open("/dev/full", os.O_WRONLY), self.descriptor)

    want = run_model(asked).tokens
    assert asked.expert_trace is not None
    asked.expert_trace.unlink()
    monkeypatch.setattr(run_module, "TraceFile", Full)
    output = asked.expert_trace.parent / "t.h5"
    tokens: list[int] = []
    with pytest.raises(K3Error, match=r"experts\.trace: got No space left") as refused:
        run_model(
            dataclasses.replace(asked, output=output),
            lambda event: tokens.append(event["id"]) if event["event"] == "token" else None,
        )
    assert refused.value.exit_code == 1
    assert f"written: {output}" in str(refused.value.hint)
    assert tuple(tokens) == tuple(want)
    assert not list(asked.expert_trace.parent.glob("*.trace*"))


def test_a_trace_without_a_budget_is_refused(asked: RunOptions) -> None:
    with pytest.raises(UsageError, match="--expert-trace: got no memory budget"):
        run_model(RunOptions(asked.source, (1,), 1, cache=asked.cache, expert_trace=Path("x")))


@pytest.mark.parametrize("cut", [0, 5, 40, -3])
def test_a_cut_trace_is_refused(asked: RunOptions, cut: int) -> None:
    run_model(asked)
    assert asked.expert_trace is not None
    asked.expert_trace.write_bytes(asked.expert_trace.read_bytes()[:cut])
    with pytest.raises(ArtifactError, match=r"experts\.trace"):
        read_expert_trace(asked.expert_trace)


def made(steps: list[list[int]]) -> ExpertTrace:
    rows = [(n, 0, key, 0) for n, step in enumerate(steps) for key in step]
    return ExpertTrace(np.array(rows, EVENT_DTYPE), 3, 10, 6, 100)


def best_of_all(wanted: list[tuple[int, ...]], slots: int) -> int:
    """The most hits of any way to drop, by trying them all."""

    def most(at: int, held: frozenset[int]) -> int:
        if at == len(wanted):
            return 0
        here = set(wanted[at])
        others = sorted(held - here)
        keep = min(len(others), slots - len(here))
        rest = max(most(at + 1, frozenset(here | set(kept)))
                   for kept in itertools.combinations(others, keep))  # fmt: skip
        return len(held & here) + rest

    return most(0, frozenset())


@pytest.mark.parametrize("seed", range(6))
def test_no_policy_beats_the_best_and_the_best_is_reached(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [sorted(rng.choice(6, 2, replace=False).tolist()) for _ in range(8)]
    wanted = requests_of(made(steps))
    for slots in (2, 3, 4):
        best = best_of_all(wanted, slots)
        assert POLICIES["optimal"](wanted, slots) == best
        assert all(policy(wanted, slots) <= best for policy in POLICIES.values())


def test_lru_and_lfu_drop_what_their_names_say() -> None:
    wanted = requests_of(made([[0], [0], [1], [2], [0], [1]]))
    assert POLICIES["lru"](wanted, 2) == 1  # 0 is oldest when 2 comes
    assert POLICIES["lfu"](wanted, 2) == 2  # 0 was asked for twice
