"""`k3tool bench inspect`: the report against stock safetensors, the values against read(2)."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.whole import require_whole
from k3tool.errors import incomplete
from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.frame import BenchReport

VALUES_BYTES = 4 * 10**9


@dataclass(frozen=True, slots=True)
class Options:
    """What `bench inspect` measures: the report, or with `values` the look at every byte.

    Without `checkpoint` one is made in a temporary folder.
    """

    checkpoint: Path | None
    values: bool = False
    layers: tuple[int, ...] | None = None
    jobs: int | None = None
    cold: bool = False
    repeats: int = 7


def run(opts: Options) -> "BenchReport":
    """Measure. Raises: UsageError on options that do not go together; K3Error if a side fails."""
    if opts.layers is not None and opts.checkpoint is None:
        raise incomplete("--layers", "CHECKPOINT", "they are its layers")
    of_values = {"--layers": opts.layers is not None, "--jobs": opts.jobs is not None,
                 "--cold": opts.cold}  # fmt: skip
    for option, is_given in of_values.items():
        if is_given and not opts.values:
            raise incomplete(option, "--values", "headers alone are read without it")
    if opts.checkpoint is not None:
        with Checkpoint.open(opts.checkpoint) as checkpoint:
            require_whole(checkpoint)  # or the process that is timed refuses it
        return _measure(opts, {"": opts.checkpoint})
    from k3tool.checkpoint.released_layout import RELEASED_DATA, write_released

    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        path = Path(folder)
        if opts.values:
            from k3tool.bench.source import MOSTLY_EXPERTS, sized_config, write_source

            write_source(path / "filled", *sized_config(VALUES_BYTES, MOSTLY_EXPERTS))
            return _measure(opts, {"": path / "filled"})
        made = {"experts by name": path / "by-name", "experts shuffled": path / "shuffled"}
        for label, each in made.items():
            write_released(each, RELEASED_DATA, shuffled=label == "experts shuffled")
        return _measure(opts, made)


def _measure(opts: Options, checkpoints: Mapping[str, Path]) -> "BenchReport":
    if not opts.values:
        from k3tool.bench.inspect_headers import bench_inspect

        return bench_inspect(checkpoints, opts.repeats)
    from k3tool.bench.inspect_values import bench_values
    from k3tool.checkpoint.values import require_threads

    jobs = opts.jobs or os.cpu_count() or 1
    require_threads(jobs)
    (checkpoint,) = checkpoints.values()
    return bench_values(checkpoint, opts.layers, jobs=jobs, repeats=opts.repeats, cold=opts.cold)


@click.command("inspect")
@click.argument("checkpoint", type=common.PATH, required=False)
@click.option("--values", is_flag=True, help="Measure inspect --values against read(2).")
@click.option(
    "--layers",
    callback=common.layer_list,
    metavar="LIST",
    help="With --values and CHECKPOINT: layers to read.",
)
@click.option("--jobs", type=common.POSITIVE, help="With --values: threads. Default: one a CPU.")
@click.option("--cold", is_flag=True, help="With --values: read from disk, not the page cache.")
@shared.repeats_option()
@shared.strict_option()
@shared.baseline_option()
@common.as_json()
def command(
    checkpoint: Path | None,
    values: bool,
    layers: tuple[int, ...] | None,
    jobs: int | None,
    cold: bool,
    repeats: int,
    strict: bool,
    as_json: bool,
    baseline: Path | None,
) -> None:
    """Measure inspect against stock safetensors, or read(2).

    The second is `--values`, its look at every value. Without CHECKPOINT one is made in a temporary
    folder: for the report stand-ins of the released one, with the experts in the stock writer's
    order and in an order of each layer's own; 4 GB with the release's widths, mostly MXFP4 experts,
    for `--values`.

    \b
    Example:
      k3tool bench inspect
      k3tool bench inspect --values --cold
    """
    opts = Options(checkpoint, values, layers, jobs, cold, repeats)
    name = "inspect --values" if values else "inspect"
    shared.measure(name, lambda: run(opts), strict=strict, as_json=as_json, baseline=baseline)
