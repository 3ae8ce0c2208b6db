"""Copy one output file for all its ranks: each source byte is read once, hashed, placed by rule.

Memory holds one block of a tensor and one rank's columns of it, whatever the tensor's size. A file
that stands from a killed run is read again and compared with its recorded hashes.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3tool.checkpoint.headers import TensorInfo
from k3tool.checkpoint.safetensors_writer import (
    WRITE_BUFFER_BYTES,
    SafetensorsWriter,
    safetensors_header,
)
from k3tool.checkpoint.shard_plan import Entry, FileJob, ShardPlan, rank_layout, rank_metadata
from k3tool.checkpoint.shard_threads import Tally
from k3tool.errors import ArtifactError
from k3tool.model.weight_slices import rank_slice

Array = npt.NDArray[Any]
BLOCK_BYTES = 8 << 20  # large enough for full disk speed, small enough for many jobs
SHA256_BYTES = 32
SCALE_REFUSED_FROM = 253  # numerics rule 4: such a group would leave binary32's range or be NaN


class RefusedValueError(ArtifactError):
    """Report a value that must not be used in a file that is whole.

    To `shard`, which copies files, it is an input like any other that it refuses; to who runs them,
    what `inspect --values` calls unsound.
    """


class FileRecord(NamedTuple):
    """What was written of one file: by rank, one hash and one largest scale a tensor, in order.

    `sha256` holds 32 bytes a tensor; `max_scale` one byte, 0 where there are no scales.
    """

    file: str
    sha256: dict[int, bytes]
    max_scale: dict[int, bytes]


def write_file(
    plan: ShardPlan, job: FileJob, folders: Mapping[int, Path], tally: Tally
) -> FileRecord:
    """Write one file into every rank's folder and return its record.

    Raises: ArtifactError naming the tensor whose values are refused; K3Error when writing fails.
    """
    layout = rank_layout(job)
    with contextlib.ExitStack() as stack:
        writers = {
            rank: stack.enter_context(
                SafetensorsWriter(folder / job.name, layout, rank_metadata(plan, rank))
            )
            for rank, folder in folders.items()
        }
        copier = _Copier(plan, writers, tally)
        for entry in job.entries:
            copier.copy(entry)
        digests = {
            rank: bytes.fromhex("".join(writer.digests.values()))
            for rank, writer in writers.items()
        }
        return FileRecord(job.name, digests, {r: bytes(s) for r, s in copier.max_scale.items()})


def copy_bytes(n_ranks: int) -> int:
    """Return the memory of one file's copy: a block, its columns, and a buffer for each writer."""
    return 2 * BLOCK_BYTES + n_ranks * WRITE_BUFFER_BYTES


class _Copier:
    """The buffers and writers of one file."""

    def __init__(
        self, plan: ShardPlan, writers: Mapping[int, SafetensorsWriter], tally: Tally
    ) -> None:
        self.checkpoint, self.tp = plan.checkpoint, plan.tp
        self.writers = writers
        self.tally = tally
        self.max_scale: dict[int, bytearray] = {rank: bytearray() for rank in writers}
        self._block = bytearray(BLOCK_BYTES)
        self._columns = bytearray()

    def copy(self, entry: Entry) -> None:
        """Copy one tensor's parts to the ranks."""
        spec, info, _ = entry
        for rank, writer in self.writers.items():
            writer.start(spec.name)
            self.max_scale[rank].append(0)
        axis = rank_slice(spec, self.tp, 0).axis
        if axis is None:
            self._replicate(info)
        elif axis == 0:
            self._rows(entry)
        else:
            self._cols(entry)

    def _replicate(self, info: TensorInfo) -> None:
        first, *others = self.writers.values()
        for _, block in self._blocks(info, 0, info.n_bytes):
            first.append(block)
            for writer in others:
                writer.append(block, hashed=False)
            self.tally.add(len(block) * len(self.writers))
        sha256 = first.finish()
        for writer in others:
            writer.finish(sha256)

    def _rows(self, entry: Entry) -> None:
        spec, info, part = entry
        for rank, writer in self.writers.items():
            start = rank * part.n_bytes
            for offset, block in self._blocks(info, start, start + part.n_bytes):
                if spec.name.endswith("weight_scale"):
                    self._check_scales(info, offset, block)
                    self._note_scale(rank, np.frombuffer(block, dtype=np.uint8))
                writer.append(block)
                self.tally.add(len(block))
            writer.finish()

    def _cols(self, entry: Entry) -> None:
        """Scatter whole rows: a rank's few bytes of each row would touch every page anyway."""
        spec, info, part = entry
        n_rows = info.shape[0]
        row_bytes, width = info.n_bytes // n_rows, part.n_bytes // n_rows
        step = max(1, BLOCK_BYTES // row_bytes) * row_bytes
        for offset, block in self._blocks(info, 0, info.n_bytes, step):
            if spec.name.endswith("weight_scale"):
                self._check_scales(info, offset, block)
            rows = np.frombuffer(block, dtype=np.uint8).reshape(-1, row_bytes)
            for rank, writer in self.writers.items():
                piece = self._packed(rows[:, rank * width : (rank + 1) * width])
                if spec.name.endswith("weight_scale"):
                    self._note_scale(rank, piece)
                writer.append(piece)
                self.tally.add(piece.size)
        for writer in self.writers.values():
            writer.finish()

    def _packed(self, columns: Array) -> Array:
        """Return columns as adjoining bytes, in a buffer that the next call uses again."""
        if len(self._columns) < columns.size:
            self._columns = bytearray(columns.size)
        packed = np.frombuffer(self._columns, dtype=np.uint8, count=columns.size)
        np.copyto(packed.reshape(columns.shape), columns)
        return packed

    def _blocks(
        self, info: TensorInfo, start: int, stop: int, step: int | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset in the tensor, bytes) of [start, stop); the bytes live until the next."""
        step = BLOCK_BYTES if step is None else step
        if len(self._block) < step:  # one row may be longer than a block
            self._block = bytearray(step)
        for offset in range(start, stop, step):
            view = memoryview(self._block)[: min(step, stop - offset)]
            self.checkpoint.read_into(info, info.offset + offset, view)
            self.tally.add_read(len(view))
            if offset + step < stop:  # the disk reads while this block is hashed and written
                ahead = min(step, stop - offset - step)
                self.checkpoint.prefetch(info, info.offset + offset + step, ahead)
            yield offset, view

    # -- values that are refused ---------------------------------------------------------------

    def _note_scale(self, rank: int, scales: Array) -> None:
        largest = int(scales.max(initial=0))
        self.max_scale[rank][-1] = max(self.max_scale[rank][-1], largest)

    def _check_scales(self, info: TensorInfo, offset: int, block: memoryview) -> None:
        scales = np.frombuffer(block, dtype=np.uint8)
        if scales.max(initial=0) < SCALE_REFUSED_FROM:
            return
        index = int(np.argmax(scales >= SCALE_REFUSED_FROM))
        row, group = divmod(offset + index, info.n_bytes // info.shape[0])
        raise RefusedValueError(
            f"{self.checkpoint.path / info.file}: {info.name}: row {row}, group {group}",
            got=f"scale byte {scales[index]}",
            need=f"at most {SCALE_REFUSED_FROM - 1}",
            hint="the values are damaged or of another format: fetch the file again",
        )


# -- what stands already -----------------------------------------------------------------------


def stands(
    plan: ShardPlan, job: FileJob, record: FileRecord, folders: Mapping[int, Path], tally: Tally
) -> bool:
    """Return whether every rank holds a job's file with the recorded bytes, by reading them all."""
    read = 0
    for rank, folder in folders.items():
        header = safetensors_header(rank_layout(job), rank_metadata(plan, rank))
        if not _file_stands(folder / job.name, header, job, record.sha256.get(rank, b""), tally):
            tally.add(-read)
            return False
        read += job.n_bytes
    return True


def _file_stands(path: Path, header: bytes, job: FileJob, sha256: bytes, tally: Tally) -> bool:
    if len(sha256) != SHA256_BYTES * len(job.entries):
        return False
    try:
        with path.open("rb", buffering=0) as file:
            if path.stat().st_size != len(header) + job.n_bytes or file.read(len(header)) != header:
                return False
            found = [_read_sha256(file, entry.part.n_bytes) for entry in job.entries]
    except OSError:
        return False
    if b"".join(found) != sha256:
        return False
    tally.add(job.n_bytes)
    return True


def _read_sha256(file: RawIOBase, n_bytes: int) -> bytes:
    digest = hashlib.sha256()
    left = n_bytes
    while left and (block := file.read(min(BLOCK_BYTES, left))):
        digest.update(block)
        left -= len(block)
    return digest.digest()
