"""Many prompts over one engine: each request is answered as if it were alone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from k3tool.runtime.batch_file import BatchLine, check_lines
from k3tool.runtime.prepare import Job, Say, running
from k3tool.runtime.run import Event, Follow, OnEvent, start_event
from k3tool.runtime.sampling import chooser
from k3tool.runtime.scheduler import NewToken, Request, Scheduler


@dataclass(slots=True)
class _Answer:
    """What a request has given so far."""

    line: BatchLine
    ids: list[int] = field(default_factory=list)
    stop: str | int | None = None


def run_batch(
    job: Job, lines: Sequence[BatchLine], end_ids: Sequence[int],
    follow_of: Callable[[BatchLine], Follow | None], on_event: OnEvent, say: Say,
) -> None:  # fmt: skip
    """Answer all requests. Events: `start`, a `token` and a `finished` of each request, `end`.

    `end_ids` end every request, beside its own. `follow_of` may stop a request by its text.
    Raises: UsageError for a request that fits in no slot; as Engine.step.
    """
    check_lines(lines, job.source.config.vocab_size, int(job.program.isa.params["ctx"]))
    with running(job, say) as engine:
        scheduler = Scheduler(engine)
        n_tokens, n_steps, ns = 0, 0, time.monotonic_ns()

        def hear(answer: _Answer, new: NewToken) -> None:
            nonlocal n_tokens
            n_tokens += 1
            answer.ids.append(new.id)
            on_event(_token_event(answer, new))
            if new.reason is not None:
                on_event(_finished_event(answer, new))

        sizes = {"requests": len(lines), "slots": engine.n_slots}
        on_event(start_event(job, engine.leaves) | sizes)
        for line in lines:
            scheduler.submit(_request(line, end_ids, follow_of(line), hear))
        while scheduler.step():
            n_steps += 1
        ns = time.monotonic_ns() - ns
        engine.end()
        on_event(
            {
                "event": "end",
                "requests": len(lines),
                "tokens": n_tokens,
                "steps": n_steps,
                "tokens_per_second": n_tokens * 1e9 / max(ns, 1),
                "peak_memory_bytes": engine.peak_bytes,
                "ranks": job.source.tp,
            }
        )


def _request(
    line: BatchLine, end_ids: Sequence[int], follow: Follow | None,
    hear: Callable[[_Answer, NewToken], None],
) -> Request:  # fmt: skip
    answer = _Answer(line)
    stop_ids = frozenset([*end_ids, *line.stop_ids])

    def ends(token: int, is_last: bool) -> bool:
        found = None if follow is None else follow(token, is_last)
        answer.stop = found if found is not None else token if token in stop_ids else None
        return found is not None

    return Request(
        line.ids, line.gen, lambda new: hear(answer, new), stop_ids, chooser(line.sampler), ends,
        wants_logits=not line.sampler.is_greedy,
    )  # fmt: skip


def _token_event(answer: _Answer, new: NewToken) -> Event:
    return {
        "event": "token",
        "request": answer.line.name,
        "step": new.number,
        "id": new.id,
        "position": new.position,
        "margin": new.choice.best - new.choice.second,
        "ranks_agree": len(new.rows),
    }


def _finished_event(answer: _Answer, new: NewToken) -> Event:
    return {
        "event": "finished",
        "request": answer.line.name,
        "prompt_tokens": len(answer.line.ids),
        "ids": answer.ids,
        "reason": new.reason,
        "stop": answer.stop,
    }
