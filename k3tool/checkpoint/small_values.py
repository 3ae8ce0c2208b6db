"""Look at the few values that say whether a sound header means what the model expects.

A_log has one value a head and is stored with zeros behind to the head's size. Values there mean
another layout, one a channel, which would pass every check of shapes and compute another model.
A few hundred bytes a layer are read.
"""

from typing import NamedTuple

import numpy as np

from k3tool.checkpoint.headers import DTYPES, TensorInfo
from k3tool.checkpoint.reader import Checkpoint
from k3tool.model.weights import TensorSpec


class PaddingFault(NamedTuple):
    """The first value that should be zero: its element, what it is, what is needed."""

    element: int
    got: str
    need: str


def padding_fault(
    checkpoint: Checkpoint, spec: TensorSpec, info: TensorInfo
) -> PaddingFault | None:
    """Return what stands behind the live heads of a padded tensor, or None for zeros.

    Raises: ArtifactError where the file cannot be read.
    """
    n_values = info.shape[0] - spec.live
    if n_values <= 0:
        return None
    tail = np.empty(n_values, dtype=DTYPES[info.dtype])
    item = tail.dtype.itemsize
    checkpoint.read_into(info, info.offset + spec.live * item, tail.view(np.uint8).data)
    wrong = np.nonzero(tail != 0)[0]  # NaN is not zero either
    if not len(wrong):
        return None
    element = spec.live + int(wrong[0])
    return PaddingFault(element, f"{tail[wrong[0]]:g}", f"zero padding behind {spec.live} heads")


# -- copies ------------------------------------------------------------------------------------

_WHOLE_BYTES, _N_SAMPLES, _SAMPLE_BYTES = 1 << 20, 16, 16 << 10


def compare_copies(checkpoint: Checkpoint, first: TensorInfo, second: TensorInfo) -> str:
    """Return in words whether two stored copies of a tensor are the same; large ones by samples."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return f"as {second.dtype} {list(second.shape)}"
    n_bytes = first.n_bytes
    if n_bytes <= _WHOLE_BYTES:
        ranges = [(0, n_bytes)]
    else:
        last = n_bytes - _SAMPLE_BYTES
        starts = [last * index // (_N_SAMPLES - 1) for index in range(_N_SAMPLES)]
        ranges = [(start, _SAMPLE_BYTES) for start in starts]
    for start, length in ranges:
        parts = []
        for info in (first, second):
            part = bytearray(length)
            checkpoint.read_into(info, info.offset + start, memoryview(part))
            parts.append(part)
        if parts[0] != parts[1]:
            return "with different bytes"
    return "with equal bytes" if n_bytes <= _WHOLE_BYTES else "with equal bytes where sampled"
