"""A file that a library writes which cannot be told that a disk is full.

The HDF5 library crashes where a write fails, so it is given this: the first error is kept, what
comes after it is dropped, and whoever made the file asks at the end.
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
        return os.lseek(self._descriptor, offset, whence)

    def tell(self) -> int:
        """Return the place."""
        return os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Read up to the buffer's length."""
        return os.readv(self._descriptor, [memoryview(buffer).cast("B")])

    def write(self, data: "ReadableBuffer") -> int:
        """Write all of it, or keep why not; say in either case that it was written."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view) and self.error is None:
                done += os.write(self._descriptor, view[done:])
        except OSError as error:
            self.error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Cut or grow the file; an error is kept like a write's."""
        end = self.tell() if size is None else size
        try:
            os.ftruncate(self._descriptor, end)
        except OSError as error:
            self.error = self.error or error
        return end

    def close(self) -> None:
        """Close it; once is enough."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()
