"""What of some files lies in the page cache, and asking the system to let go of it."""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3tool.errors import TargetError


def cached_bytes(files: Iterable[Path]) -> int:
    """Return the bytes of files that are in the page cache. Raises: TargetError where unknown."""
    return sum(int(_pages(file).sum()) for file in files) * mmap.PAGESIZE


@contextlib.contextmanager
def as_found(files: Iterable[Path]) -> Iterator[None]:
    """Drop at the end what of some files came into the page cache meanwhile.

    For small files: every page is asked for. Of a file that is not this user's the system calls
    every page present, and all of them stay, as do those that somebody maps.
    """
    absent = {file: _absent(file) for file in files}
    try:
        yield
    finally:
        for file, runs in absent.items():
            with contextlib.suppress(OSError):  # advice; who reads the file says what it lacks
                _drop(file, runs)


def _absent(file: Path) -> list[tuple[int, int]]:
    """Return the runs of a file's pages that are not there, none where that is unknown."""
    try:
        return _runs(~_pages(file))
    except (OSError, TargetError):
        return []


def _drop(file: Path, runs: Iterable[tuple[int, int]]) -> None:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for first, n_pages in runs:
            place, n_bytes = first * mmap.PAGESIZE, n_pages * mmap.PAGESIZE
            os.posix_fadvise(descriptor, place, n_bytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _runs(pages: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return (first, how many) of each run of pages that are marked."""
    edges = np.flatnonzero(np.diff(pages, prepend=False, append=False)).reshape(-1, 2)
    return [(int(first), int(end - first)) for first, end in edges]


def _pages(file: Path) -> npt.NDArray[np.bool_]:
    """Return of each page of a file whether it is there. Raises: TargetError where unknown."""
    if not file.stat().st_size:
        return np.zeros(0, np.bool_)  # which cannot be mapped
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = np.frombuffer(data, np.uint8)
        state = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
        ask = ctypes.CDLL(None, use_errno=True).mincore
        ask.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        failed = ask(view.ctypes.data, len(view), state.ctypes.data)
        del view  # an exported buffer would keep the map open
    if failed:
        got = os.strerror(ctypes.get_errno())
        raise TargetError(f"{file}: page cache", got=got, need="mincore(2)")
    return (state & 1).astype(np.bool_)


def evict(files: Iterable[Path]) -> None:
    """Ask for the pages of files to be dropped; what somebody has mapped stays."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page that is not yet written cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
