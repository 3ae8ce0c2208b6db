"""`k3tool run --load-state` with text: conversations, characters and stops that two runs share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.checkpoint.sample_writer import write_sample
from k3tool.model.config import K3Config
from k3tool.runtime.tokens import read_tokens
from k3tool.text.chat import OPEN, Message, chat_ids, kept_conversation
from k3tool.text.tokenizer import Tokenizer, open_tokenizer

Run = Callable[..., Any]
CHAT = ("--chat", "--prompt", "Hi", "--temperature", 1.1, "--seed", 3)
SAMPLING = CHAT[3:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sample checkpoint, with the cache of all runs beside it."""
    folder = tmp_path_factory.mktemp("kept") / "ckpt"
    write_sample(folder)
    return folder


@pytest.fixture
def run(k3tool: Run, model: Path) -> Run:
    def call(*arguments: object) -> Any:
        return k3tool("run", model, "--cache", model.parent / "cache", *arguments)

    return call


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    vocab = K3Config.load(model / "config.json").vocab_size
    return open_tokenizer(model, vocab, model.parent / "cache")


def end_of(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.err
    end: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return end


def test_a_conversation_in_two_runs_is_the_one_of_one_run(run: Run, tmp_path: Path) -> None:
    state = tmp_path / "chat.h5"
    whole = end_of(run(*CHAT, "--gen", 12, "--json"))
    first = end_of(run(*CHAT, "--gen", 5, "--json", "--save-state", state))
    on = ("--load-state", state, *SAMPLING, "--gen", 7)
    rest = end_of(run(*on, "--chat", "--json"))
    assert first["tokens"] + rest["tokens"] == whole["tokens"]
    assert set(rest["channels"]) == set(whole["channels"]) == {"think"}
    assert rest["text"] == whole["text"] == ""
    shown = first["channels"]["think"] + rest["channels"]["think"]
    assert shown == whole["channels"]["think"]
    done = run(*on, "--chat")
    assert (done.out, rest["channels"]["think"] in done.err) == ("\n", True)
    plain = end_of(run(*on, "--json"))  # the control: without --chat thoughts are text
    assert plain["text"] == rest["channels"]["think"] != ""


def test_the_next_message_comes_behind_a_kept_conversation(
    run: Run, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    state, out = tmp_path / "chat.h5", tmp_path / "tokens.h5"
    first = end_of(run("--chat", "--prompt", "Hi", "--gen", 5, "--json", "--save-state", state))
    more = ("--load-state", state, "--chat", "--prompt", "More", "--gen", 2, "--json")
    run(*more, "-o", out)
    before = [*chat_ids(tokenizer, [Message("user", "Hi")]), *first["tokens"]]
    kept = kept_conversation(tokenizer, before)
    behind = chat_ids(tokenizer, [Message("user", "More")], kept=kept)
    assert [*read_tokens(out).prompt] == before + behind
    named = tokenizer.control_id(OPEN)
    # One effort, two questions with an answer each, three channels: nothing is said twice.
    assert (before + behind).count(named) == 7


def test_what_a_kept_sequence_has_no_answer_to_is_refused(run: Run, tmp_path: Path) -> None:
    state = tmp_path / "ids.h5"
    assert run("--ids", "5,6", "--gen", 2, "-q", "--save-state", state).code == 0
    done = run("--load-state", state, "--chat", "--gen", 2)
    assert (done.code, done.out) == (2, "")
    assert "--chat: --load-state: got no message, need a message" in done.err
    assert run(*CHAT, "--gen", 2, "-q", "--save-state", state).code == 0
    done = run("--load-state", state, "--chat", "--prompt", "x", "--thinking", "low")
    assert (done.code, "--thinking: got also --load-state" in done.err) == (2, True)


def test_a_stop_that_began_in_the_run_before(run: Run, tmp_path: Path) -> None:
    hello, state = ("--prompt", "Hello", "--json"), tmp_path / "state.h5"
    free = [json.loads(line) for line in run(*hello, "--gen", 12).out.splitlines()[1:-1]]
    at = next(
        at for at in range(2, 9) if free[at]["text"].isascii() and len(free[at]["text"]) > 1
        and free[at + 1]["text"][:1].isascii() and free[at + 1]["text"]
    )  # fmt: skip
    stop = ("--stop", free[at]["text"][-1] + free[at + 1]["text"][0])
    whole = end_of(run(*hello, "--gen", 12, *stop))
    assert whole["new_tokens"] == at + 2
    first = end_of(run(*hello, "--gen", at + 1, *stop, "--save-state", state))
    rest = end_of(run("--load-state", state, "--json", "--gen", 12, *stop))
    assert first["tokens"] + rest["tokens"] == whole["tokens"]
    assert (rest["stop"], rest["text"]) == (stop[1], "")
