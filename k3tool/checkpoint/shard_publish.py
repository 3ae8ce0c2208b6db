"""Move finished shards to their name: at every moment that is the old output or the new one.

A set moves as one folder. A rank that joins a set of the same checkpoint and degree (another node
wrote the others) moves on its own. What is going to move is noted first, by inode, so that a run
killed in between knows on its return which moves are done.
"""

import ctypes
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from k3tool.artifact import canonical_json, open_artifact
from k3tool.atomic import atomic_path, fsync
from k3tool.checkpoint.shard_journal import Work
from k3tool.checkpoint.shards import SHARDS_NAME, SHARDS_SCHEMA, rank_folders
from k3tool.errors import ArtifactError, UsageError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class Move(NamedTuple):
    """One folder to move; `inode` tells it from what stood at `target` before."""

    source: str
    target: str
    inode: int


def check_output(out: Path, names: Sequence[str], every: Sequence[str], force: bool) -> None:
    """Refuse, before anything is read, an output that must not be touched.

    `names` are the rank folders to write, `every` those of the whole job (several processes may
    share it). Raises: UsageError.
    """
    if os.path.ismount(out):
        raise UsageError(str(out), got="a mount point", need="a folder below it")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / SHARDS_NAME).is_file():
        # Never a folder that we did not write, forced or not.
        raise UsageError(str(out), got="something that is no shards folder", need="a new folder")
    held = rank_folders(out)
    if not force and (set(held) & set(names) or _degree(held) != _degree(names)):
        raise UsageError(
            str(out),
            got=f"finished shards ({', '.join(held)})",
            need="a new folder",
            hint="--force replaces them",
        )
    if _degree(held) != _degree(names) and len(every) < _degree(every):
        raise UsageError(
            str(out),
            got=f"shards of tp {_degree(held)}",
            need="all ranks of the new degree, or another folder",
        )


def check_content(out: Path, digest: str, names: Sequence[str], every: Sequence[str]) -> bool:
    """Return whether ranks of shards.h5's `digest` join others that stand at `out`.

    Raises: UsageError where those are of other content and this job does not replace them all.
    """
    others = sorted(set(rank_folders(out)) - set(names)) if out.exists() else []
    joins = bool(others) and _digest(out) == digest
    if others and not joins and len(every) < _degree(every):
        raise UsageError(
            str(out),
            got=f"shards of other content ({', '.join(others)})",
            need="shards of this checkpoint with these options, or another folder",
        )
    return joins


def _degree(names: Sequence[str]) -> int:
    return int(names[0].rsplit("-", 1)[1]) if names else 0


def publish(
    work: Work, out: Path, digest: str, names: Sequence[str], every: Sequence[str], force: bool
) -> None:
    """Give the finished work its name; what it replaces then lies in the work folder.

    `digest` is that of the work's shards.h5. Raises: UsageError where the output has become
    something else meanwhile; OSError.
    """
    while True:
        if not work.moves.exists():
            _note_moves(work, out, digest, names, every, force)
        try:
            for move in _noted(work):
                _carry_out(out.parent, move, replace=force)
            break
        except OSError as error:
            if force or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            work.moves.unlink()  # another node was first: look again
    fsync(out.parent)


def is_published(work: Work, out: Path) -> bool:
    """Return whether all noted moves were made, and only the tidying was cut off."""
    return work.moves.exists() and all(
        _inode(out.parent / move.target) == move.inode for move in _noted(work)
    )


def _note_moves(
    work: Work, out: Path, digest: str, names: Sequence[str], every: Sequence[str], force: bool
) -> None:
    """Decide what moves where, and write it down."""
    check_output(out, names, every, force)
    joins = check_content(out, digest, names, every)
    pairs = [(work.set / name, out / name) for name in names] if joins else [(work.set, out)]
    moves = [
        Move(
            os.path.relpath(source, out.parent), os.path.relpath(target, out.parent), _inode(source)
        )
        for source, target in pairs
    ]
    with atomic_path(work.moves) as temporary:
        temporary.write_text(canonical_json(moves))


def _noted(work: Work) -> list[Move]:
    return [Move(*values) for values in json.loads(work.moves.read_bytes())]


def _carry_out(parent: Path, move: Move, *, replace: bool) -> None:
    source, target = parent / move.source, parent / move.target
    if _inode(target) == move.inode:
        return
    if replace and target.exists() and any(target.iterdir()):
        _exchange(source, target)
    else:
        source.rename(target)  # refused by the system where something stands there


def _exchange(source: Path, target: Path) -> None:
    """Swap two folders in one step; where the system cannot, in two."""
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    if rename is not None:
        paths = (os.fsencode(source), os.fsencode(target))
        if rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(target))
    target.rename(source.with_name(f"{source.name}.replaced"))
    source.rename(target)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _digest(out: Path) -> str | None:
    try:
        with open_artifact(out / SHARDS_NAME, "shards", SHARDS_SCHEMA) as artifact:
            return artifact.digest
    except ArtifactError:
        return None
