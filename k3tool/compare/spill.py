"""Rows of a stream of any length in bounded memory: what is more than a block goes to a file.

The file has no name and goes with the process; its rows are read as they are mapped.
"""

import tempfile
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from k3tool.atomic import system_words
from k3tool.errors import K3Error

Columns = npt.NDArray[Any]

# What text says of a token; position -1 and margin NaN where it does not say.
ROW_DTYPE = np.dtype([("step", "<u4"), ("position", "<i8"), ("id", "<u4"), ("margin", "<f8")])
BLOCK_ROWS = 1 << 16  # that are compared at once
BLOCK_BYTES = 1 << 21  # that are kept before they go to the file


class Spill:
    """Rows of one dtype, added one by one or many at once, and read together."""

    def __init__(self, dtype: np.dtype[Any] = ROW_DTYPE) -> None:
        """Begin with no rows."""
        self._dtype = dtype
        self._most_rows = max(1, BLOCK_BYTES // dtype.itemsize)
        self._file: IO[bytes] | None = None
        self._single: list[tuple[Any, ...]] = []
        self._parts: list[Columns] = []
        self._n_kept = 0
        self._n_written = 0

    def __len__(self) -> int:
        """Return how many rows there are."""
        return self._n_written + self._n_kept + len(self._single)

    def append(self, row: tuple[Any, ...]) -> None:
        """Add one row. Raises: K3Error when the disk is full."""
        self._single.append(row)
        if len(self._single) >= self._most_rows:
            self._gather()

    def extend(self, rows: Columns) -> None:
        """Add rows behind all others. Raises: K3Error when the disk is full."""
        assert rows.dtype == self._dtype, rows.dtype
        self._gather()
        self._keep(rows)

    def rows(self) -> Columns:
        """Return all rows, in memory or mapped. Raises: K3Error when the disk is full."""
        self._gather()
        if self._file is None:
            return np.concatenate([np.empty(0, self._dtype), *self._parts])
        self._write()
        mapped = np.memmap(self._file, self._dtype, "r")
        self._file.close()  # the map holds its bytes
        return mapped

    def __del__(self) -> None:
        """Close the file of a reader that a refusal ended."""
        if self._file is not None:
            self._file.close()

    def _gather(self) -> None:
        if self._single:
            rows = np.array(self._single, self._dtype)
            self._single = []
            self._keep(rows)

    def _keep(self, rows: Columns) -> None:
        self._parts.append(rows)
        self._n_kept += len(rows)
        if self._n_kept > self._most_rows:
            self._write()

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - the map keeps it
            for rows in self._parts:
                self._file.write(rows.tobytes())
            self._file.flush()
        except OSError as error:
            raise K3Error(
                tempfile.gettempdir(), got=system_words(error), need="room for a long stream",
                hint="free some room there, or name another folder in TMPDIR",
            ) from None  # fmt: skip
        self._n_written += self._n_kept
        self._parts, self._n_kept = [], 0
