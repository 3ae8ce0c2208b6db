"""Runs one op body on NumPy arrays, through the record and context an interpreter would use."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3tool.isa.op_spec import (
    N_HANDLES,
    NO_HANDLE,
    RECORD_WORDS,
    WORD_HANDLES,
    WORD_PARAMS,
    WORD_UNITS,
    OpSpec,
)
from k3tool.isa.table import SPECS, Op

GUARD = np.float32(1.25e30)


class StepStruct(ctypes.Structure):
    """K3Step."""

    _fields_ = [
        ("n_tokens", ctypes.c_uint32),
        ("head_from", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
        ("max_pages", ctypes.c_uint32),
        ("token_id", ctypes.c_void_p),
        ("position", ctypes.c_void_p),
        ("slot", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
    ]


@dataclass
class Tokens:
    """The step's tokens; by default one sequence in slot 0 from position `first`."""

    n: int
    first: int = 0
    ids: Any = None
    position: Any = None
    slot: Any = None
    page_table: Any = field(default_factory=lambda: np.arange(8, dtype=np.uint32)[None])
    head_from: int = 0

    def struct(self) -> tuple[StepStruct, list[np.ndarray]]:
        def words(value, default):
            return np.ascontiguousarray(default if value is None else value, np.uint32)

        keep = [
            words(self.ids, np.zeros(self.n)),
            words(self.position, self.first + np.arange(self.n)),
            words(self.slot, np.zeros(self.n)),
            words(self.page_table, None),
        ]
        pages = self.page_table.shape[1]
        step = StepStruct(self.n, self.head_from, 0, pages, *(a.ctypes.data for a in keep))
        return step, keep


def record_of(
    spec: OpSpec, units: tuple[int, int, int], params: Mapping[str, float], flags: int
) -> np.ndarray:
    """Return the record of an instruction whose handles count operands: a run is neighbours."""
    assert set(params) == {param.name for param in spec.params}, params
    words = np.zeros(RECORD_WORDS, np.uint32)
    words[0] = int(spec.op) | flags << 16
    first: dict[int, int] = {}
    for index, operand in enumerate(spec.operands):
        first.setdefault(operand.slot, index)
    handles = np.full(N_HANDLES, NO_HANDLE, np.uint16)
    handles[: spec.n_slots] = [first[slot] for slot in range(spec.n_slots)]
    words[WORD_HANDLES:WORD_UNITS] = handles.view(np.uint32)
    words[WORD_UNITS:WORD_PARAMS] = units
    for param in spec.params:
        value = params[param.name]
        as_bits = np.float32(value).view(np.uint32) if param.kind == "f32" else value
        words[spec.word(param.name)] = as_bits
    return words


def addresses_of(spec: OpSpec, operands: Mapping[str, Any]) -> Any:
    """Return where the operands lie, in the row's order; the caller keeps them alive."""
    addresses = (ctypes.c_void_p * len(spec.operands))()
    for index, operand in enumerate(spec.operands):
        value = operands[operand.name]
        assert isinstance(value, np.ndarray), operand.name
        assert value.flags.c_contiguous, operand.name
        addresses[index] = value.ctypes.data
    return addresses


class Bodies:
    """The op bodies of one compilation."""

    def __init__(self, isa: str, path: object) -> None:
        self.isa = isa
        self.lib = ctypes.CDLL(str(path))
        self.lib.t_op.restype = ctypes.c_uint64

    def run(
        self,
        op: Op,
        operands: Mapping[str, Any],
        *,
        n_units: int,
        width: int,
        unit_cols: int = 1,
        params: Mapping[str, float] | None = None,
        tokens: Tokens,
        max_tokens: int | None = None,
        slices: list[tuple[int, int]] | None = None,
        ranks: tuple[int, int, int] = (0, 1, 0),
        check_fault: bool = True,
        scratch_floats: int | None = None,
        flags: int = 0,
    ) -> int:
        """Run `op` on `operands` (arrays are written in place). Returns the fault word.

        `self.scratch` is what the last slice left there.
        """
        spec = SPECS[op]
        words = record_of(spec, (n_units, width, unit_cols), params or {}, flags)
        addresses = addresses_of(spec, operands)
        integers = {param.name: int(words[spec.word(param.name)]) for param in spec.params}
        known = {"n_units": n_units, "width": width, "unit_cols": unit_cols, **integers}
        max_tokens = max_tokens or tokens.n
        need = spec.scratch(known, max_tokens) if scratch_floats is None else scratch_floats
        scratch = np.full(need + 64, GUARD)
        step, held = tokens.struct()
        fault = 0
        for u0, u1 in slices or [(0, n_units)]:
            fault = fault or self.lib.t_op(
                ctypes.c_void_p(words.ctypes.data), addresses, ctypes.byref(step),
                ctypes.c_void_p(scratch.ctypes.data), need, ranks[0], ranks[1], max_tokens,
                ctypes.c_int64(ranks[2]), u0, u1,
            )  # fmt: skip
        assert np.all(scratch[need:] == GUARD), f"{spec.name} wrote past its scratch"
        assert held
        self.scratch = scratch[:need]
        if check_fault:
            assert fault == 0, f"{spec.name}: fault {fault >> 32} detail {fault & 0xFFFFFFFF}"
        return fault
