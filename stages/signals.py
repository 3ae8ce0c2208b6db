"""Signals that end a command: SIGINT, SIGTERM and SIGHUP become exceptions, so that what is
half-written is removed and ranks are stopped.
"""

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 128 + signal.SIGINT
_TAKEN = (signal.SIGTERM, signal.SIGHUP)
_AGAIN_SECONDS = 0.01  # the place that drops exceptions has been left by then


class Terminated(BaseException):
    """SIGTERM or SIGHUP as an exception."""

    def __init__(self, number: int) -> None:
        """Keep which signal it was, and the exit code that says so."""
        super().__init__(number)
        self.number = number
        self.exit_code = 128 + number


def take_signals() -> None:
    """Raise `Terminated` on SIGTERM, and on SIGHUP unless nohup asked to go on."""
    for each in _TAKEN:
        if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, _terminate)


def send_dropped_again() -> None:
    """Have a signal come again whose exception Python drops: one that arrives in a callback of its
    garbage collector or its import locks ends in `sys.unraisablehook`, and the command would go on.
    """
    sys.unraisablehook = _unraisable


def ignore_signals() -> None:
    """Let no further signal interrupt an end that another began: it would be a traceback."""
    for each in (signal.SIGINT, *_TAKEN):
        signal.signal(each, signal.SIG_IGN)


def _terminate(number: int, frame: FrameType | None) -> None:
    for each in _TAKEN:
        signal.signal(each, signal.SIG_IGN)  # once: a second one must not cut the cleaning
    raise Terminated(number)


def _unraisable(dropped: "UnraisableHookArgs") -> None:
    if isinstance(dropped.exc_value, Terminated):
        number = dropped.exc_value.number
        signal.signal(number, _terminate)
    elif isinstance(dropped.exc_value, KeyboardInterrupt):
        number = signal.SIGINT
    else:
        sys.__unraisablehook__(dropped)
        return
    # Not from here: an exception of this function would be dropped like the first.
    import threading

    again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
