"""isa.h5: emitted, saved, loaded; a stream out of range is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3tool.compiler.plan import load_plan, save_plan
from k3tool.errors import ArtifactError, UsageError
from k3tool.isa import device
from k3tool.isa.columns import ENTRY_DTYPE, Columns
from k3tool.isa.emit import emit
from k3tool.isa.stream import Isa, load_isa, save_isa
from tests.isa import plans


@pytest.fixture
def isa() -> Isa:
    return emit(plans.plan(), "cpu")


def test_a_saved_stream_loads_with_the_same_bytes(isa: Isa, tmp_path: Path) -> None:
    digest = save_isa(isa, tmp_path / "isa.h5")
    back = load_isa(tmp_path / "isa.h5")
    assert back.digest == digest
    assert back.tensors == isa.tensors
    assert back.inputs == isa.inputs
    assert set(back.streams) == {"decode", "prefill"}
    for name, stream in isa.streams.items():
        other = back.streams[name]
        for rank in range(2):
            assert (other.instructions[rank] == stream.instructions[rank]).all()
        for field in stream.queues.__slots__:
            ours, theirs = getattr(stream.queues, field), getattr(other.queues, field)
            assert ours.tobytes() == theirs.tobytes(), field


def test_the_same_plan_gives_the_same_digest(isa: Isa, tmp_path: Path) -> None:
    first = save_isa(isa, tmp_path / "a.h5")
    assert save_isa(emit(plans.plan(), "cpu"), tmp_path / "b.h5") == first


def test_wire_to_device_and_back_keeps_every_field(tmp_path: Path) -> None:
    saved = save_plan(plans.plan(), tmp_path / "plan.h5")
    plan = load_plan(tmp_path / "plan.h5")
    assert plan.digest == saved.digest
    isa = emit(plan, "cpu", "plan.h5")
    for name, phase in plan.phases.items():
        stream, queues = isa.streams[name], isa.streams[name].queues
        back = device.unpack(stream.instructions[1])
        for field in device.RECORD_FIELDS[:-1]:
            assert (back[field] == phase.packets[field]).all(), field
        assert np.bincount(queues.entries["inst"]).tolist() == phase.packets["n_slices"].tolist()
        assert (queues.signals == phase.packets["counter"]).all()
        assert queues.waits.tobytes() == phase.waits.tobytes()
        assert queues.gate_counts.tolist() == [8, 2]
        finals = np.concatenate([queues.local_counts, queues.gate_counts])
        assert sorted(finals[finals > 0]) == sorted(phase.packets["threshold"])


def test_another_target_than_the_plans_is_refused() -> None:
    with pytest.raises(UsageError, match="--target: got cuda:sm_90a, need cpu"):
        emit(plans.plan(), "cuda:sm_90a")


def set_entry(field: str, value: int) -> Callable[[Isa], None]:
    def change(isa: Isa) -> None:
        isa.streams["decode"].queues.entries[field][2] = value

    return change


def swap_entries(isa: Isa) -> None:
    entries = isa.streams["decode"].queues.entries
    entries[[1, 2]] = entries[[2, 1]]


def set_word(word: int, value: int) -> Callable[[Isa], None]:
    def change(isa: Isa) -> None:
        isa.streams["decode"].instructions[1][3, word] = value

    return change


def set_column(name: str, index: int, value: int, field: str = "") -> Callable[[Isa], None]:
    def change(isa: Isa) -> None:
        column: Columns = getattr(isa.streams["decode"].queues, name)
        (column[field] if field else column)[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_entry("inst", 8), "decode: entry 2: inst"),
        (set_entry("unit1", 65), "decode: entry 2: units"),
        (set_entry("unit0", 64), "decode: entry 2: units"),
        (set_entry("wait_ofs", 7), "decode: entry 2: waits"),
        (set_entry("n_waits", 8), "decode: entry 2: waits"),
        (set_entry("signal_ofs", 8), "decode: entry 2: signals"),
        (set_entry("reserved", 1), "decode: entry 2: reserved"),
        (swap_entries, "decode: entry 2: queue order: got instruction 1 after 2"),
        (set_entry("unit0", 47), "decode: instruction 2: slices"),
        (set_entry("n_waits", 2), "instruction 2: waits for: got instruction 2, need an earlier"),
        (set_column("waits", 3, 7, "counter"), "instruction 4: waits for: got instruction 7"),
        (set_column("waits", 3, 2, "counter"), "instruction 4: waits for: got nobody"),
        (set_word(0, 3), r"rank 1: instruction 3: opcode: got 3 \(ROUND_BF16\)"),
        (set_word(0, 250), r"rank 1: instruction 3: opcode: got 250 \(unknown\)"),
        (set_word(1, 20 << 16), "rank 1: instruction 3: ALL_REDUCE_ADD: handles"),
        (set_word(3, 0), "rank 1: instruction 3: ALL_REDUCE_ADD: handles"),
        (set_column("queue_ofs", 1, 60), "decode: queue_ofs"),
        (set_column("signals", 3, 8), "decode: signal 3: counter"),
        (set_column("waits", 3, 0x80000002, "counter"), "decode: wait 3: counter"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(
    isa: Isa, tmp_path: Path, change: Callable[[Isa], None], message: str
) -> None:
    save_isa(isa, tmp_path / "control.h5")
    load_isa(tmp_path / "control.h5")
    change(isa)
    save_isa(isa, tmp_path / "isa.h5")
    with pytest.raises(ArtifactError, match=message):
        load_isa(tmp_path / "isa.h5")


def test_ranks_and_workgroups_have_to_be_those_of_the_params(isa: Isa, tmp_path: Path) -> None:
    for params, message in ((("tp", 4), "ranks: got 2, need 4"),
                            (("workgroups", 5), "workgroups: got 4, need 5")):  # fmt: skip
        save_isa(replace(isa, params={**isa.params, params[0]: params[1]}), tmp_path / "isa.h5")
        with pytest.raises(ArtifactError, match=message):
            load_isa(tmp_path / "isa.h5")


def test_an_entry_is_laid_out_as_the_header_says() -> None:
    offsets = {name: ENTRY_DTYPE.fields[name][1] for name in ENTRY_DTYPE.names or ()}
    assert offsets == {
        "inst": 0, "unit0": 4, "unit1": 8, "wait_ofs": 12, "signal_ofs": 16, "n_waits": 20,
        "n_signals": 22, "slice": 24, "flags": 26, "reserved": 28,
    }  # fmt: skip
