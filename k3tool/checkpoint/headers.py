"""Read safetensors headers raw: names, dtypes, shapes, offsets, and everything that can be wrong.

It never reads tensor data. Format: a little-endian u64 header length, that many bytes of JSON
(an object, maybe padded with spaces), then the data; offsets are relative to the data and leave no
hole. Source: the safetensors README, section Format.

There are two readers of a header's text. The quick one (header_table) checks columns at once and
accepts or declines; it names nothing. What it declines the careful one here reads again, tensor by
tensor, and names what is wrong, so a message never depends on which one met the file.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeGuard

from k3tool.checkpoint.header_order import KnownLayout, cut
from k3tool.checkpoint.header_table import ANY_LAYER, MOST_AXES, TensorTable, quick_table
from k3tool.checkpoint.json_text import json_fault, json_kind, parse_json
from k3tool.checkpoint.regular_file import open_regular, refuse_pointer, unreadable
from k3tool.errors import ArtifactError, quoted

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


class Header:
    """One file's header; `sha256` is over its bytes as stored, `size` the file's in bytes.

    `table` may be shared by files of equal layers: its names then hold ANY_LAYER where this file's
    have `layer`, and its rows have the order of the first such file. Names and TensorInfos are made
    when they are asked for.
    """

    def __init__(
        self,
        file: str,
        size: int,
        raw: bytes,
        metadata: dict[str, str],
        table: TensorTable,
        layer: int | None = None,
    ) -> None:
        """Take the parsed parts of one file."""
        self.file = file
        self.size = size
        self.sha256 = hashlib.sha256(raw).hexdigest()
        self.metadata = metadata
        self.table = table
        self.layer = layer
        self.data_start = 8 + len(raw)

    def names(self) -> list[str]:
        """Return the tensors' names, in the order of the table."""
        return self.table.names if self.layer is None else self.table.names_at(self.layer)

    def find(self, name: str) -> TensorInfo | None:
        """Return where one tensor lies, without making the entries of all others."""
        stored = name
        if self.layer is not None:
            stored = name.replace(f"layers.{self.layer}.", f"layers.{ANY_LAYER}.")
        try:
            row = self.table.names.index(stored)
        except ValueError:
            return None
        dtype, shape = self.table.kinds[self.table.kind_of[row]]
        n_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        offset = self.data_start + self.table.starts[row]
        return TensorInfo(name, dtype, shape, self.file, offset, n_bytes)

    def infos(self) -> Iterator[TensorInfo]:
        """Yield where each tensor lies, in the order of the table."""
        table, start = self.table, self.data_start
        sizes = [math.prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in table.kinds]
        for name, kind, offset in zip(self.names(), table.kind_of, table.starts, strict=True):
            yield TensorInfo(name, *table.kinds[kind], self.file, start + offset, sizes[kind])

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Return where each tensor lies, by name."""
        return {info.name: info for info in self.infos()}


def read_header_bytes(path: Path) -> tuple[bytes, int]:
    """Return (header JSON as stored, file size). Raises: ArtifactError naming the file."""
    need = "a safetensors file"
    try:
        with open(open_regular(path, need), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                file.seek(0)
                refuse_pointer(path, file.read(64), need)
                raise _bad_length(path, length, size)
            return file.read(length), size
    except OSError as error:
        raise unreadable(path, need, error) from None


def _bad_length(path: Path, length: int, size: int) -> ArtifactError:
    """Return the refusal for a header that does not fit the file, or the format."""
    if size < 8:
        return ArtifactError(
            str(path), got=f"{size} bytes", need="a safetensors file, of 8 bytes and a header",
            hint="the download stopped early: fetch it again",
        )  # fmt: skip
    got = f"a header of {length} bytes in a file of {size} bytes"
    if length > MAX_HEADER_BYTES:
        need = f"at most {MAX_HEADER_BYTES} bytes of header, the format's limit"
        return ArtifactError(
            str(path), got=got, need=need, hint="this is no safetensors file: fetch it again"
        )
    return ArtifactError(
        str(path), got=got, need=f"at least {8 + length} bytes of file",
        hint="the download stopped early: fetch it again",
    )  # fmt: skip


# A number of more digits is no layer's, and a name of it is like any other name.
_LAYER = re.compile(rb"layers\.(0|[1-9][0-9]{0,8})\.")
_ANY_LAYER = (ANY_LAYER.encode(), b"\\u%04x" % ord(ANY_LAYER))  # as a header may write it
MAX_TABLES = 8  # kinds of layers a checkpoint has, with room; each holds a header's text


class HeaderReader:
    """Reads headers and shares what is equal: a layer's header is that of its kind, renumbered.

    Equal means: byte for byte, once the layer number is taken out of the names; or the same entries
    in another order, at other offsets.
    """

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._tables: dict[bytes, tuple[dict[str, str], TensorTable]] = {}
        self._layouts: list[KnownLayout] = []

    def read(self, path: Path) -> Header:
        """Read and check one file's header. Raises: ArtifactError naming file and tensor."""
        raw, size = read_header_bytes(path)
        found = _LAYER.search(raw)
        layer = int(found[1]) if found and not any(mark in raw for mark in _ANY_LAYER) else None
        text = raw.rstrip(b" ")  # the padding is as long as the layer's number allows
        if found and layer is not None:
            text = text.replace(found[0], b"layers.%s." % ANY_LAYER.encode())
        known = self._tables.get(text) or self._reordered(text)
        if known is None:
            known = quick_table(text, DTYPE_BYTES)
            if known is None or (layer is not None and not known[1].can_renumber):
                layer, known = None, _careful_table(path, raw)
            elif layer is not None and len(self._tables) < MAX_TABLES:
                self._tables[text] = known
                self._layouts.append(KnownLayout(text, *known))
        metadata, table = known
        _check_size(path, 8 + len(raw) + table.n_bytes, size)
        return Header(path.name, size, raw, metadata, table, layer)

    def _reordered(self, text: bytes) -> tuple[dict[str, str], TensorTable] | None:
        entries = cut(text) if self._layouts else None
        if entries is None:
            return None
        found = (layout.reordered(entries, DTYPE_BYTES) for layout in self._layouts)
        return next((known for known in found if known is not None), None)


def read_header(path: Path) -> Header:
    """Read and check one file's header. Raises: ArtifactError naming file and tensor."""
    return HeaderReader().read(path)


def _careful_table(path: Path, raw: bytes) -> tuple[dict[str, str], TensorTable]:
    try:
        parsed = parse_json(raw)
    except ValueError as error:
        raise _damaged(str(path), f"invalid header ({json_fault(error)})", "JSON") from None
    if not isinstance(parsed, dict) or not raw.startswith(b"{"):
        raise _damaged(str(path), "a header that is no object", "a JSON object")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _damaged(f"{path}: __metadata__", json_kind(metadata), "a JSON object of text values")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise _damaged(f"{path}: __metadata__: {key}", json_kind(value), "text values")
    tensors = {name: _tensor(path, name, entry, 0) for name, entry in parsed.items()}
    n_bytes = _check_contiguous(path, tensors, 0)
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    infos = tensors.values()
    kind_of = [kinds.setdefault((info.dtype, info.shape), len(kinds)) for info in infos]
    starts = [info.offset for info in infos]
    return metadata, TensorTable(list(tensors), list(kinds), kind_of, starts, n_bytes)


def _tensor(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _damaged(f"{path}: {name}", json_kind(entry), "an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _damaged(f"{path}: {name}: dtype", _shown(dtype), f"one of {', '.join(DTYPES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        got = f"shape {_shown(shape)}, data_offsets {_shown(offsets)}"
        raise _damaged(f"{path}: {name}", got, "natural numbers, two of them for data_offsets")
    if len(shape) > MOST_AXES:
        need = f"at most {MOST_AXES}, as an array has"
        raise _damaged(f"{path}: {name}: shape", f"{len(shape)} axes", need)
    n_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != n_bytes:
        raise _damaged(
            f"{path}: {name}: data_offsets",
            f"{offsets[1] - offsets[0]} bytes",
            f"{quoted(n_bytes)} for {dtype} {quoted(shape)}",
        )
    return TensorInfo(name, dtype, tuple(shape), path.name, start + offsets[0], n_bytes)


def _damaged(place: str, got: str, need: str) -> ArtifactError:
    hint = "fetch the file again; if it is whole, its writer is at fault"
    return ArtifactError(place, got=got, need=need, hint=hint)


def _shown(value: object) -> str:
    """Return a parsed value as it stands in the file."""
    return "no such field" if value is None else quoted(value)


def _naturals(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(item) is int and item >= 0 for item in values)


def _check_contiguous(path: Path, tensors: dict[str, TensorInfo], start: int) -> int:
    """Refuse holes and overlaps; return where the last tensor ends."""
    position = start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.n_bytes)):
        if info.offset != position:
            raise _damaged(
                f"{path}: {info.name}: data_offsets",
                f"start {info.offset - start}",
                f"{position - start}, no hole and no overlap",
            )
        position += info.n_bytes
    return position


def _check_size(path: Path, need: int, size: int) -> None:
    if need != size:
        if size < need:
            hint = "the download stopped early: fetch it again"
        else:
            hint = f"the file is {size - need} bytes longer than its tensors: fetch it again"
        raise ArtifactError(str(path), got=f"{size} bytes", need=f"{need} by its header", hint=hint)
