"""`k3tool bench decode`: a token's time against the reading of its bytes, and where it went."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3tool.runtime.copying import CHOICES
from k3tool.runtime.interpreter import LEAVES
from k3tool.targets import DEFAULT_CHUNK
from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.decode import Options
    from k3tool.bench.frame import BenchReport


def run(options: "Options") -> "BenchReport":
    """Measure. Raises: UsageError for what is not there or does not fit; as `run` else."""
    from k3tool.bench.decode import bench_decode

    return bench_decode(options)


@click.command("decode")
@click.argument("checkpoint", type=common.PATH)
@common.numerics()
@click.option("--context", type=click.IntRange(min=0), default=1000, show_default=True, metavar="N",
              help="Positions before the first token; they hold noise.")  # fmt: skip
@click.option(
    "--tokens", type=common.POSITIVE, default=8, show_default=True, help="Tokens of a run."
)
@click.option("--threads", type=common.POSITIVE, metavar="N", help="Threads. Default: all cores.")
@click.option("--leaves", type=click.Choice(LEAVES), default="auto", show_default=True,
              help="Instruction set of the op bodies.")  # fmt: skip
@click.option("--workgroups", type=common.POSITIVE, metavar="N", help="As of run.")
@click.option("--chunk", type=common.POSITIVE, default=DEFAULT_CHUNK, show_default=True,
              metavar="N", help="Prompt tokens in a step of prefill.")  # fmt: skip
@click.option("--cache", type=common.PATH, help="As of run.")
@click.option("--weights", type=click.Choice(CHOICES), default="auto", show_default=True,
              help="As of run; auto copies wherever there is room.")  # fmt: skip
@shared.repeats_option()
@shared.strict_option()
@shared.baseline_option()
@common.as_json()
def command(strict: bool, as_json: bool, baseline: Path | None, **given: Any) -> None:
    """Measure resident decode as a share of read bandwidth, and prefill against decode.

    The weights stay in memory, copied or as mapped; both are measured in turn on the same threads.
    The anatomy says for the median token what each op moved and took, what hand-offs and idle
    workers took.

    \b
    Example:
      k3tool sample MID --preset mid
      k3tool bench decode MID --context 1000 --json
    """
    from k3tool.bench.decode import Options

    shared.measure(
        "decode", lambda: run(Options(**given)), strict=strict, as_json=as_json, baseline=baseline
    )
