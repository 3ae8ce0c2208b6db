"""A signal whose exception Python drops comes again: a callback it meets must not swallow it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys, time, weakref
from stages.signals import send_dropped_again, take_signals, Terminated
{install}
take_signals()
class Each: pass
each = Each()
kept = weakref.ref(each, lambda _: (os.kill(os.getpid(), {number}), sum(range(1000))))
try:
    del each
    for _ in range(500): time.sleep(0.01)
    print("went on")
except (KeyboardInterrupt, Terminated) as stop:
    print(type(stop).__name__, getattr(stop, "exit_code", 130))
"""


def ended(number: int, install: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(number=number, install=install).replace("500", "500" if install else "5")
    return subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGINT, "KeyboardInterrupt 130"),
        (signal.SIGTERM, "Terminated 143"),
        (signal.SIGHUP, "Terminated 129"),
    ],
)
def test_a_signal_that_a_callback_drops_comes_again(number: int, says: str) -> None:
    done = ended(number, "send_dropped_again()")
    assert (done.stdout.strip(), done.stderr) == (says, "")


def test_without_it_the_program_goes_on() -> None:
    """The control: Python says that it ignored the exception, and goes on."""
    done = ended(signal.SIGINT, "")
    assert done.stdout.strip() == "went on"
    assert "Exception ignored" in done.stderr


def test_an_end_that_has_begun_is_not_interrupted() -> None:
    script = (
        "import os; from stages.signals import ignore_signals, take_signals; take_signals()\n"
        "ignore_signals()\nfor n in (2, 15, 1): os.kill(os.getpid(), n)\nprint('ended')"
    )
    for text, says in ((script, "ended"), (script.replace("\nignore_signals()", ""), "")):
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=REPO, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip() == says, done.stderr


def test_another_dropped_exception_is_said_as_python_says_it() -> None:
    script = "from stages.signals import send_dropped_again as s; s()\n" + (
        "class A:\n def __del__(self): 1 / 0\nA()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "Exception ignored" in done.stderr
    assert "ZeroDivisionError" in done.stderr
