"""Which file holds which tensor: the index file, or the headers where there is none.

It does not check the index against the headers; coverage does.
"""

import json
from pathlib import Path
from typing import NamedTuple

from k3tool.checkpoint.headers import read_header
from k3tool.errors import ArtifactError

INDEX_NAME = "model.safetensors.index.json"


class Index(NamedTuple):
    """Names to file names. `from_headers` says that the folder has no index file."""

    weight_map: dict[str, str]
    total_size: int | None
    from_headers: bool
    raw: bytes

    @property
    def files(self) -> list[str]:
        """Return the file names, sorted."""
        return sorted(set(self.weight_map.values()))


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint folder, or build it from the headers of its files.

    Raises: ArtifactError naming the file and entry.
    """
    path = folder / INDEX_NAME
    if not path.exists():
        return _index_from_headers(folder)
    try:
        raw = path.read_bytes()
        parsed = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(str(path), got=f"unreadable ({error})", need="an index file") from None
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ArtifactError(f"{path}: weight_map", got="none", need="names to file names")
    checked: set[str] = set()
    for name, file in weight_map.items():
        if file in checked:
            continue
        if not isinstance(file, str) or Path(file).name != file:
            # A path would let an index read outside its folder.
            raise ArtifactError(f"{path}: {name}", got=repr(file), need="a plain file name")
        checked.add(file)
    return Index(weight_map, _total_size(path, parsed), False, raw)


def _total_size(path: Path, parsed: dict[str, object]) -> int | None:
    metadata = parsed.get("metadata", {})
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and (type(total) is not int or total < 0):
        raise ArtifactError(f"{path}: metadata.total_size", got=repr(total), need="a byte count")
    return total


def _index_from_headers(folder: Path) -> Index:
    weight_map: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name in read_header(path).tensors:
            if name in weight_map:
                raise ArtifactError(
                    f"{path}: {name}", got=f"also in {weight_map[name]}", need="one file for it"
                )
            weight_map[name] = path.name
    if not weight_map:
        raise ArtifactError(
            str(folder), got="no safetensors files", need="a checkpoint folder or a rank folder"
        )
    return Index(weight_map, None, True, b"")
