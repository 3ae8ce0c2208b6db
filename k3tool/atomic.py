"""Write files and folders so that they are complete or not there at all.

A killed process can leave a hidden temporary sibling behind, never a half-written final name.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from k3tool.checkpoint.names import refuse_read_name
from k3tool.errors import K3Error, UsageError

TEMPORARY = ".tmp"  # how the hidden names of files end that are being written
_MOST_NAME = 255  # bytes of a file's name on Linux
_LEFT = re.compile(rf"\.([0-9]+)-[0-9a-f]{{8}}{re.escape(TEMPORARY)}")


class Output(NamedTuple):
    """A file that a command was asked to write: by which option, where, and of what kind.

    A file there that has other bytes than `mark` at `mark_at` is not what the command writes.
    """

    option: str
    path: Path
    kind: str
    mark: bytes
    mark_at: int = 0


def artifact_line(kind: str) -> bytes:
    """Return the first line of an artifact's file."""
    return f"k3tool {kind}\n".encode()


def artifact_output(path: Path, kind: str, option: str = "-o") -> Output:
    """Return the output of a command that writes an artifact."""
    return Output(option, path, f"{kind} artifact", artifact_line(kind))


def check_outputs(outputs: Sequence[Output], inputs: Sequence[Path]) -> None:
    """Refuse to write over an input, another output, or what is not of the output's own kind.

    A new file may do harm as well: see refuse_read_name.

    A rename replaces whatever stands there, a device node or the checkpoint's config included, so
    this is asked before any work. Raises: UsageError naming the option; K3Error (exit 1) for a
    folder that cannot be written.
    """
    taken = [(path, "an input of this command") for path in inputs]
    for output in outputs:
        refuse_read_name(output.path, f"{output.option}: {output.path}")
        for path, what in taken:
            if _same(output.path, path):
                raise UsageError(f"{output.option}: {output.path}", got=what, need="another file")
        taken.append((output.path, f"the file of {output.option}"))
        _check_place(output)


def _same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:  # one of them is not there (yet)
        return os.path.realpath(first) == os.path.realpath(second)


def _check_place(output: Output) -> None:
    place, need = f"{output.option}: {output.path}", "a file in a folder that exists"
    try:
        mode = output.path.stat().st_mode
    except FileNotFoundError:
        if not output.path.absolute().parent.is_dir():
            raise UsageError(place, got="no such folder", need=need) from None
        _check_folder(output.path)
        return
    except OSError as error:
        raise UsageError(place, got=(error.strerror or str(error)).lower(), need=need) from None
    if not stat.S_ISREG(mode):
        got = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise UsageError(place, got=got, need="a new file, or one to replace")
    try:
        with output.path.open("rb") as file:
            file.seek(output.mark_at)
            found = file.read(len(output.mark))
    except OSError as error:
        raise UsageError(place, got=(error.strerror or str(error)).lower(), need=need) from None
    if found != output.mark:
        hint = "remove it first, or write somewhere else"
        raise UsageError(place, got=f"a file that is no {output.kind}", need="a new file, or "
                         "one of its kind to replace", hint=hint)  # fmt: skip
    _check_folder(output.path)


def _check_folder(path: Path) -> None:
    """Refuse a folder that takes no new name: the end of a long run is too late to learn it."""
    folder = path.absolute().parent
    if os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return
    is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    error = OSError(errno.EROFS if is_read_only else errno.EACCES, "")
    hint = disk_hint(error)
    raise K3Error(str(path), got=system_words(error), need="a writable file", hint=hint)


def system_words(error: OSError) -> str:
    """Return the system's words for an error; HDF5 puts a paragraph of its own in their place."""
    return os.strerror(error.errno) if error.errno else str(error)


def is_full(error: K3Error) -> bool:
    """Return whether a file was refused because its disk, or a quota on it, has no room left."""
    return error.got in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def disk_hint(error: OSError) -> str:
    """Return the next step after what the system says of an output."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some room there, or write somewhere else"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "write somewhere else, or as a user who may write there"
    if error.errno == errno.EIO:
        return "the disk fails: write somewhere else"
    return "write somewhere else"


def temporary_of(path: Path) -> Path:
    """Return a sibling that this process writes before it is named `path`, another one each time.

    The process alone would not do: two machines, or containers, have processes of one number.
    """
    return _hidden(path, f".{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")


def leftovers(path: Path) -> list[Path]:
    """Return what processes that were killed have left beside `path` of writing it."""
    try:
        names = sorted(os.listdir(path.absolute().parent))
    except OSError:
        return []
    found = ((path.parent / name, _LEFT.search(name)) for name in names)
    return [
        each for each, end in found
        if end is not None and each == _hidden(path, end[0]) and not _is_running(int(end[1]))
    ]  # fmt: skip


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    return True


def _hidden(path: Path, end: str) -> Path:
    """Return a hidden sibling of `path`; a name that would be too long is cut, so that every name
    that can be given can be written.
    """
    name = os.fsencode(path.name)
    if len(name) + len(end) + 1 > _MOST_NAME:
        own = hashlib.sha256(name).hexdigest()[:8]  # two long names may begin alike
        name = name[: _MOST_NAME - len(end) - len(own) - 2] + f".{own}".encode()
    return path.parent / f".{os.fsdecode(name)}{end}"


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; fsync and rename it there on success, else remove it.

    Raises: K3Error (exit 1) when the directory cannot be written.
    """
    temporary = temporary_of(path)
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        got, hint = system_words(error), disk_hint(error)
        raise K3Error(str(path), got=got, need="a writable file", hint=hint) from None
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
    Raises: UsageError as refuse_read_name; K3Error (exit 1) when the folder cannot be written.
    """
    out = Path(os.path.abspath(out))  # "." has no name to stand beside
    refuse_read_name(out, str(out))
    building = _hidden(out, f".{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        building.mkdir()  # what stands there under this name already is not ours to remove
    except OSError as error:
        raise _unwritable(out, error) from None
    try:
        yield building
        building.rename(out)
    except OSError as error:
        raise _unwritable(out, error) from None
    except K3Error as error:  # of a file in it: its folder has a name that nobody knows
        error.object = error.object.replace(str(building), str(out))
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _unwritable(out: Path, error: OSError) -> K3Error:
    hint = disk_hint(error)
    return K3Error(str(out), got=system_words(error), need="a writable folder", hint=hint)
