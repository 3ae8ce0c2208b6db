"""The wire form: variable-length packets as they lie in a plan, decoded once, on the host.

One generic loop over the op table: no code of any op's own. A packet holds the operands and
parameters that its op's row has, and nothing else. What the codec refuses is form (lengths, unknown
or reserved opcodes, fields out of range); what packets mean to each other is
``k3tool.compiler.checks``.

Header: magic, version u16, 0 u16, first 8 bytes of the ISA hash, packets u32, waits u32, bytes u32.
Packet: op u16, flags u16, operands u8, params u8, waits u16, words u32; a handle u16 per operand
(an odd number is padded by NO_HANDLE); a u32 per parameter; a u32 per name of FIELDS; a (counter,
threshold) pair of u32 per wait. All little-endian.
"""

import functools
import struct
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np

from k3tool.errors import ArtifactError
from k3tool.isa import op_spec, table
from k3tool.isa.columns import (
    GATE,
    PACKET_DIGEST,
    PACKET_DTYPE,
    PACKET_REARM,
    WAIT_DTYPE,
    Columns,
    empty_packets,
    spec_of,
)

MAGIC = b"K3PK"
WIRE_VERSION = 1
MAX_BYTES = 1 << 28  # no plan comes near; a length field is never trusted beyond it
MAX_WAITS = 0xFFFF  # of one packet: the count is 16 bits wide here and in a stream entry
MAX_SLICES = 0xFFFF  # the slice number of a stream entry is 16 bits wide
FIELDS = ("n_units", "width", "unit_cols", "grain", "n_slices", "counter", "threshold")

_HEADER = struct.Struct("<4sHH8sIII")
_HEAD = struct.Struct("<HHBBHI")


@functools.cache
def _body(n_operands: int, n_params: int) -> struct.Struct:
    """Return the part of a packet between its head and its waits."""
    return struct.Struct(f"<{n_operands + n_operands % 2}H{n_params + len(FIELDS)}I")


def hash_prefix() -> bytes:
    """Return the bytes of the ISA hash that the header carries."""
    return bytes.fromhex(table.isa_hash()[:16])


def encode(packets: Columns, waits: Columns) -> bytes:
    """Return the wire bytes of packets and their waits.

    Shapes: packets (P,) PACKET_DTYPE, waits (N,) WAIT_DTYPE; each packet's waits are a range of N.
    Wrong columns are our own bug: AssertionError.
    """
    fault = first_fault(packets, waits)
    assert fault is None, fault
    parts = [b""]
    n_waits = 0
    for packet in packets:
        spec = spec_of(int(packet["op"]))
        assert spec is not None
        first, count = int(packet["wait_ofs"]), int(packet["n_waits"])
        body = _body(spec.n_slots, len(spec.params))
        handles = packet["handles"][: spec.n_slots + spec.n_slots % 2]
        params = packet["params"][: len(spec.params)]
        n_words = (_HEAD.size + body.size) // 4 + 2 * count
        lengths = (spec.n_slots, len(spec.params), count, n_words)
        parts.append(_HEAD.pack(int(packet["op"]), int(packet["flags"]), *lengths))
        fields = (int(packet[name]) for name in FIELDS)
        parts.append(body.pack(*handles.tolist(), *params.tolist(), *fields))
        parts.append(waits[first : first + count].astype(WAIT_DTYPE).tobytes())
        n_waits += count
    n_bytes = _HEADER.size + sum(map(len, parts))
    assert n_bytes <= MAX_BYTES, n_bytes
    parts[0] = _HEADER.pack(MAGIC, WIRE_VERSION, 0, hash_prefix(), len(packets), n_waits, n_bytes)
    return b"".join(parts)


def decode(data: bytes, where: str = "wire") -> tuple[Columns, Columns]:
    """Return (packets, waits) of wire bytes; `where` names the source in messages.

    The waits of packet i follow those of packet i - 1, so equal bytes give equal columns.
    Raises: ArtifactError on anything that `encode` would not have written, with the packet's index.
    """
    n_packets, n_waits = _decode_header(data, where)
    packets = empty_packets(n_packets)
    lists: list[Columns] = []
    offset, total = _HEADER.size, 0
    for index in range(n_packets):
        offset, wait_list = _decode_packet(data, offset, packets[index : index + 1], where, index)
        packets["wait_ofs"][index] = total
        total += len(wait_list)
        lists.append(wait_list)
    if offset != len(data):
        _refuse(where, f"{len(data) - offset} bytes after the last packet", "none")
    if total != n_waits:
        _refuse(f"{where}: header: waits", n_waits, f"{total}, what the packets hold")
    waits = np.concatenate(lists) if lists else np.zeros(0, WAIT_DTYPE)
    fault = first_fault(packets, waits)
    if fault is not None:
        index, name, got, need = fault
        _refuse(f"{where}: packet {index}: {name}", got, need)
    return packets, waits


def _refuse(what: str, got: object, need: object) -> NoReturn:
    raise ArtifactError(what, got=got, need=need, hint="compile the plan again with this build")


def _decode_header(data: bytes, where: str) -> tuple[int, int]:
    if len(data) < _HEADER.size:
        _refuse(f"{where}: header", f"{len(data)} bytes", f"at least {_HEADER.size}")
    magic, version, zero, prefix, n_packets, n_waits, n_bytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        _refuse(f"{where}: magic", magic.hex(), MAGIC.hex())
    if (version, zero) != (WIRE_VERSION, 0):
        _refuse(f"{where}: version", f"{version}.{zero}", f"{WIRE_VERSION}.0")
    if prefix != hash_prefix():
        _refuse(f"{where}: isa_hash", prefix.hex() + "..", hash_prefix().hex() + "..")
    if n_bytes != len(data) or n_bytes > MAX_BYTES:
        _refuse(f"{where}: length", f"{len(data)} bytes", f"{n_bytes}, at most {MAX_BYTES}")
    if n_packets * _HEAD.size > len(data):
        _refuse(f"{where}: header: packets", n_packets, f"as many as {len(data)} bytes can hold")
    return n_packets, n_waits


def _decode_packet(
    data: bytes, offset: int, row: Columns, where: str, index: int
) -> tuple[int, Columns]:
    """Fill one row from `offset` on; return the next packet's offset and this one's waits."""
    at = f"{where}: packet {index}"
    if len(data) - offset < _HEAD.size:
        _refuse(at, f"{len(data) - offset} bytes left", f"a head of {_HEAD.size}")
    op, flags, n_operands, n_params, count, n_words = _HEAD.unpack_from(data, offset)
    spec = spec_of(op)
    if spec is None:
        known = {**table.RESERVED, **table.RETIRED}
        _refuse(f"{at}: opcode", f"{op} ({known.get(op, 'unknown')})", "an op of the table")
    body = _body(spec.n_slots, len(spec.params))
    size = _HEAD.size + body.size + count * WAIT_DTYPE.itemsize
    got = (n_operands, n_params, n_words)
    need = (spec.n_slots, len(spec.params), size // 4)
    if got != need:
        _refuse(f"{at}: {spec.name}: (operands, params, words)", got, need)
    if len(data) - offset < size:
        _refuse(f"{at}: {spec.name}", f"{len(data) - offset} bytes left", size)
    words = body.unpack_from(data, offset + _HEAD.size)
    n_handles = n_operands + n_operands % 2
    row["op"], row["flags"], row["n_waits"] = op, flags, count
    row["handles"][0, :n_handles] = words[:n_handles]
    row["params"][0, :n_params] = words[n_handles : n_handles + n_params]
    for name, value in zip(FIELDS, words[n_handles + n_params :], strict=True):
        row[name] = value
    first = offset + _HEAD.size + body.size
    waits = np.frombuffer(data, WAIT_DTYPE, count, first).copy()
    return offset + size, waits


# -- fields --------------------------------------------------------------------------------------


def first_fault(packets: Columns, waits: Columns) -> tuple[int, str, object, str] | None:
    """Return (packet index, field, got, need) of the first field out of range, None if all fit."""
    assert packets.dtype == PACKET_DTYPE, packets.dtype
    assert waits.dtype == WAIT_DTYPE, waits.dtype
    for name, good, need in (*_record_rules(packets), *_schedule_rules(packets, len(waits))):
        if not good.all():
            bad = int(np.argmin(good))
            return bad, name, packets[name][bad].tolist(), need
    return _first_wait_fault(packets, waits)


def _record_rules(packets: Columns) -> Iterator[tuple[str, Columns, str]]:
    """Yield (field, which packets satisfy it, what is needed) for what goes into a record."""
    n_operands = _per_op(packets["op"], lambda spec: spec.n_slots)
    n_params = _per_op(packets["op"], lambda spec: len(spec.params))
    used = np.arange(op_spec.N_HANDLES) < n_operands[:, None]
    spare = np.arange(op_spec.N_PARAMS) >= n_params[:, None]
    own = _per_op(packets["op"], lambda spec: spec.flag_mask)
    known = np.where(own < 0, 0, own) | PACKET_DIGEST | PACKET_REARM
    fitting = ((packets["handles"] == op_spec.NO_HANDLE) != used).all(axis=1)
    yield "op", n_operands >= 0, "an op of the table"
    yield "flags", (packets["flags"] & ~known) == 0, "digest, rearm and the op's own"
    yield "handles", fitting, "a tensor for each operand and none beyond"
    unused = ~((packets["params"] != 0) & spare).any(axis=1)
    yield "params", unused, "0 beyond the op's own"
    for name in ("n_units", "width", "grain"):
        yield name, packets[name] >= 1, "at least 1"


def _schedule_rules(packets: Columns, n_waits: int) -> Iterator[tuple[str, Columns, str]]:
    """Yield (field, which packets satisfy it, what is needed) for slices, counters and waits."""
    names = ("n_units", "grain", "n_slices", "counter", "wait_ofs", "n_waits")
    wide = {name: packets[name].astype(np.int64) for name in names}
    tiles = -(-wide["n_units"] // np.maximum(wide["grain"], 1))
    most = np.minimum(tiles, MAX_SLICES)
    good = (wide["n_slices"] >= 1) & (wide["n_slices"] <= most)
    yield "n_slices", good, f"1 to the number of tiles, at most {MAX_SLICES}"
    own = wide["counter"] == np.arange(len(packets))
    gate = ((wide["counter"] & GATE) != 0) & ((wide["counter"] & ~GATE) < len(packets))
    yield "counter", own | gate, "the packet's own index or a gate below the number of packets"
    yield "threshold", packets["threshold"] >= 1, "at least 1"
    yield "n_waits", wide["n_waits"] <= MAX_WAITS, f"at most {MAX_WAITS}"
    yield "wait_ofs", wide["wait_ofs"] + wide["n_waits"] <= n_waits, "a range of the waits"


def _per_op(ops: Columns, size: Callable[[op_spec.OpSpec], int]) -> Columns:
    """Return `size` of each opcode's row, -1 where the table has none."""
    found, inverse = np.unique(ops, return_inverse=True)
    specs = [spec_of(int(op)) for op in found]
    sizes = np.array([-1 if spec is None else size(spec) for spec in specs], np.int64)
    return sizes[inverse] if len(ops) else np.zeros(0, np.int64)


def _first_wait_fault(packets: Columns, waits: Columns) -> tuple[int, str, object, str] | None:
    counter = waits["counter"].astype(np.int64)
    good = ((counter & ~GATE) < len(packets)) & (waits["threshold"] >= 1)
    if good.all():
        return None
    bad = int(np.argmin(good))
    last = packets["wait_ofs"].astype(np.int64) + packets["n_waits"]
    owner = int(np.argmax((packets["wait_ofs"] <= bad) & (bad < last)))
    got = tuple(waits[bad].tolist())
    return owner, "wait", got, "a packet's or gate's counter and at least 1 arrival"
