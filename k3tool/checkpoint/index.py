"""Which file holds which tensor: the index file, or the headers where there is none.

It does not check the index against the headers; coverage does.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from k3tool.checkpoint.header_table import count_quotes
from k3tool.checkpoint.headers import HeaderReader, no_duplicates
from k3tool.checkpoint.regular_file import json_fault, read_regular
from k3tool.errors import ArtifactError

INDEX_NAME = "model.safetensors.index.json"
_NEXT_STEP = "fetch the index again, or remove it: then the headers rule"


@dataclass(frozen=True, slots=True)
class Index:
    """Names to file names. `from_headers` says that the folder has no index file.

    `files` are the file names, sorted; `sha256` is of the index file's bytes, none without one.
    """

    weight_map: dict[str, str]
    files: list[str]
    total_size: int | None
    from_headers: bool
    sha256: str


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint folder, or build it from the headers of its files.

    Raises: ArtifactError naming the file and entry.
    """
    path = folder / INDEX_NAME
    if not os.path.lexists(path):
        return _index_from_headers(folder)
    try:
        raw = read_regular(path, "an index file")
        parsed = orjson.loads(raw)
        if not _names_once(raw, parsed):
            json.loads(raw, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            str(path),
            got=f"invalid JSON ({json_fault(error)})",
            need="an index file",
            hint=_NEXT_STEP,
        ) from None
    if not isinstance(parsed, dict):
        raise ArtifactError(
            str(path), got=f"a JSON {type(parsed).__name__}", need="a JSON object", hint=_NEXT_STEP
        )
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ArtifactError(
            f"{path}: weight_map", got="no names", need="tensor names to file names",
            hint=_NEXT_STEP,
        )  # fmt: skip
    files = _files(path, weight_map)
    digest = hashlib.sha256(raw).hexdigest()
    return Index(weight_map, files, _total_size(path, parsed), False, digest)


def _names_once(raw: bytes, parsed: object) -> bool:
    """Return whether surely no key stands twice: every string of the text has two quotes."""
    return b"\\\\" not in raw and count_quotes(raw) == 2 * _count_strings(parsed)


def _count_strings(value: Any) -> int:
    if isinstance(value, str):
        return 1
    if isinstance(value, dict):
        kinds = {*map(type, value.values())}
        texts = kinds <= {str}
        return len(value) + (len(value) if texts else sum(map(_count_strings, value.values())))
    return sum(map(_count_strings, value)) if isinstance(value, list) else 0


def _files(path: Path, weight_map: dict[str, Any]) -> list[str]:
    """Return the file names. A path among them would let an index read outside its folder."""
    if {*map(type, weight_map.values())} == {str}:
        files = sorted(set(weight_map.values()))
        if all(map(_is_plain, files)):
            return files
    name, file = next(
        (name, file)
        for name, file in weight_map.items()
        if not isinstance(file, str) or not _is_plain(file)
    )
    raise ArtifactError(
        f"{path}: {name}", got=json.dumps(file, ensure_ascii=False), need="a plain file name",
        hint=_NEXT_STEP,
    )  # fmt: skip


def _is_plain(file: str) -> bool:
    """Return whether a name stays in its folder: Path("..").name is ".." and must not pass."""
    return Path(file).name == file and file not in ("", ".", "..") and "\0" not in file


def _total_size(path: Path, parsed: dict[str, object]) -> int | None:
    metadata = parsed.get("metadata", {})
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and (type(total) is not int or total < 0):
        raise ArtifactError(
            f"{path}: metadata.total_size", got=json.dumps(total), need="a byte count",
            hint=_NEXT_STEP,
        )  # fmt: skip
    return total


def _index_from_headers(folder: Path) -> Index:
    weight_map: dict[str, str] = {}
    files = []
    reader = HeaderReader()
    for path in sorted(folder.glob("*.safetensors")):
        files.append(path.name)
        for name in reader.read(path).names():
            weight_map.setdefault(name, path.name)  # a second copy is coverage's to report
    if not weight_map:
        raise ArtifactError(
            str(folder), got="no safetensors files", need="a checkpoint folder or a rank folder",
            hint="fetch the files that belong to config.json",
        )  # fmt: skip
    return Index(weight_map, files, None, True, hashlib.sha256(b"").hexdigest())
