"""Record where every source byte went, as shards.h5 (layout: k3tool.checkpoint.shards).

It writes what the shard writer tells it and reads no tensor.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from k3tool.artifact import Dataset, InputRef, write_artifact
from k3tool.checkpoint.headers import TensorInfo
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shards import SHARDS_NAME, SHARDS_SCHEMA, rank_folder_name
from k3tool.model.weights import TensorSpec, rank_slice


class Placed(NamedTuple):
    """One source tensor and where its bytes went.

    `offset` is in the data of `file`, the same for every rank; `max_scale` is 0 where there are no
    scales; `sha256` holds 32 bytes per written rank.
    """

    spec: TensorSpec
    info: TensorInfo
    file: str
    offset: int
    rank_bytes: int
    max_scale: int
    sha256: bytes


def write_provenance(
    checkpoint: Checkpoint,
    tp: int,
    ranks: tuple[int, ...],
    building: Path,
    placed: list[Placed],
    dropped: list[TensorInfo],
) -> str:
    """Write shards.h5 into the folder being built and return its digest."""
    identities = []
    for rank in ranks:
        with Checkpoint.open(building / rank_folder_name(rank, tp)) as written:
            identities.append(written.identity)
    sources = checkpoint.index.files
    beside = sorted(path for path in building.iterdir() if path.is_file())
    rank_files = sorted({entry.file for entry in placed})
    datasets = {
        "ranks": Dataset(np.array(ranks, dtype=np.uint32), ("rank",)),
        "rank_identity": Dataset(identities, ("rank",)),
        "source_files": Dataset(sources, ("file",)),
        "rank_files": Dataset(rank_files, ("file",)),
        "files/name": Dataset([path.name for path in beside], ("file",)),
        "files/sha256": Dataset(
            [hashlib.sha256(path.read_bytes()).hexdigest() for path in beside], ("file",)
        ),
        "dropped/name": Dataset([info.name for info in dropped], ("tensor",)),
        "dropped/file": Dataset([info.file for info in dropped], ("tensor",)),
        "dropped/bytes": Dataset(
            np.array([info.n_bytes for info in dropped], dtype=np.uint64), ("tensor",), "bytes"
        ),
        **_tensor_columns(placed, tp, sources, rank_files),
    }
    return write_artifact(
        building / SHARDS_NAME,
        "shards",
        SHARDS_SCHEMA,
        datasets,
        {"tp": tp, "checkpoint_identity": checkpoint.identity},
        [InputRef("checkpoint", "checkpoint", checkpoint.path.name, checkpoint.identity)],
        {"tp": tp, "ranks": list(ranks)},
    )


def _tensor_columns(
    placed: list[Placed], tp: int, sources: list[str], rank_files: list[str]
) -> dict[str, Dataset]:
    """Return one row per tensor: source range, split, place in every rank's file, content hash.

    Rank r holds [r * extent / tp, (r + 1) * extent / tp) along `axis`; axis -1 means all of it.
    """
    source_row = {name: row for row, name in enumerate(sources)}
    rank_row = {name: row for row, name in enumerate(rank_files)}
    parts = [rank_slice(entry.spec, 1, 0) for entry in placed]

    def column(values: list[int], dtype: str, unit: str = "") -> Dataset:
        return Dataset(np.array(values, dtype=dtype), ("tensor",), unit)

    def words(values: list[str]) -> Dataset:
        return Dataset(values, ("tensor",))

    sha256 = np.frombuffer(b"".join(entry.sha256 for entry in placed), dtype=np.uint8)
    layers = [-1 if entry.spec.layer is None else entry.spec.layer for entry in placed]
    axes = [-1 if part.axis is None else part.axis for part in parts]
    return {
        "tensors/name": words([entry.spec.name for entry in placed]),
        "tensors/layer": column(layers, "<i4"),
        "tensors/dtype": words([entry.info.dtype for entry in placed]),
        "tensors/split": words([str(entry.spec.split) for entry in placed]),
        "tensors/axis": column(axes, "<i4"),
        "tensors/extent": column([part.stop for part in parts], "<u8", "rows or columns"),
        "tensors/source_file": column([source_row[e.info.file] for e in placed], "<u4"),
        "tensors/source_offset": column([e.info.offset for e in placed], "<u8", "bytes"),
        "tensors/source_bytes": column([e.info.n_bytes for e in placed], "<u8", "bytes"),
        "tensors/rank_file": column([rank_row[e.file] for e in placed], "<u4"),
        "tensors/rank_offset": column([e.offset for e in placed], "<u8", "bytes of data"),
        "tensors/rank_bytes": column([e.rank_bytes for e in placed], "<u8", "bytes"),
        "tensors/max_scale": column([e.max_scale for e in placed], "u1", "biased exponent"),
        "tensors/sha256": Dataset(sha256.reshape(len(placed), -1, 32), ("tensor", "rank", "byte")),
    }
