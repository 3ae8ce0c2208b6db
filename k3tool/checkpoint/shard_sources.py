"""Notice a checkpoint that is written to while shard reads it.

A file is read in pieces, over hours. What was replaced meanwhile would be copied by the header and
under the identity of what stood there before, and every later look would find the copy sound.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.side_files import SIDE_FILES
from k3tool.errors import ArtifactError


class State(NamedTuple):
    """What tells a file from one that was written later, in its place or over it."""

    size: int
    mtime_ns: int
    inode: int
    device: int


class Sources:
    """The files of a checkpoint's folder as they were before it was opened."""

    def __init__(self, folder: str | Path) -> None:
        """Look at the folder; what is wrong with it is said by who opens it."""
        self._folder = Path(folder)
        try:
            names = os.listdir(self._folder)
        except OSError:
            names = []
        self._states = {name: state_of(self._folder / name) for name in names}

    def times(self, files: Iterable[str]) -> dict[str, list[int]]:
        """Return size and time of files: what a killed run's work was made from."""
        found = {file: self._states.get(file) for file in files}
        return {file: [state.size, state.mtime_ns] for file, state in found.items() if state}

    def require_unchanged(self, files: Iterable[str]) -> None:
        """Refuse files that are not the ones from the start. Raises: ArtifactError naming one."""
        for name in (*files, "config.json", INDEX_NAME, *SIDE_FILES):
            path, before = self._folder / name, self._states.get(name)
            now = state_of(path)
            if now != before:
                got = change(before, now, "shard")
                raise ArtifactError(
                    str(path), got=got, need="the file that was there then",
                    hint="nothing was written: shard again when nobody writes there any more",
                )  # fmt: skip


def state_of(path: Path) -> State | None:
    """Return what a file is now, None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return State(found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)


def change(before: State | None, now: State | None, what: str) -> str:
    """Return in words what happened to a file since `what` began."""
    if now is None:
        return f"no file any more since {what} began"
    if before is None or now[2:] != before[2:]:
        return f"another file than when {what} began"
    return f"a file that was written to since {what} began"
