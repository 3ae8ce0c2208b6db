"""`k3tool verify ranks`: compare the ranks of runs, and runs with each other."""

from dataclasses import dataclass
from pathlib import Path

import click

from k3tool.runtime.tokens import read_tokens, verify_ranks
from stages import options as common
from stages.verify import shared


@dataclass(frozen=True, slots=True)
class Options:
    """Which records to compare."""

    files: tuple[Path, ...]
    strict: bool = False


def run(options: Options) -> shared.Result:
    """Make the checks. Raises: ArtifactError for damaged or unrelated inputs."""
    checks = verify_ranks([read_tokens(path) for path in options.files])
    return shared.result_of(checks, strict=options.strict)


@click.command("ranks", short_help="Compare ranks, and runs of any TP degree, bit by bit.")
@click.argument("files", type=common.PATH, nargs=-1, required=True)
@shared.strict()
@common.as_json()
def command(files: tuple[Path, ...], strict: bool, as_json: bool) -> None:
    """Compare the ranks inside each tokens.h5, then every file with the first.

    Files may be of any TP degree; they have to answer one prompt from one checkpoint. The first
    difference is shown with step, ranks, ids and margins.

    \b
    Example:
      k3tool verify ranks tp1.h5 tp8.h5
    """
    shared.report(run(Options(files, strict)), "ranks", strict=strict, as_json=as_json)
