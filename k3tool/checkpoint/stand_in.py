"""Whether a checkpoint's files hold data, or holes that nothing was ever written into.

A hole reads as zeros and takes no disk: of such files is the stand-in of the release, and a
download that took its room first and was not finished. What a file system counts is no proof: one
that compresses holds less than it reads, and stores zeros as holes; one over a network may count
nothing. So the values decide: the last norm of a model that says anything is not all zeros.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import ArtifactError
from k3tool.model.weights import layer_rows
from k3tool.tables import bytes_text


def has_hole(path: Path) -> bool:
    """Return whether a part of a file was never written: it is read without asking a device."""
    with path.open("rb") as file:
        return os.lseek(file.fileno(), 0, os.SEEK_HOLE) < os.fstat(file.fileno()).st_size


def held_bytes(files: Iterable[Path]) -> int:
    """Return the bytes of disk that files take, as far as their file system counts them."""
    return sum(512 * file.stat().st_blocks for file in files)


def is_stand_in(folders: Sequence[Checkpoint]) -> bool:
    """Return whether a checkpoint, or all ranks of one, has holes in place of its weights."""
    files = [folder.file_path(file) for folder in folders for file in folder.index.files]
    try:
        sizes = {file: file.stat().st_size for file in files}
        if not files or 2 * held_bytes(files) >= sum(sizes.values()):
            return False
        return has_hole(max(files, key=sizes.__getitem__)) and _is_silent(folders[0])
    except (OSError, ArtifactError):
        return False  # something else is wrong with it, and is said by who looks for that


def require_data(checkpoint: Checkpoint) -> None:
    """Refuse to run holes. Raises: ArtifactError saying what such files are for."""
    if not is_stand_in([checkpoint]):
        return
    files = [checkpoint.file_path(file) for file in checkpoint.index.files]
    held, size = held_bytes(files), sum(file.stat().st_size for file in files)
    raise ArtifactError(
        str(checkpoint.path),
        got=f"holes for data: {bytes_text(held)} of {bytes_text(size)} on disk, the last norm zero",
        need="weights",
        hint="finish the download; a stand-in is for inspect, shard --dry-run, compile-plan and "
        "run --plan-only",
    )


def _is_silent(checkpoint: Checkpoint) -> bool:
    """Return whether the last norm is all zeros, and so every logit of every token."""
    (name,) = (s.name for s, _ in layer_rows(checkpoint.config, None) if s.row.claimed_by == _NORM)
    return not checkpoint.read(name).view(np.uint8).any()


_NORM = "RMSNORM"  # the one op of its kind outside of the layers
