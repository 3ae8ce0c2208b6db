"""Record where every source byte went, as shards.h5 and rank.h5 (k3tool.checkpoint.shards).

It writes what the plan and the journal say and reads no tensor.
"""

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.artifact import Dataset, InputRef, write_artifact
from k3tool.checkpoint.names import RANK_NAME, SHARDS_NAME
from k3tool.checkpoint.shard_plan import ShardPlan
from k3tool.checkpoint.shards import RANK_SCHEMA, SHARDS_SCHEMA

Array = npt.NDArray[Any]


def write_set(plan: ShardPlan, folder: Path, path: Path) -> str:
    """Write shards.h5 to `path` for the side files that lie in `folder`; return its digest."""
    checkpoint = plan.checkpoint
    beside = sorted(
        entry for entry in folder.iterdir() if entry.is_file() and entry.name != SHARDS_NAME
    )
    dropped = plan.dropped
    datasets = {
        "source_files": Dataset(checkpoint.index.files, ("file",)),
        "rank_files": Dataset(plan.files, ("file",)),
        "files/name": Dataset([entry.name for entry in beside], ("file",)),
        "files/sha256": Dataset(
            [hashlib.sha256(entry.read_bytes()).hexdigest() for entry in beside], ("file",)
        ),
        "dropped/name": Dataset([row.name for row in dropped], ("range",)),
        "dropped/file": Dataset([row.file for row in dropped], ("range",)),
        "dropped/reason": Dataset([row.reason for row in dropped], ("range",)),
        "dropped/offset": _column([row.offset for row in dropped], "<u8", "range", "bytes"),
        "dropped/bytes": _column([row.n_bytes for row in dropped], "<u8", "range", "bytes"),
        **_tensor_columns(plan),
    }
    return write_artifact(
        path,
        "shards",
        SHARDS_SCHEMA,
        datasets,
        {"tp": plan.tp, "checkpoint_identity": checkpoint.identity},
        [checkpoint.as_input()],
        {"tp": plan.tp, "keep_vision": bool(plan.vision)},
    )


def _column(
    values: "Sequence[int] | array[int]", dtype: str, axis: str = "tensor", unit: str = ""
) -> Dataset:
    return Dataset(np.array(values, dtype=dtype), (axis,), unit)


def _coded(values: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the distinct words and each row's number among them: half a million words are slow."""
    words = sorted(set(values))
    number = {word: code for code, word in enumerate(words)}
    return words, [number[value] for value in values]


# Columns of `tensors/` that follow from checkpoint and degree alone: (dtype in the file, unit).
PLAN_COLUMNS = {
    "layer": ("<i4", "0-based, -1 outside"),
    "axis": ("<i4", ""),
    "extent": ("<u8", "rows or columns"),
    "source_file": ("<u4", ""),
    "source_offset": ("<u8", "bytes"),
    "source_bytes": ("<u8", "bytes"),
    "rank_bytes": ("<u8", "bytes"),
}
# And those that follow from how files are cut.
_FILE_COLUMNS = {"rank_file": ("<u4", ""), "rank_offset": ("<u8", "bytes of data")}


def plan_columns(plan: ShardPlan) -> dict[str, Array]:
    """Return the columns that the plan alone settles, by name. Shapes: a row a tensor."""
    return {
        name: np.array(getattr(plan.rows, name), dtype=dtype)
        for name, (dtype, _) in PLAN_COLUMNS.items()
    }


def _tensor_columns(plan: ShardPlan) -> dict[str, Dataset]:
    """Return one row per tensor: source range, split, place in every rank's file.

    Rank r holds [r * extent / tp, (r + 1) * extent / tp) along `axis`; axis -1 means all of it.
    """
    rows = plan.rows
    dtypes, dtype = _coded(rows.dtype)
    splits, split = _coded(rows.split)
    return {
        "dtypes": Dataset(dtypes, ("word",)),
        "splits": Dataset(splits, ("word",)),
        "tensors/name": Dataset(rows.name, ("tensor",)),
        "tensors/dtype": _column(dtype, "u1"),
        "tensors/split": _column(split, "u1"),
        **{
            f"tensors/{name}": _column(getattr(rows, name), dtype, unit=unit)
            for name, (dtype, unit) in {**PLAN_COLUMNS, **_FILE_COLUMNS}.items()
        },
    }


def write_rank(
    folder: Path, tp: int, rank: int, digest: str, identity: str, sha256: bytes, max_scale: bytes
) -> None:
    """Write rank.h5 into a rank folder; `digest` is that of the set's shards.h5."""
    hashes = np.frombuffer(sha256, dtype=np.uint8).reshape(len(max_scale), 32)
    scales = np.frombuffer(max_scale, dtype=np.uint8)
    write_artifact(
        folder / RANK_NAME,
        "rank",
        RANK_SCHEMA,
        {
            "tensors/sha256": Dataset(hashes, ("tensor", "byte")),
            "tensors/max_scale": Dataset(scales, ("tensor",), "biased exponent"),
        },
        {"tp": tp, "rank": rank, "identity": identity},
        [InputRef("shards", "shards", SHARDS_NAME, digest)],
        {"tp": tp, "rank": rank},
    )
