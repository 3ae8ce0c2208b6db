"""The host VM run entry by entry: a slice stores its own units, whenever its turn comes.

`k3tool.ref.vm` runs whole instructions in record order. Here the order is given, so that an
interleaving that a stream allows can be executed on real values. An entry computes its whole
instruction from what memory holds at that moment and stores the part that is its slice's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from k3tool.isa import op_spec
from k3tool.isa.columns import spec_of
from k3tool.isa.op_spec import OpSpec
from k3tool.isa.table import SPECS, Op
from k3tool.ref.formats import Array, Step
from k3tool.ref.ops import REFERENCE, keyword_names, operand_names, split_result
from k3tool.ref.vm import Vm, handle_of
from tests.isa.interleave import Place


class SlicedVm(Vm):
    """A rank group whose steps run in an order of entries."""

    def step_in(self, phase: str, ids: Sequence[int], order: Sequence[Place]) -> None:
        """Run the next tokens through one phase's program, entry by entry."""
        step = Step(np.asarray(ids, dtype=np.int64), self.position)
        for memory in self.memories:
            memory.poison(phase)
        with np.errstate(all="ignore"):  # what was not written is NaN
            for rank, entry in order:
                self._execute_entry(phase, rank, entry, step)
        self.position += len(step.ids)

    def _execute_entry(self, phase: str, rank: int, entry: int, step: Step) -> None:
        stream = self.isa.streams[phase]
        row = stream.queues.entries[entry]
        record = stream.instructions[rank][int(row["inst"])]
        spec = spec_of(int(record[0]) & 0xFFFF)
        assert spec is not None
        reference = REFERENCE[spec.op]
        operands = [self._operand(spec, record, name, rank, step) for name in operand_names(spec)]
        keywords = self._keywords(spec, record) | {"step": step}
        result = reference(*operands, **{name: keywords[name] for name in keyword_names(reference)})
        self._store_slice(spec, record, rank, step, result, row)

    def _store_slice(
        self, spec: OpSpec, record: Array, rank: int, step: Step, result: Any, row: Any
    ) -> None:
        memory, tokens = self.memories[rank], len(step.ids)
        value, states = split_result(spec, result)
        units = slice(int(row["unit0"]), int(row["unit1"]))
        cols = int(record[op_spec.WORD_UNIT_COLS])
        for name, new in states.items():
            kept = memory[handle_of(spec, record, name)]
            _store_state(spec, kept, np.asarray(new), units, cols, tokens)
        if spec.output.role == "inout":
            block = memory[handle_of(spec, record, spec.output.name)][len(value) - 1]
            columns = slice(units.start * cols, units.stop * cols)
            block[:tokens, columns] = value[-1][:, columns]
        values = value if isinstance(value, tuple) else (value,)
        kept = [memory[handle_of(spec, record, operand.name)] for operand in spec.outputs]
        if not kept:
            return
        if spec.unit == "member":
            for i in range(units.start, units.stop):
                kept[i][:tokens] = values[i]
            return
        mine = _mine(spec, record, units, cols, tokens, sum(v.shape[-1] for v in values))
        at = 0
        for buffer, new in zip(kept, values, strict=True):
            own = mine[:, at : at + new.shape[-1]]
            buffer[:tokens][own] = np.asarray(new)[own]
            at += new.shape[-1]


def _mine(
    spec: OpSpec, record: Array, units: slice, cols: int, tokens: int, width: int
) -> np.ndarray:
    """Return which elements of a result (tokens, width) a slice writes."""
    mine = np.zeros((tokens, width), bool)
    if spec.unit == "token":
        mine[units] = True
    elif spec.unit == "step":
        mine[:] = True
    else:
        run = int(record[op_spec.WORD_UNITS]) * cols  # an expert's rows come once a chosen expert
        for start in range(0, width, run):
            mine[:, start + units.start * cols : start + units.stop * cols] = True
    return mine


def _store_state(
    spec: OpSpec, kept: Array, new: Array, units: slice, cols: int, tokens: int
) -> None:
    if spec.op is Op.MLA_CACHE:  # rows by position, this step's last
        rows, first = kept.reshape(-1, kept.shape[-1]), len(new) - tokens
        for token in range(units.start, min(units.stop, tokens)):
            rows[first + token] = new[first + token]
    elif kept[0].ndim == 3:  # a matrix a head
        kept[0][units] = new[units]
    else:  # taps, by channel
        columns = slice(units.start * cols, units.stop * cols)
        kept[0][:, columns] = new[:, columns]


assert {spec.unit for spec in SPECS.values() if not spec.is_load} == {
    "token", "row", "column", "channel", "head", "page", "step", "member"
}  # fmt: skip
