"""The records a rank writes on its pipe (layout: kernels_cpu/record.h), and faults in words."""

import os
from typing import Any, NamedTuple

import numpy as np

from k3tool.checkpoint.spread import MOST_FOLDERS
from k3tool.errors import ArtifactError, K3Error, TargetError, UnsoundError
from k3tool.isa.columns import GATE, spec_of
from k3tool.isa.table import ALL_PHASES, RESERVED

READY, PROMPT, TOKEN, FAULT, END, DONE = 1, 2, 3, 4, 5, 6
NO_INDEX = 0xFFFFFFFF

_FAULT_WORDS = ("code", "phase", "inst", "opcode", "workgroup", "worker", "counter", "got",
                "expected", "detail")  # fmt: skip
_IO_FIELDS = (
    ("kind", "<u4"), ("file", "<u4"), ("error", "<i4"), ("reserved", "<u4"), ("offset", "<u8"),
    ("bytes", "<u8"),
)  # fmt: skip
RECORD_DTYPE = np.dtype(
    [
        ("kind", "<u4"), ("rank", "<u4"), ("step", "<u4"), ("phase", "<u4"),
        ("position", "<u4"), ("n_tokens", "<u4"), ("id", "<u4"),
        ("best", "<f4"), ("second", "<f4"), ("slot", "<u4"),
        ("digest", "<u8"), ("logits_digest", "<u8"), ("ns", "<u8"), ("peak_bytes", "<u8"),
        ("fault", [(name, "<u4") for name in _FAULT_WORDS]), ("name", "S16"),
        ("io", [(name, kind) for name, kind in _IO_FIELDS]),
        ("n_hits", "<u8"), ("n_misses", "<u8"), ("n_read_bytes", "<u8"),
        ("trace_error", "<i4"), ("is_direct", "<u4"),
        ("n_device_bytes", "<u8", MOST_FOLDERS),
    ]
)  # fmt: skip
assert RECORD_DTYPE.itemsize == 256

# K3Fault of kernels_common/k3.h, and K3_FAULT_SCALE of kernels_cpu/interp.h.
OPCODE, NONFINITE, DEADLINE, SCRATCH, RANGE, AUDIT, PEER, SCALE = 1, 2, 3, 4, 5, 6, 7, 32
IO, ABSENT, REQUEST = 33, 34, 35
_IO_SHORT, _IO_CHANGED = 2, 3  # enum K3IoKind; of any other kind errno says what it is
# Reported first when several ranks stop: what was lost explains numbers that are none, and a rank
# that only saw another stop says nothing new.
_LATE = {IO: -1, PEER: 2, DEADLINE: 1}
_STILL = (
    "no rank got on meanwhile: something hangs, or other processes leave it no core; "
    "raise --deadline on a machine that busy"
)


class IoFault(NamedTuple):
    """What could not be read: K3IoFault of kernels_cpu/io.h."""

    kind: int
    file: int
    errno: int
    offset: int
    n_bytes: int

    def error(self, path: str, where: str) -> K3Error:
        """Return the error that a user sees; `where` says in which step and for which tensor."""
        span = f": bytes {self.offset} to {self.offset + self.n_bytes}"
        place = path + span if self.n_bytes else path
        need = f"the weights of {where}"
        if self.kind == _IO_SHORT:
            return ArtifactError(place, got="the file ends before", need=need)
        if self.kind == _IO_CHANGED:
            return ArtifactError(place, got="changed since the run began", need=need)
        return K3Error(place, got=os.strerror(self.errno), need=need)


class Fault(NamedTuple):
    """Why a rank stopped; fields as in K3FaultReport."""

    rank: int
    step: int
    position: int
    code: int
    phase: int
    inst: int
    opcode: int
    workgroup: int
    worker: int
    counter: int
    got: int
    expected: int
    detail: int
    io: IoFault | None = None

    @property
    def order(self) -> tuple[int, bool, int]:
        """Return a sort key: the fault that explains most comes first."""
        waits_for_others = self.code == DEADLINE and bool(self.counter & GATE)
        return _LATE.get(self.code, 0), waits_for_others, self.rank

    @property
    def is_waiting(self) -> bool:
        """Return whether it says only that something awaited did not come."""
        return self.code in (PEER, DEADLINE)

    def error(self, result: str = "") -> K3Error:
        """Return the error that a user sees; `result` names the tensor the instruction writes."""
        got, need, kind = self._words()
        hint = _STILL if self.code == DEADLINE else None
        return kind(f"rank {self.rank}: {self._where(result)}", got=got, need=need, hint=hint)

    def _where(self, result: str) -> str:
        at = f"step {self.step}, position {self.position}, {ALL_PHASES[self.phase]}"
        if self.inst == NO_INDEX:
            return at
        op = f"{op_name(self.opcode)} {result}".strip()
        place = f"workgroup {self.workgroup}, worker {self.worker}"
        return f"{at}: instruction {self.inst} {op}: {place}"

    def _words(self) -> tuple[str, str, type[K3Error]]:
        """Return got, need and class."""
        is_gate = bool(self.counter & GATE)
        counter = f"gate {self.counter & ~GATE}" if is_gate else f"counter {self.counter}"
        arrivals, kind = f"{self.expected} arrivals", UnsoundError
        if self.code == OPCODE:
            return f"opcode {self.opcode}, no handler", "an op this interpreter has", TargetError
        words = {
            NONFINITE: (f"a NaN or infinity (row {self.detail})", "finite numbers"),
            DEADLINE: (f"{counter} at {self.got} when the deadline passed", arrivals),
            SCRATCH: (f"more scratch used ({self.detail})", "what the program declares"),
            RANGE: (f"{self.detail}", "an id, position or expert in range"),
            AUDIT: (f"{counter} ended at {self.got}", arrivals),
            PEER: ("another rank stopped", "all ranks"),
            ABSENT: (f"expert {self.detail} is not in memory", "every expert that is used"),
            REQUEST: (
                f"a request that the image does not allow ({self.detail})",
                "one that it does",
            ),
            SCALE: (f"a scale byte above 252 in expert {self.detail}", "at most 252"),
        }
        got, need = words.get(self.code, (f"fault {self.code}", "a known fault"))
        return got, need, kind


def op_name(opcode: int) -> str:
    """Return an opcode's name; reserved and unknown ones are said to be so."""
    spec = spec_of(opcode)
    if spec is not None:
        return spec.name
    return f"{RESERVED[opcode]} (reserved)" if opcode in RESERVED else f"opcode {opcode}"


def parse_fault(record: Any) -> Fault:
    """Return the fault of a FAULT record (one RECORD_DTYPE row)."""
    words = {name: int(record["fault"][name]) for name in _FAULT_WORDS}
    io = record["io"]
    names = ("kind", "file", "error", "offset", "bytes")
    lost = IoFault(*(int(io[name]) for name in names)) if int(io["kind"]) else None
    at = (int(record["rank"]), int(record["step"]), int(record["position"]))
    return Fault(*at, **words, io=lost)
