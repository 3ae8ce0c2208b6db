"""What a row of the op table says: operands, parameters, slicing, placement; the record's words.

The rows are in `table`, what is derived of them in their readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from k3tool.isa.table import Op

RECORD_WORDS = 16
N_HANDLES = 12
NO_HANDLE = 0xFFFF
# Words of the record: 0 = op | flags << 16; 1..6 = twelve 16-bit tensor handles; then what every op
# has, so that a checker can derive an instruction's writes without knowing the op; then parameters.
WORD_HANDLES, WORD_UNITS, WORD_WIDTH, WORD_UNIT_COLS, WORD_PARAMS = 1, 7, 8, 9, 10
N_PARAMS = RECORD_WORDS - WORD_PARAMS
# Of word 0's flags: lower bits are the schedule's (`columns`), from here on an op's own.
FLAG_SHIFT = 4
RUN_SHIFT = 8  # a generated operand constant is slot | place in the slot's run << RUN_SHIFT

# What an operand is. "in": an activation; "peer": an activation in this collective's peer slots,
# read from every rank; "weight"; "state": read and written in place, lives across steps; "inout":
# an activation written in place; "out": the result; "load": a weight that is brought into memory.
Role = Literal["in", "peer", "weight", "state", "inout", "out", "load"]
# What slices divide. A unit of "token" is one token's whole row; of every other axis it is
# ``unit_cols`` neighbouring columns of the output for every token of the step. Several results lie
# side by side in that count, though each has a buffer of its own; a "member" is one of them. A
# "page" is what a page of latent cache gives, in a row with room for all of a sequence's. A
# "block" is LOAD_BLOCK_BYTES of a weight's pages, or one I/O worker's share of the experts.
Unit = Literal["token", "row", "column", "channel", "head", "page", "step", "member", "block"]
# Where the result lives. "replicated": the same on every rank; "follow": as the first "in" operand;
# "weight": rows of the weight, so sharded when the weight is split by rows; "partial": a subtree of
# a row-parallel sum, to be reduced; "reduced": the whole of such a sum, which only the graph says.
Placement = Literal["replicated", "follow", "weight", "partial", "reduced"]
# A parameter's word: "f32" holds the bits, "u32_per_rank" a stride that emission multiplies by the
# rank.
ParamKind = Literal["u32", "f32", "u32_per_rank"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor operand: its handle is that of slot ``slot`` plus ``run``.

    Twelve slots do not hold the operands of the widest ops, so neighbours may share one: their
    tensors have consecutive handles, and the slot holds the first one's.
    """

    name: str
    role: Role
    slot: int = 0
    run: int = 0


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter word of the record."""

    name: str
    kind: ParamKind
    unit: str


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One row of the table.

    ``flags`` are parameters of one bit, in word 0. `round`: the op's points in the arithmetic
    contract's list of where bf16 rounds are on, inputs being bf16 values already; `norm_round`: the
    norm's, where the result may do otherwise; `head_round`: the first member's. `x_bf16`: x holds
    bf16 values.

    ``grain`` is the number of units that a slice boundary is a multiple of. ``scratch`` gives the
    floats of workgroup scratch for parameters ``p`` (by name, with ``n_units``, ``width``,
    ``unit_cols``) and at most ``t`` tokens in a step.

    What a slice costs beyond its share: ``whole`` maps operands that every slice reads from end to
    end to how often its body does; ``again`` are operands of which it reads its part once more for
    every token. ``inner_waits`` is the number of times that a slice waits for others of its packet
    or for another rank while it runs: each is a hand-off that the critical path counts.
    """

    op: Op
    operands: tuple[Operand, ...]
    params: tuple[Param, ...]
    unit: Unit
    grain: int
    placement: Placement
    doc: str
    scratch: Callable[[Mapping[str, int], int], int]
    flags: tuple[str, ...]
    phases: tuple[str, ...]
    targets: tuple[str, ...]
    whole: Mapping[str, int] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    inner_waits: int = 0

    @property
    def name(self) -> str:
        """The op's name, upper snake."""
        return self.op.name

    @property
    def output(self) -> Operand:
        """The operand that holds the result: "out", else the one written in place."""
        for role in ("out", "inout", "state", "load"):
            for operand in self.operands:
                if operand.role == role:
                    return operand
        raise AssertionError(f"{self.name} writes nothing")

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The operands with role "out": more than one where a packet makes several values."""
        return tuple(operand for operand in self.operands if operand.role == "out")

    @property
    def n_slots(self) -> int:
        """Handle slots that the op uses."""
        return 1 + max((operand.slot for operand in self.operands), default=-1)

    @property
    def is_emitted(self) -> bool:
        """Whether it is an instruction at all, not a name that only the graph needs."""
        return bool(self.targets)

    @property
    def is_load(self) -> bool:
        """Whether it moves weights from storage into memory, and so runs on an I/O worker."""
        return any(operand.role == "load" for operand in self.operands)

    @property
    def is_collective(self) -> bool:
        """Whether it reads other ranks' peer slots."""
        return any(operand.role == "peer" for operand in self.operands)

    def operand(self, name: str) -> Operand:
        """Return operand ``name``; raise KeyError if there is none."""
        for operand in self.operands:
            if operand.name == name:
                return operand
        raise KeyError(f"{self.name} has no operand {name}")

    def slot(self, name: str) -> int:
        """Return the handle slot of operand ``name``; raise KeyError if there is none."""
        return self.operand(name).slot

    def handles(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return every operand's handle, in the row's order, of a record's slots."""
        return tuple(int(slots[o.slot]) + o.run for o in self.operands)

    def handle(self, name: str, slots: Sequence[int]) -> int:
        """Return the handle of operand ``name``; raise KeyError if there is none."""
        operand = self.operand(name)
        return int(slots[operand.slot]) + operand.run

    def flag(self, name: str) -> int:
        """Return the bit of flag ``name`` in word 0's flags; raise KeyError if there is none."""
        if name not in self.flags:
            raise KeyError(f"{self.name} has no flag {name}")
        return 1 << FLAG_SHIFT + self.flags.index(name)

    @property
    def flag_mask(self) -> int:
        """The bits of all of the op's own flags."""
        return sum(self.flag(name) for name in self.flags)

    def flag_values(self, flags: int) -> dict[str, int]:
        """Return the op's own flags, 0 or 1 each, of word 0's."""
        return {name: int(bool(flags & self.flag(name))) for name in self.flags}

    def word(self, name: str) -> int:
        """Return the record word of parameter ``name``; raise KeyError if there is none."""
        for index, param in enumerate(self.params):
            if param.name == name:
                return WORD_PARAMS + index
        raise KeyError(f"{self.name} has no parameter {name}")
