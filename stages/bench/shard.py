"""`k3tool bench shard`: shard against cp with fsync on one disk."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3tool.errors import CHECK_PATH, UsageError
from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.frame import BenchReport


@dataclass(frozen=True, slots=True)
class Options:
    """The folder whose disk is measured, and the source to make there."""

    folder: Path
    n_bytes: int
    tp: int
    jobs: int | None
    repeats: int


def run(options: Options) -> "BenchReport":
    """Measure. Raises: UsageError where the folder lacks room; K3Error where a side fails."""
    from k3tool.bench.shard import bench_shard

    if not options.folder.is_dir():
        got, need = f"{options.folder}, no folder", "one that exists"
        raise UsageError("--folder", got=got, need=need, hint=CHECK_PATH)
    return bench_shard(options.folder, options.n_bytes, options.tp, options.jobs, options.repeats)


@click.command("shard")
@click.option(
    "--folder",
    type=common.PATH,
    default=Path(),
    help="Folder on the disk to measure. Default: here.",
)
@click.option(
    "--size", type=common.Finite(min=6.0), default=8.0, show_default=True, metavar="GB",
    help="Bytes of the source, at least; the disk needs room for three times as much.",
)  # fmt: skip
@common.tp(default=2)
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="As of shard.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=5, show_default=True, metavar="N",
    help="Runs of each side.",
)  # fmt: skip
@shared.strict_option()
@shared.baseline_option()
@common.as_json()
def command(
    folder: Path,
    size: float,
    tp: int,
    jobs: int | None,
    repeats: int,
    strict: bool,
    as_json: bool,
    baseline: Path | None,
) -> None:
    """Measure shard against cp with fsync, on one disk.

    The rate is bytes written a second. A source with the release's widths is made in FOLDER and
    removed at the end.

    \b
    Example:
      k3tool bench shard --folder /mnt/nvme --size 16
    """
    options = Options(folder, int(size * 1e9), tp, jobs, repeats)
    shared.measure("shard", lambda: run(options), strict=strict, as_json=as_json, baseline=baseline)
