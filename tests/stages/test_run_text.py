"""`k3tool run` with text: prompts, conversations, stops and drawn tokens, as a user meets them."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.checkpoint.sample_writer import write_sample
from k3tool.model.config import K3Config
from k3tool.runtime.sampling import Sampler
from k3tool.runtime.tokens import read_tokens
from k3tool.text.chat import Message, chat_ids
from k3tool.text.tokenizer import Tokenizer, open_tokenizer
from stages.run.show import _tame
from tests.test_readme import LINE

REPO = Path(__file__).parents[2]
Run = Callable[..., Any]
HELLO = ("--prompt", "Hello", "--gen", 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sample checkpoint, with the cache of all runs beside it."""
    folder = tmp_path_factory.mktemp("text") / "ckpt"
    write_sample(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    vocab = K3Config.load(model / "config.json").vocab_size
    return open_tokenizer(model, vocab, model.parent / "cache")


@pytest.fixture
def run(k3tool: Run, model: Path) -> Run:
    def call(*arguments: object, source: Path | None = None) -> Any:
        return k3tool("run", source or model, "--cache", model.parent / "cache", *arguments)

    return call


def events(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def texts(found: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in found if event["event"] == "token")


def ids_text(ids: list[int]) -> str:
    return ",".join(map(str, ids))


# -- text in, text out -------------------------------------------------------------------------


def test_text_comes_out_where_text_went_in(run: Run, tokenizer: Tokenizer) -> None:
    found = events(run(*HELLO, "--json").out)
    tokens = found[-1]["tokens"]
    assert texts(found) == found[-1]["text"]
    assert found[-1]["text"] == tokenizer.decode(tokens).decode("utf-8", "replace")
    done = run(*HELLO)
    assert (done.code, done.out) == (0, found[-1]["text"] + "\n")
    assert "12 tokens (length)" in done.err
    shown = run(*HELLO, "--show", "ids")
    assert shown.out == " ".join(map(str, tokens)) + "\n"
    ids = ids_text(tokenizer.encode("Hello"))
    assert run("--ids", ids, "--gen", 12).out == shown.out
    assert run("--ids", ids, "--gen", 12, "--show", "text").out == done.out


def test_quiet_prints_the_answer_alone(run: Run) -> None:
    loud, quiet = run(*HELLO), run(*HELLO, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, loud.out, "")
    assert run("--ids", "5", "--gen", 2, "-q").err == ""


def _piped(model: Path, data: bytes, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    words = ["run", model, "--cache", model.parent / "cache", *arguments]
    return subprocess.run(
        [sys.executable, "-m", "stages.cli", *map(str, words)], input=data, capture_output=True,
        cwd=REPO, check=False, timeout=120,
    )  # fmt: skip


def test_files_and_pipes_are_read_as_the_bytes_they_are(
    run: Run, model: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    data = "naïve 你好\n".encode() + b"\xff\xc3 end\n"
    file = tmp_path / "prompt"
    file.write_bytes(data)
    ids = tokenizer.encode_bytes(data)
    expected = run("--ids", ids_text(ids), "--gen", 6).out
    from_file = run("--prompt-file", file, "--gen", 6, "--show", "ids")
    assert from_file.out == expected != ""
    piped = _piped(model, data, "--gen", 6, "--show", "ids")
    assert piped.stdout.decode() == expected
    assert b"reading the prompt from stdin" in piped.stderr
    assert _piped(model, b"", "--gen", 6).returncode == 2
    unread = _piped(model, data, "--gen", 6, "--ids", ids_text(ids))  # stdin is not asked
    assert unread.stdout.decode() == expected


def test_a_reader_that_has_enough_ends_it(model: Path) -> None:
    command = f"{sys.executable} -m stages.cli run {model} --cache {model.parent / 'cache'} "
    command += "--prompt Hello --gen 3000 --quiet | head -c 5"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, cwd=REPO, check=False,
        timeout=120,
    )  # fmt: skip
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 5, b"")


def test_a_terminal_is_no_prompt_and_is_not_ruled_by_a_model(model: Path) -> None:
    master, terminal = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "stages.cli", "run", model], stdin=terminal, cwd=REPO,
            capture_output=True, check=False, timeout=60,
        )  # fmt: skip
    finally:
        os.close(master)
        os.close(terminal)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"prompt: got none" in done.stderr
    assert _tame("a\x1b[2J\x9b\x7f\r\0\tb\nç") == "a\ufffd[2J\ufffd\ufffd\ufffd\ufffd\tb\nç"


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "prompt: got none, need token ids"),
        (("--chat",), "prompt: got none, need a message"),
        (("--prompt", ""), "--prompt: got an empty text"),
        (("--prompt", "a", "--ids", "1"), "got also --ids"),
        (("--prompt", "a", "--prompt-file", "b"), "--prompt-file: got also --prompt"),
        (("--ids", "1", "--chat"), "--chat: got also --ids"),
        (("--prompt", "a", "--system", "s"), "--system: got no --chat"),
        (("--prompt", "a", "--thinking", "low"), "--thinking: got no --chat"),
        (("--prompt", "a", "--history", "h"), "--history: got no --chat"),
        (("--prompt", "a", "--chat", "--thinking", "medium"), "--thinking"),
        (("--prompt", "a", "--top-p", "0.5"), "--top-p: got no --temperature"),
        (("--prompt", "a", "--seed", "1"), "--seed: got no --temperature"),
        (("--prompt", "a", "--temperature", "-1"), "--temperature"),
        (("--prompt", "a", "--temperature", "nan"), "--temperature"),
        (("--prompt", "a", "--temperature", "1", "--top-k", "0"), "--top-k"),
        (("--prompt", "a", "--temperature", "1", "--seed", 1 << 64), "--seed"),
        (("--prompt", "a", "--stop", ""), "--stop: got an empty text"),
        (("--prompt", "a", "--stop-id", "512"), "--stop-id: got 512"),
        (("--prompt", "a", "--stop-id", "-1"), "--stop-id"),
        (("--prompt", "a", "--stop-id", "4294967301"), "--stop-id"),
        (("--prompt", "a", "--quiet", "--json"), "--quiet"),
    ],
)
def test_bad_options_are_usage_errors(
    run: Run, model: Path, tmp_path: Path, arguments: tuple[object, ...], words: str
) -> None:
    cache = tmp_path / "cache"
    done = run(*arguments, "--cache", cache)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert not cache.exists() or not any(cache.glob("program*"))


def test_files_that_are_not_there(run: Run, tmp_path: Path) -> None:
    done = run("--prompt-file", tmp_path / "absent")
    assert (done.code, done.out) == (3, "")
    assert "--prompt-file" in done.err
    assert run("--chat", "--history", tmp_path, "--prompt", "a").code == 3
    assert run("--prompt", "a", source=tmp_path / "absent").code == 3


def test_a_model_without_a_tokenizer_takes_ids_only(run: Run, oracle: Run) -> None:
    done = run("--prompt", "a", source=oracle("tiny_tp8"))
    assert (done.code, done.out) == (3, "")
    assert "no tokenizer" in done.err
    assert "--ids" in done.err
    assert run("--ids", "1", "--stop", "x", source=oracle("tiny_tp8")).code == 3


def test_a_damaged_tokenizer_is_refused_where_text_is_needed(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    write_sample(folder)
    ranks = folder / "tiktoken.model"
    lines = ranks.read_bytes().splitlines(keepends=True)
    ranks.write_bytes(b"".join([*lines[:300], b"x 300\n", *lines[301:]]))
    done = run("--prompt", "a", source=folder)
    assert (done.code, done.out) == (3, "")
    assert "tiktoken.model: line 301" in done.err
    done = run("--ids", "1", "--gen", 2, "--json", source=folder)
    assert done.code == 0
    assert "no text beside ids: " in done.err
    assert "text" not in events(done.out)[1]


# -- conversations -----------------------------------------------------------------------------


def test_a_conversation_is_the_message_format(
    run: Run, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    history = tmp_path / "history.jsonl"
    lines = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.", "reasoning": "A greeting."},
    ]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    messages = [
        Message("system", "Be brief."), Message("user", "Hi"),
        Message("assistant", "Hello.", "A greeting."), Message("user", "Bye"),
    ]  # fmt: skip
    chat = ("--chat", "--system", "Be brief.", "--history", history, "--prompt", "Bye")
    for effort, shown in (("max", ()), ("off", ("--thinking", "off"))):
        found = events(run(*chat, *shown, "--gen", 3, "--json").out)
        ids = chat_ids(tokenizer, messages, effort)
        assert found[0]["prompt_tokens"] == len(ids)
        open_channel = "response" if effort == "off" else "think"
        assert set(found[-1]["channels"]) == {open_channel}
        assert found[-1]["text"] == found[-1]["channels"].get("response", "")
    alone = events(run("--ids", ids_text(ids), "--gen", 3, "--json").out)
    assert alone[-1]["tokens"] == found[-1]["tokens"]
    history.write_text(json.dumps({"role": "user", "content": "Bye"}) + "\n")
    asked = events(run("--chat", "--history", history, "--gen", 3, "--json").out)
    same = events(run("--chat", "--prompt", "Bye", "--gen", 3, "--json").out)
    assert asked[-1]["tokens"] == same[-1]["tokens"]


def test_thoughts_go_to_stderr_and_answers_to_stdout(run: Run) -> None:
    chat = ("--chat", "--prompt", "Hi", "--gen", 8)
    thought = events(run(*chat, "--json").out)[-1]["channels"]["think"]
    done = run(*chat)
    assert done.out == "\n"
    assert thought in done.err
    quiet = run(*chat, "--quiet")
    assert (quiet.out, quiet.err) == ("\n", "")
    answer = events(run(*chat, "--thinking", "off", "--json").out)[-1]["text"]
    assert run(*chat, "--thinking", "off").out == answer + "\n" != "\n"


# -- stops -------------------------------------------------------------------------------------


def test_a_stop_is_found_across_tokens_and_said(run: Run) -> None:
    free = events(run(*HELLO, "--json").out)
    text, tokens = free[-1]["text"], free[-1]["tokens"]
    # From the middle of one token's text into the next one's.
    at = next(
        at for at in range(2, 9) if free[at]["text"].isascii() and len(free[at]["text"]) > 1
        and free[at + 1]["text"][:1].isascii() and free[at + 1]["text"]
    )  # fmt: skip
    stop = free[at]["text"][-1] + free[at + 1]["text"][0]
    found = events(run(*HELLO, "--stop", "no such", "--stop", stop, "--json").out)
    end = found[-1]
    assert (end["reason"], end["stop"]) == ("stop", stop)
    assert end["text"] == texts(found) == text[: text.find(stop)]
    assert end["tokens"] == tokens[: len(end["tokens"])]
    assert len(end["tokens"]) < len(tokens)
    assert texts(found[:-2]) in end["text"]
    done = run(*HELLO, "--stop", stop)
    assert done.out == end["text"] + "\n"
    assert f"(stop at {json.dumps(stop, ensure_ascii=False)})" in done.err
    last = ("--prompt", "Hello", "--gen", len(end["tokens"]), "--stop", stop, "--json")
    assert events(run(*last).out)[-1]["reason"] == "stop"  # with the last token, not by length


def test_stop_ids_beside_the_models_own(run: Run) -> None:
    tokens = events(run(*HELLO, "--ignore-eos", "--json").out)[-1]["tokens"]
    stop = next(token for token in tokens[2:] if token not in tokens[:2])
    for more in ((), ("--ignore-eos",)):
        end = events(run(*HELLO, "--stop-id", 499, "--stop-id", stop, *more, "--json").out)[-1]
        assert end["tokens"] == tokens[: tokens.index(stop) + 1]
        assert (end["reason"], end["stop"]) == ("stop", stop)
    assert events(run(*HELLO, "--json").out)[-1]["stop"] is None


# -- drawn tokens ------------------------------------------------------------------------------

DRAWN = ("--temperature", 1.1, "--top-p", 0.95, "--seed", 7)


def test_one_seed_draws_the_same_tokens_whatever_runs_it(
    run: Run, k3tool: Run, tmp_path: Path
) -> None:
    out = tmp_path / "logits.npz"
    files = [tmp_path / f"{name}.h5" for name in ("a", "b")]
    end = events(run(*HELLO, *DRAWN, "--json", "--logits", out, "-o", files[0]).out)[-1]
    tokens = end["tokens"]
    for how in (("--tp", 2, "-o", files[1]), ("--prefill", "decode")):
        assert events(run(*HELLO, *DRAWN, *how, "--json").out)[-1]["tokens"] == tokens
    other = events(run(*HELLO, *DRAWN[:-1], 8, "--json").out)[-1]["tokens"]
    assert other != tokens
    with np.load(out) as data:
        sampler = Sampler(temperature=1.1, top_p=0.95, seed=7)
        assert [sampler.choose(row, n) for n, row in enumerate(data["steps"])] == tokens
        assert data["steps"].argmax(axis=1).tolist() != tokens
    record = read_tokens(files[0])
    assert record.ranks[0]["id"].tolist() == tokens
    assert record.params["sampling"]["seed"] == 7
    assert k3tool("verify", "ranks", *files).code == 0


def test_without_a_temperature_nothing_is_drawn(run: Run) -> None:
    greedy = events(run(*HELLO, "--json").out)
    assert greedy[0]["sampling"] is None
    cold = ("--temperature", 0.9, "--top-k", 1, "--seed", 3)
    assert events(run(*HELLO, *cold, "--json").out)[-1]["tokens"] == greedy[-1]["tokens"]


def test_a_kept_sequence_goes_on_drawing_where_it_stopped(run: Run, tmp_path: Path) -> None:
    state = tmp_path / "state.h5"
    whole = events(run(*HELLO, *DRAWN, "--json").out)[-1]
    first = events(run(*HELLO[:-1], 5, *DRAWN, "--json", "--save-state", state).out)[-1]
    rest = events(run("--load-state", state, "--gen", 7, *DRAWN, "--json").out)[-1]
    assert first["tokens"] + rest["tokens"] == whole["tokens"]
    assert first["text"] + rest["text"] == whole["text"]


def test_a_kept_sequence_of_a_model_without_a_tokenizer_goes_on_as_ids(
    run: Run, oracle: Run, tmp_path: Path
) -> None:
    state, source = tmp_path / "state.h5", oracle("tiny_tp8")
    assert run("--ids", "1,2", "--gen", 2, "--save-state", state, source=source).code == 0
    done = run("--load-state", state, "--gen", 2, source=source)
    assert re.fullmatch(r"\d+ \d+\n", done.out), done.err
    assert "token ids are printed" in done.err
    assert run("--load-state", state, "--show", "text", source=source).code == 3


# -- the page ----------------------------------------------------------------------------------


def test_the_commands_of_the_page_do_what_they_say(
    k3tool: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (REPO / "docs" / "text.md").read_text()
    (block,) = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    commands = [(m["command"], int(m["exit"] or 0)) for m in LINE.finditer(block)]
    assert len(commands) == len(block.splitlines()) >= 10
    for command, expected in commands:
        program, *words = shlex.split(command)
        done = k3tool(*words)
        assert (program, done.code) == ("k3tool", expected), f"$ {command}\n{done.err}"
