"""What of some files lies in the page cache, and asking the system to let go of it."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from k3tool.errors import TargetError


def cached_bytes(files: Iterable[Path]) -> int:
    """Return the bytes of files that are in the page cache. Raises: TargetError where unknown."""
    return sum(_cached_pages(file) for file in files) * mmap.PAGESIZE


def _cached_pages(file: Path) -> int:
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
    return int((state & 1).sum())


def evict(files: Iterable[Path]) -> None:
    """Ask for the pages of files to be dropped; what somebody has mapped stays."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page that is not yet written cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
