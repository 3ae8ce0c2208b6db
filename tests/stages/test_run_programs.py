"""`k3tool run` executes only programs that prove themselves, wherever they come from."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3tool.compiler.plan import load_plan, save_plan
from k3tool.isa.columns import PACKET_DIGEST, Columns
from k3tool.isa.stream import Isa, load_isa, save_isa

Run = Callable[..., "object"]
Program = tuple[Path, Path]


@pytest.fixture
def program(k3tool: Run, oracle: Run, tmp_path: Path) -> Program:
    """Return plan.h5 and isa.h5 of tiny_tp8 at TP 2."""
    plan, isa = tmp_path / "plan.h5", tmp_path / "isa.h5"
    assert k3tool("compile-plan", oracle("tiny_tp8"), "--tp", 2, "-o", plan).code == 0
    assert k3tool("emit-isa", plan, "-o", isa).code == 0
    return plan, isa


@pytest.fixture
def run(k3tool: Run, oracle: Run, tmp_path: Path) -> Run:
    def call(*arguments: object) -> object:
        words = ("--ids", "5,9,2", "--gen", 4, "--ignore-eos", "--cache", tmp_path / "cache")
        return k3tool("run", oracle("tiny_tp8"), *words, *arguments)

    return call


def with_decode(isa: Isa, **changes: object) -> Isa:
    decode = dataclasses.replace(isa.streams["decode"], **changes)
    return dataclasses.replace(isa, streams={**isa.streams, "decode": decode})


def with_entries(isa: Isa, entries: Columns) -> Isa:
    queues = dataclasses.replace(isa.streams["decode"].queues, entries=entries)
    return with_decode(isa, queues=queues)


def swap_ranks(isa: Isa) -> Isa:
    """Give each of two ranks the other's instructions: fluent, and not the model."""
    return with_decode(isa, instructions=isa.streams["decode"].instructions[::-1])


def without_digests(isa: Isa) -> Isa:
    """Leave the ranks nothing to compare."""
    entries = isa.streams["decode"].queues.entries.copy()
    entries["flags"] &= np.uint16(0xFFFF ^ PACKET_DIGEST)
    return with_entries(isa, entries)


def without_a_wait(isa: Isa) -> Isa:
    """Let the second instruction start at once."""
    entries = isa.streams["decode"].queues.entries.copy()
    entries["n_waits"][np.flatnonzero(entries["n_waits"] > 0)[0]] = 0
    return with_entries(isa, entries)


def test_the_unchanged_program_runs(run: Run, program: Program, tmp_path: Path) -> None:
    save_isa(load_isa(program[1]), tmp_path / "again.h5")
    assert run("--isa", tmp_path / "again.h5").code == 0


@pytest.mark.parametrize("fault", [swap_ranks, without_digests, without_a_wait])
def test_a_stream_that_does_not_prove_itself_is_not_run(
    run: Run, program: Program, tmp_path: Path, fault: Callable[[Isa], Isa]
) -> None:
    save_isa(fault(load_isa(program[1])), tmp_path / "broken.h5")
    done = run("--isa", tmp_path / "broken.h5")
    assert done.code in (3, 4), done.err
    assert done.out == ""
    assert "broken.h5" in done.err


def test_a_context_past_the_cache_is_refused(run: Run, program: Program, tmp_path: Path) -> None:
    """Its positions would lie in other tensors' memory."""
    isa = load_isa(program[1])
    longer = {**isa.params, "ctx": isa.params["ctx"] + 1}
    save_isa(dataclasses.replace(isa, params=longer), tmp_path / "longer.h5")
    done = run("--isa", tmp_path / "longer.h5")
    assert done.code == 4
    assert "F states" in done.err


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300", "1e7", "0", "-1"])
def test_a_deadline_that_no_clock_counts_is_refused(run: Run, seconds: str) -> None:
    done = run("--deadline", seconds)
    assert done.code == 2
    assert "--deadline: got" in done.err


def test_a_plan_that_does_not_prove_itself_is_not_run(
    run: Run, program: Program, tmp_path: Path
) -> None:
    plan = load_plan(program[0])
    decode = plan.phases["decode"]
    packets = decode.packets.copy()
    late = np.flatnonzero(packets["n_waits"] > 0)[-1]
    packets["n_waits"][late] = 0
    broken = dataclasses.replace(decode, packets=packets)
    save_plan(
        dataclasses.replace(plan, phases={**plan.phases, "decode": broken}), tmp_path / "broken.h5"
    )
    done = run("--plan", tmp_path / "broken.h5")
    assert done.code in (3, 4), done.err
    assert done.out == ""


def test_a_program_of_another_degree_in_the_cache_is_not_used(
    run: Run, program: Program, tmp_path: Path
) -> None:
    first = run()
    (entry,) = (tmp_path / "cache").glob("*.isa.h5")
    entry.write_bytes(program[1].read_bytes())
    again = run("-v")
    assert (again.code, again.out) == (0, first.out)
    assert "built again" in again.err
