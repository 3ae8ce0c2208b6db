"""Decide which file of a rank holds which tensor, and in what order.

One file per layer and one for the rest, so that a layer is one sequential read; a layer above the
size limit takes several. Routed experts come first, by expert id and in table order, so that an
expert is one contiguous range; then wider dtypes before narrower, so that offsets align naturally.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from k3tool.checkpoint.headers import DTYPE_BYTES
from k3tool.checkpoint.names import weights_name
from k3tool.model.config import K3Config
from k3tool.model.weight_slices import n_bytes, rank_shape
from k3tool.model.weights import Shape, TensorSpec, expected_tensors

MAX_FILE_BYTES = 16_000_000_000  # data of one file: what object stores and file systems still like


class ShardFile(NamedTuple):
    """One output file, the same for every rank. `layer` None: tensors outside the layers."""

    name: str
    layer: int | None
    tensors: list[TensorSpec]


def shard_files(
    config: K3Config,
    tp: int,
    vision: Sequence[TensorSpec] = (),
    max_bytes: int = MAX_FILE_BYTES,
) -> Iterator[ShardFile]:
    """Yield the files of a rank in order, holding one layer's specs at a time.

    `vision` are the image side's tensors, if they are kept; they come last.
    """
    total = sum(1 for _ in _parts(config, tp, vision, max_bytes))
    for number, (layer, tensors) in enumerate(_parts(config, tp, vision, max_bytes), start=1):
        yield ShardFile(weights_name(number, total), layer, tensors)


def _parts(
    config: K3Config, tp: int, vision: Sequence[TensorSpec], max_bytes: int
) -> Iterator[tuple[int | None, list[TensorSpec]]]:
    """Yield (layer, tensors) of each file; an expert is never cut in two."""
    for layer, group in _groups(config, vision):
        part: list[TensorSpec] = []
        size = 0
        for unit, unit_bytes in _units(group, tp):
            if part and size + unit_bytes > max_bytes:
                yield layer, part
                part, size = [], 0
            part += unit
            size += unit_bytes
        yield layer, part


def _units(group: list[TensorSpec], tp: int) -> Iterator[tuple[list[TensorSpec], int]]:
    """Yield what has to stay together, in order, with its bytes: an expert, or one tensor."""
    sizes: dict[tuple[str, Shape], int] = {}  # half a million tensors have a hundred shapes
    ordered = sorted(group, key=_order)  # stable: an expert's six stay in table order
    for _, members in itertools.groupby(ordered, key=_unit):
        unit = list(members)
        total = 0
        for spec in unit:
            shape = (spec.row.pattern, spec.shape)
            if shape not in sizes:
                sizes[shape] = n_bytes(rank_shape(spec, tp), spec.dtype)
            total += sizes[shape]
        yield unit, total


def _groups(
    config: K3Config, vision: Sequence[TensorSpec]
) -> Iterator[tuple[int | None, list[TensorSpec]]]:
    tail: list[TensorSpec] = []
    group: list[TensorSpec] = []
    layer: int | None = None
    for spec in expected_tensors(config):
        if spec.layer is None:
            tail.append(spec)
            continue
        if spec.layer != layer and layer is not None:
            yield layer, group
            group = []
        layer = spec.layer
        group.append(spec)
    assert layer is not None
    yield layer, group
    yield None, tail
    if vision:
        yield None, list(vision)


def _unit(spec: TensorSpec) -> int | str:
    return spec.name if spec.expert is None else spec.expert


def _order(spec: TensorSpec) -> tuple[int, int, str]:
    if spec.expert is not None:
        return 0, spec.expert, ""
    return 1, -DTYPE_BYTES[spec.dtype], spec.name
