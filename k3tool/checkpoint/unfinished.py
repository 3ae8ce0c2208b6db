"""Where shards grow until they are whole, and what to say of a name that they have not got yet."""

from collections.abc import Sequence
from pathlib import Path

from k3tool.errors import ArtifactError

KEY_NAME = "key"  # in the work folder: what the work is for


def work_path(out: Path, tp: int, ranks: Sequence[int]) -> Path:
    """Return the work folder's name: other ranks are other work, maybe on another machine."""
    some = "".join(f"-{rank:02d}" for rank in ranks) if len(ranks) < tp else ""
    return out.with_name(f".{out.name}.shard{some}")


def refuse_unfinished(out: Path, need: str) -> None:
    """Refuse a folder that is not there where shard has begun it. Raises: ArtifactError.

    A killed shard cannot say so itself.
    """
    if out.exists() or not out.name:
        return
    mark = f".{out.name}.shard"
    beside = out.absolute().parent
    names = [path.name for path in beside.iterdir()] if beside.is_dir() else []
    found = sorted(
        name for name in names
        if (name == mark or name.startswith(f"{mark}-")) and (beside / name / KEY_NAME).is_file()
    )  # fmt: skip
    if found:
        raise ArtifactError(
            str(out), got=f"no such folder, but unfinished shards in {', '.join(found)} beside it",
            need=need, hint="the same k3tool shard command again goes on from there",
        )  # fmt: skip
