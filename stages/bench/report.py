"""`k3tool bench report`: one page with pictures of what other commands measured."""

from dataclasses import dataclass
from pathlib import Path

import click

from k3tool.atomic import Output, check_outputs
from stages import options as common


@dataclass(frozen=True, slots=True)
class Options:
    """The files to draw, and the page."""

    files: tuple[Path, ...]
    output: Path


def run(options: Options) -> list[str]:
    """Write the page; return the headings of what nobody measured.

    Raises: TargetError without matplotlib; ArtifactError for a file that is nothing it draws.
    """
    from k3tool.bench.page import MARK
    from k3tool.bench.report import write_report

    check_outputs([Output("-o", options.output, "report", MARK)], options.files)
    return write_report(options.files, options.output)


@click.command("report")
@click.argument("files", type=common.PATH, nargs=-1, required=True)
@common.output("the page")
def command(files: tuple[Path, ...], output: Path) -> None:
    """Draw one page of measurements.

    It has anatomy, roofline, timeline, chain, experts and memory. FILES are what other commands
    wrote, in any order and number: JSON of bench (decode, prefill, roofline, budgets ...) and of
    run --plan-only, a trace of bench decode --chrome-trace, a plan.h5, a trace of run
    --expert-trace. The page needs no network and no other file; what nobody measured is named on it
    and here.

    \b
    Example:
      k3tool bench decode CKPT --chrome-trace token.json --json > decode.json
      k3tool bench report decode.json token.json plan.h5 -o report.html
    """
    missing = run(Options(files, output))
    click.echo(f"report {output}: {len(files)} files drawn")
    for heading in missing:
        click.echo(f"NOT MEASURED: {heading}")
