"""Split a checkpoint into one folder per rank: each source byte is read once and placed by rule.

Every tensor lands on a rank, on all ranks on purpose, or is named as dropped; anything else is
refused before a byte is written. A killed run goes on where it was, and its result is the same
bytes. Memory holds a block a thread, whatever the size of a tensor.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3tool.atomic import atomic_path, disk_hint
from k3tool.canonical import canonical_json
from k3tool.checkpoint.identity import checkpoint_identity
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.names import SHARDS_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_copy import FileRecord, copy_bytes, stands, write_file
from k3tool.checkpoint.shard_journal import MOVES_NAME, Work, clear_leftover, locked
from k3tool.checkpoint.shard_output import check_content, check_output, check_place
from k3tool.checkpoint.shard_plan import (
    VISION_REASON,
    FileJob,
    ShardPlan,
    plan_shards,
    require_splittable,
)
from k3tool.checkpoint.shard_provenance import write_rank, write_set
from k3tool.checkpoint.shard_publish import is_published, noted_moves, publish
from k3tool.checkpoint.shard_sources import Sources
from k3tool.checkpoint.shard_space import held_bytes, require_least_space, require_space
from k3tool.checkpoint.shard_threads import Tally, default_threads, each
from k3tool.checkpoint.shards import rank_folder_name
from k3tool.checkpoint.side_files import SIDE_FILES, read_side_file
from k3tool.checkpoint.unfinished import work_path
from k3tool.errors import ArtifactError, K3Error, UsageError
from k3tool.memory import THREAD_BYTES, require_room
from k3tool.model.config import TP_HINT
from k3tool.progress import Progress, waiting
from k3tool.targets import MOST_RANKS

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ShardsInfo:
    """What was written: sizes in bytes, the artifact's digest, the checkpoint's identity.

    `rank_bytes` is what each rank holds, `replicated_bytes` the part of it that all ranks hold;
    `read_bytes` were read of the checkpoint's tensors by this run; `resumed_bytes` of
    `written_bytes` stood from a run before.
    """

    path: Path
    tp: int
    ranks: tuple[int, ...]
    digest: str
    identity: str
    n_tensors: int
    n_files: int
    read_bytes: int
    written_bytes: int
    rank_bytes: int
    replicated_bytes: int
    resumed_bytes: int
    kept_vision: int
    dropped: tuple[str, ...]
    dropped_bytes: int
    padding_bytes: int


def shard_checkpoint(
    ckpt_path: str | Path,
    tp: int,
    out: str | Path,
    *,
    ranks: Sequence[int] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    keep_vision: bool = False,
    jobs: int | None = None,
    max_file_bytes: int | None = None,
    say: Say | None = None,
) -> ShardsInfo:
    """Write the shards of a checkpoint and return what was written.

    `ranks` None means all of them; `say` takes lines about resuming. Raises: UsageError on an
    illegal degree, rank or output; ArtifactError naming the tensor that is absent, unknown,
    mis-shaped or holds refused scales; K3Error when writing fails or the disk has not the room.
    """
    chosen = chosen_ranks(tp, ranks)
    sources = Sources(ckpt_path)
    with waiting("reading headers"):
        opened = Checkpoint.open(ckpt_path)
    with opened as checkpoint:
        job = ShardJob(checkpoint, sources, tp, Path(out), chosen, force, say=say)
        with waiting("planning"):
            job.make_plan(keep_vision, max_file_bytes)
        with job.working():
            job.prepare()
            job.check_space(job.need_bytes())
            job.write(jobs, progress)
            job.publish()
            job.tidy()
            return job.info()


def chosen_ranks(tp: int, ranks: Sequence[int] | None) -> tuple[int, ...]:
    """Return the ranks to write, sorted. Raises: UsageError for none or one that is not there."""
    if tp > MOST_RANKS:  # before that many are listed
        raise UsageError("--tp", got=tp, need=f"at most {MOST_RANKS}", hint=TP_HINT)
    chosen = tuple(sorted(set(range(tp) if ranks is None else ranks)))
    wrong = [rank for rank in chosen if not 0 <= rank < tp]
    if wrong or not chosen:
        need = f"ranks from 0 to {tp - 1}"
        raise UsageError("--rank", got=wrong, need=need, hint="leave it out to write all ranks")
    return chosen


class ShardJob:
    """One process's share of the work, step by step: make_plan, prepare, write, publish, tidy.

    `every` are the ranks of the whole job where several processes share it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        sources: Sources,
        tp: int,
        out: Path,
        ranks: tuple[int, ...],
        force: bool = False,
        *,
        every: Sequence[int] | None = None,
        say: Say | None = None,
    ) -> None:
        """Take what was asked for; nothing is touched before `working`.

        `sources` were looked at before `checkpoint` was opened.
        """
        self.sources = sources
        self.checkpoint, self.tp, self.ranks, self.force = checkpoint, tp, ranks, force
        self.path = out
        self.out = Path(os.path.realpath(out))  # a link's target is replaced, not the link
        self.names = [rank_folder_name(rank, tp) for rank in ranks]
        self.every = [rank_folder_name(rank, tp) for rank in (every or ranks)]
        self._say: Say = say or (lambda line: None)
        self._tally = Tally()
        self._resumed = 0
        self.digest = ""
        self.work: Work
        self.plan: ShardPlan

    def make_plan(self, keep_vision: bool, max_file_bytes: int | None = None) -> None:
        """Settle what goes where; nothing is written yet."""
        with self._system_errors():
            check_place(self.out, self.checkpoint.path)
            path = work_path(self.out, self.tp, self.ranks)
            clear_leftover(path)
            self._drop_moves_of_none(path)
            moves = (path / MOVES_NAME).exists()
            if not moves:
                check_output(self.out, self.names, self.every, self.force)
        require_splittable(self.checkpoint, self.tp)
        with self._system_errors():
            if not moves:
                require_least_space(self.checkpoint.config, self.tp, self.out, self.ranks)
        self.plan = plan_shards(self.checkpoint, self.tp, keep_vision, max_file_bytes, self._say)

    def _drop_moves_of_none(self, path: Path) -> None:
        """Refuse, or with --force discard, work whose noted moves cannot be read."""
        if not (path / MOVES_NAME).exists():
            return
        with locked(path) as work:
            try:
                noted_moves(work, self.out)
            except ArtifactError:
                if not self.force:
                    raise
                work.discard()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Hold the work folder; on failure keep what a rerun can use and say so."""
        path = work_path(self.out, self.tp, self.ranks)
        with self._system_errors(), locked(path) as work:
            self.work = work
            try:
                yield
            except BaseException as error:
                self._give_up(error)
                raise

    @contextlib.contextmanager
    def _system_errors(self) -> Iterator[None]:
        """Turn what the system refuses into the message a user reads."""
        try:
            yield
        except OSError as error:
            got = error.strerror or str(error)
            hint = disk_hint(error)
            raise K3Error(str(self.path), got=got, need="a writable folder", hint=hint) from None

    def _give_up(self, error: BaseException) -> None:
        """Leave nothing that a rerun cannot use."""
        if not self.digest:
            return  # the work folder is not ours to tidy
        # A read that failed may succeed next time; a value that was refused will not.
        refused = isinstance(error, ArtifactError) and not isinstance(error.__context__, OSError)
        if refused or not self.work.is_worth_keeping:
            with contextlib.suppress(OSError):
                self.work.discard()
            return
        line = f"{self.work.finished_files()} of {len(self.plan.files)} files are finished in "
        self._say(f"{line}{self.work.path}: the same command goes on from there")

    # -- before the first byte -----------------------------------------------------------------

    def prepare(self) -> None:
        """Claim the work folder for this very work."""
        candidate = self.work.candidate
        self.work.remove_candidate()
        candidate.mkdir()
        try:
            digest = self.write_beside(candidate)
            resumes = self._begin(digest)
            self.digest = digest
            if self.work.moves.exists():
                self._resumed = self.plan.rank_bytes * len(self.ranks)
                return  # all is written; the run was killed while giving it its name
            for path in candidate.iterdir():
                path.rename(self.work.set / path.name)
        finally:
            self.work.remove_candidate()
        for name in self.names:
            (self.work.set / name).mkdir(exist_ok=True)
        if resumes:
            n_files = self.work.finished_files()
            self._say(f"going on from {self.work.path}: {n_files} files are there, checking them")

    def _begin(self, digest: str) -> bool:
        """Claim the work folder for this very work; return whether a killed run goes on."""
        key = self.key(digest)
        if is_published(self.work, self.out) and not self.work.is_for(key):
            # Another command's, which had only its tidying left to do.
            self.work.discard()
            check_output(self.out, self.names, self.every, self.force)
        if not self.work.moves.exists():
            # Not only when moving: all would be written by then, and for nothing.
            joins = check_content(self.out, digest, self.names, self.every)
            if joins:
                self.work.drop_unless_of(digest)
        return self.work.begin(key, self.force)

    def key(self, digest: str) -> dict[str, object]:
        """Return what this work is known by, with the digest of its shards.h5."""
        return {
            "shards": digest,
            "checkpoint": self.checkpoint.identity,
            "tp": self.tp,
            "ranks": list(self.ranks),
            "sources": self.sources.times(self.checkpoint.index.files),
        }

    def write_beside(self, folder: Path) -> str:
        """Write config, side files and shards.h5; return the digest."""
        _write_bytes(folder / "config.json", self.checkpoint.config_bytes)
        for name in SIDE_FILES:
            data = read_side_file(self.checkpoint.path, name)
            if data is not None:
                _write_bytes(folder / name, data)
        return write_set(self.plan, folder, folder / SHARDS_NAME)

    def need_bytes(self) -> int:
        """Return the disk space that the rest of the work takes, beside the old output."""
        if self.work.moves.exists():
            return 0
        return max(0, self.plan.need_bytes * len(self.ranks) - held_bytes(self.work.set))

    def check_space(self, need: int) -> None:
        """Refuse before the first byte what will not fit."""
        require_space(self.out.parent, self.work.path, need, len(self.every))

    # -- writing -------------------------------------------------------------------------------

    def write(self, jobs: int | None = None, progress: Progress | None = None) -> None:
        """Write every file that does not stand yet, `jobs` at a time."""
        if self.work.moves.exists():
            return
        n_threads = jobs or default_threads()
        need = n_threads * (copy_bytes(len(self.ranks)) + THREAD_BYTES)
        require_room(need, f"{n_threads} files at a time (--jobs)")
        total = self.plan.rank_bytes * len(self.ranks)
        each(self.plan.jobs(), self._one, self._tally, jobs, progress, total)
        self._finish_ranks()
        # Before any process of the job gives its ranks their name.
        self.sources.require_unchanged(self.checkpoint.index.files)

    def _one(self, job: FileJob) -> None:
        folders = {
            rank: self.work.set / name for rank, name in zip(self.ranks, self.names, strict=True)
        }
        record = self.work.recall(job.name)
        if record is not None and stands(self.plan, job, record, folders, self._tally):
            self._resumed += job.n_bytes * len(self.ranks)
            return
        self.work.record(write_file(self.plan, job, folders, self._tally))

    def _finish_ranks(self) -> None:
        """Write what stands beside a rank's tensors: index, config, rank.h5."""
        identities = self._write_indexes()  # first: its text is large and gone after it
        records = [self._record(file) for file in self.plan.files]
        for rank, name in zip(self.ranks, self.names, strict=True):
            sha256 = b"".join(record.sha256[rank] for record in records)
            max_scale = b"".join(record.max_scale[rank] for record in records)
            folder, identity = self.work.set / name, identities[rank]
            write_rank(folder, self.tp, rank, self.digest, identity, sha256, max_scale)

    def _write_indexes(self) -> dict[int, str]:
        """Write index and config into every rank's folder; return the folders' identities."""
        rows, files, config = self.plan.rows, self.plan.files, self.checkpoint.config_bytes
        index = {
            "metadata": {"total_size": self.plan.rank_bytes},
            "weight_map": {
                name: files[file] for name, file in zip(rows.name, rows.rank_file, strict=True)
            },
        }
        text = canonical_json(index).encode()
        identities = {}
        for rank, name in zip(self.ranks, self.names, strict=True):
            folder = self.work.set / name
            _write_bytes(folder / INDEX_NAME, text)
            _write_bytes(folder / "config.json", config)
            identities[rank] = checkpoint_identity(folder, files, config, text)
        return identities

    def _record(self, file: str) -> FileRecord:
        record = self.work.recall(file)
        assert record is not None, file
        return record

    # -- naming it -----------------------------------------------------------------------------

    def publish(self) -> None:
        """Give the finished shards their name."""
        publish(self.work, self.out, self.digest, self.names, self.every, self.force)

    def tidy(self) -> None:
        """Remove the work folder, and in it the old output."""
        self.work.remove()

    def info(self) -> ShardsInfo:
        """Return what the finished shards are."""
        plan = self.plan
        images = [row for row in plan.dropped if row.reason == VISION_REASON]
        image_bytes = sum(row.n_bytes for row in images)
        padding_bytes = sum(row.n_bytes for row in plan.dropped) - image_bytes
        return ShardsInfo(
            path=self.path,
            tp=self.tp,
            ranks=self.ranks,
            digest=self.digest,
            identity=self.checkpoint.identity,
            n_tensors=len(plan.rows.name),
            n_files=len(plan.files),
            read_bytes=self._tally.read,
            written_bytes=plan.rank_bytes * len(self.ranks),
            rank_bytes=plan.rank_bytes,
            replicated_bytes=plan.replicated_bytes,
            resumed_bytes=self._resumed,
            kept_vision=len(plan.vision),
            dropped=tuple(row.name for row in images),
            dropped_bytes=image_bytes,
            padding_bytes=padding_bytes,
        )


def _write_bytes(path: Path, data: bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
