"""A file that a library writes which cannot be told that a disk is full.

The HDF5 library crashes where a write fails, and where it reads back other bytes than it wrote, so
it is given this: the first error is kept, what comes after it lies in memory, and whoever made the
file asks after each large write, and at the end.
"""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class DiskFile(io.RawIOBase):
    """A readable and writable file whose writes never fail; `error` is the first that did."""

    def __init__(self, path: Path) -> None:
        """Make the file, empty. Raises: OSError."""
        super().__init__()
        self.error: OSError | None = None
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._at = self._size = 0
        self._lost: list[tuple[int, bytes]] = []  # what the disk did not take, and where

    def readable(self) -> bool:
        """Return true."""
        return True

    def writable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}
        self._at = starts[whence] + offset
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Read up to the buffer's length, of what was written: on the disk or not."""
        view = memoryview(buffer).cast("B")
        n_bytes = max(0, min(len(view), self._size - self._at))
        found = os.pread(self._descriptor, n_bytes, self._at)
        view[:n_bytes] = found + bytes(n_bytes - len(found))
        for place, data in self._lost:
            first, last = max(place, self._at), min(place + len(data), self._at + n_bytes)
            if first < last:
                view[first - self._at : last - self._at] = data[first - place : last - place]
        self._at += n_bytes
        return n_bytes

    def write(self, data: "ReadableBuffer") -> int:
        """Write all of it, or keep why not; say in either case that it was written."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view) and self.error is None:
                done += os.pwrite(self._descriptor, view[done:], self._at + done)
        except OSError as error:
            self.error = error
        if done < len(view):
            self._lost.append((self._at + done, bytes(view[done:])))
        self._at += len(view)
        self._size = max(self._size, self._at)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Cut or grow the file; an error is kept like a write's."""
        self._size = self._at if size is None else size
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError as error:
            self.error = self.error or error
        return self._size

    def close(self) -> None:
        """Close it; once is enough."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()
