"""Whether the disk has room for shards, before the first byte is written."""

import os
from collections.abc import Sequence
from pathlib import Path

from k3tool.checkpoint.shard_plan import folder_bytes
from k3tool.checkpoint.unfinished import work_path
from k3tool.errors import K3Error
from k3tool.model.config import K3Config
from k3tool.model.sizes import n_tensors, rank_bytes
from k3tool.tables import count_text, have_text, need_text


def require_least_space(config: K3Config, tp: int, out: Path, ranks: Sequence[int]) -> None:
    """Refuse shards of the text model that will not fit, from the config alone.

    To look at half a million tensors first takes a minute. Raises: K3Error.
    """
    held = held_bytes(work_path(out, tp, ranks) / "set")
    place = next(parent for parent in out.absolute().parents if parent.is_dir())
    if not os.statvfs(place).f_blocks:
        return  # no disk, such as /proc: that no folder can be made there is said when it is made
    need = folder_bytes(rank_bytes(config, tp).total, n_tensors(config)) * len(ranks) - held
    require_space(out.parent, place, need, len(ranks))


def require_space(said: Path, place: Path, need: int, n_ranks: int) -> None:
    """Refuse a place without the room; `said` is what the user named. Raises: K3Error."""
    have = free_bytes(place)
    if need > have:
        raise too_little_space(said, have, need, n_ranks)


def too_little_space(said: Path, have: int, need: int, n_ranks: int) -> K3Error:
    """Return the refusal of a place with so many bytes free, of which more are needed."""
    return K3Error(
        str(said.absolute()),
        got=f"{have_text(have)} free",
        need=f"{need_text(need)} for {count_text(n_ranks, 'rank')}",
        hint="free some, or write elsewhere (run: --cache)"
        + ("" if n_ranks == 1 else ", or on several disks, rank by rank: k3tool shard --rank"),
    )


def held_bytes(folder: Path) -> int:
    """Return the bytes of the weights that a killed run left in a folder, if it is there."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def free_bytes(folder: Path) -> int:
    """Return the bytes a process without privileges may still write there."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
