"""Continuous batching on an engine that only checks what it is asked: who gets what, and when."""

import gc
import random
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from k3tool.errors import UsageError
from k3tool.runtime.engine import Choice, SlotState, StepResult, StepToken
from k3tool.runtime.scheduler import NewToken, Request, Scheduler

VOCAB, CONTEXT = 1000, 400


class CheckingEngine:
    """A sequence's next token is the sum of all its ids so far; what does not follow is refused."""

    vocab, context = VOCAB, CONTEXT

    def __init__(self, n_slots: int = 3, most_tokens: int = 16) -> None:
        self.n_slots, self.most_tokens = n_slots, most_tokens
        self.sums, self.lengths = [0] * n_slots, [0] * n_slots
        self.taken: list[list[StepToken]] = []

    def step(
        self, tokens: Sequence[StepToken], n_wanted: int, wants_logits: bool = False
    ) -> StepResult:
        assert 1 <= len(tokens) <= self.most_tokens
        self.taken.append(list(tokens))
        choices = []
        for nth, token in enumerate(tokens):
            if token.position == 0:
                self.sums[token.slot] = self.lengths[token.slot] = 0
            assert token.position == self.lengths[token.slot]
            self.lengths[token.slot] += 1
            self.sums[token.slot] += token.id
            if nth >= len(tokens) - n_wanted:
                choices.append(Choice(self.sums[token.slot] % VOCAB, 2.0, 1.0))
        logits = np.arange(n_wanted * VOCAB, dtype="f4").reshape(n_wanted, VOCAB)
        rows = np.zeros((max(n_wanted, 1), 1))
        return StepResult(tuple(choices), logits if wants_logits else None, rows, 1)

    def save_slot(self, slot: int) -> SlotState:
        return SlotState(self.lengths[slot], (str(self.sums[slot]).encode(),))

    def restore_slot(self, slot: int, state: SlotState) -> None:
        self.lengths[slot], self.sums[slot] = state.length, int(state.ranks[0])


class Heard:
    """A request and what it was told."""

    def __init__(self, prompt: Sequence[int], most_new: int, **given: Any) -> None:
        self.tokens: list[NewToken] = []
        self.request = Request(prompt, most_new, self.tokens.append, **given)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def reason(self) -> str | None:
        return self.tokens[-1].reason if self.tokens else None


class Seen(list[int]):
    """A prompt of which it can be told whether somebody still holds it."""


def alone(prompt: Sequence[int], most_new: int) -> list[int]:
    total, ids = sum(prompt), []
    for _ in range(most_new):
        ids.append(total % VOCAB)
        total += ids[-1]
    return ids


def run(engine: CheckingEngine, *heard: Heard) -> Scheduler:
    scheduler = Scheduler(engine)
    for one in heard:
        scheduler.submit(one.request)
    scheduler.run()
    return scheduler


@pytest.mark.parametrize("seed", range(20))
def test_each_gets_what_it_gives_alone(seed: int) -> None:
    rng = random.Random(seed)
    engine = CheckingEngine(rng.randrange(1, 6), rng.choice([6, 16, 64]))
    heard = [
        Heard([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))], rng.randrange(1, 30))
        for _ in range(12)
    ]
    scheduler = Scheduler(engine)
    late = list(heard)
    while late or scheduler.step():  # they come while others run
        for one in [late.pop() for _ in range(min(len(late), rng.randrange(3)))]:
            scheduler.submit(one.request)
        if late:
            scheduler.step()
    for one in heard:
        assert one.ids == alone(one.request.prompt, one.request.most_new)
        assert [token.number for token in one.tokens] == list(range(one.request.most_new))
        n = len(one.request.prompt)
        assert [token.position - n + 1 for token in one.tokens] == list(range(len(one.tokens)))
        assert one.reason == "length"
    assert scheduler.n_running == scheduler.n_waiting == 0


def test_two_hundred_through_three_slots() -> None:
    """One of them fills its slot to the last position; every slot is full until few are left."""
    rng = random.Random(9)
    heard = [Heard([rng.randrange(VOCAB)] * rng.randrange(1, 90), rng.randrange(1, 9))
             for _ in range(199)]  # fmt: skip
    heard.insert(77, Heard([4] * (CONTEXT - 5), 6))
    engine = CheckingEngine(3, 16)
    scheduler = run(engine, *heard)
    for one in heard:
        assert one.ids == alone(one.request.prompt, one.request.most_new)
        assert one.reason == "length"
    assert (scheduler.n_running, scheduler.n_waiting) == (0, 0)
    full = sum(len({token.slot for token in step}) == 3 for step in engine.taken)
    assert full > 0.95 * len(engine.taken)


def test_a_long_prompt_stops_nobody() -> None:
    """While 300 ids are read, the others have a token in every step, and steps stay short."""
    engine = CheckingEngine(3, 16)
    first, second = Heard([1], 40), Heard([2], 40)
    scheduler = Scheduler(engine)
    scheduler.submit(first.request)
    scheduler.submit(second.request)
    scheduler.step()
    long, n_before = Heard([3] * 300, 2), len(engine.taken)
    scheduler.submit(long.request)
    while not long.tokens:
        before = len(first.tokens), len(second.tokens)
        scheduler.step()
        assert (len(first.tokens), len(second.tokens)) == (before[0] + 1, before[1] + 1)
    assert len(engine.taken) - n_before == -(-300 // 14)  # 14 of 16 are left for the prompt
    scheduler.run()
    assert long.ids == alone([3] * 300, 2)


def test_prompts_share_a_step() -> None:
    """First come, first served, the short prompt would wait for the long one."""
    engine = CheckingEngine(3, 16)
    long, short = Heard([1] * 300, 1), Heard([2] * 6, 1)
    scheduler = Scheduler(engine)
    scheduler.submit(long.request)
    scheduler.submit(short.request)
    scheduler.step()
    assert short.tokens
    assert not long.tokens
    assert len(engine.taken[0]) == 16


def test_a_cancelled_one_leaves_its_slot_at_once() -> None:
    engine = CheckingEngine(1)
    scheduler = Scheduler(engine)
    running, waiting, next_one = Heard([1], 50), Heard([5], 5), Heard([7], 2)
    for one in (running, waiting, next_one):
        scheduler.submit(one.request)
    scheduler.step()
    assert (scheduler.n_running, scheduler.n_waiting) == (1, 2)
    scheduler.cancel(running.request)
    scheduler.cancel(waiting.request)
    assert scheduler.n_waiting == 1
    scheduler.step()
    assert next_one.ids == [7]  # in the very next step
    scheduler.run()
    assert (len(running.tokens), waiting.tokens, next_one.ids) == (1, [], [7, 14])


def test_who_leaves_the_queue_is_let_go_while_slots_are_taken() -> None:
    """Or those who come and go would pile up behind one that takes long."""
    scheduler = Scheduler(CheckingEngine(n_slots=1))
    scheduler.submit(Heard([1], 50).request)
    scheduler.step()
    prompts = [Seen([1]) for _ in range(3)]
    kept = [weakref.ref(prompt) for prompt in prompts]
    waiting = [Heard(prompt, 2).request for prompt in prompts]
    for request in waiting:
        scheduler.submit(request)
    scheduler.cancel(waiting[0])
    scheduler.cancel(waiting[2])
    scheduler.step()
    del prompts, waiting, request
    gc.collect()
    assert [reference() is None for reference in kept] == [True, False, True]
    assert scheduler.n_waiting == 1
    scheduler.run()
    assert (scheduler.n_running, scheduler.n_waiting) == (0, 0)


def test_one_cancelled_by_what_another_is_told_hears_nothing_more() -> None:
    scheduler = Scheduler(CheckingEngine(2))
    second = Heard([2], 5)
    first = Request([1], 5, lambda token: scheduler.cancel(second.request))
    scheduler.submit(first)
    scheduler.submit(second.request)
    scheduler.run()
    assert second.tokens == []


class Mistake(Exception):
    """What a callback raises."""


@pytest.mark.parametrize("callback", ["on_token", "ends", "choose"])
def test_a_callback_that_fails_ends_its_own_request(callback: str) -> None:
    """Its slot is free for who waits; without anybody who takes the error, nothing goes on."""

    def fail(*_: Any) -> Any:
        raise Mistake(callback)

    def broken(**more: Any) -> Request:
        request = Heard([1], 5, **more).request
        setattr(request, callback, fail)
        return request

    taken: list[Exception] = []
    scheduler = Scheduler(CheckingEngine(2))
    good, late = Heard([2], 5), Heard([3], 5)
    for request in (broken(on_error=taken.append), good.request, late.request):
        scheduler.submit(request)
    scheduler.run()
    assert [type(error) for error in taken] == [Mistake]
    assert (good.ids, late.ids) == (alone([2], 5), alone([3], 5))
    assert (scheduler.n_running, scheduler.n_waiting) == (0, 0)
    scheduler.submit(broken())
    with pytest.raises(Mistake):
        scheduler.run()


def test_it_stops_where_it_is_told_to() -> None:
    ids = alone([3], 9)
    at_id = Heard([3], 9, stop_ids=frozenset([ids[4]]))
    by_text = Heard([3], 9, ends=lambda token, is_last: token == ids[2])
    asked: list[bool] = []

    def never(token: int, is_last: bool) -> bool:
        asked.append(is_last)
        return False

    to_the_end = Heard([3], 3, ends=never)
    run(CheckingEngine(), at_id, by_text, to_the_end)
    assert (at_id.ids, at_id.reason) == (ids[: ids.index(ids[4]) + 1], "stop")
    assert (by_text.ids, by_text.reason) == (ids[:3], "stop")
    assert (to_the_end.ids, asked, to_the_end.reason) == (ids[:3], [False, False, True], "length")


def test_who_chooses_gets_own_logits_and_the_choice_goes_on() -> None:
    seen: list[float] = []

    def choose(choice: Choice, logits: Any) -> int:
        seen.append(float(logits[0]))
        return 4

    chosen, greedy = Heard([1, 2], 3, choose=choose, wants_logits=True), Heard([9], 3)
    run(CheckingEngine(), chosen, greedy)
    assert chosen.ids == [4, 4, 4]
    assert greedy.ids == alone([9], 3)
    assert set(seen) <= {0.0, float(VOCAB)}  # row 0 or 1 of a step's logits
    assert len(seen) == 3


def test_it_goes_on_behind_a_state() -> None:
    engine = CheckingEngine()
    run(engine, Heard([5, 6], 1))
    slot = engine.lengths.index(2)
    behind = Heard([7], 2, state=engine.save_slot(slot))
    run(engine, behind)
    assert behind.ids == alone([5, 6, 7], 2)
    assert behind.tokens[0].position == 2


@pytest.mark.parametrize(
    ("prompt", "most_new", "need"),
    [
        ([], 1, "at least one"), ([1], 0, "at least one"), ([1, VOCAB], 1, "0 to 999"),
        ([1, -1], 1, "0 to 999"), ([1] * CONTEXT, 2, "401 together"),
    ],
)  # fmt: skip
def test_what_fits_in_no_slot_is_refused(prompt: list[int], most_new: int, need: str) -> None:
    with pytest.raises(UsageError, match=need):
        Scheduler(CheckingEngine()).submit(Heard(prompt, most_new).request)


def test_the_last_position_is_used() -> None:
    full = Heard([1] * CONTEXT, 1)
    run(CheckingEngine(), full)
    assert full.reason == "length"
