"""A run on a terminal: its rate is shown while tokens come, and is not in the middle of them."""

import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.checkpoint.sample_writer import write_sample

REPO = Path(__file__).parents[2]
# A rate with every token and a bar at once, so that a short run has them.
PROGRAM = """
import sys
import k3tool.progress
k3tool.progress.RATE_SECONDS = k3tool.progress.BAR_SECONDS = 0.0
from stages.cli import run_command
sys.exit(run_command(sys.argv[1:]))
"""
TITLE = re.compile(r"\x1b\]2;\d+ tokens, [\d.]+ tokens/s\a")
LINE = re.compile(r"\r\d+ tokens, [\d.]+ tokens/s ")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal") / "ckpt"
    write_sample(folder)
    return folder


@pytest.fixture
def on_terminal(model: Path) -> Callable[..., tuple[str, str]]:
    """Return what runs a model with stderr, and stdout unless piped, on a terminal.

    It gives what the terminal got, and what the pipe did.
    """

    def run(
        *arguments: str, term: str = "xterm", is_piped: bool = False, columns: int = 0
    ) -> tuple[str, str]:
        leader, follower = pty.openpty()
        if columns:  # else none is known
            termios.tcsetwinsize(follower, (24, columns))
        cache = str(model.parent / "cache")
        command = [sys.executable, "-c", PROGRAM, "run", str(model), "--cache", cache]
        command += ["--gen", "12", "--ignore-eos", *arguments]
        done = subprocess.Popen(
            command, cwd=REPO, stdin=subprocess.DEVNULL, stderr=follower,
            stdout=subprocess.PIPE if is_piped else follower, env={**os.environ, "TERM": term},
        )  # fmt: skip
        os.close(follower)
        got = b""
        try:
            while part := os.read(leader, 65536):
                got += part
        except OSError:  # the last writer has closed it
            pass
        os.close(leader)
        piped = done.communicate(timeout=60)[0] or b""
        assert done.returncode == 0, got
        return got.decode().replace("\r\n", "\n"), piped.decode()

    return run


def test_the_rate_is_in_the_title_where_text_comes_on_the_same_terminal(
    on_terminal: Callable[..., tuple[str, str]],
) -> None:
    """And nothing of it between the tokens: without its sequences the text is the pipe's."""
    beside, text = on_terminal("--prompt", "Hello", "--show", "ids", is_piped=True)
    assert len(LINE.findall(beside)) > 3
    assert not TITLE.search(beside)
    both, _ = on_terminal("--prompt", "Hello", "--show", "ids")
    assert len(TITLE.findall(both)) > 3
    assert both.count("\x1b[22;2t") == both.count("\x1b[23;2t") == 1
    bare = TITLE.sub("", both).replace("\x1b[22;2t", "").replace("\x1b[23;2t", "")
    assert "\x1b" not in bare
    assert "\r" not in bare
    assert text in bare
    assert text not in both  # the control: titles do come between the tokens
    assert "decode " in bare.splitlines()[-1]  # the summary has the rate of all of them


def test_thoughts_are_text_too(on_terminal: Callable[..., tuple[str, str]]) -> None:
    beside, _ = on_terminal("--prompt", "Hi", "--chat", "--thinking", "low", is_piped=True)
    assert TITLE.search(beside)
    assert not LINE.search(beside)


@pytest.mark.parametrize("arguments", [(), ("--quiet",)])
def test_a_terminal_without_a_title_gets_no_sequence(
    on_terminal: Callable[..., tuple[str, str]], arguments: tuple[str, ...]
) -> None:
    term = "xterm" if arguments else "dumb"
    both, _ = on_terminal("--ids", "1,2,3", *arguments, term=term)
    assert "\x1b" not in both
    assert re.search(r"^\d+( \d+){11}$", both, re.MULTILINE)


def test_quiet_shows_no_bar_of_any_step(on_terminal: Callable[..., tuple[str, str]]) -> None:
    """At a terminal whose size is known, where a bar would be drawn; the control asks for it."""
    quiet = ("--ids", "1,2,3", "--weights", "copied", "--quiet")
    beside, ids = on_terminal(*quiet, columns=80, is_piped=True)
    assert beside == ""
    assert len(ids.split()) == 12
    beside, _ = on_terminal(*quiet[:-1], columns=80, is_piped=True)
    assert "reading the weights into memory: " in beside


@pytest.mark.parametrize(("term", "columns"), [("dumb", 0), ("xterm", 20)])
def test_a_terminal_that_cannot_erase_a_line_gets_none(
    on_terminal: Callable[..., tuple[str, str]], term: str, columns: int
) -> None:
    """The control, a line on a terminal that can, is the first test's."""
    beside, _ = on_terminal("--ids", "1,2,3", term=term, columns=columns, is_piped=True)
    assert "\x1b[K" not in beside
    assert not LINE.search(beside)
    assert "decode " in beside
