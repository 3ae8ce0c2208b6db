"""Run one piece of work a file on a few threads, with a count of bytes and a way to stop."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from os import cpu_count
from typing import TypeVar

from k3tool.progress import Progress

Job = TypeVar("Job")
DEFAULT_THREADS = 4  # one hashes about 1 GB/s, an SSD takes more
_POLL_SECONDS = 0.2


class Stopped(Exception):
    """Another piece failed or the user interrupted: this one is given up."""


class Tally:
    """Count the bytes done by all threads, and carry the word to stop to them."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.done = 0
        self.read = 0  # bytes of the checkpoint
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def add(self, n_bytes: int) -> None:
        """Count bytes; fewer than none takes some back. Raises: Stopped when someone asked."""
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self.done += n_bytes

    def add_read(self, n_bytes: int) -> None:
        """Count bytes that were read of the checkpoint."""
        with self._lock:
            self.read += n_bytes

    def stop(self) -> None:
        """Make every thread end at its next block."""
        self._stop.set()


def default_threads() -> int:
    """Return how many files are worked on at a time."""
    return min(DEFAULT_THREADS, cpu_count() or 1)


def each(
    jobs: Iterable[Job],
    work: Callable[[Job], None],
    tally: Tally,
    n_threads: int | None,
    progress: Progress | None,
    total: int,
) -> None:
    """Do `work` on every job, taking few ahead; the first failure ends the others and is raised."""
    count = n_threads or default_threads()
    pending: set[Future[None]] = set()
    with ThreadPoolExecutor(count, "shard") as pool:
        try:
            for job in jobs:
                while len(pending) > count:
                    pending = _wait(pending, tally, progress, total)
                pending.add(pool.submit(work, job))
            while pending:
                pending = _wait(pending, tally, progress, total)
        except BaseException:
            tally.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _wait(
    pending: set[Future[None]], tally: Tally, progress: Progress | None, total: int
) -> set[Future[None]]:
    done, left = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
    if progress is not None:
        progress(tally.done, total)
    for future in done:
        future.result()
    return left
