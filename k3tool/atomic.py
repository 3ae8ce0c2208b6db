"""Write files and folders so that they are complete or not there at all.

A killed process can leave a hidden temporary sibling behind, never a half-written final name.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from k3tool.errors import K3Error


def system_words(error: OSError) -> str:
    """Return the system's words for an error; HDF5 puts a paragraph of its own in their place."""
    return os.strerror(error.errno) if error.errno else str(error)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; fsync and rename it there on success, else remove it.

    Raises: K3Error (exit 1) when the directory cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        raise K3Error(str(path), got=system_words(error), need="a writable file") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder beside `out` that takes its name on success and vanishes on failure.

    An `out` that exists must be an empty folder.
    Raises: K3Error (exit 1) when the folder cannot be written.
    """
    building = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        building.mkdir()
        yield building
        building.rename(out)
    except OSError as error:
        raise K3Error(str(out), got=system_words(error), need="a writable folder") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
