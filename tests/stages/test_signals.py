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
        (signal.SIGINT, "Interrupted 130"),
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


def python(script: str, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_dropped_signal_comes_again_where_no_thread_starts(number: int) -> None:
    script = SCRIPT.replace("{install}", "send_dropped_again(); import _thread, threading\n{none}")
    none = 'def no(*_): raise RuntimeError("can\'t start new thread")\n'
    none += "_thread.start_new_thread = threading._start_new_thread = no"
    done = python(script.format(none=none, number=number))
    assert done.stdout.split() in (["Interrupted", "130"], ["Terminated", "143"])
    assert done.stderr == ""


def test_an_end_that_has_come_is_not_interrupted() -> None:
    script = (
        "import os; from stages.signals import ignore_signals, take_signals; take_signals()\n"
        "ignore_signals()\nfor n in (2, 15, 1): os.kill(os.getpid(), n)\nprint('ended')"
    )
    for text, says in ((script, "ended"), (script.replace("\nignore_signals()", ""), "")):
        done = python(text)
        assert done.stdout.strip() == says, done.stderr


CLEANING = """
import os
from stages.signals import take_signals, Interrupted, Terminated
take_signals()
def send(*numbers):
    for each in numbers: os.kill(os.getpid(), each)
try:
    try: send({first})
    finally: send(15, 1, 2, 2); print("cleaned")
except (Interrupted, Terminated) as stop:
    print(type(stop).__name__, end=" ")
try: send({then})
except (Interrupted, Terminated) as stop: print(type(stop).__name__)
"""


@pytest.mark.parametrize(("first", "says"), [(2, "Interrupted"), (15, "Terminated")])
def test_further_signals_do_not_cut_the_cleaning(first: int, says: str) -> None:
    """But one whose exception somebody swallowed was not the end: the next one is heard."""
    for then, heard in ((15, "Terminated"), (2, "Interrupted")):
        done = python(CLEANING.format(first=first, then=then))
        assert (done.stdout.split(), done.stderr) == (["cleaned", says, heard], "")


PAIR = """
import os, signal, _thread
from stages.signals import take_signals, Interrupted, Terminated
take_signals()
signal.pthread_sigmask(signal.SIG_BLOCK, {{1, 2, 15}})
for each in ({one}, {other}): os.kill(os.getpid(), each)
try:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {{1, 2, 15}})
    for _ in range(1000): pass
except (Interrupted, Terminated): print("ended")
"""


@pytest.mark.parametrize(("one", "other"), [(15, 1), (2, 15), (1, 2)])
def test_two_signals_at_once_are_one_end(one: int, other: int) -> None:
    done = python(PAIR.format(one=one, other=other))
    assert (done.stdout, done.stderr) == ("ended\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_the_parent_had_ignored_stays_ignored(number: int) -> None:
    script = "import os; from stages.signals import take_signals; take_signals()\n" + (
        f"os.kill(os.getpid(), {int(number)}); print('went on')"
    )
    trap = ("sh", "-c", f"trap '' {int(number)}; exec \"$@\"", "sh")
    assert python(script, *trap).stdout == "went on\n"
    assert python(script).stdout == ""


ENDING = """
import os, sys
import stages.cli as cli
def ended(_):
    {in_command}
    return 0
cli.run_command = ended
real = cli.ignore_signals
def ignored():
    {before}
    real()
    {after}
cli.ignore_signals = ignored
cli.main()
"""


@pytest.mark.parametrize(
    ("in_command", "before", "after", "code"),
    [
        ((), (), (), 0),
        ((15,), (), (2, 15, 1), 143),
        ((15,), (2, 1), (2,), 143),
        ((2,), (15,), (15,), 130),
        ((), (2,), (15,), 130),
        ((), (15,), (2,), 143),
        ((), (), (15, 2, 1), 0),
    ],
)
def test_signals_around_the_end_of_a_command(
    in_command: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...], code: int
) -> None:
    """The first one before the end counts; none gives a traceback, wherever it meets `main`."""
    sent = {
        name: f"for n in {numbers}: os.kill(os.getpid(), n)"
        for name, numbers in (("in_command", in_command), ("before", before), ("after", after))
    }
    done = python(ENDING.format(**sent))
    assert (done.returncode, done.stderr) == (code, "")


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
