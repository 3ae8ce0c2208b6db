"""Which file holds which tensor: the index file, or the headers where there is none.

It does not check the index against the headers; coverage does.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from k3tool.checkpoint.header_table import count_quotes
from k3tool.checkpoint.headers import HeaderReader
from k3tool.checkpoint.json_text import MOST_DEPTH, TOO_DEEP, json_fault, json_kind, parse_json
from k3tool.checkpoint.regular_file import read_regular
from k3tool.errors import ArtifactError, quoted

INDEX_NAME = "model.safetensors.index.json"
MOST_TOTAL = (1 << 63) - 1  # a file's size has no more
_MOST_NAME = 300  # letters of a wrong file name that are shown
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
    return parse_index(read_regular(path, "an index file"), path)


def parse_index(raw: bytes, path: Path) -> Index:
    """Return an index from its text; `path` is for messages. Raises: ArtifactError."""
    try:
        parsed = _parsed(raw)
    except ValueError as error:
        raise ArtifactError(
            str(path),
            got=f"invalid JSON ({json_fault(error)})",
            need="an index file",
            hint=_NEXT_STEP,
        ) from None
    if not isinstance(parsed, dict):
        raise ArtifactError(str(path), got=json_kind(parsed), need="a JSON object", hint=_NEXT_STEP)
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ArtifactError(
            f"{path}: weight_map", got="no names", need="tensor names to file names",
            hint=_NEXT_STEP,
        )  # fmt: skip
    files = _files(path, weight_map)
    digest = hashlib.sha256(raw).hexdigest()
    return Index(weight_map, files, _total_size(path, parsed), False, digest)


def _parsed(raw: bytes) -> Any:
    """Return the JSON value, read quickly where that shows as much as reading strictly."""
    try:
        parsed = orjson.loads(raw)
    except ValueError:
        parse_json(raw)  # its words, if it finds a fault too
        raise
    if b"\\\\" in raw or count_quotes(raw) != 2 * _count_strings(parsed):
        parse_json(raw)  # more strings than values: a key may stand twice
    return parsed


def _count_strings(value: Any, depth: int = 0) -> int:
    """Return the strings of a value, keys included. Raises: ValueError for one nested too deep."""
    if isinstance(value, str):
        return 1
    if not isinstance(value, dict | list):
        return 0
    if depth >= MOST_DEPTH:
        raise ValueError(TOO_DEEP)
    inside = value.values() if isinstance(value, dict) else value
    n_keys = len(value) if isinstance(value, dict) else 0
    if {*map(type, inside)} <= {str}:
        return n_keys + len(value)
    return n_keys + sum(_count_strings(each, depth + 1) for each in inside)


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
        f"{path}: {name}", got=quoted(file, _MOST_NAME), need="a plain file name",
        hint=_NEXT_STEP,
    )  # fmt: skip


def _is_plain(file: str) -> bool:
    """Return whether a name stays in its folder: Path("..").name is ".." and must not pass."""
    return Path(file).name == file and file not in ("", ".", "..") and "\0" not in file


def _is_utf8(name: str) -> bool:
    """Return whether the system's bytes of a name were text: others come as half surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def _total_size(path: Path, parsed: dict[str, object]) -> int | None:
    metadata = parsed.get("metadata", {})
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and (type(total) is not int or not 0 <= total <= MOST_TOTAL):
        # A whole number above 64 bits was read as a float, whose digits are not the file's.
        is_large = type(total) is float and total > MOST_TOTAL
        got = "more than 64 bits hold" if is_large else quoted(total)
        raise ArtifactError(
            f"{path}: metadata.total_size", got=got, need="a byte count below 2^63",
            hint=_NEXT_STEP,
        )  # fmt: skip
    return total


def _index_from_headers(folder: Path) -> Index:
    weight_map: dict[str, str] = {}
    files = []
    reader = HeaderReader()
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.isascii() and not _is_utf8(path.name):
            raise ArtifactError(
                str(path), got="a name that is no UTF-8", need="a name that an index can hold",
                hint="rename the file",
            )  # fmt: skip
        files.append(path.name)
        for name in reader.read(path).names():
            weight_map.setdefault(name, path.name)  # a second copy is coverage's to report
    if not weight_map:
        raise ArtifactError(
            str(folder), got="no safetensors files", need="a checkpoint folder or a rank folder",
            hint="fetch the files that belong to config.json",
        )  # fmt: skip
    return Index(weight_map, files, None, True, hashlib.sha256(b"").hexdigest())
