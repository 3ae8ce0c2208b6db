"""`k3tool compile-plan`: a model's shape in, packets of both phases out."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from k3tool.artifact import InputRef
from k3tool.atomic import artifact_output, check_outputs
from k3tool.checkpoint.names import SHARDS_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Phase, Plan
from k3tool.compiler.proved import save_proved_plan
from k3tool.compiler.rules import RULE_NAMES
from k3tool.errors import ArtifactError, UsageError, excluded
from k3tool.isa.table import ALL_PHASES, Op
from k3tool.memory import require_memory
from k3tool.model.config import K3Config
from k3tool.progress import waiting
from k3tool.runtime.budget import compile_bytes, fit
from k3tool.runtime.options import parse_size
from k3tool.tables import bytes_text
from k3tool.targets import BATCH, DEFAULT_CHUNK, DEFAULT_CONTEXT, Target, get_target
from stages import options as common


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was asked for; None means: what the input, the target or the model says."""

    source: Path
    output: Path
    tp: int | None = None
    target: str = "cpu"
    workgroups: int | None = None
    chunk: int = DEFAULT_CHUNK
    batch: int = BATCH
    ctx: int | None = None
    without: tuple[str, ...] = ()
    phases: tuple[str, ...] = ALL_PHASES
    numerics: str = "f32"
    eps: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None  # of all ranks and the driver: the plan gets packets that load


@dataclass(frozen=True, slots=True)
class PhaseCounts:
    """Counts of one phase; `critical_path` is the hand-offs on the longest chain."""

    packets: int
    waits: int
    gates: int
    packet_path: int
    critical_path: int
    buffers: int
    arena_bytes: int
    peer_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """The plan as written, with what a person wants to see of it."""

    plan: Plan
    output: Path
    phases: Mapping[str, PhaseCounts]
    rules: Mapping[str, tuple[int, int]]  # applications that fired, and that the plan rests on


def run(options: Options) -> Result:
    """Compile, write and check plan.h5; one that does not prove itself on its bytes is not left.

    Raises: UnsoundError naming the check that did not pass; ArtifactError for an input that is
    absent, damaged or of another model; UsageError for an option that does not fit it.
    """
    check_outputs([artifact_output(options.output, "plan")], [options.source])
    target = get_target(options.target)
    if options.memory_bytes is not None:
        _check_budget(options, target)
    config, tp, inputs, identity = _read_source(options)
    require_memory(compile_bytes(config), "compiling")
    limit = config.max_position_embeddings

    def compile_chunk(chunk: int) -> Plan:
        return compile_plan(
            config,
            tp=tp,
            target=target.name,
            workgroups=target.workgroups if options.workgroups is None else options.workgroups,
            chunk=chunk,
            batch=options.batch,
            ctx=min(DEFAULT_CONTEXT, limit) if options.ctx is None else options.ctx,
            without=options.without,
            phases=options.phases,
            numerics=options.numerics,
            inputs=inputs,
            checkpoint_identity=identity,
        )

    if options.memory_bytes is None:
        plan = compile_chunk(options.chunk)
    else:
        plan = fit(compile_chunk, options.chunk, options.memory_bytes)
    plan = save_proved_plan(plan, options.output)
    phases = {name: _phase_counts(plan, phase) for name, phase in plan.phases.items()}
    fired = Counter(row.rule for row in plan.fired)
    used = Counter(row.rule for row in plan.fired if row.used)
    rules = {name: (fired[name], used[name]) for name in RULE_NAMES}
    return Result(plan, options.output, phases, rules)


def _check_budget(options: Options, target: Target) -> None:
    """Refuse a budget that no runtime keeps. Raises: UsageError."""
    if target.family != "cpu":
        raise excluded("--memory", f"--target {target.name}", "a GPU has no use for it")
    if tuple(sorted(options.phases)) != tuple(sorted(ALL_PHASES)):
        phases = " ".join(f"--phase {name}" for name in options.phases)
        raise excluded("--memory", phases, "one ring serves both phases")


def _read_source(options: Options) -> tuple[K3Config, int, list[InputRef], str]:
    """Return (config, tp, inputs, checkpoint identity) of a shards folder, checkpoint or config."""
    source = options.source
    if os.path.exists(source / SHARDS_NAME):
        shards = Shards.open(source, options.eps)
        if options.tp not in (None, shards.tp):
            need = f"{shards.tp}, as {source} was sharded"
            raise UsageError("--tp", got=options.tp, need=need, hint="leave out --tp")
        return shards.config, shards.tp, [shards.as_input("shards")], shards.identity
    if not os.path.lexists(source):
        raise ArtifactError(
            str(source), got="absent", need="shards, a checkpoint or a config.json",
            hint="name the folder that config.json lies in, or that file",
        )  # fmt: skip
    if os.path.isfile(source):
        config = K3Config.load(source, options.eps)
        return config, _degree(config, options.tp), [], ""
    with Checkpoint.open(source, options.eps) as checkpoint:
        if checkpoint.tp is not None:
            raise ArtifactError(
                str(source),
                got=f"the folder of rank {checkpoint.rank} of {checkpoint.tp}",
                need="the shards folder it lies in, a checkpoint or a config.json",
                hint=f"name {source.resolve().parent}",
            )
        tp = _degree(checkpoint.config, options.tp)
        return checkpoint.config, tp, [checkpoint.as_input()], checkpoint.identity


def _degree(config: K3Config, tp: int | None) -> int:
    """Return a legal degree; shards alone have one of their own. Raises: UsageError."""
    config.check_tp(tp)
    assert tp is not None
    return tp


def _phase_counts(plan: Plan, phase: Phase) -> PhaseCounts:
    buffers = sum(tensor.phase == phase.name for tensor in plan.tensors)
    return PhaseCounts(
        packets=len(phase.packets),
        waits=len(phase.waits),
        gates=phase.n_gates,
        packet_path=phase.packet_path,
        critical_path=phase.critical_path,
        buffers=buffers,
        arena_bytes=phase.arena_bytes,
        peer_bytes=phase.peer_bytes,
    )


# -- output ------------------------------------------------------------------------------------


def as_dict(result: Result) -> dict[str, object]:
    """Return the result as plain values for `--json`."""
    plan = result.plan
    return {
        "output": str(result.output),
        "digest": plan.digest,
        "params": dict(plan.params),
        "inputs": [ref._asdict() for ref in plan.inputs],
        "tensors": len(plan.tensors),
        "phases": {name: asdict(counts) for name, counts in result.phases.items()},
        "rules": {name: {"fired": f, "used": u} for name, (f, u) in result.rules.items()},
    }


def summary_lines(result: Result) -> Iterator[str]:
    """Yield what a person reads."""
    plan, params = result.plan, result.plan.params
    yield (
        f"plan {result.output}: {params['target']}, {params['numerics']['mode']}, "
        f"tp {params['tp']}, "
        f"{params['workgroups']} workgroups, batch {params['batch']}, chunk {params['chunk']}, "
        f"ctx {params['ctx']}, {len(plan.tensors)} tensors"
    )
    if not plan.inputs:
        yield "made from a config alone: it is bound to no checkpoint"
    for name, c in result.phases.items():
        yield (
            f"{name}: {c.packets} packets, {c.critical_path} hand-offs on the longest chain, "
            f"{c.waits} waits, {c.gates} gates, {c.buffers} buffers, "
            f"arena {bytes_text(c.arena_bytes)}, peer segment {bytes_text(c.peer_bytes)}"
        )
    used = [f"{name} {u}" for name, (_, u) in result.rules.items() if u]
    yield f"rules used: {', '.join(used) or 'none'}"
    if params["rules_off"]:
        yield f"rules off: {', '.join(params['rules_off'])}"
    yield f"theorems: {len(params['theorems'])}, one for each rule used"
    yield f"digest {plan.digest[:16]}"


def explain_lines(result: Result) -> Iterator[str]:
    """Yield what made the plan what it is: rules, ops, and which rules made which ops."""
    plan = result.plan
    yield "rule: applications, of which the plan rests on, theorem"
    for name, (fired, used) in result.rules.items():
        theorem = plan.params["theorems"].get(name, "")
        yield f"  {name:24} {fired:6} {used:6}  {theorem[:16] or 'not used'}"
    for phase in plan.phases.values():
        yield f"{phase.name}: packets by op, and the rules that made them"
        rules = [" ".join(plan.rules_of(phase.name, p)) for p in range(len(phase.packets))]
        ops = zip(phase.packets["op"].tolist(), rules, strict=True)
        for (op, names), count in sorted(Counter(ops).items()):
            yield f"  {Op(op).name:20} {count:6}  {names or 'primitive'}"
    for phase in plan.phases.values():
        yield f"{phase.name}: fused packets, and the rule applications that made them"
        for index, rows in enumerate(phase.made_by):
            if rows:
                yield f"  {index:5} {Op(int(phase.packets['op'][index])).name}"
            for row in rows:
                yield f"        {plan.fired[row].rule} at {plan.fired[row].root}"
    yield "eps"
    for site, value in result.plan.params["eps"].items():
        yield f"  {site:28} {value:g}"


def parse_eps(values: tuple[str, ...]) -> dict[str, float]:
    """Return `SITE=VALUE` options as a dict. Raises: UsageError naming one that is malformed."""
    out: dict[str, float] = {}
    for text in values:
        site, _, value = text.partition("=")
        try:
            out[site] = float(value)
        except ValueError:
            raise UsageError("--eps", got=text, need="SITE=VALUE, such as norm=1e-5") from None
    return out


@click.command(name="compile-plan")
@click.argument("source", metavar="SOURCE", type=common.PATH)
@common.tp()
@click.option("--target", default="cpu", show_default=True, help="What the plan is for.")
@click.option(
    "--workgroups", type=int, metavar="N", help="Workgroups to lay out for. Default: the target's."
)
@click.option(
    "--chunk",
    type=int,
    default=DEFAULT_CHUNK,
    show_default=True,
    metavar="N",
    help="Tokens a prefill step.",
)
@click.option(
    "--batch", type=int, default=BATCH, show_default=True, metavar="N", help="Sequences at once."
)
@click.option(
    "--ctx",
    type=int,
    metavar="N",
    help=f"Positions a sequence may reach. Default: {DEFAULT_CONTEXT}, or the model's limit.",
)
@click.option(
    "--phase",
    multiple=True,
    type=click.Choice(ALL_PHASES),
    help="Compile this phase alone. Default: both, which a run needs.",
)
@common.numerics()
@click.option("--without", multiple=True, metavar="RULE", help="Switch a rewrite rule off.")
@click.option("--eps", multiple=True, metavar="SITE=VALUE", help="Replace one norm's epsilon.")
@click.option("--memory", metavar="SIZE",
              help="Give the plan packets that bring its weights within this much memory, as run "
              "--memory does; not with a --phase alone, nor with a GPU's --target.")  # fmt: skip
@click.option("--explain", is_flag=True, help="Say which rules made which ops; not with --json.")
@common.output("the plan (plan.h5)")
@common.as_json()
def command(
    source: Path,
    tp: int | None,
    target: str,
    workgroups: int | None,
    chunk: int,
    batch: int,
    ctx: int | None,
    phase: tuple[str, ...],
    numerics: str,
    without: tuple[str, ...],
    eps: tuple[str, ...],
    memory: str | None,
    explain: bool,
    output: Path,
    as_json: bool,
) -> None:
    """Compile a model into a plan: operator graph, fused ops, packets, counters, memory map.

    SOURCE is a shards folder (its tp is the plan's), a checkpoint or a config.json (with --tp).

    \b
    Example:
      k3tool compile-plan SHARDS -o plan.h5
      k3tool compile-plan CKPT/config.json --tp 8 --explain -o plan.h5
      k3tool compile-plan SHARDS --memory 32GB -o plan-32gb.h5
    """
    common.refuse_beside("explain", beside="as_json")
    overrides = parse_eps(eps)
    phases = phase or ALL_PHASES
    options = Options(
        source,
        output,
        tp,
        target,
        workgroups,
        chunk,
        batch,
        ctx,
        without,
        phases,
        numerics,
        overrides,
        None if memory is None else parse_size(memory),
    )
    with waiting("compiling"):
        result = run(options)
    if as_json:
        click.echo(json.dumps(as_dict(result), indent=1))
        return
    click.echo("\n".join(summary_lines(result)))
    if explain:
        click.echo("\n".join(explain_lines(result)))
