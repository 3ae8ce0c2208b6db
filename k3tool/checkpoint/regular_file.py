"""Open the files of a checkpoint, and say in words what stands there instead.

Nothing but a regular file is opened: a named pipe would wait for ever and a device has side
effects. Links are followed, because download caches are made of them.
"""

import errno
import os
import stat
from pathlib import Path

from k3tool.errors import ArtifactError

_POINTER = b"version https://git-lfs.github.com/spec/"


def open_regular(path: Path, need: str) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises: ArtifactError saying what is there: nothing, a dangling link, a folder, no permission.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            got = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            raise ArtifactError(str(path), got=got, need=need, hint="put the file in its place")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, need, error) from None


def read_regular(path: Path, need: str) -> bytes:
    """Return a regular file's bytes. Raises: ArtifactError as open_regular; for a pointer too."""
    try:
        with open(open_regular(path, need), "rb") as file:
            data = file.read()
    except OSError as error:
        raise unreadable(path, need, error) from None
    refuse_pointer(path, data, need)
    return data


def refuse_pointer(path: Path, start: bytes, need: str) -> None:
    """Refuse a file that holds git-lfs's note of where its bytes are."""
    if start.startswith(_POINTER):
        raise ArtifactError(
            str(path), got="a git-lfs pointer", need=need, hint="git lfs pull fetches the files"
        )


def json_fault(error: Exception) -> str:
    """Return in words why bytes are no JSON: a decoder's own message quotes as Python does."""
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start}"
    return str(error)


def unreadable(path: Path, need: str, error: OSError) -> ArtifactError:
    """Return the refusal for a file that the system does not open or read."""
    if error.errno == errno.ENOENT:
        if not path.is_symlink():
            return ArtifactError(str(path), got="absent", need=need, hint="fetch the file again")
        got = f"a link to nothing ({os.readlink(path)})"
        return ArtifactError(str(path), got=got, need=need, hint="fetch the file again")
    hint = None
    if error.errno == errno.ELOOP:
        hint = "the link leads to itself: fetch the file again"
    elif error.errno in (errno.EACCES, errno.EPERM):
        hint = f"give the user who runs this the right to read {path}"
    elif error.errno == errno.EIO:
        hint = "the disk fails: check it, then fetch the file again"
    got = (error.strerror or str(error)).lower()
    return ArtifactError(str(path), got=got, need=need, hint=hint)
