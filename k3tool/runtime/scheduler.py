"""Continuous batching: requests enter free slots of an engine and leave them while others go on.

Each step takes one token of every sequence that is generating, and fills what is left of the step
with prompt tokens, shared out among the prompts that are being read. So a sequence that generates
gets a token in every step, and a step is never longer than one chunk, however long a prompt is. A
request's tokens are what it gives alone: a token's bits do not depend on what else a step holds.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from k3tool.errors import UsageError
from k3tool.runtime.engine import Choice, Engine, SlotState, StepResult, StepToken
from k3tool.runtime.stepping import Array, Choose, Ends


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that a request gave.

    `number` counts from 0, `position` is of the token whose logits it was chosen by. `rows` [R] are
    what all ranks said. `reason` is None, or why it is the last: `stop` or `length`.
    """

    id: int
    number: int
    position: int
    choice: Choice
    rows: Array
    reason: str | None


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: ids in, at most `most_new` tokens out, each told to `on_token`.

    `choose` decides what goes on (greedy unless given; with `wants_logits` it gets the logits),
    `ends` may stop the sequence with any token. `state` is what the slot begins with: the prompt
    goes on behind it. What these raise ends the request alone where `on_error` takes it.
    `is_cancelled` may be set at any time, by any thread.
    """

    prompt: Sequence[int]
    most_new: int
    on_token: Callable[[NewToken], object]
    stop_ids: frozenset[int] = frozenset()
    choose: Choose | None = None
    ends: Ends | None = None
    wants_logits: bool = False
    state: SlotState | None = None
    on_error: Callable[[Exception], object] | None = None
    is_cancelled: bool = False

    @property
    def start(self) -> int:
        """Return the position of the first token of the prompt."""
        return 0 if self.state is None else self.state.length


@dataclass(slots=True)
class _Running:
    """A request in its slot: `todo` are ids not yet read, `position` is the next one's."""

    request: Request
    slot: int
    position: int
    todo: deque[int] = field(default_factory=deque)
    n_new: int = 0

    def take(self, n: int) -> list[StepToken]:
        """Return the next `n` tokens to be read."""
        tokens = [StepToken(self.todo.popleft(), self.position + i, self.slot) for i in range(n)]
        self.position += n
        return tokens


class Scheduler:
    """Requests over one engine. `step` is for one thread; `submit` and `cancel` for any."""

    def __init__(self, engine: Engine, most_tokens: int | None = None) -> None:
        """Take an engine that is ready; `most_tokens` of a step if not as many as it takes."""
        self._engine = engine
        most = min(engine.most_tokens, most_tokens or engine.most_tokens)
        self._most = max(most, engine.n_slots)  # every slot has its token in every step
        self._waiting: deque[Request] = deque()
        self._free = deque(range(engine.n_slots))
        self._running: list[_Running] = []  # in the order they came

    @property
    def n_waiting(self) -> int:
        """Return the requests that have no slot yet."""
        return sum(not request.is_cancelled for request in tuple(self._waiting))

    @property
    def n_running(self) -> int:
        """Return the requests that have a slot."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Let a request wait for a slot. Raises: UsageError for one that fits in none."""
        self.check(request)
        self._waiting.append(request)

    def check(self, request: Request) -> None:
        """Refuse a request that fits in no slot. Raises: UsageError."""
        n, room = len(request.prompt), self._engine.context - request.start
        if not n or request.most_new < 1:
            got = f"{n} ids, {request.most_new} tokens to generate"
            raise UsageError("request", got=got, need="at least one of each")
        if n + request.most_new - 1 > room:
            raise UsageError(
                "prompt and tokens", got=f"{n} + {request.most_new}",
                need=f"{room + 1} together: what is left of {self._engine.context} positions",
                hint="generate fewer, or shorten the prompt",
            )  # fmt: skip
        for nth, token in enumerate(request.prompt, 1):
            if not 0 <= token < self._engine.vocab:
                raise UsageError(
                    f"id {nth} of {n}", got=token, need=f"0 to {self._engine.vocab - 1}"
                )

    def cancel(self, request: Request) -> None:
        """Drop a request; the step that begins next does not have it, and may use its slot."""
        request.is_cancelled = True

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

    def step(self) -> bool:
        """Run one step and tell of its tokens. Returns whether there was anything to do.

        Raises: what the engine raises; what a callback raises of a request without `on_error`.
        After either nothing goes on.
        """
        self._drop_cancelled()
        self._admit()
        if not self._running:
            return False
        tokens, wanted = self._fill()
        last = [running.take(1)[0] for running in wanted]  # choices are of the last tokens
        wants_logits = any(running.request.wants_logits for running in wanted)
        result = self._engine.step([*tokens, *last], len(last), wants_logits)
        for nth, running in enumerate(wanted):
            if not running.request.is_cancelled:  # by what an earlier one of this step told
                self._hear_alone(running, result, nth)
        return True

    # -- slots ---------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        for running in [r for r in self._running if r.request.is_cancelled]:
            self._leave(running)
        # Now, not when a slot is free: until then those who come and go would pile up.
        for request in [r for r in tuple(self._waiting) if r.is_cancelled]:
            self._waiting.remove(request)

    def _leave(self, running: _Running) -> None:
        self._running.remove(running)
        self._free.append(running.slot)

    def _admit(self) -> None:
        while self._free and self._waiting:
            request = self._waiting.popleft()
            if request.is_cancelled:
                continue
            slot = self._free.popleft()
            if request.state is not None:
                self._engine.restore_slot(slot, request.state)
            self._running.append(_Running(request, slot, request.start, deque(request.prompt)))

    # -- one step ------------------------------------------------------------------------------

    def _fill(self) -> tuple[list[StepToken], list[_Running]]:
        """Return tokens that want no choice, and the sequences whose next token wants one.

        A sequence that generates has one token to read, the one it gave. Of prompts each gets an
        equal part of the room that is left, longer ones also what shorter ones do not need.
        """
        wanted = [running for running in self._running if len(running.todo) == 1]
        reading = [running for running in self._running if len(running.todo) > 1]
        prompts = sorted(reading, key=lambda running: len(running.todo))
        tokens: list[StepToken] = []
        for nth, running in enumerate(prompts):
            room = self._most - len(wanted) - len(tokens)
            n = min(len(running.todo), max(1, room // (len(prompts) - nth)))
            if n == len(running.todo):
                wanted.append(running)
                n -= 1
            tokens += running.take(n)
        return tokens, wanted

    def _hear_alone(self, running: _Running, result: StepResult, nth: int) -> None:
        """Take a sequence's choice; where its callbacks fail it leaves, and no other."""
        try:
            self._hear(running, result, nth)
        except Exception as error:
            if running.request.on_error is None:
                raise
            if running in self._running:
                self._leave(running)
            running.request.on_error(error)

    def _hear(self, running: _Running, result: StepResult, nth: int) -> None:
        """Take the choice after a sequence's last token."""
        request, choice = running.request, result.choices[nth]
        logits = result.logits[nth] if request.wants_logits and result.logits is not None else None
        chosen = choice.id if request.choose is None else request.choose(choice, logits)
        running.n_new += 1
        reason = "length" if running.n_new == request.most_new else None
        if chosen in request.stop_ids:
            reason = "stop"
        if request.ends is not None and request.ends(chosen, reason is not None):
            reason = "stop"
        if reason is not None:
            self._leave(running)
        else:
            running.todo.append(chosen)
        rows = result.rows[nth]
        request.on_token(
            NewToken(chosen, running.n_new - 1, running.position - 1, choice, rows, reason)
        )
