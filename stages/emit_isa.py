"""`k3tool emit-isa`: a plan in, the instruction streams of all ranks out."""

from dataclasses import asdict, dataclass
from pathlib import Path

import click

from k3tool.atomic import artifact_output, check_outputs
from k3tool.canonical import canonical_json
from k3tool.compiler.plan import load_plan
from k3tool.compiler.proved import save_proved_isa
from k3tool.isa.emit import emit
from k3tool.progress import waiting
from stages import options as common


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was asked for; `target` None means the plan's own."""

    plan: Path
    output: Path
    target: str | None = None


@dataclass(frozen=True, slots=True)
class PhaseCounts:
    """Counts of one phase that a person wants to see."""

    instructions: int
    entries: int
    waits: int
    gates: int
    scratch_floats: int


@dataclass(frozen=True, slots=True)
class Result:
    """What was written."""

    output: str
    digest: str
    target: str
    ranks: int
    workgroups: int
    phases: dict[str, PhaseCounts]


@waiting("emitting")
def run(options: Options) -> Result:
    """Emit, write and check isa.h5; one that does not prove itself on its bytes is not left.

    Raises: UnsoundError naming the check that did not pass; ArtifactError for a damaged or stale
    plan; UsageError for a target not the plan's.
    """
    check_outputs([artifact_output(options.output, "isa")], [options.plan])
    plan = load_plan(options.plan)
    target = str(plan.params["target"]) if options.target is None else options.target
    isa = emit(plan, target, options.plan.name)
    digest = save_proved_isa(isa, options.output)
    phases = {
        name: PhaseCounts(
            len(stream.queues.signals),
            len(stream.queues.entries),
            len(stream.queues.waits),
            stream.n_gates,
            stream.scratch_floats,
        )
        for name, stream in isa.streams.items()
    }
    return Result(str(options.output), digest, target, isa.tp, isa.n_workgroups, phases)


@click.command("emit-isa")
@click.argument("plan", type=common.PATH)
@common.output("the streams (isa.h5)")
@click.option("--target", help="Refuse a plan that was compiled for another target.")
@common.as_json()
def command(plan: Path, output: Path, target: str | None, as_json: bool) -> None:
    """Emit a plan's instruction streams: 64-byte instructions and workgroup queues for every rank.

    \b
    Example:
      k3tool emit-isa plan.h5 --target cpu -o isa.h5
    """
    result = run(Options(plan, output, target))
    if as_json:
        click.echo(canonical_json(asdict(result)))
        return
    for name, counts in result.phases.items():
        click.echo(
            f"{name}: {counts.instructions} instructions, {counts.entries} entries in "
            f"{result.workgroups} queues, {counts.waits} waits, {counts.gates} gates, "
            f"{counts.scratch_floats} scratch floats"
        )
    click.echo(f"{result.output}: {result.ranks} ranks, {result.target}, {result.digest[:16]}")
