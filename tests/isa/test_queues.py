"""Device records and workgroup queues: derived from packet columns, checked by counting."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3tool.errors import ArtifactError
from k3tool.isa import device, queues, table
from k3tool.isa.columns import GATE, WAIT_DTYPE, Columns, empty_packets
from tests.isa.programs import programs


@given(programs())
def test_records_unpack_to_what_was_packed(program: tuple[Columns, Columns]) -> None:
    packets, _ = program
    back = device.unpack(device.pack(packets, 1))
    for name in device.RECORD_FIELDS:
        assert (back[name] == packets[name]).all(), name


def test_only_a_per_rank_parameter_depends_on_the_rank() -> None:
    packets = empty_packets(2)
    packets["op"] = [table.Op.ARGMAX, table.Op.GEMV_BF16]
    packets["params"][0, :2] = (100, 800)
    packets["params"][1, :2] = (64, 1)
    first, fourth = device.pack(packets, 0), device.pack(packets, 3)
    word = table.SPECS[table.Op.ARGMAX].word("vocab_base")
    assert first[0, word] == 0
    assert fourth[0, word] == 300
    fourth[0, word] = 0
    assert (first == fourth).all()


def test_words_are_where_the_interpreter_reads_them() -> None:
    packets = empty_packets(1)
    packets["op"], packets["flags"] = table.Op.GEMV_BF16, 1
    packets["handles"][0, :3] = (1, 2, 3)
    packets["n_units"], packets["width"], packets["unit_cols"] = 7, 8, 9
    packets["params"][0, :2] = (10, 11)
    raw = device.pack(packets, 0).tobytes()
    assert np.frombuffer(raw, "<u2")[:5].tolist() == [table.Op.GEMV_BF16, 1, 1, 2, 3]
    assert np.frombuffer(raw, "<u4")[7:12].tolist() == [7, 8, 9, 10, 11]


@given(programs(max_units=200), st.integers(0, 5))
def test_every_unit_is_in_exactly_one_slice_on_tile_bounds(
    program: tuple[Columns, Columns], extra: int
) -> None:
    packets, waits = program
    n_workgroups = max(1, int(packets["n_slices"].max(initial=1))) + extra
    stream = queues.build(packets, waits, queues.Crew(*[n_workgroups] * 3), 2)
    for index, packet in enumerate(packets):
        mine = stream.entries[stream.entries["inst"] == index]
        mine = mine[np.argsort(mine["slice"])]
        assert mine["slice"].tolist() == list(range(packet["n_slices"]))
        bounds = [0, *mine["unit1"].tolist()]
        assert mine["unit0"].tolist() == bounds[:-1]
        assert bounds[-1] == packet["n_units"]
        assert all(bound % packet["grain"] == 0 for bound in bounds[:-1])
        assert (mine["unit0"] < mine["unit1"]).all()


@given(programs(max_units=200), st.integers(0, 5))
def test_queues_keep_packet_order_and_lose_no_entry(
    program: tuple[Columns, Columns], extra: int
) -> None:
    packets, waits = program
    n_workgroups = max(1, int(packets["n_slices"].max(initial=1))) + extra
    stream = queues.build(packets, waits, queues.Crew(*[n_workgroups] * 3), 2)
    assert stream.queue_ofs[0] == 0
    assert stream.queue_ofs[-1] == len(stream.entries) == packets["n_slices"].sum()
    for first, last in zip(stream.queue_ofs, stream.queue_ofs[1:], strict=False):
        assert (np.diff(stream.entries["inst"][first:last].astype(np.int64)) > 0).all()
    gates = packets["counter"] >= GATE
    assert stream.local_counts.sum() == packets["n_slices"][~gates].sum()
    assert stream.gate_counts.sum() == 2 * packets["n_slices"][gates].sum()


def test_more_slices_than_workgroups_are_refused_with_the_packet() -> None:
    packets = empty_packets(2)
    packets["op"], packets["n_units"], packets["grain"] = table.Op.ADD, 16, 1
    packets["n_slices"] = [2, 3]
    none = np.zeros(0, WAIT_DTYPE)
    queues.build(packets, none, queues.Crew(3), 1)
    with pytest.raises(ArtifactError, match="packet 1: n_slices: got 3, need at most 2"):
        queues.build(packets, none, queues.Crew(2), 1)


def test_a_stream_of_full_size_is_built_in_a_few_seconds() -> None:
    packets = empty_packets(2600)
    packets["op"], packets["n_units"], packets["grain"] = table.Op.GEMV_BF16, 7168, 8
    packets["n_slices"], packets["counter"] = 256, np.arange(2600)
    start = time.monotonic()
    stream = queues.build(packets, np.zeros(0, WAIT_DTYPE), queues.Crew(256), 8)
    assert len(stream.entries) == 2600 * 256
    assert time.monotonic() - start < 5
