"""`k3tool bench io`: what a device gives when weights are read around the page cache."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3tool.tables import bytes_text
from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.frame import BenchReport, Spread


WARM_UP = 1  # passes that are not kept: a device that slept takes its time to wake


@dataclass(frozen=True, slots=True)
class Options:
    """What to read; sizes in bytes, `depth` reads at once."""

    path: Path
    block_bytes: int = 1 << 20
    depth: int = 4
    n_bytes: int = 512 << 20
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Result:
    """Bytes a second over the repeats; `is_direct` false: perhaps memory's rate, not a device's.

    `has_hole`: surely not a device's.
    """

    file: str
    block_bytes: int
    depth: int
    rate: "Spread"
    is_direct: bool
    has_hole: bool


def run(options: Options) -> Result:
    """Measure. Raises: UsageError, K3Error as k3tool.bench.io.measure_io."""
    from k3tool.bench.frame import spread
    from k3tool.bench.io import largest_file, measure_io
    from k3tool.checkpoint.stand_in import has_hole

    file = largest_file(options.path)
    passes = [
        measure_io(file, options.block_bytes, options.depth, options.n_bytes)
        for _ in range(WARM_UP + options.repeats)
    ][WARM_UP:]
    rate = spread([one.rate for one in passes])
    is_direct = all(one.is_direct for one in passes)
    return Result(str(file), options.block_bytes, options.depth, rate, is_direct, has_hole(file))


def report_of(result: Result) -> "BenchReport":
    """Return it in the form that all measurements have."""
    from k3tool.bench.frame import BenchReport, machine_line, spread

    in_gb = [rate / 1e9 for rate in (result.rate.least, result.rate.median, result.rate.most)]
    rate = spread(in_gb)._replace(n=result.rate.n)
    definition = [*definition_lines(result), machine_line()]
    facts = asdict(result) | {"rate": result.rate._asdict()}
    return BenchReport("io", definition, [("read from the device", rate, "GB/s")], (), facts)


def definition_lines(result: Result) -> Iterator[str]:
    """Yield what was read, and why it may be no device's rate."""
    yield (
        f"{result.file}: blocks of {bytes_text(result.block_bytes)} each read once, out of order, "
        f"{result.depth} at a time; a pass is one value, the first is not kept"
    )
    if not result.is_direct:
        yield "through the page cache: this file system reads in no other way"
    if result.has_hole:
        yield "the file has holes, which are read from no device: this is not its rate"


@click.command("io")
@click.argument("path", type=common.PATH)
@click.option(
    "--block",
    "block_bytes",
    type=click.IntRange(min=1),
    default=1 << 20,
    show_default=True,
    metavar="BYTES",
    help="Bytes of a read: an expert's, say.",
)
@click.option("--depth", type=int, default=4, show_default=True, help="Reads at a time.")
@click.option(
    "--bytes",
    "n_bytes",
    type=click.IntRange(min=1),
    default=512 << 20,
    show_default=True,
    help="Bytes of a pass, at most the file's.",
)
@shared.repeats_option(3, "Passes")
@shared.baseline_option()
@common.as_json()
def command(as_json: bool, path: Path, block_bytes: int, depth: int, n_bytes: int,
            repeats: int, baseline: Path | None) -> None:  # fmt: skip
    """Measure a device as a run with --memory reads it.

    It reads around the page cache. PATH is a file, or a folder of which the largest weight file is
    read.

    \b
    Example:
      k3tool bench io CKPT --block 17547264 --depth 4
    """
    options = Options(path, block_bytes, depth, n_bytes, repeats)
    shared.measure(
        "io", lambda: report_of(run(options)), strict=False, as_json=as_json, baseline=baseline
    )
