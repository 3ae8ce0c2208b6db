"""`k3tool bench budgets`: one model in budgets from the least to all of it, and its proof."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.frame import BenchReport


@dataclass(frozen=True, slots=True)
class Options:
    """The model, and how many budgets of what size of run."""

    source: Path
    count: int = 10
    ids: tuple[int, ...] = (1, 2, 3)
    gen: int = 4
    tp: int = 1
    numerics: str = "f32"
    cache: Path | None = None
    beside: tuple[Path, ...] = ()
    repeats: int = 3


def run(options: Options) -> "BenchReport":
    """Measure. Raises: what `k3tool run` raises, in words, as K3Error."""
    from k3tool.bench.budgets import Asked, bench_budgets

    command = (sys.executable, "-m", "stages.cli")
    return bench_budgets(
        Asked(options.source, command, options.count, options.ids, options.gen, options.tp,
              options.cache, options.numerics, options.beside, options.repeats)
    )  # fmt: skip


@click.command("budgets")
@click.argument("source", type=common.PATH, required=False)
@common.shards()
@click.option("--count", type=click.IntRange(min=2), default=10, show_default=True, metavar="N",
              help="Budgets.")  # fmt: skip
@click.option("--ids", metavar="1,2,3", default="1,2,3", show_default=True, help="The prompt.")
@click.option("--gen", type=click.IntRange(min=1), default=4, show_default=True,
              help="Tokens to generate.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
              help="Runs of each budget; its share of the device is their median.")  # fmt: skip
@common.tp(default=1)
@common.numerics(default="f32")
@click.option("--cache", type=common.PATH, help="As of run.")
@shared.page_option()
@shared.strict_option()
@shared.baseline_option()
@common.as_json()
def command(source: Path | None, shards: tuple[Path, ...], count: int, ids: str, gen: int,
            repeats: int, tp: int, numerics: str, cache: Path | None, page: Path | None,
            strict: bool, as_json: bool, baseline: Path | None) -> None:  # fmt: skip
    """Run one model in budgets from the least to all of it.

    Compared are bits, peaks of memory and rates. SOURCE is a checkpoint or a shards folder; its
    files are dropped from the page cache.

    \b
    Example:
      k3tool bench budgets CKPT --strict
      k3tool bench budgets SHARDS --tp 2 --count 4
    """
    from k3tool.runtime.options import parse_ids

    first, *beside = common.folders_of(source, shards)
    options = Options(
        first, count, parse_ids(ids), gen, tp, numerics, cache, tuple(beside), repeats
    )
    shared.check_page(page, [first, *beside])
    shared.measure(
        "budgets", lambda: run(options), strict=strict, as_json=as_json, baseline=baseline,
        after=lambda said: shared.write_page(page, said),
    )  # fmt: skip
