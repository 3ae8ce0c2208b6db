"""Move finished shards to their name: at every moment that is the old output or the new one.

A set moves as one folder. A rank that joins a set of the same checkpoint and degree (another node
wrote the others) moves on its own. What is going to move is noted first, by inode, so that a run
killed in between knows on its return which moves are done.
"""

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from k3tool.atomic import atomic_path, fsync
from k3tool.canonical import canonical_json
from k3tool.checkpoint.names import RANK_FOLDER
from k3tool.checkpoint.shard_journal import Work, read_json
from k3tool.checkpoint.shard_output import check_content, check_output, refuse_foreign
from k3tool.errors import ArtifactError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class Move(NamedTuple):
    """One folder to move; `inode` tells it from what stood at `target` before."""

    source: str
    target: str
    inode: int


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
            moves = [move for move in noted_moves(work, out) if not _is_made(out, move)]
            targets = [out.parent / move.target for move in moves]
            if force:  # again: they may have been noted by a run that was killed long ago
                refuse_foreign(out, [path for path in targets if path.is_dir()])
            for move in moves:
                _carry_out(out.parent, move, replace=force)
            break
        except OSError as error:
            if force or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            work.moves.unlink()  # another node was first: look again
    fsync(out.parent)


def is_published(work: Work, out: Path) -> bool:
    """Return whether all noted moves were made, and only the tidying was cut off."""
    return work.moves.exists() and all(_is_made(out, move) for move in noted_moves(work, out))


def _is_made(out: Path, move: Move) -> bool:
    return _inode(out.parent / move.target) == move.inode


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


def noted_moves(work: Work, out: Path) -> list[Move]:
    """Return the moves that were noted. Raises: ArtifactError where they are not of our folders."""
    found = read_json(work.moves)
    values = found if isinstance(found, list) else [found]
    moves = [Move(*move) for move in values if _is_move(move)]
    legal = [move for move in moves if _is_legal(move, work, out)]
    if not legal or len(legal) != len(values):
        raise ArtifactError(
            str(work.moves), got="no list of moves", need="what shard wrote there",
            hint="--force discards the unfinished shards",
        )  # fmt: skip
    return legal


def _is_move(values: object) -> bool:
    return isinstance(values, list) and [type(value) for value in values] == [str, str, int]


def _is_legal(move: Move, work: Work, out: Path) -> bool:
    """Return whether a move is one that we note: the set to its name, or a rank into a set."""
    source, target = work.path.parent / move.source, out.parent / move.target
    if (source, target) == (work.set, out):
        return True
    name = target.name
    return bool(RANK_FOLDER.fullmatch(name)) and (source, target) == (work.set / name, out / name)


def _carry_out(parent: Path, move: Move, *, replace: bool) -> None:
    source, target = parent / move.source, parent / move.target
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
