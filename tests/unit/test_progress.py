"""Lines of progress: none of a short step, now and then one of a long step, with the time left."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool import progress
from k3tool.progress import EVERY_SECONDS, LINE, TITLE, Lines, TokenRate, duration_text


def test_a_line_now_and_then() -> None:
    now, written = [100.0], []
    step = Lines("shard", lambda: now[0], written.append)
    for tick in range(1, 200):  # five a second
        now[0] = 100 + 0.2 * tick
        step(tick * 10**9, 400 * 10**9)
    assert len(written) == int(0.2 * 199 / EVERY_SECONDS)
    assert written[0] == "shard: 50.00 GB of 400.0 GB, 5.000 GB/s, 70 s left"
    step(10**9, 10**9)
    assert len(written) == 3, "too soon after the one before"


def test_a_step_that_cannot_tell_says_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    said, heard = [], threading.Event()

    class Stderr:
        def write(self, text: str) -> None:
            said.append(text)
            heard.set()

        def flush(self) -> None: ...

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr("sys.stderr", Stderr())
    with progress.waiting("compiling"):
        pass
    assert said == [], "a short step says nothing"
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.001)
    with progress.waiting("compiling"):
        assert heard.wait(60)
    assert said[0] == "compiling: 0 s so far"
    n_threads = threading.active_count()
    with pytest.raises(KeyError), progress.waiting("compiling"):
        raise KeyError
    assert threading.active_count() == n_threads


class Said:
    """A stderr that tells who waits for a line of it."""

    def __init__(self, is_terminal: bool = False) -> None:
        self.lines: list[str] = []
        self._is_terminal, self._heard = is_terminal, threading.Event()

    def write(self, text: str) -> None:
        self.lines.append(text.strip())
        self._heard.set()

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return self._is_terminal

    def next_of(self, step: str) -> None:
        for _ in range(1000):
            self._heard.clear()
            assert self._heard.wait(60)
            if any(line.startswith(f"{step}: ") for line in self.lines[-2:]):
                return
        raise AssertionError(f"nothing of {step}")


def test_a_waiting_says_the_step_it_has_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.001)
    progress.at_step("nobody waits")
    with progress.waiting("headers"):
        said.next_of("headers")
        progress.at_step("compiling")
        said.next_of("compiling")
        with progress.waiting("proving"):
            said.next_of("proving")
            n_before = len(said.lines)
            progress.at_step("proving more")
            said.next_of("proving more")
            assert not any("compiling" in line for line in said.lines[n_before:]), "one at a time"
        said.next_of("compiling")  # which goes on
        with progress.progress_of("shard"):
            time.sleep(0.01)
            n_before = len(said.lines)
            time.sleep(0.05)
            assert len(said.lines) == n_before, "the step inside says it itself"
        said.next_of("compiling")
    assert not any("nobody" in line for line in said.lines)


def test_on_a_terminal_the_first_line_comes_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.001)
    for is_terminal in (True, False):
        said = Said(is_terminal)
        monkeypatch.setattr("sys.stderr", said)
        with progress.waiting("headers"):
            if is_terminal:
                said.next_of("headers")
            time.sleep(0.05)
        assert len([line for line in said.lines if line]) == is_terminal


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_silenced_step_says_nothing(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    with progress.silenced(is_silent):
        with progress.silenced(False), progress.progress_of("shard") as update:
            update(1, 2)
        before = threading.active_count()
        with progress.waiting("compiling"):
            assert threading.active_count() == before + (not is_silent)
    said = capsys.readouterr().err
    assert (said == "") is is_silent
    with progress.progress_of("shard") as update:
        update(1, 2)
    assert "shard: " in capsys.readouterr().err, "it holds inside alone"


def test_a_step_of_which_nothing_is_done_has_no_time_left() -> None:
    now, written = [0.0], []
    step = Lines("values", lambda: now[0], written.append)
    now[0] = 11
    step(0, 5000)
    now[0] = 22
    step(-3, 5000)  # what was taken for done is done again
    assert len(written) == 2
    assert not any("left" in line for line in written)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "0 s"), (99, "99 s"), (100, "2 min"), (3540, "59 min"), (3599, "1 h 00 min"),
     (11_100, "3 h 05 min")],
)  # fmt: skip
def test_durations(seconds: float, said: str) -> None:
    assert duration_text(seconds) == said


def test_long_steps_speak_where_there_is_no_terminal(
    k3tool: Callable, oracle: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, shards = tmp_path / "fresh", tmp_path / "shards"
    shutil.copytree(oracle("tiny_tp8"), source)  # run looks once at files that do not change
    commands = {
        "shard": ("shard", source, "--tp", 2, "-o", shards),
        "check": ("shard", "--check", shards, source),
        "values": ("inspect", source, "--values"),
        "looking for NaN and Inf": ("run", source, "--ids", 1, "--cache", tmp_path / "cache"),
    }
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    for what, command in commands.items():
        outcome = k3tool(*command)
        assert outcome.code == 0
        assert f"{what}: " in outcome.err
        assert f"{what}: " not in outcome.out
    monkeypatch.undo()
    assert k3tool("inspect", source, "--values").err == ""  # and short ones do not


def test_a_rate_now_and_then_and_a_clean_line_at_the_end() -> None:
    now, written = [5.0], []
    rate = TokenRate(LINE, lambda: now[0], written.append)
    for _ in range(11):
        rate.token()
        now[0] += 0.1
    assert written == [
        "\r4 tokens, 10.0 tokens/s ", "\r7 tokens, 10.0 tokens/s ", "\r10 tokens, 10.0 tokens/s "
    ]  # fmt: skip
    rate.close()
    assert written[-1] == "\r\x1b[K"


def test_a_title_is_kept_and_given_back() -> None:
    now, written = [5.0], []
    rate = TokenRate(TITLE, lambda: now[0], written.append)
    for _ in range(8):
        rate.token()
        now[0] += 0.1
    assert written == [
        "\x1b[22;2t\x1b]2;4 tokens, 10.0 tokens/s\a", "\x1b]2;7 tokens, 10.0 tokens/s\a"
    ]  # fmt: skip
    rate.close()
    rate.close()  # once is enough
    assert written[2:] == ["\x1b[23;2t"]


def test_a_run_too_short_for_a_rate_leaves_no_line() -> None:
    written: list[str] = []
    rate = TokenRate(LINE, lambda: 1.0, written.append)
    rate.token()
    rate.close()
    assert written == []
