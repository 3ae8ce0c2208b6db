"""Settle before the first byte what every rank will hold, and refuse what cannot be split soundly.

It reads headers, no tensor. The plan is the same on every machine and for every choice of ranks, so
that nodes which write one rank each write the same shards.h5.
"""

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from k3tool.checkpoint.headers import TensorInfo
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.safetensors_writer import TensorLayout
from k3tool.checkpoint.shard_layout import ShardFile, shard_files
from k3tool.checkpoint.whole import require_whole
from k3tool.errors import ArtifactError
from k3tool.model.vision import is_vision
from k3tool.model.weight_slices import RankSlice, rank_slice
from k3tool.model.weights import Split, TensorRow, TensorSpec, Where
from k3tool.progress import EVERY_SECONDS

VISION_REASON = "image side: the text model does not read it"
PADDING_REASON = "zero padding behind the live heads"
# Room a tensor takes in header, index and artifacts; its names are about 100 bytes long.
ENTRY_BYTES = 600


class Dropped(NamedTuple):
    """A source range that no rank holds, and why. `offset` is from the start of the file."""

    name: str
    file: str
    offset: int
    n_bytes: int
    reason: str


class Entry(NamedTuple):
    """One tensor to place: what it is, where it lies, and its part on every rank."""

    spec: TensorSpec
    info: TensorInfo
    part: TensorLayout


class FileJob(NamedTuple):
    """One output file, with its tensors in order."""

    name: str
    entries: list[Entry]

    @property
    def n_bytes(self) -> int:
        """Return the bytes of tensor data in the file."""
        return sum(entry.part.n_bytes for entry in self.entries)


def _numbers() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Rows:
    """One row per placed tensor in file order, as columns: half a million rows stay small.

    `axis` is -1 where every rank holds all of it; else rank r holds [r * extent / tp,
    (r + 1) * extent / tp) along it. `source_bytes` leaves out dropped padding.
    """

    name: list[str] = field(default_factory=list)
    dtype: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    layer: "array[int]" = field(default_factory=_numbers)
    axis: "array[int]" = field(default_factory=_numbers)
    extent: "array[int]" = field(default_factory=_numbers)
    source_file: "array[int]" = field(default_factory=_numbers)
    source_offset: "array[int]" = field(default_factory=_numbers)
    source_bytes: "array[int]" = field(default_factory=_numbers)
    rank_file: "array[int]" = field(default_factory=_numbers)
    rank_offset: "array[int]" = field(default_factory=_numbers)
    rank_bytes: "array[int]" = field(default_factory=_numbers)


@dataclass(slots=True)
class ShardPlan:
    """What goes where. Sizes are bytes of tensor data in one rank, equal on all ranks."""

    checkpoint: Checkpoint
    tp: int
    vision: list[TensorSpec]
    max_file_bytes: int | None
    rows: Rows = field(default_factory=Rows)
    files: list[str] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    rank_bytes: int = 0
    replicated_bytes: int = 0

    @property
    def need_bytes(self) -> int:
        """Return the disk space of one rank, artifacts and headers included, rounded up."""
        return folder_bytes(self.rank_bytes, len(self.rows.name))

    def jobs(self) -> Iterator[FileJob]:
        """Yield all files, holding one at a time.

        The largest tensors lie outside the layers: begun last, they would leave one thread alone.
        """
        for in_layers in (False, True):
            for file in _files(self):
                if (file.layer is not None) == in_layers:
                    yield FileJob(file.name, [_entry(self, spec) for spec in file.tensors])


def folder_bytes(weight_bytes: int, n_tensors: int) -> int:
    """Return the disk space of a rank's folder with so many tensors, rounded up."""
    return weight_bytes + ENTRY_BYTES * n_tensors


def require_splittable(checkpoint: Checkpoint, tp: int) -> None:
    """Refuse, in seconds, a checkpoint that is not whole or cannot be split so.

    What inspect says comes first: a damaged config may allow no degree. Raises: ArtifactError with
    inspect's first finding; UsageError on an illegal degree.
    """
    if checkpoint.tp is not None:
        raise ArtifactError(
            str(checkpoint.path), got="a rank folder of shards", need="a checkpoint",
            hint="name the folder of the checkpoint that these shards were made from",
        )  # fmt: skip
    require_whole(checkpoint)
    checkpoint.config.check_tp(tp)


def plan_shards(
    checkpoint: Checkpoint,
    tp: int,
    keep_vision: bool,
    max_file_bytes: int | None = None,
    say: Callable[[str], None] | None = None,
) -> ShardPlan:
    """Return where each byte of a checkpoint goes for which require_splittable has held.

    `say` is told now and then how far it is: half a million tensors take a minute.
    """
    images = sorted(name for name in checkpoint.index.weight_map if is_vision(name))
    vision = [_vision_spec(checkpoint, name) for name in images] if keep_vision else []
    plan = ShardPlan(checkpoint, tp, vision, max_file_bytes)
    source_row = {name: row for row, name in enumerate(checkpoint.index.files)}
    heard = time.monotonic()
    for file in _files(plan):
        _place_file(plan, file, source_row)
        if say is not None and time.monotonic() - heard >= EVERY_SECONDS:
            heard = time.monotonic()
            total = len(checkpoint.index.weight_map)
            say(f"planning: {len(plan.rows.name)} of {total} tensors have a place")
    for name in images if not keep_vision else ():
        info = checkpoint.tensor_info(name)
        plan.dropped.append(Dropped(name, info.file, info.offset, info.n_bytes, VISION_REASON))
    return plan


def _files(plan: ShardPlan) -> Iterator[ShardFile]:
    limit = {} if plan.max_file_bytes is None else {"max_bytes": plan.max_file_bytes}
    return shard_files(plan.checkpoint.config, plan.tp, plan.vision, **limit)


def _vision_spec(checkpoint: Checkpoint, name: str) -> TensorSpec:
    """Return a kept image tensor as it is stored: whole on every rank."""
    info = checkpoint.tensor_info(name)
    row = TensorRow(name, info.dtype, lambda _: (), Split.REPLICATE, "", Where.VISION, "vision")
    live = info.shape[0] if info.shape else 1
    shape = info.shape or (1,)
    return TensorSpec(name, info.dtype, shape, Split.REPLICATE, live, row, None, None, name)


# -- one tensor --------------------------------------------------------------------------------


def _entry(plan: ShardPlan, spec: TensorSpec) -> Entry:
    """Return a tensor's entry; that it is what it has to be was settled before."""
    info = plan.checkpoint.tensor_info(spec.name)
    return Entry(spec, info, _part(info, rank_slice(spec, plan.tp, 0)))


def _part(info: TensorInfo, part: RankSlice) -> TensorLayout:
    """Return a rank's part in the stored form: a convolution stays 2-D or 3-D as it came."""
    if part.axis is None:
        return TensorLayout(info.name, info.dtype, info.shape, info.n_bytes)
    size = part.stop - part.start
    shape = (*info.shape[: part.axis], size, *info.shape[part.axis + 1 :])
    n_bytes = info.n_bytes // info.shape[part.axis] * size
    return TensorLayout(info.name, info.dtype, shape, n_bytes)


def _place_file(plan: ShardPlan, file: ShardFile, source_row: dict[str, int]) -> None:
    rows, offset = plan.rows, 0
    for spec in file.tensors:
        _, info, part = _entry(plan, spec)
        whole = rank_slice(spec, 1, 0)
        live_bytes = info.n_bytes
        if spec.split is Split.LIVE_ROWS and info.shape[0] > spec.live:
            live_bytes = info.n_bytes // info.shape[0] * spec.live
            start, size = info.offset + live_bytes, info.n_bytes - live_bytes
            plan.dropped.append(Dropped(info.name, info.file, start, size, PADDING_REASON))
        rows.name.append(info.name)
        rows.dtype.append(info.dtype)
        rows.split.append(str(spec.split))
        rows.layer.append(-1 if spec.layer is None else spec.layer)
        rows.axis.append(-1 if whole.axis is None else whole.axis)
        rows.extent.append(whole.stop)
        rows.source_file.append(source_row[info.file])
        rows.source_offset.append(info.offset)
        rows.source_bytes.append(live_bytes)
        rows.rank_file.append(len(plan.files))
        rows.rank_offset.append(offset)
        rows.rank_bytes.append(part.n_bytes)
        offset += part.n_bytes
        if whole.axis is None:
            plan.replicated_bytes += part.n_bytes
    plan.files.append(file.name)
    plan.rank_bytes += offset


def rank_layout(job: FileJob) -> list[TensorLayout]:
    """Return the layout of a job's file, the same on every rank."""
    return [entry.part for entry in job.entries]


def rank_metadata(plan: ShardPlan, rank: int) -> dict[str, object]:
    """Return what a rank's file says of itself in its header."""
    source = plan.checkpoint.identity
    return {"kind": "shards", "rank": rank, "tp": plan.tp, "source": source}
