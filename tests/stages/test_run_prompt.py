"""Where a prompt comes from, and how much of one that is too long is read for nothing."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3tool.checkpoint.sample_writer import write_sample
from k3tool.model.config import K3Config
from k3tool.text.tokenizer import Tokenizer, open_tokenizer

REPO = Path(__file__).parents[2]
Run = Callable[..., Any]
LONG = "many words of it. " * 500_000  # 9 MB, which takes seconds to encode


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sample checkpoint, with the cache of all runs beside it."""
    folder = tmp_path_factory.mktemp("prompts") / "ckpt"
    write_sample(folder)
    return folder


@pytest.fixture
def run(k3tool: Run, model: Path) -> Run:
    def call(*arguments: object) -> Any:
        return k3tool("run", model, "--cache", model.parent / "cache", "--gen", 2, *arguments)

    return call


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the characters of each piece that is encoded."""
    seen: list[int] = []
    encode = Tokenizer._encode_piece

    def count(self: Tokenizer, text: str) -> Iterator[int]:
        seen.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "_encode_piece", count)
    return seen


# -- too long ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["--prompt-file", "--chat", "--history", "--batch"])
def test_a_text_that_is_too_long_is_refused_before_it_is_encoded(
    run: Run, encoded: list[int], tmp_path: Path, way: str
) -> None:
    path = tmp_path / "long"
    message = {"role": "user", "content": LONG}
    request = {"id": "one", "prompt": LONG}
    given = {"--history": json.dumps(message), "--batch": json.dumps(request)}.get(way, LONG)
    path.write_text(given)
    options: list[object] = [way, path] if way != "--chat" else ["--chat", "--prompt-file", path]
    done = run(*options, *(["--chat"] if way == "--history" else []))
    assert done.code == 2, done.err
    assert "characters, more than 40" in done.err
    assert "need at most 4094 tokens beside 2 to generate (max_position_embeddings" in done.err
    assert sum(encoded) < 1000  # tags, and the sentence that stands in front of a conversation


def test_a_text_that_fits_exactly_is_read(run: Run, model: Path, encoded: list[int]) -> None:
    """The control: the bound is of what is generated too, and not one token too low."""
    vocab = K3Config.load(model / "config.json").vocab_size
    n = len(open_tokenizer(model, vocab, model.parent / "cache").encode("Hello"))
    assert run("--prompt", "Hello", "--ctx", n + 2).code == 0
    assert sum(encoded) == 2 * len("Hello")
    done = run("--prompt", "Hello", "--ctx", n + 1)
    assert done.code == 2
    need = f"need at most {n - 1} tokens beside 2 to generate (--ctx = {n + 1})"
    assert f"--prompt: got 5 characters, more than {n - 1} tokens, {need}" in done.err
    done = run("--prompt", "He", "--ctx", 2)  # what is generated has no place itself
    assert "prompt and tokens: got" in done.err or "at most 2 tokens (--ctx)" in done.err


# -- pipes -----------------------------------------------------------------------------------------


def test_a_prompt_may_come_from_a_pipe(run: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    said = run("--prompt", "Hello").out
    for option, text in (
        ("--prompt-file", "Hello"),
        ("--batch", '{"prompt": "Hello", "id": 1}'),
    ):
        writer = threading.Thread(target=pipe.write_text, args=(text,))
        writer.start()
        done = run(option, pipe)
        writer.join()
        assert done.code == 0, done.err
        assert f"reading {option} from {pipe}, a pipe" in done.err
        assert (json.loads(done.out)["text"] if option == "--batch" else done.out[:-1]) == said[:-1]


def test_stdin_may_be_named(model: Path) -> None:
    command = [sys.executable, "-m", "stages.cli", "run", model, "--gen", "2", "--cache",
               model.parent / "cache", "--prompt-file", "/dev/stdin"]  # fmt: skip
    done = subprocess.run(
        list(map(str, command)), input="Hello", capture_output=True, text=True, cwd=REPO,
        check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("place", ["/dev/zero", "/dev"])
def test_what_is_no_file_and_no_pipe_is_refused(run: Run, place: str) -> None:
    done = run("--prompt-file", place)
    assert done.code == 3
    is_device = place == "/dev/zero"
    assert ("no regular file" if is_device else "a folder") in done.err
    assert (f"cat {place} | k3tool run ... --prompt-file /dev/stdin" in done.err) == is_device


@pytest.mark.parametrize("chat", [(), ("--chat",)])
def test_a_kept_sequence_that_goes_on_says_that_stdin_is_not_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: tuple[str, ...]
) -> None:
    state = tmp_path / "state.h5"
    assert run("--prompt", "Hello", "--ignore-eos", "--save-state", state, *chat).code == 0
    note = "stdin is not read: the kept sequence goes on"
    file = tmp_path / "text"
    file.write_text("and then")
    outputs = []
    for text in (b"", b"and then", None):
        reading, writing = os.pipe()
        os.write(writing, text or b"")
        os.close(writing)
        with os.fdopen(reading) as pipe, file.open() as regular:
            monkeypatch.setattr(sys, "stdin", regular if text is None else pipe)
            done = run("--load-state", state, "--ignore-eos", *chat)
        assert done.code == 0, done.err
        assert (note in done.err) == (text != b"")  # of nothing there is nothing to say
        outputs.append(done.out)
    assert len(set(outputs)) == 1
    with file.open() as regular:
        monkeypatch.setattr(sys, "stdin", regular)
        behind = run("--load-state", state, "--ignore-eos", "--prompt-file", file, *chat)
    assert behind.code == 0, behind.err
    assert note not in behind.err
    assert chat or behind.out != outputs[0]  # two tokens of a thought are not printed on stdout
