"""`k3tool bench`: measurements and models, each number with what it was made from beside it."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3tool.artifact import canonical_json
from k3tool.errors import UnsoundError, UsageError
from k3tool.targets import get_target
from stages import options as common

if TYPE_CHECKING:
    from k3tool.bench.chain import Chain
    from k3tool.bench.frame import BenchReport
    from k3tool.bench.simulate import Costs, Simulated
    from k3tool.isa.stream import Isa


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure: `what` is chain (of a plan) or simulate (of a stream), `file` its artifact.

    Bandwidths are in GB/s, None for the target's data sheet; times in us.
    """

    what: str
    file: Path
    phase: str = "decode"
    bandwidth: float | None = None
    seeds: int = 4
    handoff_us: float = 3.46
    gate_us: float | None = None
    unit_bandwidth: float = 100.0
    stall_rate: float = 0.00001
    stall_us: float = 10.0


def run(options: Options) -> "Chain | Simulation":
    """Measure. Raises: ArtifactError for a damaged file or another kind; UnsoundError as found."""
    if options.what == "chain":
        return _chain(options)
    assert options.what == "simulate", options.what
    return _simulate(options)


@click.group("bench")
def command() -> None:
    """Measure, with the definition beside each number.

    \b
    Example:
      k3tool bench chain plan.h5
      k3tool bench simulate isa.h5 --seeds 8
      k3tool bench inspect --values
      k3tool bench shard --folder /mnt/nvme
    """


def _phase_option() -> common.Decorator:
    return click.option(
        "--phase", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True,
        help="Which phase.",
    )  # fmt: skip


def _bandwidth_option() -> common.Decorator:
    return click.option(
        "--bandwidth", type=click.FloatRange(min=1.0), metavar="GB/s",
        help="Memory bandwidth to assume. Default: the target's data sheet.",
    )  # fmt: skip


def _bandwidth(target: str, given: float | None) -> float:
    """Return bytes a second; a CPU has no one number and is taken as the 100 GB/s of a desktop."""
    return (get_target(target).peak_bytes_per_s or 1e11) if given is None else given * 1e9


# -- chain ---------------------------------------------------------------------------------------


@command.command("chain")
@click.argument("plan", type=common.PATH)
@_phase_option()
@_bandwidth_option()
@common.as_json()
def chain(plan: Path, phase: str, bandwidth: float | None, as_json: bool) -> None:
    """Count a plan's hand-offs: packets, edges, waits, polls, path, and the floor they imply.

    `critical_path` counts every packet gate and every wait inside a packet on the longest chain as
    one each, a gate that all ranks arrive at included. The floor is that count times what one
    hand-off costs in the system this one starts from.

    \b
    Example:
      k3tool bench chain plan.h5 --json
    """
    measured = run(Options("chain", plan, phase, bandwidth))
    assert not isinstance(measured, Simulation)
    if as_json:
        click.echo(canonical_json(chain_data(measured)))
        return
    click.echo("\n".join(chain_lines(measured)))


def _chain(options: Options) -> "Chain":
    from k3tool.bench.chain import measure_chain
    from k3tool.compiler.plan import load_plan

    plan = load_plan(options.file)
    bandwidth = _bandwidth(str(plan.params["target"]), options.bandwidth)
    return measure_chain(plan, options.phase, bandwidth)


def chain_data(c: "Chain") -> dict[str, object]:
    """Return what `--json` prints."""
    from k3tool.bench.chain import PRIOR

    names = ("packets", "critical_path")
    prior = {name: dict(zip(names, row, strict=True)) for name, row in PRIOR.items()}
    return {**asdict(c), "prior": prior}


def chain_lines(c: "Chain") -> Iterator[str]:
    """Yield what a person reads."""
    from k3tool.bench.chain import HANDOFF_US, PRIOR

    yield f"{c.phase}, {c.target}, TP {c.tp}"
    yield f"packets          {c.packets:8}   {_beside(PRIOR, 0)}"
    yield f"critical path    {c.critical_path:8}   {_beside(PRIOR, 1)} (hand-offs)"
    yield f"packet path      {c.packet_path:8}   packets on the longest chain"
    yield f"mean width       {c.mean_width:8.2f}   packets per step of it"
    yield f"edges            {c.edges:8}   one packet reads what the other wrote"
    yield f"waits            {c.waits:8}   {c.transitive} edges need none: others imply them"
    spread = ", ".join(f"{n}: {count}" for n, count in c.waits_per_packet.items())
    yield f"waits a packet              {spread}"
    yield f"polls            {c.polls:8}   slices times waits"
    widths = ", ".join(f"{name}: {n}" for name, n in c.polls_by_width.items() if n)
    yield f"polls by slices             {widths}"
    yield f"arrivals         {c.bumps:8}   {c.gates} gates at all {c.tp} ranks"
    yield f"live counters    {c.live_counters:8}   at most, in packet order"
    mb = c.bytes_total / 1e6
    yield f"bytes            {mb:8.1f}   MB a rank and step, at full context"
    mean, median = c.bytes_mean / 1e3, c.bytes_median / 1e3
    yield f"bytes a packet   {mean:8.1f}   kB mean, {median:.1f} median"
    ms = c.bytes_total / c.bandwidth * 1e3
    yield f"at {c.bandwidth / 1e9:.0f} GB/s these bytes take {ms:.3f} ms"
    for name, us in HANDOFF_US.items():
        yield (
            f"floor at {us:5.2f} us {c.floor_ms[name]:7.3f}   ms ({name}); "
            f"{c.below_floor[name]} packets move less than a hand-off's worth of bytes"
        )
    yield "packets by op"
    for op, count in c.histogram.items():
        yield f"  {op:20} {count:6}"


def _beside(prior: dict[str, tuple[int, int]], which: int) -> str:
    return "the starting system: " + ", ".join(
        f"{row[which]} {name}" for name, row in prior.items()
    )


# -- simulate ------------------------------------------------------------------------------------


@command.command("simulate")
@click.argument("isa", type=common.PATH)
@_phase_option()
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="N",
    help="How many runs, each with its own stalls and interleaving.",
)
@click.option(
    "--handoff-us",
    type=click.FloatRange(min=0.0),
    default=3.46,
    show_default=True,
    help="Cost of a hand-off on one rank.",
)
@click.option(
    "--gate-us",
    type=click.FloatRange(min=0.0),
    metavar="US",
    help="Cost of one that all ranks arrive at. Default: --handoff-us.",
)
@_bandwidth_option()
@click.option(
    "--unit-bandwidth",
    type=click.FloatRange(min=0.001),
    default=100.0,
    show_default=True,
    metavar="GB/s",
    help="What one workgroup can move alone.",
)
@click.option(
    "--stall-rate",
    type=click.FloatRange(0.0, 1.0),
    default=0.00001,
    show_default=True,
    help="Part of entries that stall.",
)
@click.option(
    "--stall-us",
    type=click.FloatRange(min=0.0),
    default=10.0,
    show_default=True,
    help="Mean stall.",
)
@common.as_json()
def simulate(
    isa: Path,
    phase: str,
    seeds: int,
    handoff_us: float,
    gate_us: float | None,
    bandwidth: float | None,
    unit_bandwidth: float,
    stall_rate: float,
    stall_us: float,
    as_json: bool,
) -> None:
    """Execute a stream's waits and signals on all ranks, and predict a token's time.

    Every seed is executed twice: in random order by queues (and by domain windows, where the target
    has them), which must never lock, and in time, with the costs given. The first line is the time
    without stalls. What is modelled and what is not stands in k3tool/bench/simulate.py.

    \b
    Example:
      k3tool bench simulate isa.h5 --seeds 8 --handoff-us 5.72
    """
    costs = (handoff_us, gate_us, unit_bandwidth, stall_rate, stall_us)
    result = run(Options("simulate", isa, phase, bandwidth, seeds, *costs))
    assert isinstance(result, Simulation)
    if as_json:
        click.echo(canonical_json({"phase": phase, "deadlocks": 0, **asdict(result)}))
        return
    click.echo("\n".join(simulated_lines(result)))


@dataclass(frozen=True, slots=True)
class Simulation:
    """Times of one run without stalls and of every seed, and what executing each seed took."""

    costs: "Costs"
    without_stalls: "Simulated"
    seeds: "Sequence[Simulated]"
    executed: Sequence[dict[str, int]]


def _simulate(options: Options) -> Simulation:
    from k3tool.bench.simulate import Costs, Timeline, simulate
    from k3tool.isa.stream import load_isa

    isa = load_isa(options.file)
    gate_us = options.handoff_us if options.gate_us is None else options.gate_us
    memory = (_bandwidth(isa.target, options.bandwidth), options.unit_bandwidth * 1e9)
    calm = Costs(options.handoff_us, gate_us, *memory, 0.0, 0.0)
    costs = replace(calm, stall_rate=options.stall_rate, stall_us=options.stall_us)
    timeline = Timeline(isa, isa.streams[options.phase])
    base = simulate(timeline, calm, 0)
    results, executed = [], []
    for seed in range(options.seeds):
        executed.append(_execute(isa, options.phase, seed))
        results.append(simulate(timeline, costs, seed))
        click.echo(f"seed {seed}: done", err=True)
    return Simulation(costs, base, results, executed)


def _execute(isa: "Isa", phase: str, seed: int) -> dict[str, int]:
    """Execute one interleaving by queues and one by windows; return entries and rounds of each."""
    from k3tool.isa.execution import execute

    stream = isa.streams[phase]
    by_queue = execute(isa, stream, seed)
    out = {"seed": seed, "entries": by_queue.entries, "rounds": by_queue.rounds}
    if stream.windows is not None:
        out["window_rounds"] = execute(isa, stream, seed, by_window=True).rounds
    return out


def simulated_lines(result: Simulation) -> Iterator[str]:
    """Yield what a person reads."""
    base, executed = result.without_stalls, result.executed
    yield f"token            {base.token_us / 1e3:9.3f} ms without stalls"
    local = base.handoffs - base.gates
    yield f"  hand-offs      {base.handoff_us / 1e3:9.3f} ms, {local} on one rank"
    yield f"  gates          {base.gate_us / 1e3:9.3f} ms, {base.gates} of all ranks"
    yield f"  bytes          {base.work_us / 1e3:9.3f} ms on the chain that decides"
    for op, us in list(base.work_us_by_op.items())[:8]:
        yield f"    {op:20} {us / 1e3:9.3f} ms"
    times = sorted(r.token_us / 1e3 for r in result.seeds)
    yield f"with stalls      {times[0]:9.3f} to {times[-1]:.3f} ms over {len(times)} seeds"
    ways = "by queues and by windows" if "window_rounds" in executed[0] else "by queues"
    yield f"no deadlock in {len(executed)} random orders {ways} of {executed[0]['entries']} entries"


# -- measurements --------------------------------------------------------------------------------


def _repeats_option() -> common.Decorator:
    return click.option(
        "--repeats", type=click.IntRange(min=1), default=7, show_default=True, metavar="N",
        help="Runs of each side that are kept, after one to warm up.",
    )  # fmt: skip


def _strict_option() -> common.Decorator:
    return click.option("--strict", is_flag=True, help="Exit code 4 if a limit is missed.")


def show(report: "BenchReport", *, strict: bool, as_json: bool) -> None:
    """Print a measurement. Raises: UnsoundError under `strict` if one of its limits is missed."""
    click.echo(json.dumps(report.as_dict(), indent=1) if as_json else "\n".join(report.lines()))
    for limit in report.limits:
        if strict and not limit.is_held:
            got = f"{limit.value:.3g}"
            raise UnsoundError(f"bench {report.name}: {limit.name}", got=got, need=limit.bound)


# -- inspect -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """What `bench inspect` measures: the report, or with `values` the look at every byte.

    Without `checkpoint` the stand-in of the released one is made in a temporary folder.
    """

    checkpoint: Path | None
    values: bool = False
    layers: tuple[int, ...] | None = None
    jobs: int = 0
    cold: bool = False
    fingerprint: bool = False
    repeats: int = 7


def measure_inspect(opts: InspectOptions) -> "BenchReport":
    """Measure. Raises: UsageError on options that do not go together; K3Error if a side fails."""
    if not opts.values and (opts.layers is not None or opts.cold or opts.fingerprint):
        raise UsageError("--layers, --cold, --fingerprint", got="no --values", need="--values")
    if opts.checkpoint is None:
        from k3tool.checkpoint.released_layout import RELEASED_DATA, write_released

        with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
            made, layers = Path(folder) / "released", (0,) if opts.values else None
            write_released(made, RELEASED_DATA, layers or ())
            return measure_inspect(replace(opts, checkpoint=made, layers=layers))
    if not opts.values:
        from k3tool.bench.inspect_headers import bench_inspect

        return bench_inspect(opts.checkpoint, opts.repeats)
    from k3tool.bench.inspect_values import bench_values

    return bench_values(
        opts.checkpoint, opts.layers, jobs=opts.jobs or os.cpu_count() or 1,
        repeats=opts.repeats, cold=opts.cold, fingerprint=opts.fingerprint,
    )  # fmt: skip


@command.command("inspect")
@click.argument("checkpoint", type=common.PATH, required=False)
@click.option("--values", is_flag=True, help="Measure inspect --values against read(2).")
@click.option("--layers", callback=common.layer_list, metavar="LIST", help="Layers to read.")
@click.option("--jobs", type=click.IntRange(min=0), default=0, help="Threads; 0 is one a CPU.")
@click.option("--cold", is_flag=True, help="Read from disk instead of the page cache.")
@click.option("--fingerprint", is_flag=True, help="Let the scan make fingerprints too.")
@_repeats_option()
@_strict_option()
@common.as_json()
def inspect(
    checkpoint: Path | None,
    values: bool,
    layers: tuple[int, ...] | None,
    jobs: int,
    cold: bool,
    fingerprint: bool,
    repeats: int,
    strict: bool,
    as_json: bool,
) -> None:
    """Measure inspect against stock safetensors, or its look at every value against read(2).

    Without CHECKPOINT the stand-in of the released one is made in a temporary folder: holes for
    the report, 2.3 GB of layer 0 for `--values`.

    \b
    Example:
      k3tool bench inspect
      k3tool bench inspect --values --cold
    """
    opts = InspectOptions(checkpoint, values, layers, jobs, cold, fingerprint, repeats)
    show(measure_inspect(opts), strict=strict, as_json=as_json)


# -- shard ---------------------------------------------------------------------------------------


@command.command("shard")
@click.option(
    "--folder",
    type=common.PATH,
    default=Path(),
    help="Folder on the disk to measure. Default: here.",
)
@click.option(
    "--size", type=click.FloatRange(min=6.0), default=8.0, show_default=True, metavar="GB",
    help="Bytes of the source, at least; the disk needs room for three times as much.",
)  # fmt: skip
@common.tp(default=2)
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="As of shard.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=5, show_default=True, metavar="N",
    help="Runs of each side.",
)  # fmt: skip
@_strict_option()
@common.as_json()
def shard(
    folder: Path,
    size: float,
    tp: int,
    jobs: int | None,
    repeats: int,
    strict: bool,
    as_json: bool,
) -> None:
    """Measure shard against cp with fsync, in bytes written a second on one disk.

    A source with the release's widths is made in FOLDER and removed at the end.

    \b
    Example:
      k3tool bench shard --folder /mnt/nvme --size 16
    """
    from k3tool.bench.shard import bench_shard

    show(bench_shard(folder, int(size * 1e9), tp, jobs, repeats), strict=strict, as_json=as_json)
