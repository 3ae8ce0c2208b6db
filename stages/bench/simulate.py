"""`k3tool bench simulate`: a stream's waits and signals executed on all ranks, and its time."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3tool.tables import count_text
from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.simulate import Costs, Simulated
    from k3tool.isa.stream import Isa


@dataclass(frozen=True, slots=True)
class Options:
    """The stream and what its parts cost.

    Phase None is decode, or the only one.

    Bandwidths are in GB/s, times in us. None: the target's (`k3tool.targets`), of `gate_us` that of
    `handoff_us`.
    """

    isa: Path
    phase: str | None = None
    bandwidth: float | None = None
    seeds: int = 4
    handoff_us: float | None = None
    gate_us: float | None = None
    unit_bandwidth: float | None = None
    stall_rate: float = 0.00001
    stall_us: float = 10.0


@dataclass(frozen=True, slots=True)
class Simulation:
    """Times of one run without stalls and of every seed, and what executing each seed took.

    A step is one of `phase`, of `tokens` tokens.
    """

    phase: str
    tokens: int
    costs: "Costs"
    without_stalls: "Simulated"
    seeds: "Sequence[Simulated]"
    executed: Sequence[dict[str, int]]


def run(options: Options) -> Simulation:
    """Simulate. Raises: ArtifactError for a damaged file or another kind; UnsoundError as found."""
    from k3tool.bench.simulate import Costs, Timeline, simulate
    from k3tool.isa.stream import load_isa
    from k3tool.targets import get_target

    isa = load_isa(options.isa)
    phase = shared.chosen_phase(options.phase, isa.streams)
    target = get_target(isa.target)
    handoff_us = target.handoff_us if options.handoff_us is None else options.handoff_us
    gate_us = handoff_us if options.gate_us is None else options.gate_us
    alone = options.unit_bandwidth
    unit_bandwidth = target.unit_bytes_per_s if alone is None else alone * 1e9
    bandwidth = shared.bytes_per_s(isa.target, options.bandwidth)
    calm = Costs(handoff_us, gate_us, bandwidth, unit_bandwidth, 0.0, 0.0)
    costs = replace(calm, stall_rate=options.stall_rate, stall_us=options.stall_us)
    timeline = Timeline(isa, isa.streams[phase])
    base = simulate(timeline, calm, 0)
    results, executed = [], []
    for seed in range(options.seeds):
        executed.append(_execute(isa, phase, seed))
        results.append(simulate(timeline, costs, seed))
        click.echo(f"seed {seed}: done", err=True)
    return Simulation(phase, isa.streams[phase].max_tokens, costs, base, results, executed)


def _execute(isa: "Isa", phase: str, seed: int) -> dict[str, int]:
    """Execute one interleaving by queues and one by windows; return entries and rounds of each."""
    from k3tool.isa.execution import execute

    stream = isa.streams[phase]
    by_queue = execute(isa, stream, seed)
    out = {"seed": seed, "entries": by_queue.entries, "rounds": by_queue.rounds}
    if stream.windows is not None:
        out["window_rounds"] = execute(isa, stream, seed, by_window=True).rounds
    return out


@click.command("simulate")
@click.argument("isa", type=common.PATH)
@shared.phase_option()
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
    type=common.Finite(min=0.0),
    metavar="US",
    help="Cost of a hand-off on one rank. Default: the target's.",
)
@click.option(
    "--gate-us",
    type=common.Finite(min=0.0),
    metavar="US",
    help="Cost of one that all ranks arrive at. Default: --handoff-us.",
)
@shared.bandwidth_option()
@click.option(
    "--unit-bandwidth",
    type=common.Finite(min=0.001),
    metavar="GB/s",
    help="What one workgroup can move alone. Default: the target's.",
)
@click.option(
    "--stall-rate",
    type=common.Finite(0.0, 1.0),
    default=0.00001,
    show_default=True,
    help="Part of entries that stall.",
)
@click.option(
    "--stall-us",
    type=common.Finite(min=0.0),
    default=10.0,
    show_default=True,
    help="Mean stall.",
)
@shared.baseline_option("")
@common.as_json()
def command(
    isa: Path,
    phase: str | None,
    seeds: int,
    handoff_us: float | None,
    gate_us: float | None,
    bandwidth: float | None,
    unit_bandwidth: float | None,
    stall_rate: float,
    stall_us: float,
    as_json: bool,
    baseline: Path | None,
) -> None:
    """Execute a stream's waits, and predict a step's time.

    Signals are those of all ranks. Every seed is executed twice: in random order by queues (and by
    domain windows, where the target has them), which must never lock, and in time, with the costs
    given. The first line is the time without stalls. What is modelled and what is not stands in
    k3tool/bench/simulate.py.

    \b
    Example:
      k3tool bench simulate isa.h5 --seeds 8 --handoff-us 5.72
    """
    costs = (handoff_us, gate_us, unit_bandwidth, stall_rate, stall_us)

    def counted() -> tuple[dict[str, object], Iterator[str]]:
        result = run(Options(isa, phase, bandwidth, seeds, *costs))
        return {"deadlocks": 0, **asdict(result)}, simulated_lines(result)

    shared.count("simulate", counted, as_json=as_json, baseline=baseline)


def simulated_lines(result: Simulation) -> Iterator[str]:
    """Yield what a person reads."""
    base, executed = result.without_stalls, result.executed
    step = f"step of {count_text(result.tokens, 'token')}"
    yield f"{step:16} {base.token_us / 1e3:9.3f} ms without stalls, {result.phase}"
    local = base.handoffs - base.gates
    yield f"  hand-offs      {base.handoff_us / 1e3:9.3f} ms, {local} on one rank"
    yield f"  gates          {base.gate_us / 1e3:9.3f} ms, {base.gates} of all ranks"
    steps = "from packet to packet; bench chain counts the first packet's gate too"
    yield f"  chain          {base.handoffs:9} hand-offs {steps}"
    yield f"  bytes          {base.work_us / 1e3:9.3f} ms on the chain that decides"
    for op, us in list(base.work_us_by_op.items())[:8]:
        yield f"    {op:20} {us / 1e3:9.3f} ms"
    times = sorted(r.token_us / 1e3 for r in result.seeds)
    yield f"with stalls      {times[0]:9.3f} to {times[-1]:.3f} ms over {len(times)} seeds"
    ways = "by queues and by windows" if "window_rounds" in executed[0] else "by queues"
    yield f"no deadlock in {len(executed)} random orders {ways} of {executed[0]['entries']} entries"
