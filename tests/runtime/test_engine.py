"""Several sequences at once on real programs: the bits of each are those of running alone."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from k3tool.errors import TargetError
from k3tool.runtime.engine import Engine, StepToken
from k3tool.runtime.options import RunOptions, parse_size
from k3tool.runtime.prepare import prepare, running
from k3tool.runtime.ranks import RankGroup
from k3tool.runtime.scheduler import NewToken, Request, Scheduler

SLOTS, GEN = 8, 5
LENGTHS = (3, 17, 1, 40, 9, 70, 5, 2, 31, 4, 12)
CASES = (("tiny_tp8", 1, "f32"), ("tiny_tp8", 2, "bf16"), ("tiny13", 1, "f32"))


class Alone(NamedTuple):
    """What a sequence gives when it runs by itself: (n,) ids, (n, V) logits as bits."""

    ids: tuple[int, ...]
    logits: np.ndarray


class Case(NamedTuple):
    """A model in one mode: an engine of SLOTS slots, and one that runs sequences alone."""

    engine: RankGroup
    single: RankGroup


def _silent(text: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(
    request: pytest.FixtureRequest, oracle: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:  # fmt: skip
    name, tp, numerics = request.param
    cache = tmp_path_factory.mktemp("cache")

    def job_of(batch: int) -> Any:
        options = RunOptions(
            oracle(name), (), 1, tp=tp, threads=1, numerics=numerics, cache=cache, batch=batch,
            ctx=512,
        )  # fmt: skip
        return prepare(options, _silent, _silent, is_engine=True, logits_rows=batch)

    with running(job_of(SLOTS), _silent) as engine, running(job_of(1), _silent) as single:
        assert isinstance(engine, RankGroup)
        assert isinstance(single, RankGroup)
        assert (engine.n_slots, single.n_slots) == (SLOTS, 1)
        yield Case(engine, single)


def prompt_of(n: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(1000 * n + seed)
    return tuple(rng.randrange(200) for _ in range(n))


def tokens_of(ids: Sequence[int], start: int, slot: int) -> list[StepToken]:
    return [StepToken(token, start + i, slot) for i, token in enumerate(ids)]


def run_alone(engine: Engine, prompt: Sequence[int], n_new: int = GEN, slot: int = 0) -> Alone:
    """Read a prompt in steps as long as they come, then a token a step."""
    at, todo, ids, logits = 0, list(prompt), [], []
    while len(ids) < n_new:
        part, todo = todo[: engine.most_tokens], todo[engine.most_tokens :]
        found = engine.step(tokens_of(part, at, slot), 1, True)
        at += len(part)
        if not todo:
            assert found.logits is not None
            ids.append(found.choices[0].id)
            logits.append(found.logits[0])
            todo = ids[-1:]
    return Alone(tuple(ids), np.array(logits).view("<u4"))


class Kept:
    """A request that keeps all logits it was chosen by."""

    def __init__(self, prompt: Sequence[int], n_new: int = GEN) -> None:
        self.ids: list[int] = []
        self.logits: list[np.ndarray] = []

        def choose(choice: Any, logits: Any) -> int:
            self.logits.append(logits)
            return int(choice.id)

        def hear(token: NewToken) -> None:
            self.ids.append(token.id)

        self.request = Request(prompt, n_new, hear, choose=choose, wants_logits=True)

    def is_as(self, alone: Alone) -> bool:
        found = np.array(self.logits).view("<u4")
        return tuple(self.ids) == alone.ids and np.array_equal(found, alone.logits)


def test_arriving_and_leaving_each_gives_the_bits_of_running_alone(case: Case) -> None:
    """More sequences than slots, of mixed lengths, some of them while others generate."""
    prompts = [prompt_of(n, 1) for n in LENGTHS]
    kept = [Kept(prompt, 2 + i % GEN) for i, prompt in enumerate(prompts)]
    scheduler = Scheduler(case.engine)
    for nth, one in enumerate(kept):
        scheduler.submit(one.request)
        for _ in range(nth % 3):
            scheduler.step()
    scheduler.run()
    for prompt, one in zip(prompts, kept, strict=True):
        assert one.is_as(run_alone(case.single, prompt, one.request.most_new)), len(prompt)
    wrong = run_alone(case.single, prompts[0][::-1], kept[0].request.most_new)
    assert not kept[0].is_as(wrong)  # the control: other ids, other bits


def test_a_decode_step_of_all_slots_is_one_step(case: Case) -> None:
    """One reading of the weights for all of them: the tokens of a step, not steps one by one."""
    prompts = [prompt_of(4, seed) for seed in range(SLOTS)]
    want = [run_alone(case.single, prompt, 2) for prompt in prompts]
    first = [run_alone(case.engine, prompt, 1, slot) for slot, prompt in enumerate(prompts)]
    tokens = [StepToken(found.ids[0], 4, slot) for slot, found in enumerate(first)]
    found = case.engine.step(tokens, SLOTS, True)
    assert found.logits is not None
    assert [choice.id for choice in found.choices] == [one.ids[1] for one in want]
    for row, one in zip(found.logits, want, strict=True):
        assert np.array_equal(row.view("<u4"), one.logits[1])
    assert found.rows["slot"][:, 0].tolist() == list(range(SLOTS))
    assert set(found.rows["n_tokens"].flat) == {SLOTS}


def test_a_slot_used_again_shows_no_trace_of_the_last(case: Case) -> None:
    want = run_alone(case.single, prompt_of(9, 2))
    run_alone(case.engine, prompt_of(70, 3), slot=2)
    found = run_alone(case.engine, prompt_of(9, 2), slot=2)
    assert np.array_equal(found.logits, want.logits)


def test_without_a_restart_the_trace_is_seen(case: Case) -> None:
    """The control: the same ids behind another sequence, at positions that follow it."""
    ids = prompt_of(9, 2)
    want = run_alone(case.single, ids, 1)
    case.engine.step(tokens_of(prompt_of(30, 3), 0, 2), 0)
    found = case.engine.step(tokens_of(ids, 30, 2), 1, True)
    assert found.logits is not None
    assert not np.array_equal(found.logits.view("<u4"), want.logits)


def test_a_slot_is_rolled_back_as_if_nothing_was_tried(case: Case) -> None:
    engine, prompt = case.engine, prompt_of(17, 4)
    one, other = prompt_of(4, 5), prompt_of(4, 6)
    want = run_alone(case.single, prompt + other, 3)
    engine.step(tokens_of(prompt, 0, 5), 0)
    state = engine.save_slot(5)
    assert state.length == 17
    engine.step(tokens_of(one, 17, 5), 0)  # tried
    tried = engine.save_slot(5)
    engine.restore_slot(5, state)
    assert engine.save_slot(5) == state != tried

    def go_on(slot: int) -> np.ndarray:
        found = engine.step(tokens_of(other, 17, slot), 1, True)
        rows: list[Any] = [found.logits]
        for nth, token in enumerate(want.ids[:2]):
            rows.append(engine.step([StepToken(token, 21 + nth, slot)], 1, True).logits)
        return np.concatenate(rows).view("<u4")

    assert np.array_equal(go_on(5), want.logits)
    engine.restore_slot(7, state)  # a copy goes on in another slot
    assert np.array_equal(go_on(7), want.logits)
    engine.restore_slot(5, tried)  # the control: what was tried is a state of its own
    found = engine.step(tokens_of(other, 21, 5), 1, True)
    assert found.logits is not None
    assert not np.array_equal(found.logits.view("<u4"), want.logits[:1])


def test_a_state_of_another_program_is_refused(case: Case) -> None:
    state = case.engine.save_slot(0)
    short = type(state)(state.length, tuple(data[:-4] for data in state.ranks))
    with pytest.raises(ValueError, match="of another program"):
        case.engine.restore_slot(0, short)


def test_steps_that_no_slot_is_ready_for_are_refused(case: Case) -> None:
    engine = case.engine
    engine.step(tokens_of((1, 2), 0, 0), 0)
    many = engine.most_tokens + 1
    bad: list[tuple[list[StepToken], int, str]] = [
        ([], 0, "a step of 0 tokens"),
        ([StepToken(1, 0, 0)] * many, 1, f"a step of {many} tokens"),
        ([StepToken(1, 3, 0)], 1, "its slot is at 2"),  # a gap
        ([StepToken(1, 1, 0)], 1, "its slot is at 2"),  # again
        ([StepToken(1, 2, SLOTS)], 1, f"there are {SLOTS} slots"),
        ([StepToken(1, 0, -1)], 1, f"there are {SLOTS} slots"),
        ([StepToken(engine.vocab, 2, 0)], 1, f"{engine.vocab} ids"),
        ([StepToken(1, 2, 0), StepToken(1, 4, 0)], 1, "its slot is at 3"),
        ([StepToken(1, 0, 1), StepToken(1, 0, 1)], 1, "its slot is at 1"),
        ([StepToken(1, 2, 0)], 2, "2 choices of 1 tokens"),
    ]
    for tokens, n_wanted, said in bad:
        with pytest.raises(ValueError, match=said):
            engine.step(tokens, n_wanted)
    engine.step([StepToken(3, 2, 0)], 1)  # nothing has changed


def test_under_the_least_budget_too(oracle: Callable[[str], Path], tmp_path: Path) -> None:
    """A decode step asks for the experts of all its tokens: the cache has slots for them."""
    source = oracle("tiny_tp8")

    def options(batch: int, memory: int | None) -> RunOptions:
        return RunOptions(
            source, (), 1, threads=1, cache=tmp_path, chunk=1, ctx=256, batch=batch,
            memory_bytes=memory,
        )  # fmt: skip

    with pytest.raises(TargetError) as caught:
        prepare(options(4, 1 << 20), _silent, _silent, is_engine=True)
    found = re.search(r"--memory ([\d.]+[KMG]?B)", str(caught.value))
    assert found is not None
    job = prepare(options(4, parse_size(found[1])), _silent, _silent, is_engine=True, logits_rows=4)
    assert job.program.isa.residency is not None
    prompts = [prompt_of(n, 9) for n in (3, 7, 2, 5, 4)]
    kept = [Kept(prompt, 3) for prompt in prompts]
    with running(job, _silent) as engine:
        scheduler = Scheduler(engine)
        for one in kept:
            scheduler.submit(one.request)
        scheduler.run()
    alone = prepare(options(1, None), _silent, _silent, is_engine=True, logits_rows=1)
    with running(alone, _silent) as engine:
        for prompt, one in zip(prompts, kept, strict=True):
            assert one.is_as(run_alone(engine, prompt, 3))
