"""`k3tool disasm`: a stream or a plan, one instruction a line."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click

from k3tool.artifact import open_artifact
from k3tool.artifact_roots import how_made
from k3tool.atomic import artifact_output, check_outputs
from k3tool.checkpoint.regular_file import read_regular
from k3tool.compiler.plan import Plan, load_plan
from k3tool.compiler.proved import save_proved_plan
from k3tool.errors import ArtifactError, UsageError, incomplete, quoted
from k3tool.isa import disasm
from k3tool.isa.assemble import assemble
from k3tool.isa.stream import Isa, Stream, load_isa
from k3tool.isa.table import ALL_PHASES
from stages import options as common
from stages.refusals import unfit
from stages.streams import flush_or_stop

_LISTING = "give all that k3tool disasm printed of this plan, edited or not"


@dataclass(frozen=True, slots=True)
class Options:
    """What to print: `phase` None is every phase, `rows` None every instruction."""

    file: Path
    phase: str | None = None
    rank: int = 0
    rows: tuple[int | None, int | None] | None = None
    workgroup: int | None = None
    listing: Path | None = None  # to assemble instead of printing
    output: Path | None = None


def run(options: Options) -> Iterator[str]:
    """Yield lines.

    Raises: ArtifactError for a damaged file or another kind; UsageError for a bad choice.
    """
    if options.listing is not None and options.output is None:
        raise incomplete("--assemble", "-o")
    if options.output is not None and options.listing is None:
        raise incomplete("-o", "--assemble")
    with open_artifact(options.file, ("isa", "plan")) as file:
        kind = file.kind
    if options.listing is not None and options.output is not None:
        yield _assembled(options.file, options.listing, options.output)
    elif kind == "plan":
        if options.workgroup is not None or options.rank:
            name = "--rank" if options.rank else "--workgroup"
            need = "an isa.h5: a plan has neither ranks nor queues"
            raise UsageError(name, got="a plan", need=need, hint=how_made("isa"))
        yield from _plan_lines(load_plan(options.file), options)
    else:
        yield from _isa_lines(load_isa(options.file), options)


def _assembled(file: Path, listing: Path, output: Path) -> str:
    """Write a plan with the packets of a listing; return a line that says so."""
    check_outputs([artifact_output(output, "plan")], [file, listing])
    plan = load_plan(file)
    try:
        text = read_regular(listing, "a listing", is_fetched=False).decode()
    except UnicodeDecodeError:
        raise ArtifactError(
            str(listing), got="no utf-8 text", need="a listing", hint=_LISTING
        ) from None
    found = assemble(text.splitlines(), str(listing), len(plan.tensors))
    if sorted(found) != sorted(plan.phases):
        got, need = ", ".join(found), " and ".join(plan.phases)
        raise ArtifactError(str(listing), got=got, need=f"{need}, whole", hint=_LISTING)
    phases = {}
    for name, phase in plan.phases.items():
        packets, waits = found[name]
        if len(packets) != len(phase.packets):
            got, need = f"{len(packets)} packets of {name}", f"{len(phase.packets)}, as {file} has"
            raise ArtifactError(str(listing), got=got, need=need, hint=_LISTING)
        phases[name] = replace(phase, packets=packets, waits=waits)
    saved = save_proved_plan(replace(plan, phases=phases), output)
    return f"plan {output}: digest {saved.digest}"


def _phases(names: list[str], options: Options) -> list[str]:
    if options.phase is None:
        return names
    if options.phase not in names:
        raise UsageError("--phase", got=options.phase, need=" or ".join(names))
    return [options.phase]


def _rows(options: Options, phase: str, n_rows: int) -> range:
    """Return the instructions to print. A range is never clamped: its end may be a typing error."""
    first, last = options.rows or (None, None)
    first, last = first or 0, n_rows if last is None else last
    if last > n_rows or (first >= last and n_rows):
        need = f"a part of 0:{n_rows}, the instructions of {phase}"
        raise UsageError("--range", got=f"{first}:{last}", need=need)
    return range(first, last)


def _plan_lines(plan: Plan, options: Options) -> Iterator[str]:
    chosen = _phases(list(plan.phases), options)
    # All choices are checked before a line is printed.
    ranges = [_rows(options, name, len(plan.phases[name].packets)) for name in chosen]
    for name, rows in zip(chosen, ranges, strict=True):
        phase = plan.phases[name]
        yield f"; {name}: {len(phase.packets)} packets, {phase.max_tokens} tokens, TP {plan.tp}"
        yield from disasm.lines(disasm.of_plan(phase, plan.tp), plan.tensors, rows.start, rows.stop)


def _isa_lines(isa: Isa, options: Options) -> Iterator[str]:
    if options.rank >= isa.tp:
        raise UsageError("--rank", got=options.rank, need=f"below {isa.tp}")
    if options.workgroup is not None and options.workgroup >= isa.n_workgroups:
        need = f"below {isa.n_workgroups}"
        raise UsageError("--workgroup", got=options.workgroup, need=need)
    chosen = _phases(list(isa.streams), options)
    ranges = [_rows(options, name, len(isa.streams[name].queues.signals)) for name in chosen]
    for name, rows in zip(chosen, ranges, strict=True):
        stream = isa.streams[name]
        listing = disasm.of_stream(stream, options.rank)
        yield _isa_head(stream, isa, options)
        if options.workgroup is None:
            yield from disasm.lines(listing, isa.tensors, rows.start, rows.stop)
        else:
            group = options.workgroup
            yield from disasm.queue_lines(stream, listing, isa.tensors, group, rows)


def _isa_head(stream: Stream, isa: Isa, options: Options) -> str:
    queue = "" if options.workgroup is None else f", workgroup {options.workgroup}"
    return (
        f"; {stream.name}: {len(stream.queues.signals)} instructions, {stream.max_tokens} tokens, "
        f"rank {options.rank} of {isa.tp}{queue}, {isa.target}"
    )


def _parse_range(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int | None, int | None] | None:
    """Parse ``a:b``, ``a:``, ``:b`` or one index."""
    if value is None:
        return None
    first, colon, last = value.partition(":")
    try:
        if not colon:
            return int(first), int(first) + 1
        bounds = (int(first) if first else None, int(last) if last else None)
    except ValueError:
        raise unfit(param, ctx, got=quoted(value), need="A:B, such as 0:8") from None
    if any(bound is not None and bound < 0 for bound in bounds):
        raise unfit(param, ctx, got=quoted(value), need="bounds that count from 0")
    return bounds


_OF_PRINTING = ("phase", "rank", "rows", "workgroup")


@click.command("disasm")
@click.argument("file", type=common.PATH)
@click.option("--phase", type=click.Choice(ALL_PHASES), help="Only this phase.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, metavar="R",
              help="Whose.")  # fmt: skip
@click.option("--range", "rows", callback=_parse_range, metavar="A:B", help="Instructions A to B.")
@click.option("--workgroup", type=click.IntRange(min=0), help="The queue of one workgroup.")
@click.option(
    "--assemble",
    "listing",
    type=common.PATH,
    metavar="FILE",
    help="Read a plan's listing back; with -o, and without --phase, --rank, --range and "
    "--workgroup.",
)
@common.output("the plan that --assemble makes", required=False)
def command(
    file: Path,
    phase: str | None,
    rank: int,
    rows: tuple[int | None, int | None] | None,
    workgroup: int | None,
    listing: Path | None,
    output: Path | None,
) -> None:
    """Print a stream (isa.h5) or a plan as a person reads it, one instruction a line.

    `x=%12(l0.h)` is operand x, handle 12, its name. `wait=[p3>=8, g0>=16]`: eight slices of
    packet 3 and 16 arrivals at gate 0, of all ranks, before any slice starts.

    \b
    Example:
      k3tool disasm isa.h5 --phase decode --range 0:20
      k3tool disasm isa.h5 --rank 3 --workgroup 0

    --assemble is the inverse: FILE's packets are replaced by those of an (edited) listing of all of
    it, and the plan is written if it passes its checks.

    \b
    Example:
      k3tool disasm plan.h5 > plan.txt
      k3tool disasm plan.h5 --assemble plan.txt -o edited.h5
    """
    common.refuse_beside(*_OF_PRINTING, beside="listing", why="a plan is assembled whole")
    for line in run(Options(file, phase, rank, rows, workgroup, listing, output)):
        click.echo(line)
        flush_or_stop()  # a stream may have millions of lines
