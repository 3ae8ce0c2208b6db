"""The records a rank writes on its pipe (layout: kernels_cpu/record.h), and faults in words."""

from typing import Any, NamedTuple

import numpy as np

from k3tool.errors import K3Error, TargetError, UnsoundError
from k3tool.isa.columns import GATE, spec_of
from k3tool.isa.table import ALL_PHASES, RESERVED

READY, PROMPT, TOKEN, FAULT, END = 1, 2, 3, 4, 5
NO_INDEX = 0xFFFFFFFF

_FAULT_WORDS = ("code", "phase", "inst", "opcode", "workgroup", "worker", "counter", "got",
                "expected", "detail")  # fmt: skip
RECORD_DTYPE = np.dtype(
    [
        ("kind", "<u4"), ("rank", "<u4"), ("step", "<u4"), ("phase", "<u4"),
        ("position", "<u4"), ("n_tokens", "<u4"), ("id", "<u4"),
        ("best", "<f4"), ("second", "<f4"), ("reserved", "<u4"),
        ("digest", "<u8"), ("logits_digest", "<u8"), ("ns", "<u8"), ("peak_bytes", "<u8"),
        ("fault", [(name, "<u4") for name in _FAULT_WORDS]), ("name", "S16"),
    ]
)  # fmt: skip
assert RECORD_DTYPE.itemsize == 128

# K3Fault of kernels_common/k3.h, and K3_FAULT_SCALE of kernels_cpu/interp.h.
OPCODE, NONFINITE, DEADLINE, SCRATCH, RANGE, AUDIT, PEER, SCALE = 1, 2, 3, 4, 5, 6, 7, 32
# Reported first when several ranks stop: a rank that only saw another stop says nothing new.
_LATE = {PEER: 2, DEADLINE: 1}


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

    @property
    def order(self) -> tuple[int, bool, int]:
        """Return a sort key: the fault that explains most comes first."""
        waits_for_others = self.code == DEADLINE and bool(self.counter & GATE)
        return _LATE.get(self.code, 0), waits_for_others, self.rank

    def error(self) -> K3Error:
        """Return the error that a user sees."""
        got, need, kind = self._words()
        return kind(f"rank {self.rank}: {self._where()}", got=got, need=need)

    def _where(self) -> str:
        at = f"step {self.step}, position {self.position}, {ALL_PHASES[self.phase]}"
        if self.inst == NO_INDEX:
            return at
        place = f"instruction {self.inst} {op_name(self.opcode)}"
        return f"{at}: {place}: workgroup {self.workgroup}, worker {self.worker}"

    def _words(self) -> tuple[str, str, type[K3Error]]:
        """Return got, need and class."""
        counter = f"gate {self.counter & ~GATE}" if self.counter & GATE else f"counter {self.counter}"
        match self.code:
            case 1:
                return f"opcode {self.opcode}, no handler", "an op this interpreter has", TargetError
            case 2:
                return f"a NaN or infinity (row {self.detail})", "finite numbers", UnsoundError
            case 3:
                waiting = f"{counter} at {self.got} past the deadline"
                return waiting, f"{self.expected} arrivals", UnsoundError
            case 4:
                return f"more scratch used ({self.detail})", "what the program declares", UnsoundError
            case 5:
                return f"{self.detail} out of range", "a token, position or expert id", UnsoundError
            case 6:
                return f"{counter} ended at {self.got}", f"{self.expected} arrivals", UnsoundError
            case 7:
                return "another rank stopped", "all ranks", UnsoundError
            case 32:
                return f"a scale of 253 or more in expert {self.detail}", "at most 252", UnsoundError
            case _:
                return f"fault {self.code}", "a known fault", UnsoundError


def op_name(opcode: int) -> str:
    """Return an opcode's name; reserved and unknown ones are said to be so."""
    spec = spec_of(opcode)
    if spec is not None:
        return spec.name
    return f"{RESERVED[opcode]} (reserved)" if opcode in RESERVED else f"opcode {opcode}"


def parse_fault(record: Any) -> Fault:
    """Return the fault of a FAULT record (one RECORD_DTYPE row)."""
    words = (int(record["fault"][name]) for name in _FAULT_WORDS)
    return Fault(int(record["rank"]), int(record["step"]), int(record["position"]), *words)
