"""Write safetensors files that open with the stock library and suit direct reads.

It streams: nothing of a tensor is held beyond the piece being written.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy.typing as npt

from k3tool.artifact_digest import bytes_of
from k3tool.atomic import atomic_path
from k3tool.canonical import canonical_json

Array = npt.NDArray[Any]
WRITE_BUFFER_BYTES = 1 << 20
DATA_ALIGN_BYTES = 4096  # O_DIRECT reads need it; the page size is the safe unit everywhere
WRITEBACK_BYTES = 32 << 20  # the disk starts on this much instead of idling until the last fsync


class TensorLayout(NamedTuple):
    """Describe one tensor of a file to be written: its header fields and its size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


def safetensors_header(tensors: Sequence[TensorLayout], metadata: Mapping[str, object]) -> bytes:
    """Return length word and header, padded so that data starts on a 4 KiB file offset.

    One metadata key: with two or more the stock writer's order, and so the file's hash, is random.
    """
    header: dict[str, object] = {"__metadata__": {"k3": canonical_json(dict(metadata))}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.n_bytes],
        }
        offset += tensor.n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % DATA_ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


class SafetensorsWriter:
    """Write one safetensors file atomically, tensor after tensor, in pieces of any size.

    A context manager: the file appears when the block ends, and only if every tensor of the layout
    got exactly its bytes. `digests` maps names to the sha256 of what was written, in layout order.
    """

    def __init__(
        self, path: str | Path, tensors: Sequence[TensorLayout], metadata: Mapping[str, object]
    ) -> None:
        """Fix the layout; the header is written when the block is entered."""
        self.tensors = tensors
        self.digests: dict[str, str] = {}
        self._header = safetensors_header(tensors, metadata)
        self._atomic = atomic_path(Path(path))
        self._sha256 = hashlib.sha256()
        self._left = 0
        self._unstarted = 0  # bytes whose way to the disk has not been started

    def __enter__(self) -> Self:
        """Open the temporary file and write the header."""
        self._file = self._atomic.__enter__().open("wb", buffering=WRITE_BUFFER_BYTES)
        self._file.write(self._header)
        return self

    def start(self, name: str) -> None:
        """Begin the next tensor of the layout; the caller names it, so that order is checked."""
        tensor = self.tensors[len(self.digests)]
        assert self._left == 0, (tensor.name, self._left)
        assert tensor.name == name, (tensor.name, name)
        self._sha256, self._left = hashlib.sha256(), tensor.n_bytes

    def append(self, data: Array | bytes | memoryview, *, hashed: bool = True) -> None:
        """Append bytes, or an array's bytes in C order, to the tensor that was started.

        `hashed` False leaves the hash to the caller, who gives it to `finish`.
        """
        view = data if isinstance(data, memoryview) else bytes_of(data)
        self._file.write(view)
        if hashed:
            self._sha256.update(view)
        self._left -= len(view)
        self._unstarted += len(view)
        if self._unstarted >= WRITEBACK_BYTES:
            self._start_writeback()

    def _start_writeback(self) -> None:
        """Let the disk begin, and the page cache forget: no one reads a large file back soon."""
        with contextlib.suppress(OSError):  # advice; a file system may not take it
            end = self._file.tell()
            os.posix_fadvise(self._file.fileno(), 0, end, os.POSIX_FADV_DONTNEED)
        self._unstarted = 0

    def finish(self, sha256: str | None = None) -> str:
        """End the tensor that was started and return the sha256 of its bytes."""
        tensor = self.tensors[len(self.digests)]
        assert self._left == 0, (tensor.name, self._left)
        self.digests[tensor.name] = sha256 or self._sha256.hexdigest()
        return self.digests[tensor.name]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        """Publish the file, or remove it where the block failed."""
        try:
            self._file.close()
            assert kind is not None or len(self.digests) == len(self.tensors), "a tensor is missing"
        except BaseException as failure:
            self._atomic.__exit__(type(failure), failure, failure.__traceback__)
            raise
        return self._atomic.__exit__(kind, error, trace)
