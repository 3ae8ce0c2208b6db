"""The compiled interpreter on hand-made programs: it computes, and every trap names its place."""

import errno
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3tool.errors import ArtifactError, TargetError, UnsoundError
from k3tool.isa.columns import GATE, Columns
from k3tool.isa.stream import Isa
from k3tool.isa.table import RESERVED, Op
from k3tool.runtime import records
from k3tool.runtime.build import build
from k3tool.runtime.interpreter import check_leaves, handlers, load
from k3tool.runtime.ranks import FaultError, Launch, RankGroup
from k3tool.runtime.records import Fault
from tests.runtime import toy


def fault_of(launch: Launch) -> Fault:
    with pytest.raises(FaultError) as caught:
        toy.run(launch)
    return caught.value.fault


def faulty(isa: Isa, folder: Path, **options: object) -> Fault:
    return fault_of(toy.launch(toy.images(isa, folder), **options))


# -- it computes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "workgroups", "threads"),
    [(1, 1, 1), (1, 4, 2), (1, 3, 5), (2, 4, 1), (4, 2, 2), (4, 9, 1)],
)
def test_any_ranks_workgroups_and_threads_give_the_tokens(
    tmp_path: Path, tp: int, workgroups: int, threads: int
) -> None:
    made = toy.images(toy.toy_isa(tp, workgroups), tmp_path)
    want = toy.expected_tokens(toy.random_weights(), (5,), 6)
    assert toy.run(toy.launch(made, n_threads=threads)) == want


@pytest.mark.parametrize("leaves", ["scalar", "avx2", "avx512"])
def test_leaves_can_be_chosen(tmp_path: Path, leaves: str) -> None:
    if leaves not in load().leaves:
        pytest.skip(f"NOT RUN: no {leaves} on this CPU")
    made = toy.images(toy.toy_isa(), tmp_path)
    with RankGroup(toy.launch(made, leaves=leaves)) as group:
        list(group.steps())
        assert group.leaves == leaves


def test_a_chunk_longer_than_the_program_takes_is_refused(tmp_path: Path) -> None:
    made = toy.images(toy.toy_isa(2), tmp_path, first_phase="decode")
    with pytest.raises(ArtifactError, match="chunk 3 above"):  # decode takes one token at a time
        toy.run(toy.launch(made))


def test_unavailable_leaves_are_refused() -> None:
    bare = load()
    only = type(bare)(bare.path, bare.isa_hash, bare.source_hash, ("scalar",))
    check_leaves(only, "auto")
    with pytest.raises(TargetError, match="avx512"):
        check_leaves(only, "avx512")


# -- traps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", [99, 255, 300, 65535, *RESERVED])
def test_unknown_and_reserved_opcodes_trap(tmp_path: Path, opcode: int) -> None:
    def edit(rows: Columns) -> None:
        rows[toy.ADD, 0] = opcode

    fault = faulty(toy.change_records(toy.toy_isa(), edit), tmp_path)
    assert (fault.code, fault.inst, fault.opcode) == (records.OPCODE, toy.ADD, opcode)
    error = fault.error()
    assert isinstance(error, TargetError)
    assert f"instruction {toy.ADD}" in str(error)
    assert RESERVED.get(opcode, str(opcode)) in str(error)


@pytest.fixture(scope="module")
def without_add(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("variant") / "k3-cpu"
    return build(made, defines=["K3_CONTROL_WITHOUT=K3_OP_ADD"], only=["scalar"])


def test_a_removed_handler_is_missing_and_traps(tmp_path: Path, without_add: Path) -> None:
    assert Op.ADD not in handlers("cpu", without_add)["decode"]
    assert Op.ADD in handlers("cpu")["decode"]
    options = {"interpreter": without_add, "leaves": "scalar"}
    fault = faulty(toy.toy_isa(), tmp_path, **options)
    assert (fault.code, fault.inst) == (records.OPCODE, toy.ADD)


def test_a_variant_is_never_taken_for_the_real_one(without_add: Path) -> None:
    with pytest.raises(TargetError, match="source_hash"):
        load(without_add)


def _raise_threshold(counter: int) -> Callable[[Columns], Columns]:
    def edit(waits: Columns) -> Columns:
        assert (waits["counter"] == counter).any()
        waits["threshold"][waits["counter"] == counter] += 1
        return waits

    return edit


@pytest.mark.parametrize(("counter", "waiting"), [(toy.EMBED, toy.ADD), (GATE, toy.REDUCE)])
def test_a_threshold_too_high_meets_the_deadline(
    tmp_path: Path, counter: int, waiting: int
) -> None:
    isa = toy.change_queues(toy.toy_isa(2), waits=_raise_threshold(counter))
    fault = faulty(isa, tmp_path, deadline_seconds=0.4)
    reached = 4 * (2 if counter & GATE else 1)
    assert (fault.code, fault.inst, fault.counter) == (records.DEADLINE, waiting, counter)
    assert (fault.got, fault.expected) == (reached, reached + 1)
    name = "gate 0" if counter & GATE else f"counter {counter}"
    assert name in str(fault.error())
    assert "raise --deadline" in fault.error().text()
    assert isinstance(fault.error(), UnsoundError)


def test_a_fault_leaves_nan_and_no_token(tmp_path: Path) -> None:
    isa = toy.change_queues(toy.toy_isa(), waits=_raise_threshold(toy.NORM))
    made = toy.images(isa, tmp_path, all_logits=True)
    start = toy.launch(made, deadline_seconds=0.4, logits_shape=(10, toy.VOCAB))
    with RankGroup(start) as group:
        with pytest.raises(FaultError):
            list(group.steps())
        assert np.isnan(group.logits()[:3]).all()  # the step that failed
        assert (group.logits()[3:] == 0).all()  # never reached


def test_the_audit_finds_an_entry_that_never_ran(tmp_path: Path) -> None:
    """Drop a slice of the head and lower what waits for it: only the final count can tell."""

    def edit(waits: Columns) -> Columns:
        waits["threshold"][waits["counter"] == toy.HEAD] -= 1
        return waits

    def silence(entries: Columns) -> Columns:
        entries["n_signals"][(entries["inst"] == toy.HEAD) & (entries["slice"] == 0)] = 0
        return entries

    fault = faulty(toy.change_queues(toy.toy_isa(), waits=edit, entries=silence), tmp_path)
    assert (fault.code, fault.counter) == (records.AUDIT, toy.HEAD)
    assert (fault.got, fault.expected) == (3, 4)


def test_the_audit_finds_a_gate_that_got_too_much(tmp_path: Path) -> None:
    def add(counts: Columns) -> Columns:
        counts[1] -= 1
        return counts

    fault = faulty(toy.change_queues(toy.toy_isa(2), gate_counts=add), tmp_path)
    assert (fault.code, fault.counter, fault.got) == (records.AUDIT, GATE | 1, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_norm_input_traps(tmp_path: Path, bad: float) -> None:
    weights = toy.random_weights()
    weights["table"][5, 17] = bad
    made = toy.images(toy.toy_isa(2), tmp_path, per_rank={0: weights, 1: weights})
    fault = fault_of(toy.launch(made))
    assert (fault.code, fault.inst, fault.opcode) == (records.NONFINITE, toy.NORM, Op.RMSNORM)
    assert "RMSNORM y=decode/h" in str(fault.error("y=decode/h"))


def test_too_little_declared_scratch_traps(tmp_path: Path) -> None:
    def fuse(rows: Columns) -> None:
        x, w, y = rows[toy.HEAD, 1] & 0xFFFF, rows[toy.HEAD, 1] >> 16, rows[toy.HEAD, 2] & 0xFFFF
        norm = rows[toy.NORM, 1] >> 16
        rows[toy.HEAD, 0] = (rows[toy.HEAD, 0] & 0xFFFF0000) | Op.NORM_GEMV_BF16
        rows[toy.HEAD, 1], rows[toy.HEAD, 2] = x | norm << 16, w | y << 16
        rows[toy.HEAD, 10:13] = toy.HIDDEN, 0, 1

    isa = toy.change_records(toy.toy_isa(), fuse)
    enough = toy.change_stream(isa, lambda s: replace(s, scratch_floats=4096))
    assert len(toy.run(toy.launch(toy.images(enough, tmp_path)))) == 6
    short = toy.change_stream(isa, lambda s: replace(s, scratch_floats=8))
    fault = faulty(short, tmp_path)
    assert (fault.code, fault.inst) == (records.SCRATCH, toy.HEAD)


def test_a_token_outside_the_table_traps(tmp_path: Path) -> None:
    def edit(rows: Columns) -> None:
        rows[toy.EMBED, 10] = 4

    fault = faulty(toy.change_records(toy.toy_isa(), edit), tmp_path)
    assert (fault.code, fault.inst) == (records.RANGE, toy.EMBED)


def test_canaries_notice_a_thread_without_flushing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = tmp_path_factory.mktemp("variant") / "k3-cpu"
    build(made, defines=["K3_CONTROL_NO_FTZ"], only=["team"])
    with pytest.raises(TargetError, match="canary"):
        toy.run(toy.launch(toy.images(toy.toy_isa(), tmp_path), interpreter=made))


@pytest.mark.parametrize(
    ("number", "limit"),
    [(errno.EMFILE, "ulimit -n"), (errno.EAGAIN, "ulimit -u"), (errno.EACCES, None)],
)
def test_what_a_limit_forbids_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, limit: str | None
) -> None:
    """Of a process that does not start for another reason the hint is the interpreter's own."""
    made = toy.launch(toy.images(toy.toy_isa(), tmp_path))

    def refuse(*words: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(TargetError) as ranks:
        toy.run(made)
    copy = tmp_path / "k3-cpu"  # one that has not been asked yet
    copy.touch(0o755)
    with pytest.raises(TargetError) as asked:
        load(copy)
    if limit is None:
        assert str(ranks.value.need) == "memory and processes"
        assert "make build" in str(asked.value.hint)
    else:
        assert limit in str(ranks.value.hint)
        assert limit in str(asked.value.hint)
