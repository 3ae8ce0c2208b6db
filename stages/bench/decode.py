"""`k3tool bench decode`: a token's time against the reading of its bytes, and where it went."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3tool.atomic import Output, check_outputs
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
    "--gen",
    "tokens",
    type=common.POSITIVE,
    default=8,
    show_default=True,
    help="Tokens to generate and time, in each run.",
)
@shared.threads_option()
@click.option("--leaves", type=click.Choice(LEAVES), default="auto", show_default=True,
              help="Instruction set of the op bodies.")  # fmt: skip
@click.option("--workgroups", type=common.POSITIVE, metavar="N", help="As of run.")
@click.option("--chunk", type=common.POSITIVE, default=DEFAULT_CHUNK, show_default=True,
              metavar="N", help="Prompt tokens in a step of prefill.")  # fmt: skip
@click.option("--cache", type=common.PATH, help="As of run.")
@click.option("--weights", type=click.Choice(CHOICES), default="auto", show_default=True,
              help="As of run; auto copies wherever there is room.")  # fmt: skip
@click.option("--batch", type=click.IntRange(min=2), metavar="N",
              help="Measure N sequences at once against one, too.")  # fmt: skip
@shared.versus_option()
@click.option("--chrome-trace", type=common.PATH, metavar="FILE",
              help="Write a token's packets by worker, for Perfetto or chrome://tracing.",
              )  # fmt: skip
@shared.page_option()
@shared.repeats_option()
@shared.strict_option()
@shared.baseline_option()
@common.as_json()
def command(strict: bool, as_json: bool, baseline: Path | None, chrome_trace: Path | None,
            page: Path | None, **given: Any) -> None:  # fmt: skip
    """Measure decode as a share of the read bandwidth.

    Prefill is measured against it. The weights stay in memory, copied or as mapped; both are
    measured in turn on the same threads. The anatomy says for the median token what each op moved
    and took, what hand-offs and idle workers took. With --versus the tokens of two builds run in
    turn.

    \b
    Example:
      k3tool sample MID --preset mid
      k3tool bench decode MID --context 1000 --json
      k3tool bench decode MID --batch 8
      k3tool bench decode MID --chrome-trace token.json --report report.html
    """
    from k3tool.bench.decode import Options

    options = Options(**given)
    _check_files(options, chrome_trace, page)
    shared.measure(
        "decode", lambda: run(options), strict=strict, as_json=as_json, baseline=baseline,
        after=lambda said: _write_files(options, said, chrome_trace, page),
    )  # fmt: skip


def _check_files(options: "Options", chrome_trace: Path | None, page: Path | None) -> None:
    """Refuse outputs that cannot be, before anything is measured."""
    from k3tool.bench.timeline import TRACE_MARK

    outputs = shared.page_outputs(page)
    if chrome_trace is not None:
        outputs.append(Output("--chrome-trace", chrome_trace, "trace", TRACE_MARK))
    check_outputs(outputs, [options.checkpoint])


def _write_files(
    options: "Options", said: dict[str, Any], chrome_trace: Path | None, page: Path | None
) -> None:
    """Run once more for the trace, which takes no part in the measurement."""
    if chrome_trace is None and page is None:
        return
    from k3tool.bench.gathered import Gathered
    from k3tool.bench.report import write_page
    from k3tool.bench.timeline import record_token, write_trace

    trace = record_token(options)
    if chrome_trace is not None:
        write_trace(chrome_trace, trace)
    if page is not None:
        write_page(Gathered([("this run", said)], timelines=[("this run", trace)]), page)
