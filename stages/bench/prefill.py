"""`k3tool bench prefill`: reading a prompt, by chunk, against decode and the machine's limits."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3tool.runtime.copying import CHOICES
from k3tool.runtime.interpreter import LEAVES
from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.decode import Options
    from k3tool.bench.frame import BenchReport


def run(options: "Options", chunks: tuple[int, ...]) -> "BenchReport":
    """Measure. Raises: UsageError for what is not there or does not fit; as `run` else."""
    from k3tool.bench.prefill import bench_prefill

    return bench_prefill(options, chunks)


@click.command("prefill")
@click.argument("checkpoint", type=common.PATH)
@common.numerics()
@click.option("--chunk", "chunks", type=common.POSITIVE, multiple=True, default=(16, 64, 256),
              show_default=True, metavar="N", callback=shared.distinct,
              help="Prompt tokens in a step; may be repeated.",
              )  # fmt: skip
@click.option("--gen", "tokens", type=common.POSITIVE, default=4, show_default=True,
              help="Tokens to generate and time, in each run of decode.")  # fmt: skip
@shared.threads_option()
@click.option("--leaves", type=click.Choice(LEAVES), default="auto", show_default=True,
              help="Instruction set of the op bodies.")  # fmt: skip
@click.option("--workgroups", type=common.POSITIVE, metavar="N", help="As of run.")
@click.option("--cache", type=common.PATH, help="As of run.")
@click.option("--weights", type=click.Choice(CHOICES), default="auto", show_default=True,
              help="As of run; auto copies wherever there is room.")  # fmt: skip
@shared.repeats_option(3)
@shared.versus_option()
@shared.page_option()
@shared.strict_option()
@shared.baseline_option()
@common.as_json()
def command(checkpoint: Path, chunks: tuple[int, ...], tokens: int, numerics: str,
            threads: int | None, leaves: str, workgroups: int | None, cache: Path | None,
            weights: str, repeats: int, versus: Path | None, page: Path | None, strict: bool,
            as_json: bool, baseline: Path | None) -> None:  # fmt: skip
    """Measure prefill by chunk, against decode and the peaks.

    Numbers are tokens a second, times decode, shares of multiply-adds and of reading. Each chunk
    runs in turn with decode on the same threads; peaks are measured beside them. The anatomy says
    of the chunk of the median time what each op took.

    \b
    Example:
      k3tool bench prefill CKPT
      k3tool bench prefill CKPT --chunk 64 --chunk 512 --numerics bf16 --json
    """
    from k3tool.bench.decode import Options

    options = Options(checkpoint, numerics, 0, tokens, repeats, threads, leaves, workgroups,
                      cache=cache, weights=weights, versus=versus)  # fmt: skip
    shared.check_page(page, [checkpoint])
    shared.measure(
        "prefill", lambda: run(options, chunks), strict=strict, as_json=as_json, baseline=baseline,
        after=lambda said: shared.write_page(page, said),
    )  # fmt: skip
