"""Spread the ranks of one job over MPI processes, on one machine or on many.

Every process writes its own ranks into the same OUT, which may be one shared folder or one of that
name on every node. Nobody publishes before all have written; a failure of one is a failure of all.
Needs mpi4py (extra `mpi`) and a start under mpirun.
"""

import dataclasses
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_sources import Sources
from k3tool.checkpoint.shard_writer import Say, ShardJob, ShardsInfo, chosen_ranks
from k3tool.errors import K3Error, TargetError, install_extra
from k3tool.progress import Progress

Result = TypeVar("Result")


class Group:
    """The processes of this run. A step that fails in one ends all of them with its exit code."""

    def __init__(self) -> None:
        """Start MPI. Raises: TargetError where mpi4py or an MPI library is absent."""
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            absent = isinstance(error, ModuleNotFoundError)
            got = "no module mpi4py" if absent else str(error)
            raise TargetError(
                "--mpi", got=got, need="mpi4py and an MPI library",
                hint=f"{install_extra('mpi')}, and mpirun of Open MPI or MPICH",
            ) from None  # fmt: skip
        self._comm: Any = MPI.COMM_WORLD
        self.rank, self.size = int(self._comm.rank), int(self._comm.size)

    def together(self, step: Callable[[], Result]) -> list[Result]:
        """Do a step everywhere and return all results by process.

        Raises: the step's K3Error in the first process that failed; the others leave silently.
        """
        error: K3Error | None = None
        result: Result | None = None
        try:
            result = step()
        except K3Error as failure:
            error = failure
        except BaseException:  # the others would wait for this process forever
            self._abort()
        codes: list[int] = self._comm.allgather(0 if error is None else error.exit_code)
        failed = [process for process, code in enumerate(codes) if code]
        if failed and self.rank == failed[0]:
            assert error is not None
            raise error
        if failed:
            raise SystemExit(codes[failed[0]])
        return list(self._comm.allgather(result))

    def in_turn(self, step: Callable[[], None]) -> None:
        """Do a step in one process after the other."""
        for process in range(self.size):
            self.together(step if process == self.rank else lambda: None)

    def _abort(self) -> NoReturn:
        traceback.print_exc()
        sys.stderr.flush()
        self._comm.Abort(1)
        raise SystemExit(1)


def shard_mpi(
    ckpt_path: str | Path,
    tp: int,
    out: str | Path,
    *,
    ranks: Sequence[int] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    keep_vision: bool = False,
    jobs: int | None = None,
    say: Say | None = None,
) -> ShardsInfo | None:
    """Write this process's ranks of a job; return what all wrote in process 0, None elsewhere.

    `progress` is told of this process's share. Raises: as shard_checkpoint; TargetError without
    MPI.
    """
    group = Group()
    every = chosen_ranks(tp, ranks)
    mine = every[group.rank :: group.size]
    with ExitStack() as stack:

        def begin() -> ShardJob | None:
            sources = Sources(ckpt_path)
            checkpoint = stack.enter_context(Checkpoint.open(ckpt_path))
            if not mine:  # more processes than ranks
                return None
            job = ShardJob(checkpoint, sources, tp, Path(out), mine, force, every=every, say=say)
            job.make_plan(keep_vision)
            stack.enter_context(job.working())
            job.prepare()
            return job

        jobs_of: list[ShardJob | None] = []
        group.together(lambda: jobs_of.append(begin()))
        job = jobs_of[0]
        _check_space(group, job)
        group.together(lambda: job.write(jobs, progress) if job else None)
        group.in_turn(lambda: job.publish() if job else None)
        # Only now: a run killed before finds in every work folder how far its process came.
        group.together(lambda: job.tidy() if job else None)
        infos = group.together(lambda: job.info() if job else None)
    return _joined([info for info in infos if info is not None]) if group.rank == 0 else None


def _check_space(group: Group, job: ShardJob | None) -> None:
    """Add up what the processes on one disk of one machine need."""

    def need() -> tuple[str, int, int]:
        if job is None:
            return socket.gethostname(), -1, 0
        return socket.gethostname(), os.stat(job.work.path).st_dev, job.need_bytes()

    needs = group.together(need)
    here = needs[group.rank][:2]
    total = sum(n_bytes for *place, n_bytes in needs if tuple(place) == here)
    group.together(lambda: job.check_space(total) if job else None)


def _joined(infos: Sequence[ShardsInfo]) -> ShardsInfo:
    return dataclasses.replace(
        infos[0],
        ranks=tuple(sorted(rank for info in infos for rank in info.ranks)),
        read_bytes=sum(info.read_bytes for info in infos),
        written_bytes=sum(info.written_bytes for info in infos),
        resumed_bytes=sum(info.resumed_bytes for info in infos),
    )
