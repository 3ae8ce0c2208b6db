"""`k3tool run --batch`: each request is answered as if alone, a bad line is refused by number."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.checkpoint.sample_writer import write_sample

Run = Callable[..., Any]
REQUESTS: tuple[dict[str, Any], ...] = (
    {"id": "short", "ids": [1, 2, 3]},
    {"ids": list(range(4, 90)), "gen": 9},
    {"prompt": "Hello", "gen": 5},
    {"id": 7, "prompt": "drawn: ", "temperature": 1.5, "top_k": 40, "seed": 11},
    {"ids": [9], "gen": 1},
    {"id": "stops", "ids": [5, 6], "gen": 12},  # "stop_ids" are put in by the test
)
# Each field, as the command line says it.
OPTIONS = {"gen": "--gen", "temperature": "--temperature", "top_k": "--top-k", "seed": "--seed",
           "prompt": "--prompt"}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sample checkpoint, with the cache of all runs beside it."""
    folder = tmp_path_factory.mktemp("batch") / "ckpt"
    write_sample(folder)
    return folder


@pytest.fixture
def run(k3tool: Run, model: Path) -> Run:
    def call(*arguments: object) -> Any:
        cache = model.parent / "cache"
        return k3tool("run", model, "--cache", cache, "--threads", 1, "--ctx", 512, *arguments)

    return call


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.split("\n") if line]  # a text may have other ends


def written(folder: Path, *requests: object) -> Path:
    path = folder / "requests.jsonl"
    texts = [one if isinstance(one, str) else json.dumps(one) for one in requests]
    path.write_text("\n".join(texts) + "\n")
    return path


def alone(run: Run, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one request as a run of its own and return its events."""
    arguments: list[object] = []
    for name, option in OPTIONS.items():
        if name in request:
            arguments += [option, request[name]]
    for token in request.get("stop_ids", ()):
        arguments += ["--stop-id", token]
    if "ids" in request:
        arguments += ["--ids", ",".join(map(str, request["ids"]))]
    done = run("--ignore-eos", "--json", *(() if "gen" in request else ("--gen", 6)), *arguments)
    assert done.code == 0, done.err
    return lines(done.out)


@pytest.mark.parametrize("tp", [1, 2])
def test_each_request_is_answered_as_alone(run: Run, tmp_path: Path, tp: int) -> None:
    """Six requests through three slots: tokens, margins, texts and reasons of their own runs."""
    stopping = REQUESTS[-1]
    ids = alone(run, stopping)[-1]["tokens"]
    requests = [*REQUESTS[:-1], stopping | {"stop_ids": [ids[3]]}]
    path = written(tmp_path, *requests)
    done = run("--batch", path, "--slots", 3, "--gen", 6, "--ignore-eos", "--json", "--tp", tp)
    assert done.code == 0, done.err
    found = lines(done.out)
    assert (found[0]["event"], found[0]["requests"], found[0]["slots"]) == ("start", 6, 3)
    finished = [event for event in found if event["event"] == "finished"]
    assert found[0]["prompt_tokens"] == sum(one["prompt_tokens"] for one in finished)
    assert found[0]["gen"] == 6, "what --gen says, not what the engine was sized for"
    assert found[-1]["event"] == "end"
    assert found[-1]["tokens"] == sum(event["event"] == "token" for event in found)
    for nth, request in enumerate(requests):
        want, name = alone(run, request), request.get("id", nth)
        own = [event for event in found if event.get("request") == name]
        tokens = [event for event in own if event["event"] == "token"]
        assert len(own) == len(tokens) + 1
        compared = ("step", "id", "position", "margin", "text")
        for ours, theirs in zip(tokens, want[1:-1], strict=True):
            assert [ours[key] for key in compared] == [theirs[key] for key in compared]
            assert ours["ranks_agree"] == tp
        assert own[-1]["ids"] == want[-1]["tokens"]
        for key in ("reason", "stop", "text"):
            assert own[-1][key] == want[-1][key]
    assert own[-1]["reason"] == "stop"  # the last one's


def odd_lines(seed: int, n: int) -> list[str]:
    """Return lines of many kinds, one of exactly the context among them, and empty ones."""
    rng = random.Random(seed)
    texts = [json.dumps({"id": "full", "ids": [3] * 500, "gen": 12})]
    for nth in range(n):
        line: dict[str, Any] = {"id": f"é\u2028{nth}", "gen": rng.randrange(1, 7)}
        if nth % 4 == 3:
            line["prompt"] = "".join(rng.choices("aé你🙂\x00\n ", k=rng.randrange(1, 20)))
        else:
            line["ids"] = [rng.randrange(512) for _ in range(rng.choice([1, 2, 63, 64, 65]))]
        if nth % 3 == 1:
            line |= {"temperature": rng.choice([0.3, 5]), "seed": rng.randrange(2**64)}
            line["top_p"] = 0.9
        if nth % 5 == 2:
            line["stop_ids"] = [rng.randrange(512) for _ in range(60)]
        texts += [json.dumps(line), " " * (nth % 2)]
    rng.shuffle(texts)
    return texts


def test_odd_lines_are_answered_as_with_one_slot(run: Run, tmp_path: Path) -> None:
    """In three slots, and one behind the other; the order in which they end is not the file's."""
    path = written(tmp_path, *odd_lines(5, 24))
    found = []
    for slots in (3, 1):
        done = run("--batch", path, "--slots", slots, "--stop", "ka")
        assert done.code == 0, done.err
        found.append(lines(done.out))
    assert sorted(found[0], key=repr) == sorted(found[1], key=repr)
    assert len(found[0]) == 25
    assert found[0] != found[1]
    assert {one["reason"] for one in found[0]} == {"stop", "length"}
    full = next(one for one in found[0] if one["request"] == "full")
    assert full["prompt_tokens"] + len(full["ids"]) == 512
    over = written(tmp_path, *odd_lines(5, 3), {"ids": [3] * 501, "gen": 12})
    assert "501 + 12 = 513 positions, need at most 512" in run("--batch", over).err


def test_a_line_of_json_for_each_finished_request(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, {"ids": [1], "gen": 5}, "", {"id": "two", "ids": [2, 3], "gen": 2})
    done = run("--batch", path, "--ignore-eos")
    assert done.code == 0, done.err
    found = lines(done.out)
    assert [one["request"] for one in found] == ["two", 0]  # as they end
    assert [len(one["ids"]) for one in found] == [2, 5]
    assert "2 requests, 7 tokens in 5 steps" in done.err
    assert all(
        set(one) == {"request", "prompt_tokens", "ids", "reason", "stop", "text"} for one in found
    )


BAD: dict[str, tuple[object, str]] = {
    "no json": ("{", "line 2: got "),
    "no object": ([1, 2], "line 2: got a JSON list, need a JSON object"),
    "a key twice": ('{"ids": [1], "ids": [2]}', "line 2: got invalid JSON (ids twice)"),
    "an unknown field": ({"ids": [1], "max_tokens": 3}, 'line 2: got a field "max_tokens"'),
    "neither": ({"gen": 1}, "line 2: ids, prompt: got neither"),
    "both": ({"ids": [1], "prompt": "a"}, "line 2: ids, prompt: got both"),
    "no ids": ({"ids": []}, "line 2: ids: got []"),
    "an empty prompt": ({"prompt": ""}, 'line 2: prompt: got ""'),
    "a negative id": ({"ids": [1, -1]}, "line 2: ids: got [1, -1]"),
    "a boolean id": ({"ids": [True]}, "line 2: ids: got [true]"),
    "an id past the vocabulary": ({"ids": [512]}, "line 2: ids: got 512, need 0 to 511"),
    "an id that wraps": ({"ids": [(1 << 32) + 5]}, "line 2: ids: got 4294967301"),
    "a stop id past it": ({"ids": [1], "stop_ids": [600]}, "line 2: stop_ids: got 600"),
    "gen of none": ({"ids": [1], "gen": 0}, "line 2: gen: got 0"),
    "gen of a half": ({"ids": [1], "gen": 1.5}, "line 2: gen: got 1.5"),
    "too long": ({"ids": [1] * 500, "gen": 13}, "line 2: prompt and tokens: got 500 + 13 = 513"),
    "a hot one": ({"ids": [1], "temperature": 1e9}, "line 2: temperature: got"),
    "no share": ({"ids": [1], "temperature": 1, "top_p": 0}, "line 2: top_p: got 0"),
    "half a pair": ('{"prompt": "\\ud800"}', "line 2: got invalid JSON (half of a surrogate pair"),
    "two objects": ('{"ids": [1]} {"ids": [1]}', "line 2: got invalid JSON (Extra data"),
    "a cold seed": ({"ids": [1], "seed": 3}, "line 2: seed: got no temperature"),
    "a name twice": ({"id": 0, "ids": [1]}, "line 2: id: got 0, need a name of its own"),
    "a name that is no text": ({"id": [1], "ids": [1]}, "line 2: id: got [1]"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_line_is_refused_before_any_weight_is_read(
    run: Run, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, words = BAD[what]

    def never(*given: object, **more: object) -> None:
        raise AssertionError

    monkeypatch.setattr("stages.run.batch.prepare", never)
    text = bad if isinstance(bad, str) else json.dumps(bad)
    done = run("--batch", written(tmp_path, {"ids": [1]}, text))
    assert done.code == 2
    assert words in done.err
    assert len(done.err.splitlines()) <= 2


def test_an_empty_file_and_an_absent_one(run: Run, tmp_path: Path) -> None:
    done = run("--batch", written(tmp_path, "", ""))
    assert (done.code, "got no request" in done.err) == (2, True)
    done = run("--batch", tmp_path / "absent.jsonl")
    assert (done.code, "--batch: " in done.err) == (3, True)


@pytest.mark.parametrize(
    ("given", "option"),
    [
        (("--ids", "1"), "--ids"), (("--prompt", "a"), "--prompt"), (("--chat",), "--chat"),
        (("-o", "t.h5"), "-o"), (("--logits", "l.npz"), "--logits"),
        (("--prefill", "decode"), "--prefill"), (("--show", "ids"), "--show"),
    ],
)  # fmt: skip
def test_options_of_one_run_are_refused(
    run: Run, tmp_path: Path, given: tuple[str, ...], option: str
) -> None:
    done = run("--batch", written(tmp_path, {"ids": [1]}), *given)
    assert done.code == 2
    assert f"{option}: got also --batch" in done.err


def test_slots_of_one_run_are_refused(run: Run) -> None:
    done = run("--ids", "1", "--slots", 2)
    assert (done.code, "--slots: got no --batch" in done.err) == (2, True)


def test_too_many_slots_are_refused_by_their_own_name(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"ids": [1]}\n')
    done = run("--batch", path, "--slots", 100_000)
    assert (done.code, "--slots: got 100000, need 1 to 4096" in done.err) == (2, True)
