"""What shards may replace: what shard wrote there before, and nothing that anybody else put there.

A rename gives the old output away whole, so everything in it is looked at first, by name and kind.
Links are removed as links; what they lead to is never touched.
"""

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from k3tool.artifact import open_artifact
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.names import RANK_NAME, SHARDS_NAME, WEIGHTS_FILE, refuse_read_name
from k3tool.checkpoint.shards import SHARDS_SCHEMA, rank_folders
from k3tool.checkpoint.side_files import SIDE_FILES
from k3tool.errors import ArtifactError, UsageError, listed
from k3tool.fields import texts

_RANK_FILES = {"config.json", INDEX_NAME, RANK_NAME}
_MOST_NAMED = 3


def check_place(out: Path, checkpoint: Path) -> None:
    """Refuse a name that no folder can be given, or that the checkpoint would go with.

    `out` has its links resolved. Raises: UsageError.
    """
    if not out.name:
        raise UsageError(
            str(out), got="the root folder", need="a folder below it", hint="write to /shards"
        )
    if out.is_symlink():  # realpath stops at a link only where it leads to itself
        raise UsageError(
            str(out), got="a link that leads to itself", need="a new folder",
            hint="remove the link, or write somewhere else",
        )  # fmt: skip
    if out in (inside := Path(os.path.realpath(checkpoint)), *inside.parents):
        raise UsageError(
            str(out), got=f"the folder that {checkpoint} lies in", need="a folder apart from it",
            hint="write somewhere else",
        )  # fmt: skip
    for entry in sorted(os.scandir(inside), key=lambda entry: entry.name):
        if entry.is_symlink() and out in Path(os.path.realpath(entry.path)).parents:
            raise UsageError(
                str(out), got=f"a folder that {checkpoint}/{entry.name} leads into",
                need="a folder apart from the checkpoint", hint="write somewhere else",
            )  # fmt: skip
    refuse_read_name(out, str(out))


def check_output(out: Path, names: Sequence[str], every: Sequence[str], force: bool) -> None:
    """Refuse, before anything is read, an output that must not be touched.

    `names` are the rank folders to write, `every` those of the whole job (several processes may
    share it). Raises: UsageError.
    """
    if os.path.ismount(out):
        raise UsageError(
            str(out), got="a mount point", need="a folder below it", hint=f"write to {out}/shards"
        )
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not _is_ours(out):
        # Never a folder that we did not write, forced or not.
        raise UsageError(
            str(out), got="something that is no shards folder", need="a new folder",
            hint="write somewhere else, or remove it first",
        )  # fmt: skip
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
            hint="leave --rank out, or write somewhere else",
        )
    refuse_foreign(out, _replaced(out, held, names, every))


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
            hint="write somewhere else, or all ranks with --force",
        )
    return joins


def _is_ours(out: Path) -> bool:
    """Return whether shard wrote a folder; a damaged shards.h5 alone could be anybody's."""
    if not (out / SHARDS_NAME).is_file():
        return False
    return _digest(out) is not None or any(
        (out / name / RANK_NAME).is_file() for name in rank_folders(out)
    )


def _degree(names: Sequence[str]) -> int:
    return int(names[0].rsplit("-", 1)[1]) if names else 0


def _digest(out: Path) -> str | None:
    try:
        with open_artifact(out / SHARDS_NAME, "shards", SHARDS_SCHEMA) as artifact:
            return artifact.digest
    except ArtifactError:
        return None


# -- what others put there ---------------------------------------------------------------------


def _replaced(
    out: Path, held: Sequence[str], names: Sequence[str], every: Sequence[str]
) -> list[Path]:
    """Return the folders that a rename could give away: some ranks of a set, or all of it."""
    stay = set(held) - set(names)
    if stay and _degree(held) == _degree(names) and len(every) < _degree(every):
        return [out / name for name in names if name in held]  # it joins them, or is refused
    return [out]


def refuse_foreign(out: Path, folders: Sequence[Path]) -> None:
    """Refuse to give away `out`, or ranks in it, with anything in them that shard does not write.

    Raises: UsageError.
    """
    found = [
        os.path.relpath(path, out)
        for folder in folders
        for path in (_foreign_in_set(out) if folder == out else _foreign_in_rank(folder))
    ]
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise UsageError(
            str(out), got=f"{listed(sorted(found)[:_MOST_NAMED])}{more}, which shard did not write",
            need="nothing but shards where they are replaced", hint="move it somewhere else first",
        )  # fmt: skip


def _foreign_in_set(out: Path) -> Iterator[Path]:
    ranks = {out / name for name in rank_folders(out)}
    recorded = _recorded(out, "files/name")
    own = {"config.json", *SIDE_FILES} if recorded is None else recorded
    yield from _foreign(out, own | {SHARDS_NAME}, ranks)
    for rank in ranks:
        yield from _foreign_in_rank(rank)


def _recorded(out: Path, column: str) -> set[str] | None:
    """Return the names of files that shards.h5 says are here; None where it cannot be read."""
    try:
        with open_artifact(out / SHARDS_NAME, "shards", SHARDS_SCHEMA) as artifact:
            return set(texts(artifact, column))
    except ArtifactError:
        return None


def _foreign_in_rank(rank: Path) -> Iterator[Path]:
    if rank.is_symlink():
        return  # the link would go, not what it leads to
    if not rank.is_dir():
        yield rank
        return
    weights = _recorded(rank.parent, "rank_files")
    if weights is None:
        weights = {path.name for path in rank.iterdir() if WEIGHTS_FILE.fullmatch(path.name)}
    yield from _foreign(rank, weights | _RANK_FILES, ())


def _foreign(folder: Path, own: Collection[str], but: Collection[Path]) -> Iterator[Path]:
    """Yield what is no file of our names; a folder of such a name may hold anything."""
    for path in folder.iterdir():
        if path not in but and (path.name not in own or stat.S_ISDIR(path.lstat().st_mode)):
            yield path
