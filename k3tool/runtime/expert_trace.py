"""Which experts a run asked for, step by step: the file that `run --expert-trace` writes.

A magic, the length of a line of JSON, the line (sizes that a replay needs), then K3ExpertEvent rows
(kernels_cpu/residency.h) in the order of asking. Rank 0 writes them: every rank makes the same
choices. A trace that cannot be written whole is not left behind, and does not end the run.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from k3tool.atomic import disk_hint, fsync, temporary_of
from k3tool.canonical import canonical_json
from k3tool.checkpoint.regular_file import read_regular
from k3tool.compiler.plan import EXPERT_ROLES
from k3tool.errors import ArtifactError, K3Error
from k3tool.isa.stream import Isa

MAGIC = b"K3XTRACE"
_HOW_MADE = "one is made by: k3tool run CKPT --memory SIZE --ids 1,2,3 --expert-trace FILE"
EVENT_DTYPE = np.dtype([("step", "<u4"), ("group", "<u4"), ("expert", "<u4"), ("is_hit", "<u4")])
Array = npt.NDArray[Any]


class ExpertTrace(NamedTuple):
    """A recorded trace: EVENT_DTYPE rows, and bytes and numbers of the cache they were made with.

    `expert_bytes` and `streamed_bytes`, what a step reads of other weights, are rank 0's.
    """

    events: Array
    slots: int
    expert_bytes: int
    n_experts: int
    streamed_bytes: int


class TraceFile:
    """A trace being written, or none where `path` is None; use it as a context manager."""

    def __init__(self, path: Path | None, isa: Isa) -> None:
        """Write the head of the file under a temporary name. Raises: K3Error where that fails."""
        self.path = path
        self.descriptor: int | None = None
        if path is None:
            return
        self._temporary = temporary_of(path)
        head = canonical_json(_sizes(isa)).encode()
        try:
            self.descriptor = os.open(
                self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666
            )
            os.write(self.descriptor, MAGIC + len(head).to_bytes(8, "little") + head)
        except OSError as error:
            self.__exit__(None, None, None)
            raise K3Error(str(path), got=error.strerror, need="a writable file") from None

    def publish(self, error: int = 0) -> None:
        """Give the file its name. Raises: K3Error where that fails, or an errno ended its writing.

        Half a trace replays to other hits, so none is left; the caller has its tokens by then.
        """
        if self.path is not None and error:
            gone = OSError(error, os.strerror(error))
            raise K3Error(
                str(self.path), got=gone.strerror, need="a writable file", hint=disk_hint(gone)
            )
        if self.path is None:
            return
        try:
            fsync(self._temporary)
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise K3Error(str(self.path), got=error.strerror, need="a writable file") from None

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it; remove what has no name of its own."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
            self._temporary.unlink(missing_ok=True)


def _sizes(isa: Isa) -> dict[str, int]:
    assert isa.residency is not None, "a trace needs a memory budget"
    experts = [tensor for tensor in isa.tensors if tensor.role in EXPERT_ROLES]
    ring = sum(tensor.n_bytes for tensor in isa.tensors if tensor.role == "ring")
    return {
        "slots": int(isa.residency["slots"]),
        "expert_bytes": sum(t.n_bytes // t.local[0] for t in experts[:3]),
        "n_experts": sum(tensor.local[0] for tensor in experts) // 3,
        "streamed_bytes": ring,
    }


def read_expert_trace(path: Path) -> ExpertTrace:
    """Return a trace. Raises: ArtifactError where the file is none, cut, empty or too long."""
    data = read_regular(path, "a trace of experts", is_fetched=False)
    if data[:8] != MAGIC:
        raise ArtifactError(
            str(path), got="no trace of experts", need="what run --expert-trace writes",
            hint=_HOW_MADE,
        )  # fmt: skip
    start = 16 + int.from_bytes(data[8:16], "little")
    rest = len(data) - start
    if rest <= 0 or rest % EVENT_DTYPE.itemsize:
        got = f"{len(data)} bytes"
        raise ArtifactError(
            str(path), got=got, need="a head and whole rows, at least one", hint=_HOW_MADE
        )
    try:
        sizes = json.loads(data[16:start])
        numbers = [int(sizes[name]) for name in ExpertTrace._fields[1:]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise ArtifactError(
            f"{path}: head", got="unreadable", need="a JSON object of sizes", hint=_HOW_MADE
        ) from None
    return ExpertTrace(np.frombuffer(data, EVENT_DTYPE, -1, start), *numbers)
