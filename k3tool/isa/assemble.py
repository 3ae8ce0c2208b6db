"""The inverse of `disasm`: a plan's listing as text becomes its packets and waits again.

A line is read by the op table's row of its op, operand by operand and parameter by parameter, so
nothing is guessed and anything beyond the row is refused. Tensor names in parentheses are comments.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NoReturn

import numpy as np

from k3tool.errors import ArtifactError, quoted
from k3tool.isa import op_spec, wire
from k3tool.isa.columns import (
    GATE,
    PACKET_DIGEST,
    PACKET_REARM,
    WAIT_DTYPE,
    Columns,
    empty_packets,
)
from k3tool.isa.disasm import usual_arrivals
from k3tool.isa.op_spec import OpSpec, Param
from k3tool.isa.table import SPECS, Op

_FLAGS = {"digest": PACKET_DIGEST, "rearm": PACKET_REARM}
_NAMES = re.compile(r"\([^)]*\)")
_HEAD = re.compile(r"; (\w+): (\d+) packets, (\d+) tokens, TP (\d+)$")
_LINE = re.compile(r"(\d+) (\w+) (.*?) ?wait=\[([^\]]*)\] signal=([pg]\d+)(.*)$")
_FIELDS = {"units": "n_units", "cols": "unit_cols", "width": "width", "slices": "n_slices"}
_LARGEST = 0xFFFFFFFF


def assemble(
    lines: Iterable[str], where: str = "listing", n_handles: int = op_spec.NO_HANDLE
) -> dict[str, tuple[Columns, Columns]]:
    """Return (packets, waits) of each phase of a listing of a plan that has `n_handles` tensors.

    Raises: ArtifactError naming the line and what it has to be.
    """
    phases: dict[str, tuple[int, list[tuple[str, str]]]] = {}
    rows: list[tuple[str, str]] | None = None
    for number, line in enumerate(lines, 1):
        text, at = line.strip(), f"{where}: line {number}"
        head = _HEAD.match(text)
        if head is not None:
            if head[1] in phases:
                _refuse(at, f"{head[1]} again", "each phase once")
            rows = []
            phases[head[1]] = (int(head[4]), rows)
        elif text and rows is None:
            _refuse(at, quoted(text), "`; PHASE: N packets, N tokens, TP N` first")
        elif text and rows is not None:
            rows.append((text, at))
    if not phases:
        _refuse(where, "no phase", "a plan's listing")
    return {
        name: _phase(entries, ranks, where, n_handles) for name, (ranks, entries) in phases.items()
    }


def _phase(
    entries: list[tuple[str, str]], n_ranks: int, where: str, n_handles: int
) -> tuple[Columns, Columns]:
    packets = empty_packets(len(entries))
    packets["threshold"] = 0
    waits: list[tuple[int, int]] = []
    for index, (text, at) in enumerate(entries):
        row, plain = packets[index : index + 1], _NAMES.sub("", text)
        waits += _packet(row, plain, index, len(waits), at, n_handles)
    usual = usual_arrivals(packets, n_ranks)
    missing = packets["threshold"] == 0
    packets["threshold"][missing] = np.minimum(usual[missing], _LARGEST)
    columns = np.array(waits, WAIT_DTYPE)
    fault = wire.first_fault(packets, columns)
    if fault is not None:
        index, name, got, need = fault
        _refuse(f"{entries[index][1] if entries else where}: {name}", got, need)
    return packets, columns


def _packet(
    row: Columns, text: str, index: int, wait_ofs: int, at: str, n_handles: int
) -> list[tuple[int, int]]:
    """Fill one row from a line without names; return its waits."""
    parts = _LINE.match(text)
    if parts is None:
        _refuse(at, quoted(text), "NUMBER OP OPERANDS... wait=[...] signal=...")
    if int(parts[1]) != index:
        _refuse(f"{at}: number", parts[1], f"{index:04d}")
    if parts[2] not in Op.__members__ or not SPECS[Op[parts[2]]].is_emitted:
        _refuse(f"{at}: op", parts[2], "an op of the table")
    spec = SPECS[Op[parts[2]]]
    row["op"] = spec.op
    _words(row, spec, parts[3].split(), at, n_handles)
    waits = [_wait(word, f"{at}: wait") for word in parts[4].split(", ")] if parts[4] else []
    row["counter"] = _counter(parts[5], f"{at}: signal")
    row["wait_ofs"], row["n_waits"] = wait_ofs, min(len(waits), _LARGEST)
    row["grain"] = spec.grain
    for key, value in _pairs(parts[6].split(), at):
        match key:
            case "flags":
                for name in value.split("+"):
                    row["flags"] |= _flag(spec, name, at)
            case "grain":
                row["grain"] = _number(value, f"{at}: grain")
            case "arrivals":
                row["threshold"] = _number(value, f"{at}: arrivals")
            case _:
                _refuse(at, key, "flags, grain or arrivals")
    return waits


def _words(row: Columns, spec: OpSpec, words: list[str], at: str, n_handles: int) -> None:
    """Fill in operands, parameters and fields, which come in this order."""
    pairs = list(_pairs(words, at))
    names = [o.name for o in spec.operands] + [p.name for p in spec.params]
    if [key for key, _ in pairs[: len(names)]] != names:
        _refuse(f"{at}: {spec.name}", " ".join(key for key, _ in pairs), " ".join(names))
    for operand, (_, value) in zip(spec.operands, pairs, strict=False):
        if not value.startswith("%"):
            _refuse(f"{at}: {operand.name}", value, "%HANDLE")
        handle = _number(value[1:], f"{at}: {operand.name}")
        if handle >= n_handles:
            _refuse(f"{at}: {operand.name}", value, f"%0 to %{n_handles - 1}, the plan's tensors")
        if operand.run == 0:
            row["handles"][0, operand.slot] = handle
        first = int(row["handles"][0, operand.slot])
        if handle != first + operand.run:
            _refuse(f"{at}: {operand.name}", f"%{handle}", f"%{first + operand.run}")
    for place, param in enumerate(spec.params):
        value = pairs[len(spec.operands) + place][1]
        row["params"][0, place] = _param(param, value, at)
    fields = pairs[len(names) :]
    for key, value in fields:
        if key not in _FIELDS:
            _refuse(at, key, " or ".join(_FIELDS))
        row[_FIELDS[key]] = _number(value, f"{at}: {key}")


def _pairs(words: list[str], at: str) -> Iterator[tuple[str, str]]:
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            _refuse(at, word, "NAME=VALUE")
        yield key, value


def _param(param: Param, text: str, at: str) -> int:
    if param.kind != "f32" or text.startswith("0x"):
        return _number(text, f"{at}: {param.name}")
    try:
        value = np.float32(text)
    except ValueError:
        _refuse(f"{at}: {param.name}", text, "a number")
    return int(value.view(np.uint32))


def _wait(text: str, at: str) -> tuple[int, int]:
    counter, _, threshold = text.partition(">=")
    return _counter(counter, at), _number(threshold, at)


def _counter(text: str, at: str) -> int:
    if text[:1] not in ("p", "g"):
        _refuse(at, text, "pNUMBER or gNUMBER")
    number = _number(text[1:], at)
    if number >= GATE:
        _refuse(at, text, f"a number below {GATE}")
    return number | GATE if text[0] == "g" else number


def _flag(spec: OpSpec, name: str, at: str) -> int:
    bits = _FLAGS | {own: spec.flag(own) for own in spec.flags}
    if name not in bits:
        _refuse(f"{at}: flags", name, " or ".join(bits))
    return bits[name]


def _number(text: str, at: str) -> int:
    try:
        value = int(text, 0)
    except ValueError:
        _refuse(at, quoted(text), "a number")
    if not 0 <= value <= _LARGEST:
        _refuse(at, text, f"0 to {_LARGEST}, 32 bits")
    return value


def _refuse(what: str, got: object, need: object) -> NoReturn:
    raise ArtifactError(what, got=got, need=need, hint="edit a listing that `disasm` printed")
