"""`k3tool bench handoff`: what an empty packet costs, beside a plain barrier."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.frame import BenchReport
    from k3tool.bench.handoff import Asked


def run(options: "Asked") -> "BenchReport":
    """Measure. Raises: UsageError for sizes that are none; TargetError for a stale interpreter."""
    from k3tool.bench.handoff import bench_handoff

    return bench_handoff(options)


@click.command("handoff")
@shared.threads_option()
@click.option("--tp", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N",
              help="Ranks: processes that meet in shared memory.")  # fmt: skip
@click.option("--packets", type=common.POSITIVE, default=2000, show_default=True, metavar="N",
              help="Empty packets in a step.")  # fmt: skip
@shared.repeats_option()
@shared.versus_option()
@shared.baseline_option()
@common.as_json()
def command(threads: int | None, tp: int, packets: int, repeats: int,
            versus: Path | None, as_json: bool, baseline: Path | None) -> None:  # fmt: skip
    """Measure a packet that does nothing, against a barrier.

    The packets run on the interpreter as any program: one after the other, each waiting for the
    one before; run by one worker alone, passed from worker to worker, and waited for by all
    workers of a rank or of all ranks. The barrier does nothing else; it has as many threads, and
    runs in turn with them.

    \b
    Example:
      k3tool bench handoff
      k3tool bench handoff --threads 1 --tp 2 --json
    """
    from k3tool.bench.handoff import Asked

    asked = Asked(threads, tp, packets, repeats, versus)
    shared.measure("handoff", lambda: run(asked), strict=False, as_json=as_json, baseline=baseline)
