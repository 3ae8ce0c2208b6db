"""`k3tool verify trace`: the first op whose bits differ between two runs, or ranks of one."""

from dataclasses import asdict, dataclass
from pathlib import Path

import click

from k3tool.errors import UsageError, incomplete
from k3tool.trace.compare import check_ranks, compare_traces
from k3tool.trace.difference import Comparison
from k3tool.trace.file import TraceFile
from k3tool.trace.values import Largest, compare_values
from k3tool.verdict import Check, not_run, require
from stages import options as common
from stages.verify import shared


@dataclass(frozen=True, slots=True)
class Options:
    """One trace, or two to compare; `values` asks for the numbers at the first difference too."""

    files: tuple[Path, ...]
    values: bool = False
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Result(shared.Result):
    """The checks, the first difference where there is one, and how far its values are apart."""

    found: Comparison
    largest: Largest | None = None


def run(options: Options) -> Result:
    """Make the checks.

    Raises: UsageError for other than one or two files; ArtifactError for damaged ones, and for
    those that answer other questions.
    """
    if not 1 <= len(options.files) <= 2:
        got, need = f"{len(options.files)} files", "one trace, or two to compare"
        raise UsageError("TRACE", got=got, need=need, hint="compare them two at a time")
    shared.require_apart(options.files)
    if options.values and len(options.files) == 1:
        raise incomplete("--values", "second TRACE", "values are compared, not shown")
    largest = None
    with TraceFile(options.files[0]) as left:
        if len(options.files) == 1:
            found = Comparison([_alone(left)])
        else:
            with TraceFile(options.files[1]) as right:
                found = compare_traces(left, right)
                if options.values or found.difference is not None:
                    check, largest = compare_values(left, right, found.difference)
                    found.checks.append(check)
    made = shared.result_of(found.checks, strict=options.strict)
    return Result(made.checks, made.sound, found, largest)


def _alone(file: TraceFile) -> Check:
    check = check_ranks(file)
    if check is None:
        reason = "one rank only, nothing to compare it with: give a second trace"
        return not_run(f"{file.name}: replicated results equal on all ranks", reason)
    return check


@click.command("trace", short_help="Name the first op whose bits differ between two runs.")
@click.argument("files", metavar="TRACE [TRACE]", type=common.PATH, nargs=-1, required=True)
@click.option(
    "--values",
    is_flag=True,
    help="Compare kept values (run --trace-at) where no hash differs, too.",
)
@shared.strict()
@common.as_json()
def command(files: tuple[Path, ...], values: bool, strict: bool, as_json: bool) -> None:
    """Compare two traces of run --trace-hashes result by result, in the order of packets.

    The first difference is named by step, packet, op, layer, rank, slice and graph value; all
    before it is equal. Traces may be of any TP degree, chunking, memory budget, thread count and
    set of rules; they have to answer one prompt from one checkpoint in one mode of the arithmetic.
    Of one trace alone, what all ranks hold whole is compared.

    \b
    Example:
      k3tool verify trace good.h5 bad.h5
      k3tool verify trace tp8.h5
    """
    result = run(Options(files, values, strict))
    if as_json:
        first = result.found.difference
        more = {
            "difference": None if first is None else first._asdict(),
            "results_equal": result.found.n_results,
            "results_left_out": result.found.n_left_out,
            "largest": None if result.largest is None else asdict(result.largest),
        }
        shared.show_json(result, more)
    else:
        shared.show_lines(result)
    require(result.checks, strict=strict, alone="give a second trace to compare it with")
