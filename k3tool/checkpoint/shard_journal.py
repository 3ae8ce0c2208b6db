"""Keep the folder where shards grow until they are whole, so that a killed run can go on.

Beside the output OUT stands `.OUT.shard` (`.OUT.shard-03` for rank 3 alone): `set/` grows into the
output, `journal/` has one record for each file whose bytes and name have reached the disk, `key`
says what the work is for. A record is written after its file, so a kill can lose a record, never
leave one without its file. Whoever works here holds the lock; a dead process holds none. It is
the first thing in the folder and the last: a folder without it was never ours, and is let alone.
"""

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from k3tool.atomic import TEMPORARY, atomic_path
from k3tool.canonical import canonical_json
from k3tool.checkpoint.json_text import parse_json
from k3tool.checkpoint.regular_file import open_regular
from k3tool.checkpoint.shard_copy import FileRecord
from k3tool.checkpoint.unfinished import KEY_NAME
from k3tool.errors import ArtifactError, K3Error, UsageError, listed

Key = Mapping[str, Any]
LOCK_NAME, MOVES_NAME = "lock", "moves"
_PLAIN_FILES = {KEY_NAME, LOCK_NAME, MOVES_NAME}
_FOLDERS = {"set", "candidate", "journal"}
_MARK = b"k3tool shard\n"
# Of a key, a record or the moves: a record has 64 letters for each tensor of a file on each rank.
_MOST_JSON_BYTES = 1 << 28


class Work:
    """A locked work folder. `set` is where the output grows."""

    def __init__(self, path: Path) -> None:
        """Name the folder; `locked` makes and locks it."""
        self.path = path
        self.set = path / "set"
        self.candidate = path / "candidate"  # what is here before we know whose the work is
        self.moves = path / MOVES_NAME  # written by k3tool.checkpoint.shard_publish
        self._journal = path / "journal"
        self._key = path / KEY_NAME

    @property
    def is_worth_keeping(self) -> bool:
        """Return whether a rerun could use something of this."""
        return self._key.exists() and self._journal.is_dir() and any(self._journal.iterdir())

    def begin(self, key: Key, force: bool) -> bool:
        """Make the work ready for `key` and return whether it goes on from a killed run.

        Raises: UsageError where it holds unfinished work for something else, and not `force`.
        """
        if self.is_for(key):
            for left in self.path.rglob(f".*{TEMPORARY}"):
                left.unlink()
            return True
        self.require_place_for(key, force)
        self.discard()
        self.set.mkdir()
        self._journal.mkdir()
        _write(self._key, canonical_json(dict(key)))
        return False

    def require_place_for(self, key: Key, force: bool) -> None:
        """Refuse unfinished work for something else, unless `force`. Raises: UsageError."""
        found = self._read_key()
        is_other = not self.is_for(key) and (found is not None or self._key.exists())
        if is_other and self.finished_files() and not force:
            raise UsageError(
                str(self.path),
                got=f"unfinished shards of {_difference(found or {}, key)}",
                need="the same work as before, or none",
                hint="--force discards them",
            )

    def is_for(self, key: Key) -> bool:
        """Return whether what is here was begun for `key`."""
        return self._read_key() == dict(key)

    def drop_unless_of(self, digest: str) -> None:
        """Discard what was begun for shards.h5 of another digest, where `digest` alone has a place.

        Another option's whole work would else block the right command for a set that it can never
        join. Work with noted moves stays: it was settled what it replaces.
        """
        found = self._read_key()
        if found is not None and found.get("shards") != digest and not self.moves.exists():
            self.discard()

    def _read_key(self) -> dict[str, Any] | None:
        found = read_json(self._key)
        return found if isinstance(found, dict) else None

    def record(self, record: FileRecord) -> None:
        """Note a file as finished; its bytes are on the disk already."""
        values = {
            "sha256": {str(rank): data.hex() for rank, data in record.sha256.items()},
            "max_scale": {str(rank): data.hex() for rank, data in record.max_scale.items()},
        }
        _write(self._journal / f"{record.file}.json", canonical_json(values))

    def recall(self, file: str) -> FileRecord | None:
        """Return the record of a finished file, or None if there is none that can be read."""
        found = read_json(self._journal / f"{file}.json")
        try:
            sha256, max_scale = (
                {int(rank): bytes.fromhex(text) for rank, text in found[column].items()}
                for column in ("sha256", "max_scale")
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return FileRecord(file, sha256, max_scale)

    def finished_files(self) -> int:
        """Return how many files have a record."""
        return sum(1 for _ in self._journal.iterdir()) if self._journal.is_dir() else 0

    def discard(self) -> None:
        """Remove what was begun."""
        # The key first: one without its files would be taken for work that goes on.
        self._key.unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                if path != self.candidate:
                    shutil.rmtree(path)
            elif path.name != LOCK_NAME:
                path.unlink()

    def remove_candidate(self) -> None:
        """Remove what is here before the work is claimed."""
        shutil.rmtree(self.candidate, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        self.discard()
        shutil.rmtree(self.path)


def clear_leftover(path: Path) -> None:
    """Remove a work folder that no rerun could use: its run was killed as it began or ended."""
    if not os.path.lexists(path):
        return
    require_ours(path)
    if not (path / KEY_NAME).exists():
        with locked(path) as work:
            work.remove_candidate()
            work.discard()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Work]:
    """Yield a work folder that no other process uses; remove it if it ends up with nothing in it.

    Raises: K3Error where another process is at it.
    """
    if os.path.lexists(path):
        require_ours(path)
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        _take(lock, path)
        os.pwrite(lock, _MARK, 0)
        try:
            yield Work(path)
        finally:
            if path.exists() and not any(entry.name != LOCK_NAME for entry in path.iterdir()):
                shutil.rmtree(path)
    finally:
        os.close(lock)


def _take(lock: int, path: Path) -> None:
    """Lock an open lock file. Raises: K3Error where another process holds it, or has removed it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = os.fstat(lock).st_ino != (path / LOCK_NAME).stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        taken = True
    if taken:
        raise K3Error(
            str(path), got="another process that writes these shards", need="one at a time",
            hint="wait until it has ended, or write somewhere else",
        )  # fmt: skip


def require_idle(path: Path) -> None:
    """Refuse a work folder that is not ours, or that another process is at; nothing is written.

    Raises: UsageError; K3Error.
    """
    if not os.path.lexists(path):
        return
    require_ours(path)
    if (path / LOCK_NAME).exists():
        lock = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _take(lock, path)
        finally:
            os.close(lock)


def require_ours(path: Path) -> None:
    """Refuse a folder in the work's place that shard did not make. Raises: UsageError.

    It is removed in the end, so a link, another lock or anything of another name is somebody's.
    """
    try:
        got = None if _is_folder(path) else "a link or a file"
        if got is None:
            found = [*path.iterdir()]
            foreign = sorted(entry.name for entry in found if not _is_ours(entry))
            if foreign:
                got = f"a folder with {listed(foreign[:3])}, which shard did not write"
            elif found and not (path / LOCK_NAME).exists():
                got = "a folder that shard did not make"
    except FileNotFoundError:
        return  # another process removes it: its lock will say so
    if got is not None:
        raise UsageError(
            str(path), got=got, need="nothing there: it is where shards grow",
            hint="move it away, or write somewhere else",
        )  # fmt: skip


def _is_ours(entry: Path) -> bool:
    if entry.name in _FOLDERS or entry.name == "set.replaced":
        return _is_folder(entry)
    if not stat.S_ISREG(entry.lstat().st_mode):
        return False
    if entry.name == LOCK_NAME:  # empty: of a run killed before it wrote its mark
        return entry.stat().st_size <= len(_MARK) and entry.read_bytes() in (b"", _MARK)
    # The name of atomic_path's temporary, which a kill leaves.
    name = entry.name[1:].split(".")[0] if entry.name.endswith(TEMPORARY) else entry.name
    return name in _PLAIN_FILES


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def read_json(path: Path) -> Any:
    """Return what a file of the work folder says; None where there is none that can be read."""
    try:
        with open(open_regular(path, "shard's own file"), "rb") as file:
            data = file.read(_MOST_JSON_BYTES + 1)
        return parse_json(data) if len(data) <= _MOST_JSON_BYTES else None
    except (OSError, ValueError, ArtifactError):
        return None


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def _difference(found: Mapping[str, Any], key: Key) -> str:
    """Say in words what the unfinished work is for where that is not what is asked now."""
    if not found:
        return "a key that cannot be read"
    for name, what in (("tp", "tp"), ("checkpoint", "checkpoint"), ("ranks", "ranks")):
        if found.get(name) != key[name]:
            return f"{what} {str(found.get(name))[:16]}"
    return "the same checkpoint before its files or these options changed"
