"""`k3tool shard`: split a checkpoint into one folder per rank, or check such a split."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from k3tool.checkpoint.shard_writer import Progress, ShardsInfo, shard_checkpoint
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


def run(opts: Options, progress: Progress | None = None) -> ShardsInfo:
    """Write the shards; see k3tool.checkpoint.shard_writer.shard_checkpoint."""
    return shard_checkpoint(
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


@contextmanager
def _progress_bar(what: str) -> Iterator[Progress]:
    """Yield a progress callback that draws on stderr, and only on a terminal."""
    with tqdm(
        unit="B", unit_scale=True, file=sys.stderr, disable=not sys.stderr.isatty(), desc=what
    ) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update


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
    resumed = f", {info.resumed_bytes} of them by a run before" if info.resumed_bytes else ""
    lines = [
        f"shards {info.path}: ranks {ranks} of {info.tp}, "
        f"{info.n_tensors} tensors in {info.n_files} files each",
        f"read {info.read_bytes} bytes, wrote {info.written_bytes} bytes{resumed}",
        *(
            f"rank {rank}: {info.rank_bytes} bytes, "
            f"{info.replicated_bytes} ({share:.1f} %) of them on every rank"
            for rank in info.ranks
        ),
        f"dropped {len(info.dropped)} tensors, {info.dropped_bytes} bytes"
        + (f" ({', '.join(modules)}: not part of the text model)" if modules else "")
        + f", and {info.padding_bytes} bytes of zero padding",
    ]
    if info.kept_vision:
        lines.append(f"kept {info.kept_vision} tensors of the image side on every rank")
    if verbose:
        lines += [f"dropped {name}" for name in info.dropped]
    return [*lines, f"digest {info.digest}"]


@click.command(name="shard")
@click.argument("checkpoint", type=options.PATH)
@options.tp(required=True)
@options.output("the shards folder")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="R",
    help="Write only this rank; may be given again. Default: all ranks.",
)
@click.option("--keep-vision", is_flag=True, help="Put the image side's tensors on every rank.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Files to write at a time. Default: one a CPU, at most 4.",
)
@options.force()
@options.as_json()
@options.verbose()
def command(
    checkpoint: Path,
    tp: int,
    output: Path,
    ranks: tuple[int, ...],
    keep_vision: bool,
    jobs: int | None,
    force: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Split a checkpoint into one folder per rank.

    Each rank folder opens with the stock safetensors library; shards.h5 says where every source
    byte went. A run that was killed goes on where it was when the same command is given again.

    \b
    Example:
      k3tool shard CKPT --tp 8 -o SHARDS
      k3tool shard CKPT --tp 8 --rank 0 -o SHARDS
    """
    with _progress_bar("shard") as progress:
        info = run(
            Options(checkpoint, tp, output, ranks or None, force, keep_vision, jobs), progress
        )
    if as_json:
        click.echo(json.dumps(as_dict(info), indent=1))
    else:
        click.echo("\n".join(summary_lines(info, verbose)))
