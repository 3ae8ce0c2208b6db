"""`k3tool bench long`: thousands of tokens at many ranks with random stalls."""

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
    """The model, the ranks and the tokens."""

    source: Path
    tp: int = 8
    gen: int = 2000
    cache: Path | None = None
    stalls: bool = True


def run(options: Options) -> "BenchReport":
    """Run. Raises: as k3tool.bench.long_run.bench_long."""
    from k3tool.bench.long_run import Asked, bench_long

    return bench_long(
        Asked(options.source, options.tp, options.gen, cache=options.cache, stalls=options.stalls)
    )


@click.command("long")
@click.argument("source", type=common.PATH)
@common.tp(default=8)
@click.option("--gen", type=click.IntRange(min=4), default=2000, show_default=True,
              help="Tokens to generate.")  # fmt: skip
@click.option("--cache", type=common.PATH, help="As of run.")
@click.option("--no-stalls", is_flag=True, help="Let workers run as they can.")
@shared.strict_option()
@shared.baseline_option()
@common.as_json()
def command(source: Path, tp: int, gen: int, cache: Path | None, no_stalls: bool, strict: bool,
            as_json: bool, baseline: Path | None) -> None:  # fmt: skip
    """Generate many tokens with workers that stop at random.

    Looked for are drift, leaks and hangs, at many ranks. SOURCE is a small checkpoint: what is
    tried is the hand-offs, not the weights. It builds an interpreter that stalls, so it needs the C
    compiler.

    \b
    Example:
      k3tool bench long CKPT --tp 8 --gen 2000 --strict
    """
    options = Options(source, tp, gen, cache, not no_stalls)
    shared.measure("long", lambda: run(options), strict=strict, as_json=as_json, baseline=baseline)
