"""What runs steps, whatever it runs on: several sequences at once, each in a slot of its own.

A step takes tokens of any slots and gives a choice for each of its last tokens. What a token's bits
are depends on the tokens before it in its slot, and on nothing else: not on which step it came in,
nor on what other slots did in that step. `RankGroup` (processes) and `GpuGroup` (a device)
implement `Engine`; `k3tool.runtime.scheduler` fills their steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepToken:
    """One token of a step; those of one slot come in time order.

    `position` is in its sequence: 0 begins one, and clears what the slot's last sequence left.
    """

    id: int
    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The greedy choice after one token, the same on every rank: the best logit and the second."""

    id: int
    best: float
    second: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave; `n_wanted` are its last tokens, in order.

    `choices` [n_wanted]. `logits` f32 [n_wanted, vocab], gathered over ranks, None where nobody
    asked. `rows` [max(n_wanted, 1), R] RECORD_DTYPE: what the ranks said, already compared; of a
    step that wanted nothing, that it is done. `ns` is the slowest rank's time.
    """

    choices: tuple[Choice, ...]
    logits: Array | None
    rows: Array
    ns: int


@dataclass(frozen=True, slots=True)
class SlotState:
    """All that a slot holds after `length` tokens, by rank; only the engine reads the bytes."""

    length: int
    ranks: tuple[bytes, ...]


class Engine(Protocol):
    """Ranks that run steps together. They have to be ready (`wait_ready`) before the first."""

    @property
    def n_slots(self) -> int:
        """Return how many sequences it holds at once: the program's `batch`."""

    @property
    def context(self) -> int:
        """Return the positions that a slot holds."""

    @property
    def most_tokens(self) -> int:
        """Return the tokens that one step takes; of at most `n_slots` it is a decode step."""

    @property
    def vocab(self) -> int:
        """Return the number of token ids."""

    def step(
        self, tokens: Sequence[StepToken], n_wanted: int, wants_logits: bool = False
    ) -> StepResult:
        """Run `tokens` as one step; the last `n_wanted` get a choice, and logits if asked for.

        Raises: ValueError for a step that no engine runs (a position that does not follow, a slot
        out of range); FaultError, UnsoundError when ranks trap, die or differ.
        """

    def save_slot(self, slot: int) -> SlotState:
        """Return a copy of all that a slot holds."""

    def restore_slot(self, slot: int, state: SlotState) -> None:
        """Put a slot where `state` was saved; the next token's position is `state.length`.

        Raises: ValueError for a state of another program.
        """
