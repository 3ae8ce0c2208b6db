"""Three ways to launch a token, and a token taken apart: on emulated blocks, with the toy program.

How long anything takes here says nothing of a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.bench import gpu_tokens
from k3tool.bench.gpu_tokens import EACH, GRAPH, ONE, Asked, BlockTimes, Graphed, compare, dissect
from k3tool.errors import TargetError
from k3tool.isa.table import Op
from k3tool.runtime.engine import StepToken
from k3tool.runtime.gpu_group import GpuGroup
from k3tool.runtime.options import RunOptions
from tests.kernels.emulated_device import EmulatedDevice
from tests.runtime import toy
from tests.runtime.test_gpu_group import CUDA, group_of, program_of

Code = Callable[[str], bytes]
ASKED = Asked(RunOptions(Path("toy"), (), 0), (3, 1), gen=2, repeats=2)


@pytest.fixture
def ready(device_code: Code, tmp_path: Path) -> Iterator[Callable[..., tuple[GpuGroup, Any]]]:
    """Return a function that gives a toy's group, ready, and its device."""
    with contextlib.ExitStack() as stack:

        def make(wrap: Any = None, tp: int = 1, **given: Any) -> tuple[GpuGroup, Any]:
            device: Any = EmulatedDevice(device_code("cuda"))
            device = wrap(device) if wrap else device
            group = stack.enter_context(group_of(program_of(CUDA, tp), device, tmp_path, **given))
            group.wait_ready(lambda done, total: None)
            return group, device

        yield make


def token(group: GpuGroup, last: int, at: int = 0) -> int:
    return group.step([StepToken(last, at, 0)], 1).choices[0].id


def test_all_ways_give_the_tokens_and_a_graph_is_made_once(ready: Any) -> None:
    one, each, graph = (
        ready(), ready(launches="each"), ready(Graphed, launches="each")
    )  # fmt: skip
    want = toy.expected_tokens(toy.random_weights(), (5,), 4)
    for group, _ in (one, each, graph):
        found = [5]
        for at in range(4):
            found.append(token(group, found[-1], at))
        assert found[1:] == want
    kept = graph[1]._graphs
    assert sorted(map(len, kept)) == [1, 7]  # the canary, and decode's seven instructions
    assert graph[1].launched == each[1].launched
    found = compare({ONE: one[0], EACH: each[0], GRAPH: graph[0]}, ASKED)
    assert set(found.rates) == {ONE, EACH, GRAPH}
    assert set(found.ratios) == {EACH, GRAPH}
    assert found.ratios[GRAPH].n == ASKED.repeats


def test_ranks_are_no_graph(ready: Any) -> None:
    group, _ = ready(Graphed, tp=2, launches="each")
    with pytest.raises(TargetError, match="got several ranks, need one"):
        token(group, 5)


def test_a_body_taken_out_is_not_run_and_put_back(ready: Any) -> None:
    group, device = ready()
    (rank,) = group.ranks
    want = toy.expected_tokens(toy.random_weights(), (5,), 1)[0]
    other = next(i for i in range(6, 32)
                 if toy.expected_tokens(toy.random_weights(), (i,), 1)[0] != want)  # fmt: skip
    assert token(group, 5) == want
    gpu_tokens.take_out(device, rank, {Op.EMBED_BF16})
    assert token(group, other) == want  # the embedding of before is still there
    gpu_tokens.take_out(device, rank, ())
    assert token(group, other) != want


def test_blocks_time_their_bodies(ready: Any) -> None:
    group, device = ready()
    (rank,) = group.ranks
    clock = BlockTimes(device, rank)
    assert clock.take() == (0.0, 0.0)
    token(group, 5)
    bodies, whole = clock.take()
    assert 0 < bodies < whole
    assert clock.take() == (0.0, 0.0)


def test_a_token_taken_apart(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tokens, "LEAST_SHARE", -1e9)
    group, device = ready()
    found = dissect(group, device, ASKED)
    assert set(found.ops) == {"EMBED_BF16", "ADD", "ALL_REDUCE", "RMSNORM", "GEMV_BF16", "ARGMAX",
                              "ARGMAX_FOLD"}  # fmt: skip
    assert found.stopped == ""
    assert found.protocol > 0
    assert 0 < found.bodies < 1
    assert found.idle == pytest.approx(1 - found.protocol - found.bodies)


def test_a_body_that_the_rest_needs_ends_the_list(ready: Any) -> None:
    """What lies where an absent body would have written is no number: the step stops."""
    group, device = ready()
    (rank,) = group.ranks
    norm = rank.tensor_address(int(gpu_tokens.decode_records(rank)[toy.NORM, 1] & 0xFFFF))
    real = gpu_tokens.take_out

    def spoiled(*given: Any) -> None:
        real(*given)
        if given[2] == {Op.ALL_REDUCE}:  # which writes what the norm reads
            device.upload(norm, np.full(toy.HIDDEN, np.nan, "<f4").tobytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_tokens, "take_out", spoiled)
        found = dissect(group, device, replace(ASKED, prompt=(3,), repeats=1))
    assert found.stopped.startswith("without ALL_REDUCE: ")
