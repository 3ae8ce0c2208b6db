"""Signals that end a command: SIGINT, SIGTERM and SIGHUP become exceptions, so that what is
half-written is removed and ranks are stopped.

One end is enough: while the exception of one signal is on its way, further ones do nothing. Their
handler stays ours and looks: Python complains, with a traceback, of a signal that came before its
handler was set to SIG_IGN, and children would inherit that.
"""

import signal
import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 128 + signal.SIGINT
_TAKEN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_SECONDS = 0.01  # the place that drops exceptions has been left by then


class Interrupted(KeyboardInterrupt):
    """SIGINT as an exception; Python's own class takes no weak reference."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP as an exception."""

    def __init__(self, number: int) -> None:
        """Keep which signal it was, and the exit code that says so."""
        super().__init__(number)
        self.number = number
        self.exit_code = 128 + number


_End = Interrupted | Terminated
_under_way: "weakref.ref[_End] | None" = None  # dead where somebody dropped it: the next one counts
_is_over = False


def take_signals() -> None:
    """Raise `Interrupted` or `Terminated` on a signal, unless who started us had it ignored: nohup,
    a shell's `trap ''`, or its `&` in a script.
    """
    for each in _TAKEN:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, _stop)


def send_dropped_again() -> None:
    """Have a signal come again whose exception Python drops: one that arrives in a callback of its
    garbage collector or its import locks ends in `sys.unraisablehook`, and the command would go on.
    """
    sys.unraisablehook = _unraisable


def ignore_signals() -> None:
    """Let no further signal interrupt an end that has come: it would be a traceback."""
    global _is_over
    _is_over = True


def _stop(number: int, frame: FrameType | None) -> None:
    if _is_over or (_under_way is not None and _under_way() is not None):
        return  # a second one must not cut the cleaning
    raise _begin(number)


def _begin(number: int) -> _End:
    """Return a signal's exception. Not within its handler: a frame of its traceback that names it
    would keep it alive.
    """
    global _under_way
    end = Interrupted() if number == signal.SIGINT else Terminated(number)
    _under_way = weakref.ref(end)
    return end


def _unraisable(dropped: "UnraisableHookArgs") -> None:
    if isinstance(dropped.exc_value, Terminated):
        number = dropped.exc_value.number
    elif isinstance(dropped.exc_value, KeyboardInterrupt):
        number = signal.SIGINT
    else:
        sys.__unraisablehook__(dropped)
        return
    # Not from here: an exception of this function would be dropped like the first. And by the
    # system's clock: a thread of ours may be one more than there may be.
    signal.signal(signal.SIGALRM, lambda _, frame: _stop(number, frame))
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
