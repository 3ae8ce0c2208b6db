"""What every group of ranks does with steps: check them, follow a run's request, keep lengths.

A group says how a step is begun and how it is finished; the rest is here, once for processes and
for a device. There is one path: a run that is alone and a scheduler's mixture are the same steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy.typing as npt

from k3tool.errors import UsageError
from k3tool.isa.table import ALL_PHASES
from k3tool.runtime import records
from k3tool.runtime.engine import Choice, SlotState, StepResult, StepToken
from k3tool.runtime.image_view import ImageView
from k3tool.runtime.requests import Span, Step
from k3tool.runtime.slots import StateRow, saved_bytes, spans_of

Array = npt.NDArray[Any]
# From a choice, and the logits it was made of where they are kept, to the id that goes on.
Choose = Callable[[Choice, Array | None], int]
# From the id that goes on, and whether no step follows it anyway, to whether it is the last.
Ends = Callable[[int, bool], bool]
DECODE = ALL_PHASES.index("decode")


class Stepping(ABC):
    """The part of an Engine that does not depend on what it runs on."""

    def __init__(
        self, view: ImageView, states: Sequence[StateRow], kept_rows: int, first_position: int
    ) -> None:
        """Take any rank's image; `kept_rows` are the rows of logits that there is room for.

        `first_position` is where every slot begins, in states that nobody has computed.
        Raises: UsageError where it leaves no room for the request.
        """
        self._view, self._states, self._kept_rows = view, states, kept_rows
        header = view.header
        self.n_slots, self.context = int(header["n_slots"]), int(header["max_context"])
        self.vocab = int(header["vocab"])
        self._most = {
            phase: int(rows[0]["max_tokens"])
            for (kind, phase), rows in view.sections.items()
            if kind == "phase"
        }
        self.most_tokens = max(self._most.values())
        self._lengths = [first_position] * self.n_slots
        need = first_position + len(view.sections["prompt", 0]) + int(header["n_gen"]) - 1
        if first_position and need > self.context:
            raise UsageError(
                "first position", got=first_position, need=f"{need} positions within the context "
                f"{self.context}",
            )  # fmt: skip

    # -- what a group does ---------------------------------------------------------------------

    @abstractmethod
    def begin(self, step: Step) -> None:
        """Start a step on every rank; nothing waits."""

    @abstractmethod
    def finish(self) -> Array:
        """Return what the ranks say of the step begun, compared: [max(n_wanted, 1), R] records.

        Raises: FaultError for a trap; UnsoundError when ranks differ or do not end.
        """

    @abstractmethod
    def kept_logits(self, first: int, n: int) -> Array:
        """Return a copy of rows of the kept logits, float32 [n, vocab]."""

    @abstractmethod
    def _read_spans(self, spans: Sequence[Span], n_bytes: int) -> tuple[bytes, ...]:
        """Return these bytes of every rank."""

    @abstractmethod
    def _write_spans(self, spans: Sequence[Span], ranks: Sequence[bytes]) -> None:
        """Put bytes back in every rank."""

    @abstractmethod
    def end(self) -> None:
        """Let the ranks end, and hear their last words. Nothing can be asked of them after it."""

    def watch(self) -> None:
        """Raise, as `finish`, where a rank has ended while nothing was asked; nothing waits.

        Ranks on a device run only in a step.
        """
        return

    # -- one step ------------------------------------------------------------------------------

    def step(
        self, tokens: Sequence[StepToken], n_wanted: int, wants_logits: bool = False
    ) -> StepResult:
        """Run `tokens` as one step: Engine.step."""
        phase = DECODE if len(tokens) <= self._most[DECODE] else 1 - DECODE
        keeps = wants_logits and n_wanted > 0
        self._check(tokens, n_wanted, phase, keeps)
        self.begin(Step(phase, tokens, n_wanted, len(tokens) - n_wanted, 0 if keeps else None))
        rows = self.finish()
        for token in tokens:
            self._lengths[token.slot] = token.position + 1
        choices = tuple(_choice(row[0]) for row in rows[-n_wanted:]) if n_wanted else ()
        logits = self.kept_logits(0, n_wanted) if keeps else None
        return StepResult(choices, logits, rows, int(rows["ns"].max()))

    def _check(
        self, tokens: Sequence[StepToken], n_wanted: int, phase: int, keeps_logits: bool
    ) -> None:
        """Refuse a step that ranks would refuse, or that no slot is ready for."""
        most = self._most.get(phase, self.most_tokens)
        if not 1 <= len(tokens) <= most:
            raise ValueError(f"a step of {len(tokens)} tokens, it takes 1 to {most}")
        if not 0 <= n_wanted <= len(tokens):
            raise ValueError(f"{n_wanted} choices of {len(tokens)} tokens")
        if keeps_logits and n_wanted > self._kept_rows:
            raise ValueError(f"logits of {n_wanted} tokens, there is room for {self._kept_rows}")
        at: dict[int, int] = {}
        for token in tokens:
            if not 0 <= token.slot < self.n_slots or not 0 <= token.id < self.vocab:
                raise ValueError(f"{token}, there are {self.n_slots} slots, {self.vocab} ids")
            need = at.get(token.slot, self._lengths[token.slot])
            begins = token.position == 0 and token.slot not in at
            if (not begins and token.position != need) or token.position >= self.context:
                raise ValueError(f"{token}, its slot is at {need} of {self.context} positions")
            at[token.slot] = token.position + 1

    # -- a run's own request -------------------------------------------------------------------

    def steps(
        self, choose: Choose | None = None, ends: Ends | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> Iterator[Array]:  # fmt: skip
        """Run the image's request in slot 0: yield, for each step, all ranks' records ([R]).

        `choose` decides what goes on after a token, by default the greedy choice; a record's id is
        what was chosen. `ends` hears of every token, and may stop the run with it. The next step is
        begun before a record is yielded, so that nobody waits for who prints it. `at_end` is called
        behind the last of them, while the ranks still hold the sequence.
        Raises: as `finish`.
        """
        requests = self._requests(choose, ends)
        self.begin(next(requests))
        while True:
            rows = self.finish()
            try:
                step = requests.send(rows)
            except StopIteration:
                yield rows[-1]
                break
            self.begin(step)
            yield rows[-1]
        if at_end is not None:
            at_end()
        self.end()

    def _requests(self, choose: Choose | None, ends: Ends | None) -> Generator[Step, Array, None]:
        """Yield the steps of the image's request; each is answered with its records."""
        header, sections = self._view.header, self._view.sections
        prompt, stops = sections["prompt", 0].tolist(), set(sections["stop", 0].tolist())
        chunk, n_gen, phase = (int(header[name]) for name in ("chunk", "n_gen", "first_phase"))
        start, n_read = self._lengths[0], 0

        def step_of(phase: int, ids: Sequence[int], n_wanted: int, number: int) -> Step:
            nonlocal n_read
            at, n = start + n_read, len(ids)
            tokens = [StepToken(token, at + i, 0) for i, token in enumerate(ids)]
            head_from = 0 if header["all_logits"] else n - n_wanted
            row = n_read + head_from if header["all_logits"] else 0
            keeps = self._kept_rows > 0 and head_from < n
            n_read += n
            self._lengths[0] = start + n_read
            return Step(phase, tokens, n_wanted, head_from, row if keeps else None, number)

        for first in range(0, len(prompt), chunk):
            ids = prompt[first : first + chunk]
            rows = yield step_of(phase, ids, int(first + len(ids) == len(prompt)), 0)
        for number in range(1, n_gen + 1):
            chosen = int(rows[-1]["id"][0])
            if choose is not None:
                row = n_read - 1 if header["all_logits"] else 0
                logits = self.kept_logits(row, 1)[0] if self._kept_rows else None
                chosen = choose(_choice(rows[-1][0]), logits)
                rows[-1]["id"] = chosen
            is_last = number == n_gen or chosen in stops
            if (ends is not None and ends(chosen, is_last)) or is_last:
                return
            rows = yield step_of(DECODE, [chosen], 1, number)

    # -- states --------------------------------------------------------------------------------

    def save_slot(self, slot: int) -> SlotState:
        """Return a copy of all that a slot holds: Engine.save_slot."""
        length = self._lengths[slot]
        spans = list(spans_of(self._states, slot, length))
        return SlotState(length, self._read_spans(spans, saved_bytes(self._states, length)))

    def restore_slot(self, slot: int, state: SlotState) -> None:
        """Put a slot where `state` was saved: Engine.restore_slot."""
        need = saved_bytes(self._states, state.length)
        if not 0 <= state.length <= self.context or any(len(r) != need for r in state.ranks):
            raise ValueError(f"the state of a slot after {state.length} tokens, of another program")
        if need:
            self._write_spans(list(spans_of(self._states, slot, state.length)), state.ranks)
        self._lengths[slot] = state.length


def _choice(row: Any) -> Choice:
    assert int(row["kind"]) == records.TOKEN
    return Choice(int(row["id"]), float(row["best"]), float(row["second"]))
