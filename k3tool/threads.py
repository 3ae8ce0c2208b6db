"""Threads that the system does not give: the pools of other packages are told before they load, and
what is said of it becomes one refusal.
"""

import _thread
import os

from k3tool.errors import TargetError

# Pools that start a thread for each processor when their package loads. Where it cannot, OpenBLAS
# (NumPy's) sends its own process SIGINT, as if somebody had pressed Ctrl-C, and Rayon (egglog's)
# panics, with a backtrace.
_POOLS = ("OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
_NO_THREAD = "can't start new thread"  # of CPython, which has no error of its own for it
_NO_POOL = "ThreadPoolBuildError"  # of Rayon, in an exception whose class cannot be imported


def fit_pools() -> None:
    """Have the pools of other packages take one thread where the system gives no more.

    A limit that is reached only after this is not seen: other processes of the user count too.
    """
    if not _can_start(len(_POOLS) * len(os.sched_getaffinity(0))):
        for each in _POOLS:
            os.environ.setdefault(each, "1")


def require_thread() -> None:
    """Raise TargetError where not one more thread can be started."""
    if not _can_start(1):
        raise _refusal()


def out_of_threads(error: BaseException) -> TargetError | None:
    """Return the refusal for a thread that the system did not start, of whichever pool; None for
    another error.
    """
    ours = type(error) is RuntimeError and str(error) == _NO_THREAD
    pool = type(error).__name__ == "PanicException" and _NO_POOL in str(error)
    return _refusal() if ours or pool else None


def _refusal() -> TargetError:
    return TargetError(
        "threads", got="no more of the system", need="a few beside those that run",
        hint="raise the limit (ulimit -u, the container's), or use fewer (--jobs, --threads)",
    )  # fmt: skip


def _can_start(count: int) -> bool:
    """Return whether so many threads can run at once, by trying; all have left or are leaving."""
    gate = _thread.allocate_lock()

    def wait() -> None:
        with gate:
            pass

    with gate:
        try:
            for _ in range(count):
                _thread.start_new_thread(wait, ())
        except RuntimeError:
            return False
    return True
