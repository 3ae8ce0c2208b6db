"""Write the image of one rank: the flat file that `k3-cpu` maps (layout: image_layout).

An image joins a program, one run's request and the places of the rank's weights; it holds absolute
paths and lives only as long as the run. It reads no weight and decides nothing about the stream.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.compiler.plan import EXPERT_ROLES, Tensor
from k3tool.compiler.record_checks import results_of, short_states
from k3tool.errors import ArtifactError
from k3tool.isa.op_spec import WORD_PARAMS, OpSpec
from k3tool.isa.stream import Isa, Stream
from k3tool.isa.table import ALL_PHASES, PAGE_TOKENS, SPECS, isa_hash
from k3tool.runtime import image_layout as layout
from k3tool.runtime.digest import digest_words
from k3tool.runtime.homes import (
    check_alignment,
    pinned_bytes,
    primed_handles,
    row_tables,
    weight_homes,
)
from k3tool.runtime.weights import ExpertBytes, RankWeights, TensorBytes

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Request:
    """What one run asks of a program.

    `first_phase` is the program that reads the prompt; `chunk` tokens at a time, at most its
    max_tokens. `all_logits` computes the head for every prompt token, not only for the last.
    """

    prompt: tuple[int, ...]
    n_gen: int
    stop_ids: tuple[int, ...]
    chunk: int
    all_logits: bool = False
    first_phase: str = "prefill"


def build_image(
    isa: Isa, rank: int, weights: RankWeights, request: Request | None, vocab: int
) -> bytes:
    """Return the image of one rank; without a request it is an engine's, which is given steps.

    Raises: ArtifactError naming the tensor when a weight is absent or not what the plan says, or a
    state is too small for the sequences and positions that the parameters promise.
    """
    _check_states(isa)
    files = _Files(weights)
    places = _place(isa)
    tensors, experts = _tensor_rows(isa, places, weights, files)
    sections: list[tuple[str, int, Array]] = []
    for index, phase in enumerate(ALL_PHASES):
        if phase in isa.streams:
            sections += _phase_sections(isa, isa.streams[phase], index, rank)
    paths, text = files.tables()
    sections += [
        ("op", 0, _op_rows()),
        ("tensor", 0, tensors),
        ("expert", 0, experts),
        ("text", 0, text),
        ("file", 0, paths),
        ("prompt", 0, np.array(request.prompt if request else (), "<u4")),
        ("stop", 0, np.array(request.stop_ids if request else (), "<u4")),
    ]
    header = _header(isa, rank, request, vocab, places)
    return _join(header, sections)


def _check_states(isa: Isa) -> None:
    """Refuse states that the page table would reach past: op bodies index them without looking."""
    for state in short_states(isa.tensors, isa.params):
        raise ArtifactError(
            f"{state.name}: {state.unit}", got=state.got,
            need=f"{state.need} for batch {isa.params['batch']} and ctx {isa.params['ctx']}",
            hint="emit the stream again with this build",
        )  # fmt: skip


def checksum(data: bytes) -> int:
    """Return the sum over 8-byte words of mix(word ^ mix(index)), modulo 2^64 (image.h)."""
    return digest_words(np.frombuffer(data, "<u8"), 0)


# -- memory ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Places:
    """Sizes of a rank's memory, and the offset of each tensor in the one it lives in."""

    offsets: tuple[int, ...]
    arena_bytes: int
    private_bytes: int
    peer_bytes: int


def _place(isa: Isa) -> _Places:
    """Lay out private memory; arena and peer offsets are the plan's.

    Raises: ArtifactError if phases share peer bytes: a fast rank's first collective of the next
    step would overwrite candidates of this step's argmax fold that a slow rank has not read.
    """
    _check_peers_apart(isa)
    offsets, private = [], 0
    for tensor in isa.tensors:
        if tensor.role in ("arena", "peer"):
            offsets.append(tensor.offset)
        elif tensor.role in ("state", "output", "logits"):
            offsets.append(private)
            private += _up(tensor.n_bytes, layout.ALIGN)
        else:
            offsets.append(0)
    arena = max(stream.arena_bytes for stream in isa.streams.values())
    peer = max(stream.peer_bytes for stream in isa.streams.values())
    return _Places(tuple(offsets), _up(arena, layout.ALIGN), private, _up(peer, layout.ALIGN))


def _check_peers_apart(isa: Isa) -> None:
    spans = {
        phase: [(t.offset, t.offset + t.n_bytes) for t in isa.tensors if _is_peer(t, phase)]
        for phase in isa.streams
    }
    ends = {phase: (min(s)[0], max(e for _, e in s)) for phase, s in spans.items() if s}
    for (first, a), (second, b) in itertools.combinations(sorted(ends.items()), 2):
        if a[0] < b[1] and b[0] < a[1]:
            raise ArtifactError(
                f"isa: peer buffers of {first} and {second}", got=f"{a} and {b}", need="apart"
            )


def _is_peer(tensor: Tensor, phase: str) -> bool:
    return tensor.role == "peer" and tensor.phase == phase


def _up(n_bytes: int, align: int) -> int:
    return -(-n_bytes // align) * align


class _Files:
    """Files by path, in order of first use, and behind them all their copies in other folders."""

    def __init__(self, weights: RankWeights) -> None:
        self._weights = weights
        self._rows: dict[str, tuple[int, int]] = {}

    def row(self, path: str, n_bytes: int) -> int:
        """Return the row of a file."""
        return self._rows.setdefault(path, (len(self._rows), n_bytes))[0]

    def tables(self) -> tuple[Array, Array]:
        """Return FILE_DTYPE rows and the text they point into."""
        paths = list(self._rows)
        rows = [[0, n, layout.NO_COPY, self._weights.copies(path)[0][1]]
                for path, (_, n) in self._rows.items()]  # fmt: skip
        for index, path in enumerate(self._rows):
            last = rows[index]
            for copy, folder in self._weights.copies(path)[1:]:
                last[2] = len(rows)
                last = [0, last[1], layout.NO_COPY, folder]
                rows.append(last)
                paths.append(copy)
        text = b""
        for row, path in zip(rows, paths, strict=True):
            row[0] = len(text)
            text += os.fsencode(path) + b"\0"
        return np.array([tuple(row) for row in rows], layout.FILE_DTYPE), np.frombuffer(text, "u1")


def _tensor_rows(
    isa: Isa, places: _Places, weights: RankWeights, files: _Files
) -> tuple[Array, Array]:
    """Return TENSOR_DTYPE rows by handle and EXPERT_DTYPE rows."""
    homes = weight_homes(isa)
    primed = primed_handles(isa)
    rows = np.zeros(len(isa.tensors), layout.TENSOR_DTYPE)
    experts: list[ExpertBytes] = []
    for handle, tensor in enumerate(isa.tensors):
        row = rows[handle]
        row["place"] = layout.PLACE_OF_ROLE[tensor.role]
        row["elem_bytes"] = layout.ELEM_BYTES[tensor.dtype]
        row["bytes"], row["offset"] = tensor.n_bytes, places.offsets[handle]
        row["row_elems"] = tensor.local[-1] if tensor.local else 0
        row["replicated"] = tensor.is_replicated
        if tensor.role in ("weight", "ring"):
            _point_at(row, weights.tensor(tensor), files)
            row["is_primed"] = handle in primed
        if handle in homes:
            row["place"] = layout.PLACE_RING if tensor.role == "ring" else layout.PLACE_PINNED
            row["home"] = homes[handle]
            check_alignment(tensor, weights.tensor(tensor), layout.ELEM_BYTES[tensor.dtype])
        if tensor.role in EXPERT_ROLES:
            found = weights.experts(tensor)
            row["expert0"], row["n_experts"] = len(experts), len(found)
            row["packed_bytes"] = found[0].packed.n_bytes
            row["scale_bytes"] = found[0].scale.n_bytes
            experts += found
    table = np.zeros(len(experts), layout.EXPERT_DTYPE)
    for index, (packed, scale) in enumerate(experts):
        table[index] = (
            files.row(packed.path, packed.file_bytes),
            files.row(scale.path, scale.file_bytes),
            packed.offset,
            scale.offset,
        )
    return rows, table


def _point_at(row: Any, found: TensorBytes, files: _Files) -> None:
    row["file"], row["offset"] = files.row(found.path, found.file_bytes), found.offset


# -- program -----------------------------------------------------------------------------------


def _phase_sections(
    isa: Isa, stream: Stream, phase: int, rank: int
) -> list[tuple[str, int, Array]]:
    queues = stream.queues
    row = np.zeros(1, layout.PHASE_DTYPE)
    output, logits = (_handle_of(isa, role, stream.name) for role in ("output", "logits"))
    row["max_tokens"], row["scratch_floats"] = stream.max_tokens, stream.scratch_floats
    row["n_counters"], row["n_gates"] = len(queues.local_counts), len(queues.gate_counts)
    row["output_handle"], row["logits_handle"] = output, logits
    row["logits_cols"] = isa.tensors[logits].local[-1]
    return [
        ("phase", phase, row),
        ("inst", phase, np.ascontiguousarray(stream.instructions[rank], "<u4")),
        ("entry", phase, queues.entries),
        ("queue", phase, queues.queue_ofs.astype("<u4")),
        ("wait", phase, queues.waits),
        ("signal", phase, queues.signals.astype("<u4")),
        ("expect", phase, np.concatenate([queues.local_counts, queues.gate_counts]).astype("<u4")),
    ]


def _handle_of(isa: Isa, role: str, phase: str) -> int:
    found = [
        handle
        for handle, tensor in enumerate(isa.tensors)
        if tensor.role == role and tensor.phase in (phase, "")
    ]
    if len(found) != 1:
        raise ArtifactError(f"isa: {phase}: tensors of role {role}", got=len(found), need=1)
    return found[0]


def _op_rows() -> Array:
    rows = np.zeros(layout.N_OPCODES, layout.OP_DTYPE)
    rows["route_slot"] = layout.NO_SLOT
    for op, spec in SPECS.items():
        route = _route_slot(spec)
        units = layout.UNIT_KINDS.get(spec.unit, layout.UNIT_COLUMNS)
        first, mode = spec.slot(results_of(spec)[0].name), _digest_mode(spec)
        rows[int(op)] = (first, mode, units, route, len(results_of(spec)), 0)
    return rows


def _route_slot(spec: OpSpec) -> int:
    """Return the slot of the route an op reads, or the parameter top_k of one that makes its own.

    An expert is admitted by its id before a result that rests on it is published.
    """
    names = [operand.name for operand in spec.operands]
    if "route" in names:
        return spec.slot("route")
    if "scores" in names and not spec.is_load:
        return layout.ROUTE_IN_SCRATCH | spec.word("top_k") - WORD_PARAMS
    return layout.NO_SLOT


def _digest_mode(spec: OpSpec) -> int:
    """Return where the result lies: rows of one or more buffers, the paged cache, or elsewhere."""
    if len(spec.outputs) > 1:
        return layout.DIGEST_GROUP
    if spec.output.role == "out":
        return layout.DIGEST_ROWS
    is_cache = spec.output.role == "state" and spec.unit == "token"
    return layout.DIGEST_CACHE if is_cache else layout.DIGEST_NONE


def _header(isa: Isa, rank: int, request: Request | None, vocab: int, places: _Places) -> Array:
    header = np.zeros(1, layout.HEADER_DTYPE)
    context = int(isa.params["ctx"])
    streams = isa.streams.values()
    values = {
        "magic": layout.MAGIC, "version": layout.VERSION,
        "isa_hash": isa_hash().encode(), "rank": rank,
        "n_ranks": isa.tp, "n_workgroups": isa.n_workgroups, "n_slots": int(isa.params["batch"]),
        "max_pages": -(-context // PAGE_TOKENS), "max_context": context,
        "max_counters": max(len(stream.queues.local_counts) for stream in streams),
        "max_gates": max(stream.n_gates for stream in streams),
        "arena_bytes": places.arena_bytes, "private_bytes": places.private_bytes,
        "peer_bytes": places.peer_bytes, "vocab": vocab,
    }  # fmt: skip
    if request is not None:
        values |= {
            "chunk": request.chunk, "n_gen": request.n_gen, "all_logits": int(request.all_logits),
            "first_phase": ALL_PHASES.index(request.first_phase),
        }  # fmt: skip
    if isa.residency is not None:
        residency = isa.residency
        values |= {
            "n_load_queues": isa.crew.load, "n_fetch_queues": isa.crew.fetch,
            "n_expert_slots": residency["slots"], "slot_bytes": residency["slot_bytes"],
            "ring_bytes": residency["ring_bytes"],
            "pinned_bytes": pinned_bytes(isa.tensors, row_tables(isa)),
        }  # fmt: skip
    for name, value in values.items():
        header[name] = value
    return header


def _join(header: Array, sections: Sequence[tuple[str, int, Array]]) -> bytes:
    """Return header, section table and sections, each section on ALIGN bytes, with the checksum."""
    table = np.zeros(len(sections), layout.SECTION_DTYPE)
    head = layout.HEADER_DTYPE.itemsize
    offset = _up(head + table.nbytes, layout.ALIGN)
    for index, (kind, phase, data) in enumerate(sections):
        elem = data.dtype.itemsize * (data.shape[1] if data.ndim == 2 else 1)
        table[index] = (1 + layout.SECTIONS.index(kind), phase, offset, len(data), elem, 0)
        offset += _up(data.nbytes, layout.ALIGN)
    out = bytearray(offset)
    header["n_sections"], header["file_bytes"] = len(sections), offset
    out[head : head + table.nbytes] = table.tobytes()
    for row, (_, _, data) in zip(table, sections, strict=True):
        start = int(row["offset"])
        out[start : start + data.nbytes] = np.ascontiguousarray(data).tobytes()
    out[:head] = header.tobytes()
    header["checksum"] = checksum(bytes(out))
    out[:head] = header.tobytes()
    return bytes(out)
