"""`k3tool shard`: split a checkpoint into one folder per rank."""

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


def run(opts: Options, progress: Progress | None = None) -> ShardsInfo:
    """Write the shards; see k3tool.checkpoint.shard_writer.shard_checkpoint."""
    return shard_checkpoint(
        opts.checkpoint,
        opts.tp,
        opts.output,
        ranks=opts.ranks,
        force=opts.force,
        progress=progress,
    )


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """Yield a progress callback that draws on stderr, and only on a terminal."""
    with tqdm(
        unit="B", unit_scale=True, file=sys.stderr, disable=not sys.stderr.isatty(), desc="shard"
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
        "read_bytes": info.read_bytes,
        "written_bytes": info.written_bytes,
        "dropped": list(info.dropped),
        "dropped_bytes": info.dropped_bytes,
    }


def summary_lines(info: ShardsInfo, verbose: bool) -> list[str]:
    """Return what a person reads: sizes, what was dropped by name of module, the digest."""
    ranks = ", ".join(map(str, info.ranks))
    modules = sorted({name.split(".")[0] for name in info.dropped})
    lines = [
        f"shards {info.path}: ranks {ranks} of {info.tp}, {info.n_tensors} tensors each",
        f"read {info.read_bytes} bytes, wrote {info.written_bytes} bytes",
        f"dropped {len(info.dropped)} tensors, {info.dropped_bytes} bytes"
        + (f" ({', '.join(modules)}: not part of the text model)" if modules else ""),
    ]
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
@options.force()
@options.as_json()
@options.verbose()
def command(
    checkpoint: Path,
    tp: int,
    output: Path,
    ranks: tuple[int, ...],
    force: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Split a checkpoint into one folder per rank.

    Each rank folder opens with the stock safetensors library; shards.h5 says where every source
    byte went. Nothing is left behind when it fails.

    \b
    Example:
      k3tool shard CKPT --tp 8 -o SHARDS
      k3tool shard CKPT --tp 8 --rank 0 -o SHARDS
    """
    with _progress_bar() as progress:
        info = run(Options(checkpoint, tp, output, ranks or None, force), progress)
    if as_json:
        click.echo(json.dumps(as_dict(info), indent=1))
    else:
        click.echo("\n".join(summary_lines(info, verbose)))
