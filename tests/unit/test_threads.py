"""Threads that the system does not give: a process may start none, one, or as many as it likes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.errors import TargetError
from k3tool.threads import out_of_threads

REPO = Path(__file__).resolve().parents[2]
NOBODY = 4_242  # a user without processes: the limit counts those of a user, and never root's
SETPRIV = shutil.which("setpriv")
limited = pytest.mark.skipif(
    SETPRIV is None or os.geteuid() != 0, reason="NOT RUN: another user's limit needs root"
)


def as_nobody(limit: int, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python as a user that may have `limit` threads, who still reads what root reads."""
    assert SETPRIV is not None
    rights = "+dac_override,+dac_read_search"
    user = ("--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups")
    few = f"import resource as r; r.setrlimit(r.RLIMIT_NPROC, ({limit}, {limit})); "
    return subprocess.run(
        [SETPRIV, *user, "--inh-caps", rights, "--ambient-caps", rights,
         sys.executable, "-c", few + code, *map(str, arguments)],
        cwd=REPO, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


COMMAND = "from stages.cli import main; main()"


@limited
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("command", ["inspect", "bench decode"])
def test_no_thread_is_one_line_and_5(
    oracle: Callable[[str], Path], limit: int, command: str
) -> None:
    """One is Python's own. NumPy's pool would send SIGINT, and egglog's would panic."""
    done = as_nobody(limit, COMMAND, *command.split(), oracle("tiny13"))
    assert done.returncode == 5, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("program ")]
    assert lines[0].startswith(f"k3tool {command}: threads: got no more"), done.stderr
    assert len(lines) == 2, done.stderr


@limited
def test_what_needs_no_thread_of_ours_runs_without() -> None:
    done = as_nobody(1, COMMAND, "isa")
    assert done.returncode == 0, done.stderr


@limited
def test_without_it_numpy_interrupts_itself() -> None:
    """The control: a limit of one is one that NumPy's pool meets, or the tests above say nothing.

    With one processor it starts none.
    """
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("NOT RUN: one processor")
    done = as_nobody(1, "import numpy")
    assert "KeyboardInterrupt" in done.stderr


@limited
def test_pools_are_left_alone_where_there_is_room() -> None:
    code = "import os; from k3tool.threads import fit_pools as f; f(); "
    code += 'print(os.environ.get("OPENBLAS_NUM_THREADS"))'
    assert as_nobody(1, code).stdout == "1\n"
    assert as_nobody(1000, code).stdout == "None\n"


class PanicException(BaseException):
    """As a package in Rust raises it."""


def test_only_a_thread_that_did_not_start_is_this_refusal() -> None:
    threads = (RuntimeError("can't start new thread"), PanicException("ThreadPoolBuildError { }"))
    for each in threads:
        assert isinstance(out_of_threads(each), TargetError)
    others = (RuntimeError("x"), PanicException("x"), KeyboardInterrupt(), SystemExit(1))
    assert [out_of_threads(each) for each in others] == [None] * 4
