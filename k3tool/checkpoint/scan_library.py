"""The compiled scan of tensor bytes (kernels_cpu/scan): find it, check that it is current, call it.

ctypes lets go of the interpreter while the library reads, so threads scan in parallel. What the
numbers mean is for values.py to say.
"""

import ctypes
import functools
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3tool.errors import TargetError
from k3tool.runtime.build import REBUILD, scan_library_path, scan_source_hash

# A block stays in the second-level cache between read() and the loops; blocks take turns in a ring,
# because read() copies a fifth more slowly to lines that this cache holds: of 128 KiB to 4 MiB the
# quickest on an AMD EPYC with 1 MiB of it.
BLOCK_BYTES = 512 << 10
RING_BYTES = 2 << 20
_FINGER_BLOCK = 1024  # K3_FINGER_BLOCK
PART_BYTES = 16 << 10  # K3_PART_BYTES
CODE_SHARE = 64  # K3_CODE_SHARE: codes are counted in the first of so many parts of a piece
KEPT_BYTES = 2 << 20  # scales of one piece of codes
MAX_JOBS = 128  # of one call
NONE = 2**64 - 1  # K3_SCAN_NONE
DONE, ERROR, ENDED, STOPPED = range(4)
LOOPS = {"auto": -1, "plain": 0, "avx2": 1, "avx512": 2}


class Scan(ctypes.Structure):
    """K3Scan of scan.h, field by field."""

    _fields_ = (
        ("n_bytes", ctypes.c_uint64),
        ("n_nonfinite", ctypes.c_uint64),
        ("first_bad", ctypes.c_uint64),
        ("n_zero_rows", ctypes.c_uint64),
        ("first_zero_row", ctypes.c_uint64),
        ("fingerprint", ctypes.c_uint64 * 2),
        ("histogram", ctypes.c_uint64 * 256),
        ("first_high", ctypes.c_uint64),
        ("codes", ctypes.c_uint64 * 32),
        ("absmax_bits", ctypes.c_uint32),
        ("product_key", ctypes.c_int32),
        ("error", ctypes.c_int32),
    )

    def histogram_array(self) -> npt.NDArray[np.uint64]:
        """Return a copy of the histogram."""
        return np.frombuffer(self.histogram, dtype=np.uint64).copy()

    def codes_array(self) -> npt.NDArray[np.uint64]:
        """Return a copy of the counts of codes: of low nibbles, of high ones, in a share of all."""
        return np.frombuffer(self.codes, dtype=np.uint64).reshape(2, 16).copy()


class Job(ctypes.Structure):
    """K3ScanJob of scan.h: a range of an open file, and as what to look at it.

    With `keep` the range is scales, of at most KEPT_BYTES, and the next job's is their codes.
    """

    _fields_ = (
        ("offset", ctypes.c_uint64),
        ("n_bytes", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint64),
        ("fd", ctypes.c_int32),
        ("kind", ctypes.c_uint32),
        ("keep", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


def product_of(key: int) -> float:
    """Return the magnitude that a product_key of scan.h stands for: of a code times its scale."""
    scale, code = divmod(key, 2)  # 2 * scale + code, the code's own pairs carried into the scale
    return 0.0 if key < 2 else math.ldexp(1.5 if code else 1.0, scale - 128)


class StopFlag:
    """A number that threads inside the library look at once a block."""

    def __init__(self) -> None:
        """Start cleared."""
        self.value = ctypes.c_int(0)

    def set(self) -> None:
        """Make every scan that was given this flag return."""
        self.value.value = 1


class Scanner:
    """One thread's buffer and calls."""

    def __init__(self, stop: StopFlag, loops: str = "auto", path: Path | None = None) -> None:
        """Load the library. Raises: TargetError if it is absent, stale or lacks the loops."""
        self._library = load(path)
        self._stop = stop
        self._loops = LOOPS[loops]
        self._ring = _pages(RING_BYTES + _FINGER_BLOCK)
        self._kept = _pages(KEPT_BYTES + _FINGER_BLOCK)
        self._jobs = (Job * MAX_JOBS)()
        self._scans = (Scan * MAX_JOBS)()
        self._n_done = ctypes.c_uint32(0)
        # The same memory, column by column.
        self.results = np.frombuffer(memoryview(self._scans).cast("B"), dtype=np.dtype(Scan))

    @property
    def result(self) -> Scan:
        """Return the result of the last job begun."""
        found: Scan = self._scans[max(0, self._n_done.value - 1)]
        return found

    @property
    def n_done(self) -> int:
        """Return how many jobs of the last call were begun."""
        return self._n_done.value

    def scan_all(self, jobs: Sequence[Job], *, high_scale: int, fingerprint: bool) -> int:
        """Scan at most MAX_JOBS into `results`; return DONE, or of the last one begun why not."""
        for place, job in enumerate(jobs):
            self._jobs[place] = job
        code: int = self._library.k3_scan(
            self._jobs, len(jobs), high_scale, fingerprint, self._ring, RING_BYTES, BLOCK_BYTES,
            self._kept, KEPT_BYTES, ctypes.byref(self._stop.value), self._loops, self._scans,
            ctypes.byref(self._n_done),
        )  # fmt: skip
        return code

    def scan(
        self,
        descriptor: int,
        offset: int,
        n_bytes: int,
        kind: int,
        row_bytes: int,
        *,
        high_scale: int,
        fingerprint: bool,
    ) -> int:
        """Scan a range of an open file into `result`; return DONE, ERROR, ENDED or STOPPED."""
        job = Job(offset, n_bytes, row_bytes, descriptor, kind)
        return self.scan_all([job], high_scale=high_scale, fingerprint=fingerprint)

    def read_only(self, descriptor: int, offset: int, n_bytes: int, block_bytes: int) -> int:
        """Read a range and look at nothing: what a scan's speed is compared with."""
        if block_bytes > len(self._ring):
            self._ring = _pages(block_bytes + _FINGER_BLOCK)
        count: int = self._library.k3_scan_read_only(
            descriptor, offset, n_bytes, self._ring, block_bytes
        )
        if count < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return count


def _pages(n_bytes: int) -> "ctypes.Array[ctypes.c_char]":
    """Return memory that starts on a page: read() fills it measurably faster."""
    return (ctypes.c_char * n_bytes).from_buffer(mmap.mmap(-1, n_bytes))


@functools.lru_cache(maxsize=4)
def load(path: Path | None = None) -> ctypes.CDLL:
    """Load the library. Raises: TargetError if it is absent or made from other sources."""
    path = path or scan_library_path()
    if not path.is_file():
        raise TargetError(str(path), got="no such file", need="the scan library", hint=REBUILD)
    try:
        library = ctypes.CDLL(str(path), use_errno=True)
        library.k3_scan_source_hash.restype = ctypes.c_char_p
        library.k3_scan_size.restype = ctypes.c_size_t
        library.k3_scan_job_size.restype = ctypes.c_size_t
    except (OSError, AttributeError) as error:
        need = "the scan library"
        raise TargetError(str(path), got=str(error), need=need, hint=REBUILD) from None
    found, need = library.k3_scan_source_hash().decode(), scan_source_hash()
    sizes = (library.k3_scan_size(), library.k3_scan_job_size())
    if found != need or sizes != (ctypes.sizeof(Scan), ctypes.sizeof(Job)):
        got = f"{found[:12]}.."
        raise TargetError(
            f"{path}: source_hash", got=got, need=f"{need[:12]}.. of the sources", hint=REBUILD
        )
    size, number = ctypes.c_uint64, ctypes.c_uint32
    text, flag = ctypes.c_char_p, ctypes.POINTER(ctypes.c_int)
    library.k3_scan.argtypes = (
        ctypes.POINTER(Job), number, number, number, text, size, size, text, size, flag,
        ctypes.c_int, ctypes.POINTER(Scan), ctypes.POINTER(number),
    )  # fmt: skip
    library.k3_scan.restype = ctypes.c_int
    library.k3_scan_read_only.argtypes = (ctypes.c_int, size, size, ctypes.c_char_p, size)
    library.k3_scan_read_only.restype = ctypes.c_int64
    return library
