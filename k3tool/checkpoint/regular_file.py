"""Open the files that a user gives, and say in words what stands there instead.

Nothing but a regular file is opened: a named pipe would wait for ever, a device has side effects or
no end. Links are followed, because download caches are made of them. What is read whole is bounded.
"""

import errno
import os
import stat
from pathlib import Path

from k3tool.errors import CHECK_PATH, ArtifactError

# Of a file that is read into memory. The largest that is meant to be: the released index of 60 MB,
# and traces of experts, of which this is the choices of some 45,000 tokens.
MOST_BYTES = 1 << 30
_POINTER = b"version https://git-lfs.github.com/spec/"


def open_regular(path: Path, need: str, *, is_fetched: bool = True) -> int:
    """Open a regular file for reading and return its descriptor. `is_fetched` says that it is one
    of a checkpoint's, which came over a network, and not one that a command here wrote.

    Raises: ArtifactError saying what is there: nothing, a dangling link, a folder, no permission.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            got = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            hint = "put the file in its place" if is_fetched else CHECK_PATH
            raise ArtifactError(str(path), got=got, need=need, hint=hint)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOENT and not (is_fetched or path.is_symlink()):
            raise ArtifactError(str(path), got="no such file", need=need, hint=CHECK_PATH) from None
        raise unreadable(path, need, error) from None


def require_folder(path: Path, need: str, hint: str) -> None:
    """Refuse what is no folder whose files can be listed and opened; `hint` is for what is none.

    Raises: ArtifactError saying what is there.
    """
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise ArtifactError(str(path), got="a file", need=need, hint=hint)
        with os.scandir(path):
            pass
        os.stat(os.path.join(path, "."))  # it may be listed and not entered; Path drops the dot
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(str(path), got="no such folder", need=need, hint=hint) from None
    except OSError as error:
        raise unreadable(path, need, error, hint) from None


def read_regular(path: Path, need: str, *, is_fetched: bool = True) -> bytes:
    """Return a regular file's bytes, at most MOST_BYTES of them; `is_fetched` as of open_regular.

    Raises: ArtifactError as open_regular; for a longer file and for a pointer too.
    """
    try:
        with open(open_regular(path, need, is_fetched=is_fetched), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Asked first: a file with holes may be longer than memory.
            data = file.read(size + 1) if size <= MOST_BYTES else b""
            if len(data) > size:  # it grew, or is the system's, whose files have no size
                data += file.read(MOST_BYTES)
    except OSError as error:
        raise unreadable(path, need, error) from None
    if max(size, len(data)) > MOST_BYTES:
        got = f"{max(size, len(data))} bytes"
        raise ArtifactError(
            str(path), got=got, need=f"{need}, at most {MOST_BYTES} bytes",
            hint="this is another file: put the one that belongs here in its place",
        )  # fmt: skip
    refuse_pointer(path, data, need)
    return data


def refuse_pointer(path: Path, start: bytes, need: str) -> None:
    """Refuse a file that holds git-lfs's note of where its bytes are."""
    if start.startswith(_POINTER):
        raise ArtifactError(
            str(path), got="a git-lfs pointer", need=need, hint="git lfs pull fetches the files"
        )


def unreadable(path: Path, need: str, error: OSError, hint: str | None = None) -> ArtifactError:
    """Return the refusal for a file or folder that the system does not open or read.

    `hint` is the next step where the system's reason has none of its own.
    """
    if error.errno == errno.ENOENT:
        if not path.is_symlink():
            return ArtifactError(str(path), got="absent", need=need, hint="fetch the file again")
        got = f"a link to nothing ({os.readlink(path)})"
        return ArtifactError(str(path), got=got, need=need, hint="fetch the file again")
    if error.errno == errno.ELOOP:
        hint = "the link leads to itself: fetch the file again"
    elif error.errno in (errno.EACCES, errno.EPERM):
        hint = f"give the user who runs this the right to read {path}"
    elif error.errno == errno.EIO:
        hint = "the disk fails: check it, then fetch the file again"
    got = (error.strerror or str(error)).lower()
    return ArtifactError(str(path), got=got, need=need, hint=hint)
