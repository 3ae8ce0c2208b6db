"""Split a checkpoint into one folder per rank: each source byte is read once and placed by rule.

Every tensor lands on a rank, on all ranks on purpose, or is named as dropped; anything else is
refused before a byte is written. Memory holds one block of a tensor. Output is built in a sibling
folder and renamed when complete. It does not resume a killed run.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.artifact import canonical_json
from k3tool.atomic import atomic_folder, atomic_path
from k3tool.checkpoint.headers import TensorInfo
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.safetensors_writer import SafetensorsWriter, TensorLayout
from k3tool.checkpoint.shard_layout import ShardFile, shard_files
from k3tool.checkpoint.shard_provenance import Placed, write_provenance
from k3tool.checkpoint.shards import SHARDS_NAME, SIDE_FILES, rank_folder_name
from k3tool.errors import ArtifactError, UsageError
from k3tool.model.vision import is_vision
from k3tool.model.weights import (
    RankSlice,
    Split,
    TensorSpec,
    dtype_fault,
    find_spec,
    rank_slice,
    shape_fault,
)

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]  # (bytes read so far, bytes to read)
SCALE_REFUSED_FROM = 253  # numerics rule 4: such a group would leave binary32's range or be NaN


@dataclass(frozen=True, slots=True)
class ShardsInfo:
    """What was written: sizes in bytes, the artifact's digest, the checkpoint's identity."""

    path: Path
    tp: int
    ranks: tuple[int, ...]
    digest: str
    identity: str
    n_tensors: int
    read_bytes: int
    written_bytes: int
    dropped: tuple[str, ...]
    dropped_bytes: int


def shard_checkpoint(
    ckpt_path: str | Path,
    tp: int,
    out: str | Path,
    *,
    ranks: Sequence[int] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ShardsInfo:
    """Write the shards of a checkpoint and return what was written.

    `ranks` None means all of them. Raises: UsageError on an illegal degree, rank or output;
    ArtifactError naming the tensor that is absent, unknown, mis-shaped or holds refused scales;
    K3Error when writing fails.
    """
    out = Path(out)
    with Checkpoint.open(ckpt_path) as checkpoint:
        if checkpoint.tp is not None:
            raise ArtifactError(str(ckpt_path), got="a rank folder of shards", need="a checkpoint")
        checkpoint.config.check_tp(tp)
        chosen = _chosen_ranks(tp, ranks)
        _check_output(out, force)
        _check_tensors(checkpoint)
        with atomic_folder(out, replace=force) as building:
            return _write_all(checkpoint, tp, chosen, building, out, progress)


# -- checks before the first byte --------------------------------------------------------------


def _chosen_ranks(tp: int, ranks: Sequence[int] | None) -> tuple[int, ...]:
    chosen = tuple(sorted(set(range(tp) if ranks is None else ranks)))
    wrong = [rank for rank in chosen if not 0 <= rank < tp]
    if wrong or not chosen:
        raise UsageError("--rank", got=wrong or "none", need=f"ranks from 0 to {tp - 1}")
    return chosen


def _check_output(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / SHARDS_NAME).is_file():
        # Never a folder that we did not write, forced or not.
        raise UsageError(str(out), got="something that is no shards folder", need="a new folder")
    if not force:
        raise UsageError(
            str(out), got="finished shards", need="a new folder", hint="--force replaces them"
        )


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is not whole, or has tensors nobody would read."""
    config = checkpoint.config
    hint = f"k3tool inspect {checkpoint.path}"
    n_expected = 0
    for file in shard_files(config):
        n_expected += len(file.tensors)
        for spec in file.tensors:
            info = checkpoint.tensor_info(spec.name)
            where = f"{checkpoint.path / info.file}: {spec.name}"
            if need := dtype_fault(spec, info.dtype):
                raise ArtifactError(f"{where}: dtype", got=info.dtype, need=need, hint=hint)
            if need := shape_fault(spec, info.shape):
                raise ArtifactError(f"{where}: shape", got=list(info.shape), need=need, hint=hint)
    n_vision = sum(map(is_vision, checkpoint.index.weight_map))
    if n_expected + n_vision != len(checkpoint.index.weight_map):
        for name, source in sorted(checkpoint.index.weight_map.items()):
            if not is_vision(name) and find_spec(config, name) is None:
                raise ArtifactError(
                    f"{checkpoint.path / source}: {name}",
                    got="a tensor that nothing reads",
                    need="a tensor of the model",
                    hint=hint,
                )


# -- writing -----------------------------------------------------------------------------------


def _write_all(
    checkpoint: Checkpoint,
    tp: int,
    ranks: tuple[int, ...],
    building: Path,
    out: Path,
    progress: Progress | None,
) -> ShardsInfo:
    dropped = sorted(name for name in checkpoint.index.weight_map if is_vision(name))
    drop_infos = [checkpoint.tensor_info(name) for name in dropped]
    total = _source_bytes(checkpoint)
    for rank in ranks:
        (building / rank_folder_name(rank, tp)).mkdir()
    placed: list[Placed] = []
    read_bytes = 0
    for file in shard_files(checkpoint.config):
        for entry in _write_file(checkpoint, tp, ranks, building, file):
            placed.append(entry)
            read_bytes += entry.info.n_bytes
            if progress is not None:
                progress(read_bytes, total)
    _write_folders(checkpoint, tp, ranks, building, placed)
    digest = write_provenance(checkpoint, tp, ranks, building, placed, drop_infos)
    return ShardsInfo(
        path=out,
        tp=tp,
        ranks=ranks,
        digest=digest,
        identity=checkpoint.identity,
        n_tensors=len(placed),
        read_bytes=read_bytes,
        written_bytes=sum(entry.rank_bytes for entry in placed) * len(ranks),
        dropped=tuple(dropped),
        dropped_bytes=sum(info.n_bytes for info in drop_infos),
    )


def _source_bytes(checkpoint: Checkpoint) -> int:
    names = (name for name in checkpoint.index.weight_map if not is_vision(name))
    return sum(checkpoint.tensor_info(name).n_bytes for name in names)


def _write_file(
    checkpoint: Checkpoint, tp: int, ranks: tuple[int, ...], building: Path, file: ShardFile
) -> Iterator[Placed]:
    """Write one file of every rank side by side, reading each source tensor once."""
    infos = [checkpoint.tensor_info(spec.name) for spec in file.tensors]
    layout = [
        _rank_layout(info, rank_slice(spec, tp, 0))
        for spec, info in zip(file.tensors, infos, strict=True)
    ]
    with contextlib.ExitStack() as stack:
        writers = []
        for rank in ranks:
            path = building / rank_folder_name(rank, tp) / file.name
            metadata = {"kind": "shards", "rank": rank, "tp": tp, "source": checkpoint.identity}
            writers.append(stack.enter_context(SafetensorsWriter(path, layout, metadata)))
        offset = 0
        for spec, info, part in zip(file.tensors, infos, layout, strict=True):
            for writer in writers:
                writer.start(spec.name)
            max_scale = _copy(checkpoint, spec, info, tp, dict(zip(ranks, writers, strict=True)))
            digests = b"".join(bytes.fromhex(writer.finish()) for writer in writers)
            yield Placed(spec, info, file.name, offset, part.n_bytes, max_scale, digests)
            offset += part.n_bytes


def _rank_layout(info: TensorInfo, part: RankSlice) -> TensorLayout:
    """Return a rank's part in the stored form: a convolution stays 2-D or 3-D as it came."""
    if part.axis is None:
        return TensorLayout(info.name, info.dtype, info.shape, info.n_bytes)
    size = part.stop - part.start
    shape = (*info.shape[: part.axis], size, *info.shape[part.axis + 1 :])
    n_bytes = info.n_bytes // info.shape[part.axis] * size
    return TensorLayout(info.name, info.dtype, shape, n_bytes)


def _copy(
    checkpoint: Checkpoint,
    spec: TensorSpec,
    info: TensorInfo,
    tp: int,
    writers: dict[int, SafetensorsWriter],
) -> int:
    """Copy one tensor's parts to its ranks; return its largest scale byte (0 if it has none)."""
    is_scale = spec.name.endswith("weight_scale")
    max_scale = 0
    if spec.split is Split.LIVE_ROWS:
        _check_padding(checkpoint, spec, info)
    for row0, block in _blocks(checkpoint, spec):
        if is_scale:
            max_scale = max(max_scale, _check_scales(checkpoint, info, row0, block))
        for rank, writer in writers.items():
            part = rank_slice(spec, tp, rank)
            if part.axis is None:
                writer.append(block)
            elif part.axis == 1:
                writer.append(block[:, part.start : part.stop])
            else:
                low, high = max(part.start, row0), min(part.stop, row0 + len(block))
                if low < high:
                    writer.append(block[low - row0 : high - row0])
    return max_scale


def _blocks(checkpoint: Checkpoint, spec: TensorSpec) -> Iterator[tuple[int, Array]]:
    live = spec.live if spec.split is Split.LIVE_ROWS else None
    return checkpoint.iter_rows(spec.name, 0, live)


def _check_scales(checkpoint: Checkpoint, info: TensorInfo, row0: int, block: Array) -> int:
    largest = int(block.max(initial=0))
    if largest >= SCALE_REFUSED_FROM:
        row, group = (int(axis[0]) for axis in np.nonzero(block >= SCALE_REFUSED_FROM))
        raise ArtifactError(
            f"{checkpoint.path / info.file}: {info.name}: row {row0 + row}, group {group}",
            got=f"scale byte {block[row, group]}",
            need=f"at most {SCALE_REFUSED_FROM - 1}",
        )
    return largest


def _check_padding(checkpoint: Checkpoint, spec: TensorSpec, info: TensorInfo) -> None:
    """Refuse values behind the live heads: then the stored length means something else."""
    tail = checkpoint.read_rows(spec.name, spec.live, info.shape[0])
    if np.any(tail != 0):
        head = spec.live + int(np.nonzero(tail)[0][0])
        raise ArtifactError(
            f"{checkpoint.path / info.file}: {info.name}: element {head}",
            got=f"{tail[head - spec.live]:g}",
            need=f"zero padding behind {spec.live} heads",
        )


# -- index, config, provenance -----------------------------------------------------------------


def _write_folders(
    checkpoint: Checkpoint,
    tp: int,
    ranks: tuple[int, ...],
    building: Path,
    placed: list[Placed],
) -> None:
    index = {
        "metadata": {"total_size": sum(entry.rank_bytes for entry in placed)},
        "weight_map": {entry.spec.name: entry.file for entry in placed},
    }
    text = canonical_json(index).encode()
    for rank in ranks:
        folder = building / rank_folder_name(rank, tp)
        _write_bytes(folder / INDEX_NAME, text)
        _write_bytes(folder / "config.json", checkpoint.config_bytes)
    _write_bytes(building / "config.json", checkpoint.config_bytes)
    for name in SIDE_FILES:
        if (checkpoint.path / name).is_file():
            _write_bytes(building / name, (checkpoint.path / name).read_bytes())


def _write_bytes(path: Path, data: bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
