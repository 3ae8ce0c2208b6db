"""What every worker of a rank ran, from when to when (layout: kernels_cpu/trace.h)."""

import mmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LINE_BYTES = 64  # K3_LINE
EVENT_DTYPE = np.dtype(
    [
        ("step", "<u4"), ("inst", "<u4"), ("workgroup", "<u4"), ("worker", "<u2"), ("phase", "<u2"),
        ("start_ns", "<u8"), ("end_ns", "<u8"),
    ]
)  # fmt: skip
assert EVENT_DTYPE.itemsize == 32
WHOLE_STEP = 0xFFFFFFFF  # as an instruction: the step itself, by worker 0


class Trace(NamedTuple):
    """Slices and steps, each EVENT_DTYPE in the order they ended on their worker; and what did not
    fit.
    """

    slices: Array
    steps: Array
    n_dropped: int


def trace_bytes(n_threads: int, capacity: int) -> int:
    """Return the size of a trace file with room for `capacity` events a worker."""
    return n_threads * (LINE_BYTES + capacity * EVENT_DTYPE.itemsize)


def read_trace(descriptor: int, n_threads: int, capacity: int) -> Trace:
    """Return the trace in an open file whose writer has ended."""
    n_bytes = trace_bytes(n_threads, capacity)
    with mmap.mmap(descriptor, n_bytes, access=mmap.ACCESS_READ) as data:
        lines = np.frombuffer(data, "<u8", n_threads * LINE_BYTES // 8).reshape(n_threads, -1)
        counts, dropped = lines[:, 0].tolist(), int(lines[:, 1].sum())
        parts = []
        for worker, count in enumerate(counts):
            at = n_threads * LINE_BYTES + worker * capacity * EVENT_DTYPE.itemsize
            parts.append(np.frombuffer(data, EVENT_DTYPE, count, at).copy())
        del lines
    events = np.concatenate(parts)
    is_step = events["inst"] == WHOLE_STEP
    return Trace(events[~is_step], events[is_step], dropped)
