"""One rank in a device's memory: its image's parts, its weights, its buffers, and K3Launch.

Sizes and places come from the image (k3tool.runtime.image), as on the CPU; here they get
addresses. It asks the device for nothing before all ranks' need is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3tool.errors import ArtifactError, TargetError, UnsoundError
from k3tool.isa.stream import Isa
from k3tool.isa.table import ALL_PHASES
from k3tool.ref.formats import SCALE_LIMIT
from k3tool.runtime.gpu_object import LAUNCH_DTYPE
from k3tool.runtime.gpu_runtime import Device
from k3tool.runtime.gpu_vendors import DRIVERS
from k3tool.runtime.image_layout import (
    PLACE_ARENA,
    PLACE_EXPERTS,
    PLACE_FILE,
    PLACE_PEER,
    PLACE_PRIVATE,
)
from k3tool.runtime.image_view import view_image
from k3tool.runtime.requests import Step
from k3tool.tables import bytes_text, count_text, have_text, need_text
from k3tool.targets import get_target

Array = npt.NDArray[Any]
LINE_BYTES = 64  # K3_LINE
_ALIGN = 256
_READ_BYTES = 64 << 20
_SCRATCH_WORDS = 16  # a scratch ends on whole lines, and a guard of as many words lies behind it
_PROGRAM = ("inst", "entry", "wait", "signal", "expect")

# K3Step and K3ResultRow, and K3Control of kernels_common; REPORT is its K3FaultReport.
STEP_DTYPE = np.dtype(
    [("n_tokens", "<u4"), ("head_from", "<u4"), ("epoch", "<u4"), ("max_pages", "<u4"),
     ("token_id", "<u8"), ("position", "<u8"), ("slot", "<u8"), ("page_table", "<u8")]
)  # fmt: skip
RESULT_DTYPE = np.dtype([("row_elems", "<u4"), ("replicated", "<u4")])
_REPORT = ("code", "phase", "inst", "opcode", "workgroup", "worker", "counter", "got", "expected",
           "detail")  # fmt: skip
CONTROL_DTYPE = np.dtype(
    [("stop", "<u4"), ("departed", "<u4"), ("digest", "<u8"),
     ("fault", [(name, "<u4") for name in _REPORT])]
)  # fmt: skip


class Part(NamedTuple):
    """Bytes of a file and where they go, as an offset in the rank's memory."""

    path: str
    at: int
    n_bytes: int
    to: int
    what: str  # of a scale: the tensor's name; its bytes are looked at


@dataclass(slots=True)
class Room:
    """Memory that is being laid out: names get offsets, and at last there is a size."""

    n_bytes: int = 0
    places: dict[Any, int] = field(default_factory=dict)

    def take(self, name: Any, n_bytes: int) -> int:
        """Return the offset of a new piece."""
        at = self.places[name] = self.n_bytes
        self.n_bytes += -(-n_bytes // _ALIGN) * _ALIGN
        return at


class RankMemory:
    """A rank's image laid out; `place` puts it on a device, `step` writes what a step needs."""

    def __init__(
        self, isa: Isa, image: bytes, n_ranks: int, *, is_launch_per_op: bool = False
    ) -> None:
        """Lay out; nothing is allocated. A step is one launch, or one for each instruction."""
        self.isa, self.view, self._is_launch_per_op = isa, view_image(image), is_launch_per_op
        header = self.view.header
        self.rank, self.n_ranks = int(header["rank"]), n_ranks
        self.phases = [i for i, name in enumerate(ALL_PHASES) if name in isa.streams]
        self.n_blocks = int(header["n_workgroups"])
        self.max_tokens = max(int(self.phase_row(p)["max_tokens"]) for p in self.phases)
        self.gate_bytes = 2 * int(header["max_gates"]) * LINE_BYTES
        self.segment_bytes = self.gate_bytes + int(header["peer_bytes"])
        self.room = Room()
        self.parts: list[Part] = []
        self._lay_out()
        self.base = self._segments = self._stride = 0

    def phase_row(self, phase: int) -> Any:
        """Return a phase's PHASE_DTYPE row."""
        return self.view.sections["phase", phase][0]

    @property
    def weight_bytes(self) -> int:
        """Return what is read from files."""
        return sum(part.n_bytes for part in self.parts)

    # -- laying out ------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        header, take = self.view.header, self.room.take
        for (kind, phase), rows in self.view.sections.items():
            if kind in (*_PROGRAM, "op"):
                take((kind, phase), rows.nbytes)
        for phase in self.phases:
            for name, table in self._windows(phase).items():
                take((name, phase), table.nbytes)
            take(("launch", phase), LAUNCH_DTYPE.itemsize * self.n_segments(phase))
        n_tensors = len(self.view.sections["tensor", 0])
        take("tensor", 8 * n_tensors)
        take("results", RESULT_DTYPE.itemsize * n_tensors)
        take("expert", 16 * len(self.view.sections["expert", 0]))
        take("step", STEP_DTYPE.itemsize + 3 * 4 * self.max_tokens)
        take("page_table", 4 * int(header["n_slots"]) * int(header["max_pages"]))
        take("control", CONTROL_DTYPE.itemsize)
        for name, n_lines in self._lines().items():
            take(name, 2 * n_lines * LINE_BYTES)
        take("scratch", self.n_blocks * 4 * max(map(self._scratch_stride, self.phases)))
        take("arena", int(header["arena_bytes"]))
        take("private", int(header["private_bytes"]))
        for handle, row in enumerate(self.view.sections["tensor", 0]):
            self.parts += self._weight_parts(handle, row)

    def _weight_parts(self, handle: int, row: Any) -> Iterator[Part]:
        """Yield where a weight's bytes come from, each part on a boundary that lanes load from."""
        paths, place = self.view.paths, int(row["place"])
        if place == PLACE_FILE:
            n_bytes = int(row["bytes"])
            to = self.room.take(("weight", handle), n_bytes)
            yield Part(paths[int(row["file"])], int(row["offset"]), n_bytes, to, "")
        elif place == PLACE_EXPERTS:
            first, n = int(row["expert0"]), int(row["n_experts"])
            name = self.isa.tensors[handle].source
            for e, expert in enumerate(self.view.sections["expert", 0][first : first + n]):
                for part in ("packed", "scale"):
                    n_bytes = int(row[f"{part}_bytes"])
                    to = self.room.take((part, first + e), n_bytes)
                    at, path = int(expert[f"{part}_offset"]), paths[int(expert[f"{part}_file"])]
                    what = f"{name.replace('{E}', str(e))}.weight_scale" if part == "scale" else ""
                    yield Part(path, at, n_bytes, to, what)
        elif place not in (PLACE_ARENA, PLACE_PEER, PLACE_PRIVATE):
            raise TargetError(
                f"--target {self.isa.target}: {self.isa.tensors[handle].name}",
                got="a weight that comes by LOAD", need="all weights in the device's memory",
            )  # fmt: skip

    def n_segments(self, phase: int) -> int:
        """Return the launches of a step."""
        return len(self.view.sections["inst", phase]) if self._is_launch_per_op else 1

    def launches(self, phase: int) -> Iterator[int]:
        """Yield the addresses of a step's K3Launch structures, in order."""
        for segment in range(self.n_segments(phase)):
            yield self.at(("launch", phase)) + segment * LAUNCH_DTYPE.itemsize

    def _windows(self, phase: int) -> dict[str, Array]:
        """Return `windows` ([segment][window][2]) and, of several domains, `order` and `arrivals`.

        Without domains a window is a block's own queue.
        """
        stream = self.isa.streams[ALL_PHASES[phase]]
        insts, found = stream.queues.entries["inst"], stream.windows
        if found is None:
            return {"windows": self._cut(phase, insts, self.view.sections["queue", phase])}
        return {
            "windows": self._cut(phase, insts[found.order], found.window_ofs),
            "order": found.order.astype("<u4"), "arrivals": found.arrivals.astype("<u4"),
        }  # fmt: skip

    def _cut(self, phase: int, insts: Array, bounds: Array) -> Array:
        """Return where segments, which are ranges of instructions, cut windows of rising ones."""
        n = self.n_segments(phase)
        cuts = np.arange(n + 1) * len(self.view.sections["inst", phase]) // n
        ends = [
            first + np.searchsorted(insts[first:last], cuts)
            for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        places = np.array(ends, "<u4").reshape(len(ends), n + 1)
        return np.stack([places[:, :-1], places[:, 1:]], axis=2).swapaxes(0, 1).copy()

    def _lines(self) -> dict[str, int]:
        """Return the lines of one bank, over the phases."""
        lines = {"counters": int(self.view.header["max_counters"]), "cursors": 0, "rendezvous": 0}
        for phase in self.phases:
            windows = self._windows(phase)
            if "order" in windows:
                n_cursors = windows["windows"].size // 2
                lines["cursors"] = max(lines["cursors"], n_cursors)
                lines["rendezvous"] = max(lines["rendezvous"], windows["arrivals"].size)
        return lines

    def _scratch_stride(self, phase: int) -> int:
        """Return k3_scratch_stride: words from one block's scratch to the next one's."""
        floats = int(self.phase_row(phase)["scratch_floats"])
        return -(-floats // _SCRATCH_WORDS) * _SCRATCH_WORDS + _SCRATCH_WORDS

    # -- on a device -----------------------------------------------------------------------------

    def at(self, name: Any) -> int:
        """Return the address of a piece."""
        return self.base + self.room.places[name]

    def place(
        self, device: Device, segments: tuple[int, int], abort_word: int, deadline_ticks: int,
        progress: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Allocate and write everything; `progress` gets the bytes of weights as they are read.

        Raises: ArtifactError for a file that has changed; UnsoundError for a scale of no number.
        """
        self._segments, self._stride = segments
        self.base = device.alloc(self.room.n_bytes)
        write = device.upload
        for (kind, phase), rows in self.view.sections.items():
            if kind in (*_PROGRAM, "op"):
                _write(device, self.at((kind, phase)), rows)
        tensors = self.view.sections["tensor", 0]
        results = np.zeros(len(tensors), RESULT_DTYPE)
        for name in RESULT_DTYPE.names or ():
            results[name] = tensors[name]
        pages = int(self.view.header["n_slots"]) * int(self.view.header["max_pages"])
        _write(device, self.at("results"), results)
        _write(device, self.at("tensor"), self._pointers())
        _write(device, self.at("expert"), self._experts())
        _write(device, self.at("page_table"), np.arange(pages, dtype="<u4"))
        for phase in self.phases:
            for name, table in self._windows(phase).items():
                _write(device, self.at((name, phase)), table)
            write(self.at(("launch", phase)), self._launch(phase, abort_word, deadline_ticks))
        self._check_files()
        for part in sorted(self.parts):
            _copy(device, part, self.base, progress)

    def _check_files(self) -> None:
        """Refuse a file that was replaced since its header was read."""
        for path, row in zip(self.view.paths, self.view.sections["file", 0], strict=False):
            size = os.stat(path).st_size
            if size != int(row["bytes"]):
                raise ArtifactError(path, got=f"{size} bytes", need=f"{row['bytes']} by its header")

    def tensor_address(self, handle: int) -> int:
        """Return where a tensor lies."""
        row = self.view.sections["tensor", 0][handle]
        place, offset = int(row["place"]), int(row["offset"])
        if place == PLACE_FILE:
            return self.at(("weight", handle))
        if place == PLACE_EXPERTS:
            return self.at("expert") + 16 * int(row["expert0"])
        if place == PLACE_PEER:
            return self.gates + self.gate_bytes + offset
        return self.at("arena" if place == PLACE_ARENA else "private") + offset

    @property
    def gates(self) -> int:
        """Return the start of this rank's segment: gates in two banks, then peer buffers."""
        return self._segments + self.rank * self._stride

    def _pointers(self) -> Array:
        handles = range(len(self.view.sections["tensor", 0]))
        return np.array([self.tensor_address(handle) for handle in handles], "<u8")

    def _experts(self) -> Array:
        n = len(self.view.sections["expert", 0])
        return np.array(
            [[self.at(("packed", i)), self.at(("scale", i))] for i in range(n)], "<u8"
        ).reshape(n, 2)

    def _launch(self, phase: int, abort_word: int, deadline_ticks: int) -> Array:
        """Return a phase's K3Launch structures, one a segment."""
        row, tensors = self.phase_row(phase), self.view.sections["tensor", 0]
        windows = self._windows(phase)
        domains = windows["arrivals"].shape[1] if "arrivals" in windows else 1
        values: dict[str, Any] = self._addresses(phase) | {
            "gates": self.gates, "abort_word": abort_word, "deadline_ticks": deadline_ticks,
            "peer_stride": self._stride, "phase": phase, "n_domains": domains,
            "n_segments": self.n_segments(phase), "n_windows": windows["windows"].shape[1],
            "segment": np.arange(self.n_segments(phase)),
            "n_blocks": self.n_blocks, "n_ranks": self.n_ranks, "rank": self.rank,
            "max_gates": self.view.header["max_gates"], "busy": 0,
        }  # fmt: skip
        values |= {f"max_{name}": count for name, count in self._lines().items()}
        values |= {
            name: row[name] for name in ("n_counters", "n_gates", "max_tokens", "scratch_floats")
        }
        for head in ("output", "logits"):
            handle = int(row[f"{head}_handle"])
            values |= {f"{head}_handle": handle, f"{head}_bytes": tensors[handle]["bytes"]}
        assert set(values) == set(LAUNCH_DTYPE.names or ())
        launch = np.zeros(self.n_segments(phase), LAUNCH_DTYPE)
        for name, value in values.items():
            launch[name] = value
        return launch

    def _addresses(self, phase: int) -> dict[str, Any]:
        """Return what a launch points to, by field; 0 where this program has none."""
        plurals = {"inst": "insts", "entry": "entries", "wait": "waits", "signal": "signals"}
        found = {plurals.get(kind, kind): self.at((kind, phase)) for kind in _PROGRAM}
        for name in ("windows", "order", "arrivals"):
            found[name] = self.at((name, phase)) if (name, phase) in self.room.places else 0
        shared = ("results", "tensor", "step", "scratch", "counters", "cursors", "rendezvous",
                  "control")  # fmt: skip
        return found | {name: self.at(name) for name in shared} | {"ops": self.at(("op", 0))}

    def write_step(self, device: Device, asked: Step, epoch: int) -> None:
        """Write the parameters of a step, and clear its digest."""
        n, at, width = len(asked.tokens), self.at("step"), 4 * self.max_tokens
        lists = np.zeros((3, self.max_tokens), "<u4")
        lists[:, :n] = np.array([(t.id, t.position, t.slot) for t in asked.tokens], "<u4").T
        step = np.zeros(1, STEP_DTYPE)
        step["n_tokens"], step["head_from"], step["epoch"] = n, asked.head_from, epoch
        step["max_pages"] = self.view.header["max_pages"]
        for index, name in enumerate(("token_id", "position", "slot")):
            step[name] = at + STEP_DTYPE.itemsize + index * width
        step["page_table"] = self.at("page_table")
        device.upload(at, step.tobytes() + lists.tobytes())
        device.upload(self.at("control"), bytes(CONTROL_DTYPE.itemsize))

    def control(self, device: Device) -> Any:
        """Return what the last launch left: CONTROL_DTYPE."""
        data = device.download(self.at("control"), CONTROL_DTYPE.itemsize)
        return np.frombuffer(data, CONTROL_DTYPE)[0]

    def progress(self, device: Device) -> bytes:
        """Return all counters: what grows while blocks get on."""
        n_bytes = 2 * self._lines()["counters"] * LINE_BYTES
        return device.download(self.at("counters"), n_bytes)


def require_memory(device: Device, ranks: Sequence[RankMemory]) -> int:
    """Return the bytes that all ranks take. Raises: TargetError saying the need, if not free."""
    need = sum(rank.room.n_bytes + rank.segment_bytes for rank in ranks)
    free = device.free_bytes()
    if need > free:
        weights = bytes_text(sum(rank.weight_bytes for rank in ranks))
        monitor = DRIVERS[get_target(ranks[0].isa.target).family].monitor
        raise TargetError(
            f"memory of {device.name}", got=f"{have_text(free)} free",
            need=f"{need_text(need)} for {count_text(len(ranks), 'rank')}, "
            f"{weights} of it weights",
            hint=f"end what else uses the device ({monitor}), or compile with a smaller --ctx",
        )  # fmt: skip
    return need


def _write(device: Device, address: int, rows: Array) -> None:
    if rows.nbytes:
        device.upload(address, np.ascontiguousarray(rows).tobytes())


def _copy(device: Device, part: Part, base: int, progress: Callable[[int], None]) -> None:
    """Read a part and write it. What came short must not be computed with."""
    descriptor = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for done in range(0, part.n_bytes, _READ_BYTES):
            n = min(_READ_BYTES, part.n_bytes - done)
            data = os.pread(descriptor, n, part.at + done)
            if len(data) != n:
                place = f"{part.path}: bytes {part.at + done} to {part.at + done + n}"
                raise ArtifactError(place, got="the file ends before", need="a whole weight")
            if part.what:
                _check_scales(part, data)
            device.upload(base + part.to + done, data)
            progress(n)
    finally:
        os.close(descriptor)


def _check_scales(part: Part, data: bytes) -> None:
    """Numerics, rule 4. On the CPU an expert is asked at its first use; here they all are."""
    largest = int(np.frombuffer(data, np.uint8).max(initial=0))
    if largest >= SCALE_LIMIT:
        raise UnsoundError(
            f"{part.path}: {part.what}", got=f"scale byte {largest}",
            need=f"at most {SCALE_LIMIT - 1}", hint="k3tool inspect --values names its row",
        )  # fmt: skip
