"""Prove that every byte of a checkpoint arrived: each rank slice against its own source range.

It works out again from the weight table where each byte belongs, so that a fault of the writer or
of its records shows, and reads both sides whole. A slice with another rank's range is named so.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3tool.artifact import Artifact, open_artifact
from k3tool.checkpoint.headers import TensorInfo
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.names import RANK_NAME, SHARDS_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_copy import BLOCK_BYTES, SHA256_BYTES
from k3tool.checkpoint.shard_plan import (
    Entry,
    FileJob,
    ShardPlan,
    plan_shards,
    require_splittable,
)
from k3tool.checkpoint.shard_provenance import PLAN_COLUMNS, plan_columns
from k3tool.checkpoint.shard_threads import Tally, each
from k3tool.checkpoint.shard_writer import chosen_ranks
from k3tool.checkpoint.shards import (
    RANK_SCHEMA,
    SHARDS_SCHEMA,
    degree_faults,
    file_faults,
    rank_folder_name,
    rank_folders,
    rank_identity,
)
from k3tool.checkpoint.side_files import SIDE_FILES, read_side_file
from k3tool.checkpoint.unfinished import refuse_unfinished
from k3tool.errors import ArtifactError, UsageError, listed
from k3tool.fields import attrs_of, column, params_of, texts
from k3tool.model.weight_slices import rank_slice
from k3tool.progress import Progress
from k3tool.targets import MOST_RANKS

Array = npt.NDArray[Any]


class Fault(NamedTuple):
    """One thing that is wrong; `rank` is -1 for the provenance of all ranks."""

    rank: int
    name: str
    got: str
    need: str


@dataclass(slots=True)
class CheckInfo:
    """What was compared: ranks that are here, asked ranks that are not, bytes of all slices."""

    path: Path
    tp: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    n_tensors: int
    n_bytes: int
    rank_bytes: int
    replicated_bytes: int
    dropped_bytes: int
    faults: list[Fault] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Return whether every rank that was asked for is here and right."""
        return not self.faults and not self.missing


def check_shards(
    shards_path: str | Path,
    ckpt_path: str | Path,
    jobs: int | None = None,
    progress: Progress | None = None,
    ranks: Sequence[int] | None = None,
    say: Callable[[str], None] | None = None,
) -> CheckInfo:
    """Compare shards, or the `ranks` of them, with the checkpoint they were made from, byte for
    byte.

    What a run would refuse is a fault too, whether or not it is a byte of the checkpoint.
    Raises: ArtifactError when either cannot be read, or the shards are of another checkpoint;
    UsageError for a rank that the degree does not have.
    """
    path = Path(shards_path)
    refuse_unfinished(path, "a shards folder")
    with (
        open_artifact(path / SHARDS_NAME, "shards", SHARDS_SCHEMA) as artifact,
        Checkpoint.open(ckpt_path) as checkpoint,
    ):
        fields = attrs_of(artifact)
        identity = fields.text("checkpoint_identity")
        if checkpoint.identity != identity:
            raise ArtifactError(
                f"{path / SHARDS_NAME}: checkpoint",
                got=f"{identity[:16]}..",
                need=f"{checkpoint.identity[:16]}.. of {ckpt_path}",
                hint="name the checkpoint that the shards were made from",
            )
        tp = fields.count("tp", least=1, most=MOST_RANKS)
        try:
            require_splittable(checkpoint, tp)
        except UsageError as error:  # no option of this command: the file says it
            where = f"{path / SHARDS_NAME}: tp"
            raise ArtifactError(where, got=error.got, need=error.need) from None
        keep_vision = params_of(artifact).flag("keep_vision")
        plan = plan_shards(checkpoint, tp, keep_vision, say=say)
        check = _Check(path, plan, artifact, chosen_ranks(tp, ranks))
        check.run(jobs, progress)
        return check.info


class _Check:
    """The state of one comparison; `_entry` runs on threads."""

    def __init__(
        self, path: Path, plan: ShardPlan, artifact: Artifact, asked: tuple[int, ...]
    ) -> None:
        self.plan, self.artifact = plan, artifact
        self.tally = Tally()
        held = rank_folders(path)
        names = {rank_folder_name(rank, plan.tp): rank for rank in asked}
        ranks = tuple(sorted(names[name] for name in held if name in names))
        if not ranks:
            need = f"at least one, of ranks {listed(asked)}"
            raise ArtifactError(str(path), got="no rank folder", need=need)
        self.folders = {rank: path / rank_folder_name(rank, plan.tp) for rank in ranks}
        self.ranks: dict[int, Checkpoint] = {}
        tensors = texts(artifact, "tensors/name")
        n = len(tensors)
        self.rows = {name: row for row, name in enumerate(tensors)}
        self.rank_files = texts(artifact, "rank_files")
        self.rank_file = column(artifact, "tensors/rank_file", "<u4", n_rows=n)
        self.rank_offset = column(artifact, "tensors/rank_offset", "<u8", n_rows=n)
        if self.rank_file.max(initial=0) >= max(1, len(self.rank_files)):
            where = f"{artifact.path}: tensors/rank_file"
            raise ArtifactError(
                where, got=self.rank_file.max(), need=f"rows of {len(self.rank_files)} rank_files"
            )
        self.sha256: dict[int, Array] = {}
        self.identities: dict[int, str] = {}
        self._lock = threading.Lock()
        self.info = CheckInfo(
            path=path,
            tp=plan.tp,
            ranks=ranks,
            missing=tuple(rank for rank in asked if rank not in ranks),
            n_tensors=len(plan.rows.name),
            n_bytes=plan.rank_bytes * len(ranks),
            rank_bytes=plan.rank_bytes,
            replicated_bytes=plan.replicated_bytes,
            dropped_bytes=sum(row.n_bytes for row in plan.dropped),
        )

    def _side_files(self) -> None:
        """Compare side files with the checkpoint's: they are no part of its identity."""
        for name in SIDE_FILES:
            source = read_side_file(self.plan.checkpoint.path, name)
            try:
                copy = read_side_file(self.info.path, name)
            except ArtifactError:
                continue  # it is not what was recorded, which has been said
            if copy != source:
                need = "the checkpoint's" if source is not None else "none, as in the checkpoint"
                self.fault(-1, name, "another file, or none", need)

    def run(self, jobs: int | None, progress: Progress | None) -> None:
        for error in (
            *file_faults(self.info.path, self.artifact),
            *degree_faults(self.info.path, self.plan.tp),
        ):
            name = os.path.relpath(error.object, self.info.path)
            self.fault(-1, name, str(error.got), str(error.need))
        self._side_files()
        for rank, folder in self.folders.items():
            self.identities[rank] = rank_identity(
                self.info.path, rank, self.plan.tp, self.artifact.digest
            )
            self.ranks[rank] = Checkpoint.open(folder)
            with open_artifact(folder / RANK_NAME, "rank", RANK_SCHEMA) as artifact:
                self.sha256[rank] = column(
                    artifact, "tensors/sha256", "u1", SHA256_BYTES, n_rows=len(self.rows)
                )
        try:
            if self._provenance():
                each(self.plan.jobs(), self._job, self.tally, jobs, progress, self.info.n_bytes)
            for rank, opened in self.ranks.items():
                self._beside(rank, opened)
        finally:
            for opened in self.ranks.values():
                opened.close()
        self.info.faults.sort()

    def _beside(self, rank: int, folder: Checkpoint) -> None:
        """Compare what lies beside a rank's tensors: a run goes by it."""
        if folder.config_bytes != self.plan.checkpoint.config_bytes:
            self.fault(rank, "config.json", "other bytes", "those of the checkpoint's config.json")
        if folder.index.from_headers:
            self.fault(rank, INDEX_NAME, "no such file", "the index that shard wrote")
        if any(fault.rank == rank for fault in self.info.faults):
            return
        if folder.identity != (need := self.identities[rank]):
            got = f"identity {folder.identity[:16]}.."
            self.fault(rank, "files of its folder", got, f"{need[:16]}.. by {RANK_NAME}")

    def fault(self, rank: int, name: str, got: str, need: str) -> None:
        with self._lock:
            self.info.faults.append(Fault(rank, name, got, need))

    def _provenance(self) -> bool:
        """Compare what shards.h5 says with what the checkpoint's headers and the table give.

        Return whether its rows are the checkpoint's tensors, so that slices can be looked up.
        """
        names = self.plan.rows.name
        if list(self.rows) != names:
            self.fault(-1, SHARDS_NAME, "other tensors", f"the {len(names)} of the checkpoint")
            return False
        wanted = plan_columns(self.plan)
        for name in PLAN_COLUMNS:
            need = wanted[name]
            found = column(self.artifact, f"tensors/{name}", need.dtype, n_rows=len(names))
            for row in np.nonzero(found != need)[0][:1]:
                self.fault(-1, names[row], f"{name} {found[row]}", str(need[row]))
        for rank, folder in self.ranks.items():
            for name in sorted(set(folder.index.weight_map) - set(names)):
                self.fault(rank, name, "a tensor the checkpoint does not have", "none")
        return True

    # -- one file, on a thread -----------------------------------------------------------------

    def _job(self, job: FileJob) -> None:
        for entry in job.entries:
            for rank, folder in self.ranks.items():
                self._slice(entry, rank, folder)
                self.tally.add(entry.part.n_bytes)

    def _slice(self, entry: Entry, rank: int, folder: Checkpoint) -> None:
        try:
            info = folder.tensor_info(entry.spec.name)
        except ArtifactError as error:
            self.fault(rank, entry.spec.name, str(error.got), str(error.need))
            return
        need = (entry.part.dtype, entry.part.shape)
        if (info.dtype, info.shape) != need:
            self.fault(
                rank, info.name, f"{info.dtype} {list(info.shape)}", f"{need[0]} {list(need[1])}"
            )
            return
        self._place(rank, folder, info)
        digest, at = hashlib.sha256(), -1
        for offset, ours, source in self._pairs(entry, rank, folder, info):
            digest.update(ours.data)
            if at < 0 and not np.array_equal(ours, source):
                at = offset + int(np.argmax(ours != source))
        if at >= 0:
            self.fault(
                rank,
                info.name,
                self._whose(entry, rank, folder, info, at),
                _range(self, entry, rank),
            )
        recorded = self.sha256[rank][self.rows[info.name]].tobytes()
        if at < 0 and digest.digest() != recorded:
            self.fault(
                rank,
                info.name,
                f"sha256 {digest.hexdigest()[:16]}..",
                f"{recorded.hex()[:16]}.. by {RANK_NAME}",
            )

    def _place(self, rank: int, folder: Checkpoint, info: TensorInfo) -> None:
        """Compare where a slice lies with where shards.h5 says it lies."""
        row = self.rows[info.name]
        recorded = (self.rank_files[self.rank_file[row]], int(self.rank_offset[row]))
        start = folder.header(info.file).data_start
        if (info.file, info.offset - start) != recorded:
            got = f"{info.file} at {info.offset - start}"
            self.fault(rank, info.name, got, f"{recorded[0]} at {recorded[1]} by {SHARDS_NAME}")

    def _whose(self, entry: Entry, rank: int, folder: Checkpoint, info: TensorInfo, at: int) -> str:
        """Say what a wrong slice holds: another rank's range, or bytes from nowhere."""
        axis = rank_slice(entry.spec, self.plan.tp, 0).axis
        for other in range(self.plan.tp) if axis is not None else ():
            pairs = self._pairs(entry, other, folder, info)
            if other != rank and all(np.array_equal(a, b) for _, a, b in pairs):
                return f"rank {other}'s {_range(self, entry, other)}"
        return f"other bytes from byte {at} on"

    def _pairs(
        self, entry: Entry, rank: int, folder: Checkpoint, info: TensorInfo
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield (offset, bytes of the rank's file, bytes of `rank`'s source range) in blocks."""
        n_rows = entry.part.shape[0] if entry.part.shape else 1
        width = entry.part.n_bytes // n_rows if n_rows else 0
        axis = rank_slice(entry.spec, self.plan.tp, 0).axis
        row_bytes = width * self.plan.tp if axis == 1 else width
        step = max(1, BLOCK_BYTES // row_bytes) if row_bytes else 1
        first = rank * n_rows if axis == 0 else 0
        for row in range(0, n_rows, step):
            count = min(step, n_rows - row)
            ours = _read(folder, info, row * width, count * width)
            source = _read(
                self.plan.checkpoint, entry.info, (first + row) * row_bytes, count * row_bytes
            )
            if axis == 1:
                source = source.reshape(count, row_bytes)[:, rank * width : (rank + 1) * width]
                source = source.reshape(-1)
            yield row * width, ours, source


def _read(checkpoint: Checkpoint, info: TensorInfo, offset: int, n_bytes: int) -> Array:
    block = np.empty(n_bytes, dtype=np.uint8)
    checkpoint.read_into(info, info.offset + offset, block.data)
    return block


def _range(check: _Check, entry: Entry, rank: int) -> str:
    part = rank_slice(entry.spec, check.plan.tp, rank)
    if part.axis is None:
        return "all of the source tensor"
    return f"{'columns' if part.axis else 'rows'} [{part.start}, {part.stop})"
