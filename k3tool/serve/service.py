"""A resident engine behind an event loop: one thread runs steps, the loop talks to clients.

The thread takes requests from the scheduler's queue; what is new comes back as calls on the loop.
So a slow client costs the others nothing, and the loop waits for no step.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

from k3tool.errors import UsageError
from k3tool.runtime import engine
from k3tool.runtime.engine import Engine
from k3tool.runtime.sampling import Sampler
from k3tool.runtime.scheduler import NewToken, Request, Scheduler
from k3tool.runtime.stepping import Array
from k3tool.serve.answers import Choice
from k3tool.serve.metrics import Metrics
from k3tool.serve.requests import Ask, ChatAsk, CompletionAsk, Prompt
from k3tool.text.chat import RESPONSE, THINK, chat_ids
from k3tool.text.reply import Part, Reply
from k3tool.text.tokenizer import Room, Tokenizer
from k3tool.text.tools import ARGUMENT, RAW, CallReader

DEFAULT_NEW = 16  # tokens of a completion whose max_tokens is not said, as in the API
_WATCH_SECONDS = 1.0  # an engine without work is looked after so often
_ENDING = "the service is ending"
_ONLY_IDS = "token ids, in /v1/completions"
Update = Choice | Exception
Put = Callable[[Update], None]


class OverloadedError(Exception):
    """There are as many waiting as may wait."""


class StoppedError(Exception):
    """The engine has stopped and gives no token any more."""


class BrokenError(Exception):
    """A mistake of ours (the cause) ended one answer; the others go on."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, and how much of it at once.

    `fingerprint` is of weights and program. `end_ids` end any answer, unless asked otherwise.
    `most_waiting` sequences may wait for a slot; more are turned away.
    """

    name: str
    created: int
    fingerprint: str
    end_ids: frozenset[int]
    most_waiting: int


class Generation:
    """One answer: tokens come in on the engine's thread, updates go out on the loop."""

    def __init__(
        self, ask: Ask, reply: Reply | None, nth: int, metrics: Metrics,
        calls: CallReader | None = None,
    ) -> None:  # fmt: skip
        """Take how to choose, what makes text of tokens, and calls of it (None: nobody does)."""
        seed = secrets.randbits(64) if ask.seed is None else (ask.seed + nth) % (1 << 64)
        self._sampler = Sampler(ask.temperature, ask.top_p, ask.top_k or None, seed)
        self._reply, self._calls, self._metrics = reply, calls, metrics
        self._loop = asyncio.get_running_loop()
        self._put: Put | None = None
        self._early: list[Update] = []  # come before anybody listened
        self._parts: list[Part] = []
        self._since = time.monotonic()
        self.request: Request | None = None
        self.n_tokens = 0
        self.is_over = False

    # -- on the loop ---------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Return whether tokens of it are still to come."""
        return not (self.is_over or (self.request is not None and self.request.is_cancelled))

    def listen(self, put: Put) -> None:
        """Let `put` have every update, those that came before included."""
        self._put = put
        for update in self._early:
            put(update)
        self._early.clear()

    def cancel(self) -> None:
        """Stop it; of one that is over nothing is left to stop."""
        if self.request is not None:
            self.request.is_cancelled = True

    def refuse(self, reason: Exception) -> None:
        """Let whoever listens hear that no more comes."""
        self._deliver(reason)

    def _deliver(self, update: Update) -> None:
        if self._put is None:
            self._early.append(update)
        else:
            self._put(update)

    # -- on the engine's thread ----------------------------------------------------------------

    @property
    def wants_logits(self) -> bool:
        """Return whether a token is drawn, for which the best one is not enough."""
        return not self._sampler.is_greedy

    def choose(self, choice: engine.Choice, logits: Array | None) -> int:
        """Return the token to go on with."""
        if logits is None:
            return choice.id
        return self._sampler.choose(logits, self.n_tokens)

    def ends(self, token: int, is_last: bool) -> bool:
        """Take a token's text; return whether a stop text ends the answer with it."""
        if self._reply is None:
            return False
        self._parts = self._reply.feed(token, is_last)
        return self._reply.stopped_by is not None

    def on_token(self, new: NewToken) -> None:
        """Send what a token adds."""
        if self.n_tokens == 0:
            seconds = time.monotonic() - self._since
            self._metrics.add("k3tool_first_token_seconds_sum", seconds)
            self._metrics.add("k3tool_first_token_seconds_count")
        self.n_tokens += 1
        self._metrics.add("k3tool_generated_tokens_total")
        update = Choice(token_ids=[new.id], finish=new.reason)
        for part in self._parts:
            if part.channel == THINK:
                update.reasoning += part.text
            elif part.channel in ("", RESPONSE):
                update.text += part.text
        if self._calls is not None and self._reply is not None:
            inside = [p.text for p in self._parts if p.channel in (ARGUMENT, RAW)]
            update.calls = self._calls.feed(inside, self._reply.ended_tag)
        if new.reason == "stop":
            if self._calls is not None and self._calls.n_calls:
                update.finish = "tool_calls"
            found = self._reply.stopped_by if self._reply is not None else None
            update.stop = new.id if found is None else found
        if new.reason is not None:
            self.end(new.reason)
        self.send(update)

    def on_error(self, error: Exception) -> None:
        """End it by what one of the calls above raised."""
        self.end("broken")
        broken = BrokenError()
        broken.__cause__ = error
        self.send(broken)

    def end(self, reason: str) -> None:
        """Count how it ended, once."""
        if not self.is_over:
            self.is_over = True
            self._metrics.add("k3tool_generations_total", reason=reason)

    def send(self, update: Update) -> None:
        """Hand an update to the loop, if it still runs."""
        # Asking first whether it is closed is not enough: it may close in between.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, update)


@dataclass(slots=True)
class Service:
    """An engine and its scheduler, from the first request to the last.

    `tokenizer` None: prompts are token ids, and so are answers. `on_fault` is called once, on the
    engine's thread, when the engine stops; `in_words` makes its fault one that a user reads.
    `watch` raises where the engine stopped while nothing was asked of it.
    """

    served: Served
    engine: Engine
    tokenizer: Tokenizer | None
    on_fault: Callable[[], None] = lambda: None
    in_words: Callable[[], AbstractContextManager[None]] = nullcontext
    watch: Callable[[], None] = lambda: None
    metrics: Metrics = field(default_factory=Metrics)
    error: Exception | None = None
    _live: set[Generation] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of `_live`
    _wake: threading.Event = field(default_factory=threading.Event)
    _is_closing: bool = False
    _thread: threading.Thread | None = None
    _scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        """Lay a scheduler over the engine."""
        self._scheduler = Scheduler(self.engine)
        self.metrics.gauge("k3tool_active_sequences", lambda: self._scheduler.n_running)
        self.metrics.gauge("k3tool_waiting_sequences", lambda: self._scheduler.n_waiting)
        self.metrics.gauge("k3tool_slots", lambda: self.engine.n_slots)

    def __enter__(self) -> "Service":
        """Start the engine's thread."""
        self._thread = threading.Thread(target=self._work, name="engine")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop it after the step that runs; answers that are not whole are told so."""
        self._is_closing = True
        self._wake.set()
        assert self._thread is not None
        self._thread.join()

    def close(self) -> None:
        """End every answer now, and take no more; on the loop. The step that runs is not waited
        for.
        """
        self._is_closing = True
        self._wake.set()
        for generation in self._all_live():
            generation.refuse(StoppedError(_ENDING))

    @property
    def fault(self) -> str | None:
        """Return why the engine has stopped, None while it goes on."""
        return None if self.error is None else str(self.error)

    # -- on the loop ---------------------------------------------------------------------------

    def prompts(self, asked: CompletionAsk | ChatAsk) -> list[Sequence[int]]:
        """Return the token ids to go on from. Raises: UsageError, for text without a tokenizer."""
        if isinstance(asked, ChatAsk):
            if self.tokenizer is None:
                raise UsageError("messages", got="a model without a tokenizer", need=_ONLY_IDS)
            ids = chat_ids(
                self.tokenizer, asked.messages, asked.effort, room=self._room("messages"),
                tools=asked.tools,
            )  # fmt: skip
            return [ids]
        return [self._ids(prompt) for prompt in asked.prompts]

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise UsageError("prompt", got="text for a model without a tokenizer", need=_ONLY_IDS)
        return self.tokenizer.encode(prompt, self._room("prompt"))

    def _room(self, name: str) -> Room:
        """Return what fits in a slot: to encode what does not would take a while."""
        context = self.engine.context
        return Room(context, name, f"{context} tokens, the context")

    def start(
        self, prompts: Sequence[Sequence[int]], ask: Ask, channel: str | None,
        *, may_call: bool = False,
    ) -> list[Generation]:  # fmt: skip
        """Start `ask.n` answers to each prompt, or none of them.

        `channel` is the one that a conversation leaves open; in an answer that `may_call` calls of
        tools are looked for.
        Raises: UsageError for what fits in no slot; OverloadedError; StoppedError.
        """
        self.require_room(len(prompts) * ask.n)
        pairs = []
        for nth, ids in enumerate(ids for ids in prompts for _ in range(ask.n)):
            generation = self._generation(ask, nth, channel, may_call)
            pairs.append((generation, self._request(generation, ids, ask, channel is not None)))
        for _, request in pairs:
            self._scheduler.check(request)
        for generation, request in pairs:
            generation.request = request
            with self._lock:
                self._live.add(generation)
            self._scheduler.submit(request)
            self.metrics.add("k3tool_prompt_tokens_total", len(request.prompt))
        self._wake.set()
        if self.error is not None or self._is_closing:  # since: nobody may be left waiting
            for generation, _ in pairs:
                generation.send(StoppedError(self.fault or _ENDING))
        return [generation for generation, _ in pairs]

    def _all_live(self) -> tuple[Generation, ...]:
        with self._lock:
            return tuple(self._live)

    def require_room(self, n: int) -> None:
        """Refuse `n` answers more than run or may wait; for any thread.

        Raises: UsageError for more than ever; OverloadedError; StoppedError.
        """
        if self.error is not None or self._is_closing:
            raise StoppedError(self.fault or _ENDING)
        most = self.engine.n_slots + self.served.most_waiting
        if n > most:
            raise UsageError("n", got=f"{n} answers at once", need=f"at most {most}")
        # Not the scheduler's counts: a request that goes from one to the other is in neither.
        if sum(generation.is_wanted for generation in self._all_live()) + n > most:
            raise OverloadedError(f"{most} sequences run or wait: try again later")

    def _generation(self, ask: Ask, nth: int, channel: str | None, may_call: bool) -> Generation:
        reply = None if self.tokenizer is None else Reply(self.tokenizer, ask.stop, channel)
        if reply is None and ask.stop:
            raise UsageError("stop", got="text for a model without a tokenizer", need=_ONLY_IDS)
        return Generation(ask, reply, nth, self.metrics, CallReader() if may_call else None)

    def _request(
        self, generation: Generation, ids: Sequence[int], ask: Ask, is_chat: bool
    ) -> Request:
        ends = frozenset() if ask.ignore_eos else self.served.end_ids
        most_new = self._most_new(len(ids), ask, is_chat)
        return Request(
            ids, most_new, generation.on_token, ends | set(ask.stop_ids),
            generation.choose, generation.ends, wants_logits=generation.wants_logits,
            on_error=generation.on_error,
        )  # fmt: skip

    def _most_new(self, n: int, ask: Ask, is_chat: bool) -> int:
        """Return how many tokens an answer may have. Raises: UsageError, by the rules of a run."""
        context, vocab = self.engine.context, self.engine.vocab
        for token in ask.stop_ids:
            if token >= vocab:
                raise UsageError("stop_token_ids", got=token, need=f"0 to {vocab - 1} (vocab_size)")
        left = max(1, context - n)
        most_new = ask.max_tokens or (left if is_chat else min(left, DEFAULT_NEW))
        if n + most_new > context:
            raise UsageError(
                "prompt and tokens", got=f"{n} + {most_new} = {n + most_new} positions",
                need=f"at most {context}", hint="generate fewer, or shorten the prompt",
            )  # fmt: skip
        return most_new

    # -- the engine's thread -------------------------------------------------------------------

    def _work(self) -> None:
        """Step while there is something to do, else wait, until the end or a fault."""
        try:
            while not self._is_closing:
                self._wake.clear()
                with self.in_words():
                    was_busy = self._scheduler.step()
                self._forget()
                while not (was_busy or self._wake.wait(_WATCH_SECONDS)):
                    with self.in_words():
                        self.watch()
        except Exception as error:  # whatever it is, nobody may wait for tokens that never come
            self.error = error
            self.on_fault()
        reason = StoppedError(self.fault or _ENDING)
        for generation in self._all_live():
            generation.end("stopped")
            generation.send(reason)

    def _forget(self) -> None:
        """Let go of answers that are over."""
        for generation in self._all_live():
            assert generation.request is not None
            if generation.request.is_cancelled:
                generation.end("cancelled")
            if generation.is_over:
                with self._lock:
                    self._live.discard(generation)
