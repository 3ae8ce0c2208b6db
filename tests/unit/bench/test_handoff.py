"""Empty packets: the program that is run waits for what it says it does, and runs."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.bench.handoff import (
    ALONE,
    GATES,
    LOCAL,
    PASSED,
    TOKENS,
    Asked,
    bench_handoff,
    local_handoff_us,
    program,
)
from k3tool.errors import UsageError
from k3tool.isa.columns import GATE
from k3tool.isa.execution import execute
from k3tool.runtime.interpreter import executable_path


@pytest.mark.parametrize(("shape", "slices"), [(PASSED, 1), (LOCAL, 3), (GATES, 3)])
def test_each_packet_waits_for_all_slices_of_the_one_before(shape: str, slices: int) -> None:
    isa = program(3, 2, 9, shape)
    queues = isa.streams["decode"].queues
    counts = np.bincount(queues.entries["inst"])
    rearms = 7
    assert np.delete(counts, rearms).tolist() == [slices] * 8
    for entry in queues.entries[queues.entries["inst"] > 0]:
        (wait,) = queues.waits[entry["wait_ofs"] : entry["wait_ofs"] + entry["n_waits"]]
        before = int(entry["inst"]) - 1
        assert wait["counter"] == queues.signals[before]
        ranks = 2 if wait["counter"] & GATE else 1
        assert wait["threshold"] == counts[before] * ranks
    gates = (queues.signals & GATE) != 0
    assert int(gates.sum()) == (8 if shape == GATES else 1)
    executed = execute(isa, isa.streams["decode"], 0)
    assert executed.entries == 2 * len(queues.entries)


def test_passed_packets_lie_in_queues_in_turn_and_alone_in_one() -> None:
    passed = program(3, 1, 9, PASSED).streams["decode"].queues
    assert np.diff(passed.queue_ofs).tolist() == [3, 3, 3]
    alone = program(1, 1, 9, ALONE).streams["decode"].queues
    assert np.diff(alone.queue_ofs).tolist() == [9]


def test_they_run_on_the_interpreter_beside_a_barrier() -> None:
    report = bench_handoff(Asked(threads=2, tp=2, packets=16, repeats=2))
    assert {s.n for _, s, _ in report.rows} == {2}
    assert set(report.facts["shapes"]) == {ALONE, PASSED, LOCAL, GATES}
    for found in report.facts["shapes"].values():
        assert 0 < found["packet_ns"] < 1e9
        assert 0 < found["barrier_ns"] < 1e9
    assert TOKENS > 2
    assert 0 < local_handoff_us(1) < 1e6
    asked = Asked(threads=1, tp=1, packets=16, repeats=1, versus=executable_path())
    one = bench_handoff(asked)  # the same interpreter stands for another build's
    rows = {name: s.median for name, s, _ in one.rows}
    name = f"packet: {ALONE}, "
    ours, theirs = rows[f"{name}this one in turn"], rows[f"{name}the other interpreter"]
    assert rows[f"{name}this / the other interpreter"] == pytest.approx(ours / theirs)
    assert set(one.facts["shapes"]) == {ALONE}, "nobody to wait for"


def test_refusals(k3tool: Callable, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--packets"):
        bench_handoff(Asked(packets=1))
    assert k3tool("bench", "handoff", "--packets", "1").code == 2
    none = k3tool("bench", "handoff", "--versus", tmp_path / "none")
    assert (none.code, "none" in none.err) == (5, True)
    found = k3tool("bench", "handoff", "--threads", "1", "--packets", "8", "--repeats", "1",
                   "--json")  # fmt: skip
    assert json.loads(found.out)["packets"] == 8
