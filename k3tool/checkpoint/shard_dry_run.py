"""What `shard` would write and where, with every refusal that needs no byte of a weight.

Too little room is the one that comes last: who asks wants to know how much is missing, and of what.

The same checks in the same order as the work itself (``k3tool.checkpoint.shard_writer``), but none
of its steps: nothing is made, locked for longer than a look, or tidied. Scales and other values are
looked at while they are copied, so a refusal of those is still to come.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3tool.atomic import disk_hint, system_words
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_journal import MOVES_NAME, Work, require_idle
from k3tool.checkpoint.shard_output import check_content, check_output, check_place
from k3tool.checkpoint.shard_plan import VISION_REASON, plan_shards, require_splittable
from k3tool.checkpoint.shard_publish import noted_moves
from k3tool.checkpoint.shard_sources import Sources
from k3tool.checkpoint.shard_space import (
    free_bytes,
    held_bytes,
    too_little_space,
)
from k3tool.checkpoint.shard_writer import ShardJob, chosen_ranks
from k3tool.checkpoint.shards import rank_folders
from k3tool.checkpoint.unfinished import work_path
from k3tool.errors import ArtifactError, K3Error

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ShardsForeseen:
    """What would be written. `files` are names and bytes of tensor data, alike in every rank.

    `need_bytes` is the room that the rest of the work takes beside what stands there, of which
    `free_bytes` are free at `place`: fewer are said, not refused. `finished` files of a killed run
    would be taken up, `replaced` ranks replaced.
    """

    path: Path
    tp: int
    ranks: tuple[int, ...]
    identity: str
    n_tensors: int
    files: tuple[tuple[str, int], ...]
    rank_bytes: int
    replicated_bytes: int
    need_bytes: int
    free_bytes: int
    place: Path
    finished: int
    replaced: tuple[str, ...]
    kept_vision: int
    dropped: tuple[str, ...]
    dropped_bytes: int
    padding_bytes: int

    @property
    def fits(self) -> bool:
        """Return whether the place has the room."""
        return self.need_bytes <= self.free_bytes

    def require_room(self) -> None:
        """Refuse a place that has not the room. Raises: K3Error, as the work itself would."""
        if not self.fits:
            folder = Path(os.path.realpath(self.path)).parent
            raise too_little_space(folder, self.free_bytes, self.need_bytes, len(self.ranks))


def foresee_shards(
    ckpt_path: str | Path,
    tp: int,
    out: str | Path,
    *,
    ranks: Sequence[int] | None = None,
    force: bool = False,
    keep_vision: bool = False,
    say: Say | None = None,
) -> ShardsForeseen:
    """Return what shard_checkpoint would write, whether it fits or not.

    Raises: as it does, before its first byte, but for too little room.
    """
    chosen = chosen_ranks(tp, ranks)
    sources = Sources(ckpt_path)
    with Checkpoint.open(ckpt_path) as checkpoint:
        job = ShardJob(checkpoint, sources, tp, Path(out), chosen, force, say=say)
        try:
            return _foresee(job, keep_vision, say)
        except OSError as error:
            got, hint = system_words(error), disk_hint(error)
            raise K3Error(str(out), got=got, need="a writable folder", hint=hint) from None


def _foresee(job: ShardJob, keep_vision: bool, say: Say | None) -> ShardsForeseen:
    checkpoint, out = job.checkpoint, job.out
    check_place(out, checkpoint.path)
    work = Work(work_path(out, job.tp, job.ranks))
    require_idle(work.path)
    is_written = _has_moves(work, job)
    if not is_written:
        check_output(out, job.names, job.every, job.force)
    require_splittable(checkpoint, job.tp)
    place = _require_writable(out)
    job.plan = plan = plan_shards(checkpoint, job.tp, keep_vision, None, say)
    held = rank_folders(out) if out.is_dir() else []
    goes_on = is_written or _goes_on(job, work, held)
    need = 0 if is_written else plan.need_bytes * len(job.ranks)
    need = max(0, need - held_bytes(work.set)) if goes_on else need
    images = [row for row in plan.dropped if row.reason == VISION_REASON]
    image_bytes = sum(row.n_bytes for row in images)
    return ShardsForeseen(
        path=job.path, tp=job.tp, ranks=job.ranks, identity=checkpoint.identity,
        n_tensors=len(plan.rows.name),
        files=tuple(sorted((each.name, each.n_bytes) for each in plan.jobs())),
        rank_bytes=plan.rank_bytes, replicated_bytes=plan.replicated_bytes, need_bytes=need,
        free_bytes=free_bytes(place), place=place, finished=work.finished_files() if goes_on else 0,
        replaced=tuple(name for name in held if name in job.names),
        kept_vision=len(plan.vision), dropped=tuple(row.name for row in images),
        dropped_bytes=image_bytes,
        padding_bytes=sum(row.n_bytes for row in plan.dropped) - image_bytes,
    )  # fmt: skip


def _has_moves(work: Work, job: ShardJob) -> bool:
    """Return whether a killed run had written all and was giving it its name."""
    if not (work.path / MOVES_NAME).exists():
        return False
    try:
        noted_moves(work, job.out)
    except ArtifactError:
        if not job.force:
            raise
        return False
    return True


def _goes_on(job: ShardJob, work: Work, held: Sequence[str]) -> bool:
    """Return whether a killed run's files would be taken up.

    Raises: UsageError for unfinished work for something else, or ranks of other content.
    """
    others = sorted(set(held) - set(job.names))
    if not work.finished_files() and not others:
        return False  # only then is there something to compare shards.h5's digest with
    with tempfile.TemporaryDirectory(prefix="k3tool-dry-run-") as folder:
        digest = job.write_beside(Path(folder))
    check_content(job.out, digest, job.names, job.every)
    key = job.key(digest)
    work.require_place_for(key, job.force)
    return work.is_for(key)


def _require_writable(out: Path) -> Path:
    """Return the nearest folder above `out`. Raises: K3Error where nothing can be made in it."""
    place = next(parent for parent in out.absolute().parents if os.path.lexists(parent))
    got = None
    if not place.is_dir():
        got = f"{place}, which is no folder"
    elif not os.statvfs(place).f_blocks:
        got = f"{place}, which is on no disk"
    elif not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        got = f"{place}, which may not be written"
    if got is not None:
        need, hint = "a writable folder", "write somewhere else"
        raise K3Error(str(out), got=got, need=need, hint=hint)
    return place
