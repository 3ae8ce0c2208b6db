"""Many clients at once, half of whom go away: who stays gets what `run` gives, nothing is left."""

import json
import random
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from k3tool.serve.metrics import SERIES
from k3tool.targets import DEFAULT_CHUNK
from tests.serve.conftest import PATIENCE, SLOTS, ServerProcess, until

openai = pytest.importorskip("openai", reason="NOT RUN: openai is not installed")

N_CLIENTS, ROUNDS = 32, 2
MEGABYTES = 10**6


class Asked(NamedTuple):
    """One client: it leaves after so many parts of a stream, None: it stays."""

    prompt: list[int]
    n: int
    leaves_after: int | None


def clients(seed: int) -> list[Asked]:
    """Return clients of prompts from one token to more than a step takes, the same each time."""
    rng = random.Random(seed)
    made = []
    for nth in range(N_CLIENTS):
        length = rng.choice([1, 2, 7, 30, 90, 200])
        leaves = rng.randrange(6) if nth % 2 else None
        ids = [rng.randrange(512) for _ in range(length)]
        made.append(Asked(ids, rng.randrange(1, 25), leaves))
    return made


@pytest.fixture(scope="module")
def busy(start: Callable[..., ServerProcess]) -> Iterator[ServerProcess]:
    running = start("--waiting", N_CLIENTS)
    yield running
    code, said = running.end()
    assert code == 143, said
    assert "Traceback" not in said


def metrics(server: ServerProcess) -> dict[str, float]:
    """Return every series, summed over its labels; the reasons of generations by themselves."""
    with urllib.request.urlopen(f"{server.url.removesuffix('/v1')}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    found = dict.fromkeys(SERIES, 0.0)
    for line in lines:
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            plain = name.partition("{")[0]
            found[plain] += float(value)
            if plain != name:
                found[name] = float(value)
    return found


@pytest.fixture(scope="module")
def visitor(busy: ServerProcess) -> Iterator[Any]:
    """Return OpenAI's client, with as many connections as there are clients."""
    with openai.OpenAI(base_url=busy.url, api_key="x", max_retries=0, timeout=PATIENCE) as made:
        yield made


def ask(visitor: Any, asked: Asked) -> list[int] | None:
    """Return a client's tokens, None where it went away."""
    got = visitor.completions.create(
        model="tiny", prompt=asked.prompt, max_tokens=asked.n, temperature=0,
        extra_body={"ignore_eos": True}, stream=asked.leaves_after is not None,
    )  # fmt: skip
    if asked.leaves_after is None:
        return list(got.choices[0].token_ids)
    for nth, _ in enumerate(got):
        if nth >= asked.leaves_after:
            break
    got.close()
    return None


def rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


def test_who_stays_gets_what_run_gives(
    busy: ServerProcess, visitor: Any, sample: Path, cache: Path, tmp_path: Path,
    k3tool: Callable[..., Any],
) -> None:  # fmt: skip
    rounds = [clients(seed) for seed in range(ROUNDS)]
    stay = [asked for each in rounds for asked in each if asked.leaves_after is None]
    file = tmp_path / "alone.jsonl"
    file.write_text(
        "".join(json.dumps({"ids": asked.prompt, "gen": asked.n}) + "\n" for asked in stay)
    )
    alone = k3tool("run", sample, "--batch", file, "--slots", 1, "--ignore-eos", "--cache", cache)
    assert alone.code == 0, alone.err
    lines = [json.loads(line) for line in alone.out.splitlines()]
    want = [line["ids"] for line in sorted(lines, key=lambda line: line["request"])]

    got, sizes = [], []
    for each in rounds:
        with ThreadPoolExecutor(N_CLIENTS) as pool:
            got += [ids for ids in pool.map(lambda asked: ask(visitor, asked), each) if ids]
        until(lambda: metrics(busy)["k3tool_active_sequences"] == 0)
        sizes.append(rss_bytes(busy.process.pid))
    assert got == want

    found = metrics(busy)
    n_asked = N_CLIENTS * ROUNDS
    assert found["k3tool_waiting_sequences"] == 0
    assert found["k3tool_slots"] == SLOTS
    assert found["k3tool_prompt_tokens_total"] == sum(
        len(asked.prompt) for each in rounds for asked in each
    )
    assert found["k3tool_generations_total"] == n_asked, "each ends once"
    assert found['k3tool_generations_total{reason="length"}'] >= len(stay)
    assert found["k3tool_generated_tokens_total"] >= sum(asked.n for asked in stay)
    assert len(stay) <= found["k3tool_first_token_seconds_count"] <= n_asked
    assert found['k3tool_requests_total{path="/v1/completions",status="200"}'] == n_asked
    assert sizes[-1] - sizes[0] < 8 * MEGABYTES, "what ended is let go"


def test_a_long_prompt_is_read_in_parts(visitor: Any) -> None:
    """Somebody who generates has tokens while it is read: the steps in between are short ones."""
    n_between = 0
    with ThreadPoolExecutor(1) as pool:
        stream = visitor.completions.create(
            model="tiny", prompt=[1], max_tokens=400, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        asked = pool.submit(ask, visitor, Asked([5] * 900, 1, None))
        for _ in stream:
            if asked.done():
                break
            n_between += 1
        stream.close()
        assert asked.result()
    assert n_between >= 900 // DEFAULT_CHUNK, "a chunk at most between two of them"
