"""HDF5 artifacts: the only module that knows the HDF5 library.

It does not know what any artifact means; each stage names its own datasets.

Every artifact file
1. MUST carry `k3.kind` (one of KINDS) and `k3.schema` (an int per kind) as root attributes;
2. MUST carry `k3.inputs`: sorted JSON list of {role, kind, name, content_sha256};
3. MUST carry `k3.params`: sorted JSON of the options that change its content;
4. MUST carry `k3.content_sha256`, and a reader MUST refuse the file when it does not match;
5. MUST carry `k3.tool` (version, revision, dirty); it is not part of the digest;
6. MAY carry `k3.target`, `k3.phase`, `k3.isa_hash`; a reader that passes an ISA hash MUST refuse
   a file that has another one or none;
7. MUST hold big data in datasets, never in attributes (HDF5 refuses attributes above 64 KiB);
8. MUST give each dataset `axes` (JSON list of names), `unit` and `dtype` (logical: bf16 is u2);
9. MUST NOT hold timestamps, machine names or absolute paths: same inputs, same digest;
10. MUST be written beside its final name and renamed when complete; it is never edited;
11. MUST start with a 512-byte user block of text that holds the sha256 of all bytes behind it, and
   a reader MUST check it before it lets the HDF5 library parse the file.

The digest is of content, not of file bytes: creation order, chunking and compression differ between
equal artifacts. The file's own hash stands in front because the HDF5 library does not survive
damage gracefully: one flipped bit can make it loop for minutes. Strings count as their UTF-8 bytes,
numbers as little-endian C-order bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np

from k3tool.artifact_digest import Array, Dataset, Digest, content_sha256, stored_array, words_of
from k3tool.artifact_roots import (
    KINDS,
    OPTIONAL,
    InputRef,
    Wanted,
    a_kind,
    check_roots,
    how_made,
    parse_inputs,
    parse_params,
    require_plain,
)
from k3tool.atomic import artifact_line, atomic_path
from k3tool.canonical import canonical_json
from k3tool.disk_file import DiskFile
from k3tool.errors import CHECK_PATH, ArtifactError, K3Error
from k3tool.revision import tool_version

__all__ = ["Array", "Dataset", "InputRef"]  # re-exported: what a writer hands over

USER_BLOCK_BYTES = 512  # the smallest that HDF5 allows


# -- writing -----------------------------------------------------------------------------------


def write_artifact(
    path: str | Path,
    kind: str,
    schema: int,
    datasets: Mapping[str, Dataset],
    attrs: Mapping[str, str | int | float | bool] | None = None,
    inputs: Iterable[InputRef] = (),
    params: Mapping[str, object] | None = None,
    *,
    target: str | None = None,
    phase: str | None = None,
    isa_hash: str | None = None,
) -> str:
    """Write one artifact atomically and return its content digest.

    Dataset names may hold `/` (groups). `attrs` are small root attributes of the caller's own;
    names that start with `k3.` are ours.
    Raises: K3Error when the file cannot be written.
    """
    given = {"target": target, "phase": phase, "isa_hash": isa_hash}
    roots = _new_roots(kind, schema, attrs, inputs, params, given)
    stored = {name: stored_array(name, dataset) for name, dataset in datasets.items()}
    digest = content_sha256(
        roots,
        ((name, data, words_of(datasets[name], data)) for name, data in sorted(stored.items())),
    )
    roots["k3.content_sha256"], roots["k3.tool"] = digest, tool_version()
    path = Path(path)
    whole = _file_bytes(kind, roots, datasets, stored)
    with atomic_path(path) as temporary:
        temporary.write_bytes(whole)
    return digest


def write_large_artifact(
    path: str | Path,
    kind: str,
    schema: int,
    datasets: Mapping[str, Callable[[], Dataset]],
    inputs: Iterable[InputRef] = (),
    params: Mapping[str, object] | None = None,
    *,
    target: str | None = None,
) -> str:
    """Write an artifact as `write_artifact` does, of datasets that are made one after the other.

    Memory holds one of them at a time. Raises: K3Error when the file cannot be written.
    """
    roots = _new_roots(kind, schema, None, inputs, params, {"target": target})
    digest = Digest(roots)
    with atomic_path(Path(path)) as temporary:
        with DiskFile(temporary) as disk:
            try:
                _write_file(disk, roots, datasets, digest)
            except (OSError, RuntimeError, ValueError):
                if disk.error is None:
                    raise
            if disk.error is not None:  # HDF5 says of it what only HDF5 knows, or nothing
                raise disk.error
        block = _user_block(kind, _sha256_behind_block(temporary))
        with temporary.open("r+b") as whole:
            whole.write(block)
    return digest.hexdigest()


def _write_file(
    disk: DiskFile,
    roots: dict[str, str | int | float | bool],
    datasets: Mapping[str, Callable[[], Dataset]],
    digest: Digest,
) -> None:
    with h5py.File(disk, "w", userblock_size=USER_BLOCK_BYTES) as file:
        for name in sorted(datasets):
            dataset = datasets[name]()
            stored = stored_array(name, dataset)
            words = words_of(dataset, stored)
            digest.add(name, stored, words)
            _write_dataset(file, name, stored, words)
            if disk.error is not None:
                return
        roots["k3.content_sha256"] = digest.hexdigest()
        roots["k3.tool"] = tool_version()
        for name, value in sorted(roots.items()):
            file.attrs[name] = value


def _new_roots(
    kind: str,
    schema: int,
    attrs: Mapping[str, str | int | float | bool] | None,
    inputs: Iterable[InputRef],
    params: Mapping[str, object] | None,
    given: Mapping[str, str | None],
) -> dict[str, str | int | float | bool]:
    """Return the root attributes of a new artifact, all but digest and version."""
    assert kind in KINDS, kind
    roots: dict[str, str | int | float | bool] = dict(attrs or {})
    assert not any(name.startswith("k3.") for name in roots), sorted(roots)
    roots["k3.kind"], roots["k3.schema"] = kind, schema
    roots["k3.inputs"] = canonical_json([ref._asdict() for ref in sorted(inputs)])
    roots["k3.params"] = canonical_json(dict(params or {}))
    roots.update({OPTIONAL[key]: value for key, value in given.items() if value is not None})
    return roots


def _file_bytes(
    kind: str,
    roots: Mapping[str, str | int | float | bool],
    datasets: Mapping[str, Dataset],
    stored: Mapping[str, Array],
) -> bytes:
    """Return the bytes of the file. They are made in memory: the HDF5 library crashes when a disk
    is full, and an artifact is small.
    """
    with h5py.File(
        f"{kind}.h5", "w", driver="core", backing_store=False, userblock_size=USER_BLOCK_BYTES
    ) as file:
        for name, value in sorted(roots.items()):
            file.attrs[name] = value
        for name in sorted(stored):
            _write_dataset(file, name, stored[name], words_of(datasets[name], stored[name]))
        file.flush()
        image: bytes = file.id.get_file_image()  # without the user block
    return _user_block(kind, hashlib.sha256(image).hexdigest()) + image


def _user_block(kind: str, sha256: str) -> bytes:
    """Return the text in front of the file, padded: its kind and the hash of what follows."""
    line = artifact_line(kind) + f"sha256 {sha256}\n".encode()
    return line.ljust(USER_BLOCK_BYTES, b"\0")


def _sha256_behind_block(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(USER_BLOCK_BYTES)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_dataset(file: h5py.File, name: str, data: Array, words: Mapping[str, str]) -> None:
    dtype = h5py.string_dtype() if data.dtype.kind == "O" else data.dtype
    # One contiguous extent, so that a reader may map it (see Artifact.extent).
    dataset = file.create_dataset(name, data=data, dtype=dtype)
    for key, value in words.items():
        dataset.attrs[key] = value


# -- reading -----------------------------------------------------------------------------------


class Artifact:
    """An open, verified artifact; a context manager.

    `attrs` are the writer's own root attributes as plain Python values; `read` gives arrays
    (strings as an object array of str).
    """

    def __init__(self, path: Path, file: h5py.File) -> None:
        """Take an open file whose kind, schema and digest have been checked (open_artifact)."""
        self.path = path
        self._file = file
        self._roots = _roots(file)
        self.attrs = {k: v for k, v in self._roots.items() if not k.startswith("k3.")}
        self.kind = str(self._roots["k3.kind"])
        self.schema = int(self._roots["k3.schema"])
        self.tool = str(self._roots["k3.tool"])
        self.digest = str(self._roots["k3.content_sha256"])
        self.inputs = parse_inputs(path, self._roots)
        self.params = parse_params(path, self._roots)
        self.target: str | None = self._roots.get("k3.target")
        self.phase: str | None = self._roots.get("k3.phase")
        self.isa_hash: str | None = self._roots.get("k3.isa_hash")

    def names(self) -> list[str]:
        """Return all dataset names, sorted."""
        return _names(self._file)

    def read(self, name: str) -> Array:
        """Return one dataset whole. Raises: ArtifactError naming the file if it is absent.

        What dtype and shape it has is not asked here: see k3tool.fields.
        """
        return _read_stored(self.path, name, self._dataset(name))

    def unit(self, name: str) -> str:
        """Return the unit a dataset was written with, empty where it has none."""
        return str(self._dataset(name).attrs.get("unit", ""))

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the names of a dataset's axes, none where it was written without."""
        return tuple(json.loads(self._dataset(name).attrs.get("axes", "[]")))

    def extent(self, name: str) -> tuple[int, int]:
        """Return (offset, size) in bytes of a numeric dataset in the file, for mapping it.

        Raises: ArtifactError if the dataset has no bytes in one piece (strings, empty).
        """
        dataset = self._dataset(name)
        offset = dataset.id.get_offset()
        if offset is None or h5py.check_string_dtype(dataset.dtype) is not None:
            raise ArtifactError(
                f"{self.path}: {name}", got="no single extent", need="plain numbers"
            )
        return int(offset), int(dataset.id.get_storage_size())

    def as_input(self, role: str) -> InputRef:
        """Return this artifact as an input of another one; only its file name is kept."""
        return InputRef(role, self.kind, self.path.name, self.digest)

    def _dataset(self, name: str) -> h5py.Dataset:
        found = self._file.get(name)
        if not isinstance(found, h5py.Dataset):
            raise ArtifactError(f"{self.path}: {name}", got="absent", need="a dataset")
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self.close()


def open_artifact(
    path: str | Path,
    kind: Wanted = None,
    schema: int | None = None,
    *,
    isa_hash: str | None = None,
) -> Artifact:
    """Open an artifact after checking kind, schema, ISA hash and digest.

    `kind` may be several, of which the file is one; `kind` and `schema` None accept any known kind.
    Raises: ArtifactError naming the file and what differs.
    """
    path = Path(path)
    if not os.path.isfile(path):  # unlike Path's, it says no to a name too long to exist
        got = "a folder" if os.path.isdir(path) else "no such file"
        if got != "a folder" and os.path.exists(path):
            got = "no regular file"
        hint = how_made(kind) if kind else CHECK_PATH
        raise ArtifactError(str(path), got=got, need=f"{a_kind(kind)}, a file", hint=hint)
    _check_user_block(path, kind)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ArtifactError(str(path), got=f"unreadable ({error})", need="an HDF5 file") from None
    try:
        wanted = {"k3.kind": kind, "k3.schema": schema, "k3.isa_hash": isa_hash}
        check_roots(path, _roots(file), wanted)
        _check_digest(path, file)
        return Artifact(path, file)
    except K3Error:
        file.close()
        raise


def _check_user_block(path: Path, kind: Wanted) -> None:
    try:
        with path.open("rb") as file:
            block = file.read(USER_BLOCK_BYTES)
            words = block.split(b"\n")[0].decode(errors="replace").split(" ")
            if words[0] != "k3tool" or len(words) != 2:
                raise ArtifactError(
                    str(path), got="no k3tool file", need=a_kind(kind), hint=how_made(kind)
                )
        intact = block == _user_block(words[1], _sha256_behind_block(path))
    except OSError as error:
        raise ArtifactError(
            str(path), got=error.strerror or str(error), need="a readable file"
        ) from None
    if not intact:
        raise ArtifactError(
            f"{path}: sha256",
            got="other bytes than were written",
            need="an intact file",
            hint="the file was altered, cut or damaged: write it again",
        )


def _check_digest(path: Path, file: h5py.File) -> None:
    roots, names = _roots(file), _names(file)
    found = content_sha256(
        roots, ((name, *_read_with_words(path, name, file[name])) for name in names)
    )
    if found != roots["k3.content_sha256"]:
        raise ArtifactError(
            f"{path}: content_sha256",
            got=found[:16] + "..",
            need=f"{str(roots['k3.content_sha256'])[:16]}..",
            hint="the file was altered or damaged: write it again",
        )


def _roots(node: h5py.File | h5py.Dataset) -> dict[str, Any]:
    """Return attributes as plain Python: h5py hands out np.int64, np.bool_ and bytes."""
    values: dict[str, Any] = {}
    for name, value in node.attrs.items():
        plain = value.item() if isinstance(value, np.generic) else value
        values[str(name)] = plain.decode(errors="replace") if isinstance(plain, bytes) else plain
    return values


def _names(file: h5py.File) -> list[str]:
    names: list[str] = []

    def visit(name: str, node: h5py.Group | h5py.Dataset) -> None:
        if isinstance(node, h5py.Dataset):
            names.append(name)

    file.visititems(visit)
    return sorted(names)


def _read_with_words(path: Path, name: str, dataset: h5py.Dataset) -> tuple[Array, dict[str, Any]]:
    words = _roots(dataset)
    require_plain(f"{path}: {name}", words)
    return _read_stored(path, name, dataset), words


def _read_stored(path: Path, name: str, dataset: h5py.Dataset) -> Array:
    if h5py.check_string_dtype(dataset.dtype) is None:
        if dataset.dtype.kind not in "biuf" or dataset.shape is None:
            got = str(dataset.dtype)
            raise ArtifactError(f"{path}: {name}", got=got, need="numbers or texts")
        return np.asarray(dataset[()])
    raw = np.asarray(dataset[()], dtype=object)
    out = np.empty(raw.shape, dtype=object)
    try:
        for index, item in enumerate(raw.flat):
            out.flat[index] = item.decode() if isinstance(item, bytes) else str(item)
    except UnicodeDecodeError:
        raise ArtifactError(f"{path}: {name}", got="other bytes", need="UTF-8 text") from None
    return out
