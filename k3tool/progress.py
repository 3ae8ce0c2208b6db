"""Say on stderr how far a long step is: a bar on a terminal, elsewhere a plain line now and then.

A log that says nothing for an hour looks like a hang; one with a bar's every step is no log.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from k3tool.tables import bytes_text

Progress = Callable[[int, int], None]  # (bytes done so far, bytes to do)
EVERY_SECONDS = 10.0  # between lines, and before the first: a short step says nothing
RATE_SECONDS = 0.25  # between two rates on a terminal
FIRST_SECONDS = 3.0  # before the first line on a terminal, of a step that has no bar
BAR_SECONDS = 0.5  # before a bar: one of a shorter step only flickers
_IS_SILENT = ContextVar("_IS_SILENT", default=False)


@contextmanager
def silenced(is_silent: bool) -> Iterator[None]:
    """Let no step inside say how far it is, if `is_silent`: --quiet, however deep a step lies."""
    token = _IS_SILENT.set(is_silent or _IS_SILENT.get())
    try:
        yield
    finally:
        _IS_SILENT.reset(token)


def notice(line: str) -> None:
    """Say on stderr what a user would wonder about, unless --quiet."""
    if not _IS_SILENT.get():
        print(line, file=sys.stderr, flush=True)


@contextmanager
def progress_of(what: str) -> Iterator[Progress]:
    """Yield what a step calls, often, with its bytes so far and in all."""
    if _IS_SILENT.get():
        yield lambda done, total: None
        return
    with _speaking_for_itself():
        if not sys.stderr.isatty():
            yield Lines(what, time.monotonic, lambda line: print(line, file=sys.stderr, flush=True))
            return
        from tqdm import tqdm

        with tqdm(
            unit="B", unit_scale=True, file=sys.stderr, desc=what, leave=False, delay=BAR_SECONDS
        ) as bar:

            def update(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield update


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say now and then how long a step goes on that cannot tell how far it is.

    `at_step` inside names the steps it is made of. A step inside that says itself how far it is, or
    how long it goes on, is left to do so.
    """
    if _IS_SILENT.get():
        yield
        return
    with _speaking_for_itself():
        waiter = _Waiter(what)
        token = _WAITER.set(waiter)
        waiter.start()
        try:
            yield
        finally:
            _WAITER.reset(token)
            waiter.stop()


def at_step(what: str) -> None:
    """Name the step that the `waiting` around this has come to; without one nobody waits."""
    waiter = _WAITER.get()
    if waiter is not None:
        waiter.name_step(what)


@contextmanager
def _speaking_for_itself() -> Iterator[None]:
    """Keep the `waiting` around this from saying anything meanwhile."""
    waiter = _WAITER.get()
    if waiter is None:
        yield
        return
    waiter.n_inside += 1
    try:
        yield
    finally:
        waiter.n_inside -= 1


class _Waiter(threading.Thread):
    """Says which step it is at, and for how long."""

    def __init__(self, what: str) -> None:
        """Begin the first step."""
        super().__init__(daemon=True)
        self.n_inside = 0  # steps that speak for themselves
        self._ended = threading.Event()
        self.name_step(what)

    def name_step(self, what: str) -> None:
        """Begin another step."""
        self._step = what, time.monotonic()

    def run(self) -> None:
        """Say a line now and then."""
        pause = min(FIRST_SECONDS, EVERY_SECONDS) if sys.stderr.isatty() else EVERY_SECONDS
        while not self._ended.wait(pause):
            pause = EVERY_SECONDS
            what, start = self._step
            if not self.n_inside:
                said = f"{what}: {duration_text(time.monotonic() - start)} so far"
                print(said, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End it."""
        self._ended.set()
        self.join()


_WAITER: ContextVar[_Waiter | None] = ContextVar("_WAITER", default=None)


class Lines:
    """A line every EVERY_SECONDS: bytes done, of how many, the rate so far and the time left."""

    def __init__(self, what: str, clock: Callable[[], float], write: Callable[[str], None]) -> None:
        """Start the clock; nothing is written yet."""
        self._what, self._clock, self._write = what, clock, write
        self._start = self._last = clock()

    def __call__(self, done: int, total: int) -> None:
        """Take how far the step is."""
        now = self._clock()
        if now - self._last < EVERY_SECONDS:
            return
        self._last = now
        rate = max(0, done) / (now - self._start)
        left = f", {duration_text((total - done) / rate)} left" if 0 < done <= total else ""
        share = f"{bytes_text(done)} of {bytes_text(total)}"
        self._write(f"{self._what}: {share}, {bytes_text(rate)}/s{left}")


def duration_text(seconds: float) -> str:
    """Return a time as a person says it: `40 s`, `12 min`, `3 h 05 min`."""
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min" if seconds >= 100 else f"{seconds:.0f} s"


class RateForm(NamedTuple):
    """How a rate is shown that others replace: what is written before the first, as each, at the
    end.
    """

    begin: str
    each: str
    end: str


LINE = RateForm("", "\r{} ", "\r\x1b[K")
# The window's title, kept on the terminal's stack meanwhile. Where text comes on the same terminal
# a line would stand in its middle, and what erases it could erase text at a line's end.
TITLE = RateForm("\x1b[22;2t", "\x1b]2;{}\a", "\x1b[23;2t")
_WITHOUT_ERASING = ("", "dumb")  # values of TERM
_WITHOUT_TITLE = (*_WITHOUT_ERASING, "linux")
_LEAST_COLUMNS = 40  # a line that is longer than its terminal wraps, and erasing takes its last row


class TokenRate:
    """Says on a terminal, a few times a second, how many tokens came and how fast."""

    def __init__(
        self,
        form: RateForm = LINE,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] | None = None,
    ) -> None:
        """Begin before the first token."""
        self._form, self._clock, self._write = form, clock, write or _on_terminal
        self._n = 0
        self._first = self._last = 0.0
        self._is_shown = False

    def token(self) -> None:
        """Count a token. The rate is of those after the first, which waited for the prompt."""
        now = self._clock()
        self._n += 1
        if self._n == 1:
            self._first = self._last = now
        elif now - self._last >= RATE_SECONDS and now > self._first:
            self._last = now
            rate = (self._n - 1) / (now - self._first)
            begin = "" if self._is_shown else self._form.begin
            self._is_shown = True
            self._write(begin + self._form.each.format(f"{self._n} tokens, {rate:.1f} tokens/s"))

    def close(self) -> None:
        """Take it away, where there is one."""
        if self._is_shown:
            self._is_shown = False
            self._write(self._form.end)


def rate_form(*, shares_terminal: bool) -> RateForm | None:
    """Return how a rate is shown on stderr, None where it cannot be: stderr is no terminal, or it
    has other text on it and no title that could be set, or a line could not be erased on it.
    """
    if not sys.stderr.isatty():
        return None
    term = os.environ.get("TERM", "")
    if shares_terminal:
        return None if term in _WITHOUT_TITLE else TITLE
    try:
        is_narrow = 0 < os.get_terminal_size(sys.stderr.fileno()).columns < _LEAST_COLUMNS
    except OSError:  # it has hung up meanwhile
        return None
    return None if term in _WITHOUT_ERASING or is_narrow else LINE


def _on_terminal(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
