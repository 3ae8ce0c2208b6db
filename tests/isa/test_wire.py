"""The wire codec: round trips, and refusals by name for any other bytes."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3tool.errors import ArtifactError
from k3tool.isa import wire
from k3tool.isa.columns import GATE, WAIT_DTYPE, Columns
from tests.isa.programs import one_packet, programs


@given(programs())
def test_decode_gives_back_what_was_encoded(program: tuple[Columns, Columns]) -> None:
    packets, waits = program
    data = wire.encode(packets, waits)
    packets_back, waits_back = wire.decode(data)
    assert packets_back.tobytes() == packets.tobytes()
    assert waits_back.tobytes() == waits.tobytes()
    assert wire.encode(packets_back, waits_back) == data


def test_shared_and_unordered_wait_lists_become_lists_in_packet_order() -> None:
    packets, waits = one_packet()
    packets = np.concatenate([packets, packets])
    packets["counter"] = [0, 1]
    packets["wait_ofs"] = [1, 0]
    waits = np.array([(0, 7), (GATE, 8)], WAIT_DTYPE)
    packets_back, waits_back = wire.decode(wire.encode(packets, waits))
    assert packets_back["wait_ofs"].tolist() == [0, 1]
    assert waits_back.tolist() == [(GATE, 8), (0, 7)]


@pytest.mark.fuzz
@given(st.binary(max_size=256))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        wire.decode(data)


@pytest.mark.fuzz
@given(programs(), st.data())
def test_mutated_bytes_decode_canonically_or_are_refused(
    program: tuple[Columns, Columns], data: st.DataObject
) -> None:
    raw = bytearray(wire.encode(*program))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        packets, waits = wire.decode(bytes(raw))
    except ArtifactError:
        return
    assert wire.encode(packets, waits) == bytes(raw)


@given(programs(), st.data())
def test_every_cut_and_every_extension_is_refused(
    program: tuple[Columns, Columns], data: st.DataObject
) -> None:
    raw = wire.encode(*program)
    cut = data.draw(st.integers(0, len(raw) - 1))
    for wrong in (raw[:cut], raw + b"\0" * (1 + cut % 9)):
        with pytest.raises(ArtifactError):
            wire.decode(wrong)


def resized(raw: bytes) -> bytes:
    """Give the header the length that the bytes have, so that deeper checks are reached."""
    return raw[:24] + struct.pack("<I", len(raw)) + raw[28:]


def test_a_cut_packet_is_named_even_when_the_header_agrees() -> None:
    raw = wire.encode(*one_packet())
    with pytest.raises(ArtifactError, match="packet 0: RMSNORM"):
        wire.decode(resized(raw[:-4]))
    with pytest.raises(ArtifactError, match="4 bytes after the last packet"):
        wire.decode(resized(raw + b"\0\0\0\0"))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"XXXX", "magic"),
        (4, b"\x09\x00", "version"),
        (6, b"\x01\x00", "version"),
        (8, b"\0\0\0\0\0\0\0\0", "isa_hash"),
        (16, b"\xff\xff\xff\x7f", "header: packets"),
        (20, b"\x07\x00\x00\x00", "header: waits"),
        (28, b"\x03\x00", r"packet 0: opcode: got 3 \(ROUND_BF16\)"),
        (28, b"\xfe\xfe", r"packet 0: opcode: got 65278 \(unknown\)"),
        (30, b"\x04\x00", "packet 0: flags"),
        (32, b"\x02", "packet 0: RMSNORM: .operands"),
        (33, b"\x02", "packet 0: RMSNORM: .operands"),
        (34, b"\x02\x00", "packet 0: RMSNORM: .operands"),
        (36, b"\x01\x00", "packet 0: RMSNORM: .operands"),
        (40, b"\xff\xff", "packet 0: handles"),
        (46, b"\x00\x00", "packet 0: handles"),
        (52, b"\0\0\0\0", "packet 0: n_units"),
        (56, b"\0\0\0\0", "packet 0: width"),
        (64, b"\0\0\0\0", "packet 0: grain"),
        (68, b"\0\0\0\0", "packet 0: n_slices"),
        (68, b"\2\0\0\0", "packet 0: n_slices"),
        (72, b"\1\0\0\0", "packet 0: counter"),
        (72, b"\1\0\0\x80", "packet 0: counter"),
        (76, b"\0\0\0\0", "packet 0: threshold"),
        (80, b"\1\0\0\x80", "packet 0: wait"),
        (84, b"\0\0\0\0", "packet 0: wait"),
    ],
)
def test_each_altered_field_is_refused_by_name(offset: int, value: bytes, message: str) -> None:
    raw = wire.encode(*one_packet())
    wire.decode(raw)  # the control: unaltered bytes are accepted
    with pytest.raises(ArtifactError, match=message):
        wire.decode(raw[:offset] + value + raw[offset + len(value) :])
