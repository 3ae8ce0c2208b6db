"""`k3tool shard`: split a checkpoint into one folder per rank, or check such a split."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_check import CheckInfo, check_shards
from k3tool.checkpoint.shard_dry_run import ShardsForeseen, foresee_shards
from k3tool.checkpoint.shard_mpi import shard_mpi
from k3tool.checkpoint.shard_writer import ShardsInfo, shard_checkpoint
from k3tool.errors import UnsoundError, UsageError, listed
from k3tool.progress import Progress, progress_of, waiting
from k3tool.tables import bytes_text, have_text, need_text
from stages import options


@dataclass(frozen=True, slots=True)
class Options:
    """What to split, into how many ranks, which of them, and where to."""

    checkpoint: Path
    tp: int
    output: Path
    ranks: tuple[int, ...] | None = None
    force: bool = False
    keep_vision: bool = False
    jobs: int | None = None
    mpi: bool = False


def run(opts: Options, progress: Progress | None = None) -> ShardsInfo | None:
    """Write the shards; see k3tool.checkpoint.shard_writer.shard_checkpoint.

    None is returned by all MPI processes but the first.
    """
    write = shard_mpi if opts.mpi else shard_checkpoint
    return write(
        opts.checkpoint,
        opts.tp,
        opts.output,
        ranks=opts.ranks,
        force=opts.force,
        progress=progress,
        keep_vision=opts.keep_vision,
        jobs=opts.jobs,
        say=_say,
    )


def _say(line: str) -> None:
    click.echo(line, err=True)


def as_dict(info: ShardsInfo) -> dict[str, Any]:
    """Return the result as plain values for `--json`."""
    return {
        "shards": str(info.path),
        "tp": info.tp,
        "ranks": list(info.ranks),
        "digest": info.digest,
        "identity": info.identity,
        "tensors": info.n_tensors,
        "files": info.n_files,
        "read_bytes": info.read_bytes,
        "written_bytes": info.written_bytes,
        "rank_bytes": info.rank_bytes,
        "replicated_bytes": info.replicated_bytes,
        "resumed_bytes": info.resumed_bytes,
        "kept_vision": info.kept_vision,
        "dropped": list(info.dropped),
        "dropped_bytes": info.dropped_bytes,
        "padding_bytes": info.padding_bytes,
    }


def summary_lines(info: ShardsInfo, verbose: bool) -> list[str]:
    """Return what a person reads: sizes, what was dropped by name of module, the digest."""
    ranks = ", ".join(map(str, info.ranks))
    modules = sorted({name.split(".")[0] for name in info.dropped})
    share = 100 * info.replicated_bytes / info.rank_bytes
    resumed = (
        f", {bytes_text(info.resumed_bytes)} of them by a run before" if info.resumed_bytes else ""
    )
    lines = [
        f"shards {info.path}: ranks {ranks} of {info.tp}, "
        f"{info.n_tensors} tensors in {info.n_files} files each",
        f"read {bytes_text(info.read_bytes)} of the source, "
        f"wrote {bytes_text(info.written_bytes)}{resumed}",
        *(
            f"rank {rank}: {bytes_text(info.rank_bytes)}, "
            f"{bytes_text(info.replicated_bytes)} ({share:.1f} %) of them on every rank"
            for rank in info.ranks
        ),
        f"dropped {len(info.dropped)} tensors, {bytes_text(info.dropped_bytes)}"
        + (f" ({', '.join(modules)}: not part of the text model)" if modules else "")
        + f", and {bytes_text(info.padding_bytes)} of zero padding",
    ]
    if info.kept_vision:
        lines.append(f"kept {info.kept_vision} tensors of the image side on every rank")
    if verbose:
        lines += [f"dropped {name}" for name in info.dropped]
    return [*lines, f"digest {info.digest[:16]}"]


# -- dry run -----------------------------------------------------------------------------------


_TOO_LITTLE = ": it does not fit"


def foreseen_lines(found: ShardsForeseen, verbose: bool) -> list[str]:
    """Return what would be written, of which nothing is: sizes, room, what is replaced."""
    ranks = ", ".join(map(str, found.ranks))
    need, free = need_text(found.need_bytes), have_text(found.free_bytes)
    lines = [
        f"would write {found.path}: ranks {ranks} of {found.tp}, {found.n_tensors} tensors in "
        f"{len(found.files)} files each, {bytes_text(found.rank_bytes * len(found.ranks))}",
        f"a rank: {bytes_text(found.rank_bytes)}, {bytes_text(found.replicated_bytes)} of them on "
        "every rank",
        *(f"  {name}  {bytes_text(n_bytes)}" for name, n_bytes in found.files if verbose),
        f"room: {need} needed, {free} free in {found.place}" + ("" if found.fits else _TOO_LITTLE),
        f"dropped: {len(found.dropped)} tensors, {bytes_text(found.dropped_bytes)}, and "
        f"{bytes_text(found.padding_bytes)} of zero padding",
    ]
    if found.kept_vision:
        lines.append(f"kept: {found.kept_vision} tensors of the image side on every rank")
    if found.finished:
        lines.append(f"goes on: {found.finished} files of a run that was killed stand already")
    if found.replaced:
        lines.append(f"replaced: {', '.join(found.replaced)}")
    return [*lines, "not looked at: values (k3tool inspect --values); nothing was written"]


def foreseen_as_dict(found: ShardsForeseen) -> dict[str, Any]:
    """Return what would be written as plain values for `--json`."""
    return {
        "shards": str(found.path), "dry_run": True, "tp": found.tp, "ranks": list(found.ranks),
        "identity": found.identity, "tensors": found.n_tensors, "files": dict(found.files),
        "written_bytes": found.rank_bytes * len(found.ranks), "rank_bytes": found.rank_bytes,
        "replicated_bytes": found.replicated_bytes, "need_bytes": found.need_bytes,
        "free_bytes": found.free_bytes, "fits": found.fits, "place": str(found.place),
        "finished_files": found.finished, "replaced": list(found.replaced),
        "kept_vision": found.kept_vision, "dropped": list(found.dropped),
        "dropped_bytes": found.dropped_bytes, "padding_bytes": found.padding_bytes,
    }  # fmt: skip


@waiting("planning")
def _dry_run(opts: Options, as_json: bool, verbose: bool) -> None:
    found = foresee_shards(
        opts.checkpoint, opts.tp, opts.output, ranks=opts.ranks, force=opts.force,
        keep_vision=opts.keep_vision, say=_say,
    )  # fmt: skip
    if as_json:
        click.echo(json.dumps(foreseen_as_dict(found), indent=1))
    else:
        click.echo("\n".join(foreseen_lines(found, verbose)))
    found.require_room()


# -- check -------------------------------------------------------------------------------------

SHOWN_FAULTS = 20


def check_lines(info: CheckInfo, verbose: bool) -> list[str]:
    """Return one line a fault, what was not here to compare, and the sum."""
    shown = info.faults if verbose else info.faults[:SHOWN_FAULTS]
    lines = [
        f"FAIL    {'shards.h5' if fault.rank < 0 else f'rank {fault.rank}'}: {fault.name}: "
        f"got {fault.got}, need {fault.need}"
        for fault in shown
    ]
    if len(shown) < len(info.faults):
        lines.append(f"        and {len(info.faults) - len(shown)} more (--verbose names them)")
    if info.missing:
        lines.append(
            f"NOT RUN ranks {', '.join(map(str, info.missing))}: their folders are not here"
        )
    right = "the ranks here" if info.missing else "all ranks asked for"
    whole = "ranks differ" if info.faults else f"{right} are their source ranges"
    return [
        *lines,
        f"{'PASS' if info.is_sound else 'FAIL'}    {whole}: {len(info.ranks)} of {info.tp} ranks, "
        f"{info.n_tensors} tensors and {bytes_text(info.rank_bytes)} each "
        f"({bytes_text(info.replicated_bytes)} replicated), "
        f"{bytes_text(info.dropped_bytes)} of the source dropped",
    ]


def check_as_dict(info: CheckInfo) -> dict[str, Any]:
    """Return the comparison as plain values for `--json`."""
    return {
        "shards": str(info.path),
        "tp": info.tp,
        "ranks": list(info.ranks),
        "missing_ranks": list(info.missing),
        "tensors": info.n_tensors,
        "compared_bytes": info.n_bytes,
        "replicated_bytes": info.replicated_bytes,
        "dropped_bytes": info.dropped_bytes,
        "faults": [fault._asdict() for fault in info.faults],
        "sound": info.is_sound,
    }


def _check(
    shards: Path,
    checkpoint: Path,
    ranks: Sequence[int] | None,
    jobs: int | None,
    as_json: bool,
    verbose: bool,
) -> None:
    with progress_of("check") as progress:
        info = check_shards(shards, checkpoint, jobs, progress, ranks, _say)
    if as_json:
        click.echo(json.dumps(check_as_dict(info), indent=1))
    else:
        click.echo("\n".join(check_lines(info, verbose)))
    if info.faults:
        raise UnsoundError(
            str(shards),
            got=f"{len(info.faults)} slices or records that differ",
            need="the bytes of the checkpoint",
            hint="shard again with --force; of ranks alone, with --rank too",
        )
    if info.missing:
        here = "".join(f" --rank {rank}" for rank in info.ranks)
        raise UnsoundError(
            str(shards),
            got=f"only ranks {listed(info.ranks)} of {info.tp}",
            need=f"ranks {listed(info.missing)} too",
            hint=f"put the others here, or check what this node holds:{here}",
        )


# -- command line ------------------------------------------------------------------------------


_OF_WRITING = ("tp", "output", "keep_vision", "mpi", "dry_run", "force")


@click.command(name="shard")
@click.argument("checkpoint", type=options.PATH)
@options.tp()
@options.output("the shards folder", required=False)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="R",
    help="Write, or --check, only this rank; may be given again. Default: all ranks.",
)
@click.option("--keep-vision", is_flag=True, help="Put the image side's tensors on every rank.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Files to work on at a time. Default: one a CPU, at most 4.",
)
@click.option("--mpi", is_flag=True, help="Under mpirun: spread the ranks over the processes.")
@click.option(
    "--check",
    type=options.PATH,
    metavar="SHARDS",
    help="Write nothing: compare these shards with CHECKPOINT, byte for byte. Takes --rank and "
    "--jobs, and none of --tp, -o, --keep-vision, --mpi, --dry-run and --force.",
)
@click.option(
    "--dry-run", is_flag=True,
    help="Write nothing: say what would be written and whether it fits, and refuse what would be "
    "refused. Not with --mpi, --jobs or --check.",
)  # fmt: skip
@options.force()
@options.as_json()
@options.verbose("Also name every dropped tensor and every fault, on stdout.")
def command(
    checkpoint: Path,
    tp: int | None,
    output: Path | None,
    ranks: tuple[int, ...],
    keep_vision: bool,
    jobs: int | None,
    mpi: bool,
    check: Path | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Split a checkpoint into one folder per rank.

    Each rank folder opens with the stock safetensors library; shards.h5 says where every source
    byte went. A run that was killed goes on where it was when the same command is given again.
    Nodes may each write their own ranks: the folders are one set once they lie together.

    \b
    Example:
      k3tool shard CKPT --tp 8 -o SHARDS --dry-run
      k3tool shard CKPT --tp 8 -o SHARDS
      k3tool shard --check SHARDS CKPT
      k3tool shard CKPT --tp 8 --rank 0 -o NODE0
      mpirun -n 8 k3tool shard CKPT --tp 8 -o SHARDS8 --mpi
    """
    if check is not None:
        options.refuse_beside(*_OF_WRITING, beside="check", why="--check writes nothing")
        _check(check, checkpoint, ranks or None, jobs, as_json, verbose)
        return
    if dry_run:
        options.refuse_beside("mpi", "jobs", beside="dry_run", why="--dry-run writes nothing")
    if tp is None:
        with Checkpoint.open(checkpoint) as opened:
            opened.config.check_tp(tp)
    if output is None:
        need = "a shards folder to write, or --check SHARDS to compare"
        raise UsageError("-o", got="none", need=need, hint="see k3tool shard --help")
    assert tp is not None
    opts = Options(checkpoint, tp, output, ranks or None, force, keep_vision, jobs, mpi)
    if dry_run:
        _dry_run(opts, as_json, verbose)
        return
    with progress_of("shard") as progress:
        info = run(opts, progress)
    if info is None:
        return  # process 0 speaks for all
    if as_json:
        click.echo(json.dumps(as_dict(info), indent=1))
    else:
        click.echo("\n".join(summary_lines(info, verbose)))
