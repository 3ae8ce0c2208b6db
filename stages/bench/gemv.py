"""`k3tool bench gemv`: products of weights and one token against the memory's read bandwidth."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3tool.runtime.interpreter import LEAVES
from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.frame import BenchReport


@dataclass(frozen=True, slots=True)
class Options:
    """Which leaves and modes; `threads` None is one a CPU that this process may use."""

    leaves: str = "auto"
    modes: tuple[str, ...] = ("f32", "bf16")
    threads: int | None = None
    repeats: int = 7
    versus: Path | None = None


def run(options: Options) -> "BenchReport":
    """Measure. Raises: TargetError for leaves this CPU lacks; UnsoundError for wrong bits."""
    from k3tool.bench.gemv import bench_gemv

    return bench_gemv(
        options.leaves, options.modes, threads=options.threads, repeats=options.repeats,
        versus=options.versus,
    )  # fmt: skip


@click.command("gemv")
@click.option("--leaves", type=click.Choice(LEAVES), default="auto", show_default=True,
              help="Leaf set; auto is the quickest here, AVX2 and the peers.")  # fmt: skip
@click.option("--numerics", "modes", type=click.Choice(["f32", "bf16"]), multiple=True,
              default=("f32", "bf16"), show_default=True, callback=shared.distinct,
              help="Activations; may be repeated.")  # fmt: skip
@shared.threads_option()
@shared.repeats_option()
@shared.versus_option()
@shared.strict_option()
@shared.baseline_option()
@common.as_json()
def command(
    leaves: str,
    modes: tuple[str, ...],
    threads: int | None,
    repeats: int,
    versus: Path | None,
    strict: bool,
    as_json: bool,
    baseline: Path | None,
) -> None:
    """Measure the matrix kernels against the read bandwidth.

    Four shapes of Kimi K3's weights, at least 1 GiB of memory in huge pages, all threads, each
    kernel interleaved with plain reading. Its first rows are compared with the scalar leaves.

    \b
    Example:
      k3tool bench gemv
      k3tool bench gemv --leaves avx2 --numerics f32 --json
    """
    options = Options(leaves, modes, threads, repeats, versus)
    shared.measure("gemv", lambda: run(options), strict=strict, as_json=as_json, baseline=baseline)
