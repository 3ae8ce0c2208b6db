"""What may stand in a file for a tensor of the table, and what part of it a rank holds.

It knows shapes, dtypes and degrees; which tensors there are is weights.py's.
"""

import math
from typing import NamedTuple

from k3tool.checkpoint.headers import DTYPE_BYTES
from k3tool.model.weights import Shape, Split, TensorSpec


class RankSlice(NamedTuple):
    """The part of a stored tensor that a rank holds; `axis` None means all of it."""

    axis: int | None
    start: int
    stop: int


def shape_fault(spec: TensorSpec, shape: Shape) -> str | None:
    """Return what is needed where a stored shape is not acceptable, else None.

    Two layouts have a second form: A_log may be stored without its zero padding, and the depthwise
    convolutions as [C, 4] where a framework drops the middle axis.
    """
    if shape == spec.shape:
        return None
    if spec.split is Split.LIVE_ROWS:
        if len(shape) == 1 and shape[0] >= spec.live:
            return None
        return f"[{spec.live}] or longer with zeros behind"
    if spec.row.claimed_by == "SHORT_CONV" and shape == (spec.shape[0], spec.shape[2]):
        return None
    return str(list(spec.shape))


def rank_slice(spec: TensorSpec, tp: int, rank: int) -> RankSlice:
    """Return what part of the stored tensor a rank holds. Units: stored rows or columns.

    An even split of the padded A_log would hand ranks the wrong heads, so it is narrowed first.
    """
    match spec.split:
        case Split.REPLICATE | Split.DROP:
            return RankSlice(None, 0, spec.shape[0])
        case Split.COLS:
            axis, extent = 1, spec.shape[1]
        case _:
            axis, extent = 0, spec.live
    assert extent % tp == 0, (spec.name, extent, tp)  # K3Config.check_tp refused it before
    size = extent // tp
    return RankSlice(axis, rank * size, (rank + 1) * size)


def rank_shape(spec: TensorSpec, tp: int) -> Shape:
    """Return the shape of every rank's part of a tensor."""
    part = rank_slice(spec, tp, 0)
    if part.axis is None:
        return spec.shape
    return (*spec.shape[: part.axis], part.stop - part.start, *spec.shape[part.axis + 1 :])


def dtype_fault(spec: TensorSpec, dtype: str) -> str | None:
    """Return what is needed where a stored dtype is not acceptable, else None.

    Scale bytes may carry their own name; they are the same bytes.
    """
    if dtype == spec.dtype or (dtype == "F8_E8M0" and spec.name.endswith("weight_scale")):
        return None
    return spec.dtype


def rank_spec(spec: TensorSpec, tp: int) -> TensorSpec:
    """Return what a rank folder of our shards has to hold of a tensor."""
    shape = rank_shape(spec, tp)
    return spec._replace(shape=shape, live=shape[0])


def n_bytes(shape: Shape, dtype: str) -> int:
    """Return the stored size of a shape in bytes."""
    return math.prod(shape) * DTYPE_BYTES[dtype]
