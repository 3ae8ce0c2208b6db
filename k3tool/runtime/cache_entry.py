"""Hold an entry of the cache while it is looked for and built, and refuse in words of the folder.

A cache that cannot be written is no reason to refuse what it already holds: it is then read without
a lock, as entries come whole under their names. What a user did not name (locks, hidden siblings,
digests) is not what a refusal names: the folder is, or what has to be removed from it.
"""

import contextlib
import errno
import fcntl
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k3tool.atomic import system_words
from k3tool.checkpoint.shard_output import refuse_foreign
from k3tool.errors import ArtifactError, K3Error, UsageError
from k3tool.progress import notice

PATIENCE_SECONDS = 2.0  # before it is said that another run is waited for
_POLL_SECONDS = 0.05
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
_HINT = "name another with --cache FOLDER"


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry that no other run builds meanwhile; `error` is why this one cannot build it."""

    folder: Path
    error: OSError | None = None

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Build it here. Raises: K3Error naming the cache where that cannot be written."""
        if self.error is not None:
            raise _unwritable(self.folder, system_words(self.error))
        try:
            yield
        except OSError as error:
            raise _unwritable(self.folder, system_words(error)) from None
        except K3Error as error:
            if type(error) is not K3Error or self.folder not in Path(error.object).parents:
                raise
            raise _unwritable(self.folder, error.got) from None


def _unwritable(folder: Path, got: object) -> K3Error:
    got = got if folder.is_dir() else "no such folder any more"
    return K3Error(str(folder), got=got, need="a writable folder", hint=_HINT)


@contextlib.contextmanager
def locked(folder: Path, key: str, what: str) -> Iterator[Entry]:
    """Hold the lock of the entry `key`, so that two runs do not build it at once.

    `what` is said of it while another run holds it. Raises: ArtifactError for a lock that is none.
    """
    path = folder / f".{key}.lock"
    require_no_folder(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise _unwritable(folder, system_words(error)) from None
        yield Entry(folder, error)
        return
    try:
        _wait(descriptor, f"{what} in {folder}")
        with contextlib.suppress(OSError):  # a full disk: those who wait learn no number
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield Entry(folder)
    finally:
        os.close(descriptor)


def _wait(descriptor: int, what: str) -> None:
    start, is_said = time.monotonic(), False
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not is_said and time.monotonic() - start >= PATIENCE_SECONDS:
            notice(f"waiting for another run{_process(descriptor)}, which builds {what}")
            is_said = True
        time.sleep(_POLL_SECONDS)


def _process(descriptor: int) -> str:
    number = os.pread(descriptor, 20, 0).strip()
    return f" (process {number.decode()})" if number.isdigit() else ""


def require_no_folder(path: Path) -> None:
    """Refuse a folder where a file of the cache is to be. Raises: ArtifactError."""
    if path.is_dir():
        raise _to_remove(path, "a folder", "a file of the cache")


def remove_shards(path: Path) -> None:
    """Remove cached shards that do not open: what is left of them may not look like shards.

    Raises: ArtifactError where something in their place, or among them, is not of shard's writing.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            raise _to_remove(path, "no folder", "shards, a folder of the cache")
        refuse_foreign(path, [path])
    except UsageError as error:
        raise _to_remove(path, error.got, error.need) from None
    shutil.rmtree(path)


def _to_remove(path: Path, got: object, need: object) -> ArtifactError:
    hint = f"remove it: rm -r {shlex.quote(str(path))}"
    return ArtifactError(str(path), got=got, need=need, hint=hint)
