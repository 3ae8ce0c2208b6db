"""Decide which file of a rank holds which tensor, and in what order.

One file per layer and one for the rest, so that a layer is one sequential read. Routed experts come
first, by expert id and in table order, so that an expert is one contiguous range and all experts
one base and one stride; then wider dtypes before narrower, so that offsets align naturally.
"""

from collections.abc import Iterator
from typing import NamedTuple

from k3tool.checkpoint.headers import DTYPE_BYTES
from k3tool.model.config import K3Config
from k3tool.model.weights import TensorSpec, expected_tensors


class ShardFile(NamedTuple):
    """One output file, the same for every rank. `layer` None: tensors outside the layers."""

    name: str
    layer: int | None
    tensors: list[TensorSpec]


def shard_files(config: K3Config) -> Iterator[ShardFile]:
    """Yield the files of a rank in order, holding one layer's specs at a time."""
    total = config.num_hidden_layers + 1
    tail: list[TensorSpec] = []
    group: list[TensorSpec] = []
    layer: int | None = None
    for spec in expected_tensors(config):
        if spec.layer is None:
            tail.append(spec)
            continue
        if spec.layer != layer and layer is not None:
            yield _file(layer + 1, total, layer, group)
            group = []
        layer = spec.layer
        group.append(spec)
    assert layer is not None
    yield _file(layer + 1, total, layer, group)
    yield _file(total, total, None, tail)


def _file(number: int, total: int, layer: int | None, tensors: list[TensorSpec]) -> ShardFile:
    # The sort is stable and expert rows stand in the table in the order of an expert's bytes.
    ordered = sorted(tensors, key=_order)
    return ShardFile(f"model-{number:05d}-of-{total:06d}.safetensors", layer, ordered)


def _order(spec: TensorSpec) -> tuple[int, int, str]:
    if spec.expert is not None:
        return 0, spec.expert, ""
    return 1, -DTYPE_BYTES[spec.dtype], spec.name
