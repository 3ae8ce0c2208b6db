"""One model in several folders, a device each: copies of its files, or its files split among them.

Every folder has config and index (for shards also shards.h5 and each rank's rank.h5); a weight file
may lie in one of them or in several. Copies are held to be the same by what an identity is made of:
name, size, header and a sample of the data. It reads no weight beyond that sample.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from k3tool.checkpoint.headers import read_header_bytes
from k3tool.checkpoint.identity import FileParts, file_line
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.side_files import SIDE_FILES, read_side_file
from k3tool.errors import ArtifactError, UsageError

MOST_FOLDERS = 8  # K3_MOST_DEVICES of kernels_cpu/devices.h


def require_apart(folders: Sequence[Path]) -> None:
    """Refuse a folder that is named twice, by whatever path. Raises: UsageError."""
    if len(folders) > MOST_FOLDERS:
        raise UsageError("--shards", got=f"{len(folders)} folders", need=f"at most {MOST_FOLDERS}")
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise UsageError("--shards", got=f"{folder} twice", need="each folder once")
        seen.add(folder.resolve())


def open_spread(
    folders: Sequence[Path], eps_overrides: Mapping[str, float] | None = None
) -> Checkpoint:
    """Open a checkpoint that lies in several folders.

    Raises: ArtifactError naming a folder of another checkpoint, a file that differs from its copy
    or is in none of them.
    """
    checkpoint = Checkpoint.open(folders[0], eps_overrides, folders)
    for folder in folders[1:]:
        with Checkpoint.open(folder, eps_overrides) as other:
            for name, got, need in (
                ("config.json", other.config_bytes, checkpoint.config_bytes),
                ("index", other.index.sha256.encode(), checkpoint.index.sha256.encode()),
            ):
                if got != need:
                    raise ArtifactError(
                        f"{folder}: {name}", got=hashlib.sha256(got).hexdigest()[:16],
                        need=f"that of {folders[0]}: one checkpoint in all folders",
                    )  # fmt: skip
    require_same_side_files(folders)
    require_same_files(checkpoint)
    require_used([checkpoint], folders)
    return checkpoint


def require_same_side_files(folders: Sequence[Path]) -> None:
    """Refuse side files that differ: end tokens must not depend on which folder is named first.

    Raises: ArtifactError naming the file.
    """
    for name in SIDE_FILES:
        first = read_side_file(folders[0], name)
        for folder in folders[1:]:
            found = read_side_file(folder, name)
            if found != first:
                here, there = ("absent" if data is None else "there" for data in (found, first))
                got, need = (here, there) if here != there else ("other bytes", "the same file")
                raise ArtifactError(
                    str(folder / name), got=got, need=f"{need}, as in {folders[0]}",
                    hint="copy it to all folders, or take it away from all",
                )  # fmt: skip


def require_same_files(checkpoint: Checkpoint) -> None:
    """Refuse files that lie in no folder, and copies that differ. Raises: ArtifactError."""
    for file in checkpoint.index.files:
        places = [checkpoint.folders[number] / file for number in checkpoint.places(file)]
        if not places:
            named = ", ".join(str(folder) for folder in checkpoint.folders)
            raise ArtifactError(file, got=f"in none of {named}", need="a file of the index")
        if len(places) == 1:
            continue
        need = file_line(places[0], checkpoint.file_parts(file))
        for copy in places[1:]:
            if _line(copy) != need:
                raise ArtifactError(
                    str(copy), got="other bytes", need=f"a copy of {places[0]}",
                    hint="take one of the two away, or copy it again",
                )  # fmt: skip


def require_used(checkpoints: Sequence[Checkpoint], folders: Sequence[Path]) -> None:
    """Refuse a folder that no weight file is read from. Raises: ArtifactError naming it."""
    used = {
        number for checkpoint in checkpoints for file in checkpoint.index.files
        for number in checkpoint.places(file)
    }  # fmt: skip
    for number, folder in enumerate(folders):
        if number not in used:
            raise ArtifactError(str(folder), got="none of the weight files", need="some, or all")


def _line(path: Path) -> str:
    raw, size = read_header_bytes(path)
    parts = FileParts(path.name, size, hashlib.sha256(raw).hexdigest(), 8 + len(raw))
    return file_line(path, parts)
