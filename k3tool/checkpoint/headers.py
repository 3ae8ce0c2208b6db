"""Read safetensors headers raw: names, dtypes, shapes, offsets, and everything that can be wrong.

It never reads tensor data. Format: a little-endian u64 header length, that many bytes of JSON
(an object, maybe padded with spaces), then the data; offsets are relative to the data and leave no
hole. Source: the safetensors README, section Format.
"""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from k3tool.errors import ArtifactError

# Stored dtype -> NumPy dtype of its bits; NumPy has neither bf16 nor the 8-bit floats.
DTYPES = {
    "BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8",
    "F8_E8M0": "u1", "F8_E4M3": "u1", "F8_E5M2": "u1",
    "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
    "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "BOOL": "?",
}  # fmt: skip
DTYPE_BYTES = {name: 1 if code == "?" else int(code[-1]) for name, code in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the stock reader's own limit; K3's largest is about 0.9 MB


class TensorInfo(NamedTuple):
    """Where a tensor lies. `offset` is from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    n_bytes: int


class Header(NamedTuple):
    """One file's header; `sha256` is over its bytes as stored, `size` the file's in bytes."""

    file: str
    size: int
    sha256: str
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]


def read_header_bytes(path: Path) -> tuple[bytes, int]:
    """Return (header JSON as stored, file size). Raises: ArtifactError naming the file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ArtifactError(
                    str(path),
                    got=f"header of {length} bytes in a file of {size}",
                    need="a whole safetensors file",
                    hint="the download stopped early: fetch it again",
                )
            return file.read(length), size
    except OSError as error:
        raise ArtifactError(
            str(path), got=error.strerror or str(error), need="a safetensors file"
        ) from None


def read_header(path: Path) -> Header:
    """Read and check one file's header. Raises: ArtifactError naming file and tensor."""
    raw, size = read_header_bytes(path)
    try:
        parsed = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(str(path), got=f"invalid header ({error})", need="JSON") from None
    if not isinstance(parsed, dict) or not raw.startswith(b"{"):
        raise ArtifactError(str(path), got="a header that is no object", need="a JSON object")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ArtifactError(
            f"{path}: __metadata__", got=type(metadata).__name__, need="text values"
        )
    start = 8 + len(raw)
    tensors = {name: _tensor(path, name, entry, start) for name, entry in parsed.items()}
    _check_contiguous(path, tensors, start, size)
    return Header(path.name, size, hashlib.sha256(raw).hexdigest(), metadata, tensors)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} twice")
    return values


def _tensor(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise ArtifactError(f"{path}: {name}", got=type(entry).__name__, need="an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ArtifactError(f"{path}: {name}: dtype", got=dtype, need=f"one of {list(DTYPES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ArtifactError(
            f"{path}: {name}", got=f"shape {shape}, data_offsets {offsets}", need="natural numbers"
        )
    n_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != n_bytes:
        raise ArtifactError(
            f"{path}: {name}: data_offsets",
            got=f"{offsets[1] - offsets[0]} bytes",
            need=f"{n_bytes} for {dtype} {shape}",
        )
    return TensorInfo(name, dtype, tuple(shape), path.name, start + offsets[0], n_bytes)


def _naturals(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(item) is int and item >= 0 for item in values)


def _check_contiguous(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    position = start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.n_bytes)):
        if info.offset != position:
            raise ArtifactError(
                f"{path}: {info.name}: data_offsets",
                got=f"start {info.offset - start}",
                need=f"{position - start}, no hole and no overlap",
            )
        position += info.n_bytes
    if position != size:
        raise ArtifactError(
            str(path),
            got=f"{size} bytes",
            need=f"{position} by its header",
            hint="the file is cut or has bytes behind its tensors: fetch it again",
        )
