"""What a compiled GPU interpreter says of itself, and whether a program may be launched on it.

An object carries its identity as data (`K3Identity` of kernels_common/launch.h), which is read from
the file before a driver sees it. A kernel argument read at a wrong offset, or an opcode of another
table, would write anywhere in memory; here both are a message. It loads no driver.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from k3tool.errors import ArtifactError, TargetError
from k3tool.isa.columns import spec_of
from k3tool.isa.table import ALL_PHASES, Op, isa_hash
from k3tool.targets import Build, get_build, get_target

if TYPE_CHECKING:
    from k3tool.isa.stream import Isa

MAGIC, VERSION, SYMBOL = b"K3OBJECT", 1, "k3_identity"
WINDOWS, COLLECTIVES, SEGMENTS, FLASH = 1, 2, 4, 8
_CAPABILITIES = {
    WINDOWS: "windows", COLLECTIVES: "collectives", SEGMENTS: "segments",
    FLASH: "pages in shared memory",
}  # fmt: skip
_POINTERS = (
    "insts", "entries", "order", "windows", "waits", "signals", "expect", "arrivals", "ops",
    "results", "tensor", "step", "scratch", "counters", "gates", "cursors", "rendezvous", "control",
    "abort_word", "busy",
)  # fmt: skip
_WORDS = (
    "output_handle", "logits_handle", "phase", "segment", "n_segments", "n_windows", "n_domains",
    "n_blocks", "n_counters", "n_gates", "max_counters", "max_gates", "max_cursors",
    "max_rendezvous", "rank", "n_ranks", "max_tokens", "scratch_floats",
)  # fmt: skip
# K3Launch of kernels_common/launch.h: what a loader fills in.
LAUNCH_DTYPE = np.dtype(
    [(name, "<u8") for name in _POINTERS]
    + [("deadline_ticks", "<u8"), ("peer_stride", "<i8"), ("output_bytes", "<u8")]
    + [("logits_bytes", "<u8")]
    + [(name, "<u4") for name in _WORDS],
)
_HEAD = struct.Struct("<8s6I72s8I")
_FIELDS_BYTES = 512
_REBUILD = "make compile-gpu"


@dataclass(frozen=True, slots=True)
class Identity:
    """An object's own words: what it was compiled from and for.

    `launch` is (field, offset) of its kernel argument in order, then ("", size).
    """

    name: str
    version: int
    phases: tuple[str, ...]
    lanes: int
    capability: int
    isa_hash: str
    ops: frozenset[int]
    launch: tuple[tuple[str, int], ...]


def read_identity(data: bytes, name: str) -> Identity:
    """Return the identity of an object file; `name` is what messages call it.

    Raises: ArtifactError for a file that is no interpreter of this kind.
    """
    found = _symbol(data, SYMBOL, name)
    if len(found) < _HEAD.size or found[: len(MAGIC)] != MAGIC:
        need = f"{MAGIC.decode()} at its start"
        raise ArtifactError(f"{name}: {SYMBOL}", got=found[:8].hex(), need=need, hint=_REBUILD)
    _, version, phases, lanes, capability, size, n_fields, isa, *words = _HEAD.unpack_from(found)
    if version != VERSION:
        raise ArtifactError(f"{name}: object version", got=version, need=VERSION, hint=_REBUILD)
    ends = _HEAD.size + 2 * n_fields
    if len(found) < ends + _FIELDS_BYTES:
        got, need = f"{len(found)} bytes", f"{ends + _FIELDS_BYTES} for {n_fields} fields"
        raise ArtifactError(f"{name}: {SYMBOL}", got=got, need=need, hint=_REBUILD)
    offsets = struct.unpack_from(f"<{n_fields}H", found, _HEAD.size)
    fields = found[ends : ends + _FIELDS_BYTES].rstrip(b"\0").decode("ascii").split("\n")[:-1]
    return Identity(
        name,
        version,
        tuple(phase for index, phase in enumerate(ALL_PHASES) if phases >> index & 1),
        lanes,
        capability,
        isa.rstrip(b"\0").decode("ascii"),
        frozenset(op for op in range(256) if words[op // 32] >> op % 32 & 1),
        (*zip(fields, offsets, strict=True), ("", size)),
    )


def check_build(
    found: Identity,
    target: str,
    phases: Sequence[str],
    ops: Sequence[str],
    build: Build | None = None,
) -> None:
    """Refuse an object that is not what its compiler was asked for. Raises: TargetError."""
    _check_launch(found)
    wanted = frozenset(int(Op[name]) for name in ops)
    build = build or get_build(target, phases[0], ops)
    flash = _CAPABILITIES[FLASH]
    for field, got, need in (
        ("isa_hash", found.isa_hash, isa_hash()),
        ("phases", " ".join(found.phases), " ".join(phases)),
        ("lanes", found.lanes, build.lanes),
        ("capability", flash if found.capability & FLASH else "", flash if build.ops else ""),
        ("ops", _op_names(found.ops), _op_names(wanted)),
    ):
        if got != need:
            raise TargetError(f"{found.name}: {field}", got=got, need=need, hint=_REBUILD)


def check_object(found: Identity, isa: Isa, phase: str, *, n_segments: int = 1) -> None:
    """Refuse to launch a program's phase on an object that cannot serve it.

    Raises: TargetError with what the object has and what the program needs.
    """
    _check_launch(found)
    if found.isa_hash != isa_hash():
        got, need = f"{found.isa_hash[:12]}..", f"{isa_hash()[:12]}.. of the program"
        raise TargetError(f"{found.name}: isa_hash", got=got, need=need, hint=_REBUILD)
    if phase not in found.phases:
        got, need = " ".join(found.phases) or "no phase", phase
        raise TargetError(f"{found.name}: phase", got=got, need=need, hint=_REBUILD)
    lanes = get_build(isa.target, phase).lanes
    if found.lanes != lanes:
        need = f"{lanes} for {isa.target}"
        raise TargetError(f"{found.name}: lanes", got=found.lanes, need=need, hint=_REBUILD)
    absent = isa.opcodes()[phase] - found.ops
    if absent:
        raise TargetError(
            f"{found.name}: opcodes", got=f"no {_op_names(absent)}",
            need=f"all of the program's {phase}",
            hint=f"{_REBUILD}, or k3tool.runtime.compile_gpu --isa with this program",
        )  # fmt: skip
    lacking = _needed(isa, n_segments) & ~found.capability
    if lacking:
        names = " ".join(name for bit, name in _CAPABILITIES.items() if lacking & bit)
        raise TargetError(
            f"{found.name}: capability", got=f"no {names}", need=f"them for {isa.target}, "
            f"{isa.tp} ranks, {n_segments} segments", hint=_REBUILD,
        )  # fmt: skip


def _op_names(ops: Iterable[int]) -> str:
    """Return names, or numbers that no table of ours has."""
    specs = ((op, spec_of(op)) for op in sorted(ops))
    return " ".join(str(op) if spec is None else spec.name for op, spec in specs)


def _needed(isa: Isa, n_segments: int) -> int:
    needed = WINDOWS if get_target(isa.target).domains > 1 else 0
    needed |= COLLECTIVES if isa.tp > 1 else 0
    return needed | (SEGMENTS if n_segments > 1 else 0)


def _check_launch(found: Identity) -> None:
    """Compare the kernel argument field by field: a size alone hides two that changed places."""
    fields = LAUNCH_DTYPE.fields
    assert fields is not None
    names = LAUNCH_DTYPE.names or ()
    need = (*((name, int(fields[name][1])) for name in names), ("", LAUNCH_DTYPE.itemsize))
    if found.launch == need:
        return
    pairs = zip((*found.launch, None), (*need, None), strict=False)
    got, wanted = next((a, b) for a, b in pairs if a != b)
    raise TargetError(
        f"{found.name}: kernel argument", got=_place(got), need=_place(wanted), hint=_REBUILD
    )


def _place(field: tuple[str, int] | None) -> str:
    if field is None:
        return "nothing more"
    name, offset = field
    return f"{name} at {offset}" if name else f"its end at {offset}"


def _symbol(elf: bytes, wanted: str, name: str) -> bytes:
    """Return the bytes of a symbol's object in a 64-bit little-endian ELF file."""
    if elf[:6] != b"\x7fELF\x02\x01" or len(elf) < 64:
        raise ArtifactError(name, got=f"bytes {elf[:6].hex()}", need="a 64-bit ELF object")
    try:
        (table,) = struct.unpack_from("<Q", elf, 0x28)
        entry_bytes, count = struct.unpack_from("<HH", elf, 0x3A)
        sections = [
            struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_bytes) for i in range(count)
        ]
        for _, kind, _, _, offset, size, link, _, _, each in sections:
            for at in range(offset, offset + size, each) if kind == 2 else ():  # SHT_SYMTAB
                text, _, _, home, value, length = struct.unpack_from("<IBBHQQ", elf, at)
                start = sections[link][4] + text
                if elf[start : elf.index(b"\0", start)].decode() == wanted:
                    begin = sections[home][4] + value - sections[home][3]
                    return elf[begin : begin + length]
    except (struct.error, IndexError, ValueError, UnicodeDecodeError):
        raise ArtifactError(
            name, got="a damaged ELF file", need="an object", hint=_REBUILD
        ) from None
    raise ArtifactError(name, got=f"no {wanted}", need="an interpreter's object", hint=_REBUILD)
