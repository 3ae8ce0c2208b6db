"""`k3tool bench chain`: a plan's hand-offs and the floor they imply."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.chain import Chain


@dataclass(frozen=True, slots=True)
class Options:
    """The plan, the phase to count (None: decode, or the only one), and the bandwidth in GB/s
    (None: the target's data sheet).
    """

    plan: Path
    phase: str | None = None
    bandwidth: float | None = None


def run(options: Options) -> "Chain":
    """Count. Raises: ArtifactError for a damaged file or another kind; UnsoundError as found."""
    from k3tool.bench.chain import measure_chain
    from k3tool.compiler.plan import load_plan

    plan = load_plan(options.plan)
    bandwidth = shared.bytes_per_s(str(plan.params["target"]), options.bandwidth)
    return measure_chain(plan, shared.chosen_phase(options.phase, plan.phases), bandwidth)


@click.command("chain")
@click.argument("plan", type=common.PATH)
@shared.phase_option()
@shared.bandwidth_option()
@shared.baseline_option("")
@common.as_json()
def command(plan: Path, phase: str | None, bandwidth: float | None, as_json: bool,
            baseline: Path | None) -> None:  # fmt: skip
    """Count a plan's hand-offs, and the floor they imply.

    Counted are packets, edges, waits, polls and the path. `critical_path` counts every packet gate
    and every wait inside a packet on the longest chain as one each, a gate that all ranks arrive at
    included. The floor is that count times what one hand-off costs in the system this one starts
    from, whose counts stand beside those of the same program: decode of the released model at TP 8.

    \b
    Example:
      k3tool bench chain plan.h5 --json > before.json
      k3tool bench chain other.h5 --baseline before.json
    """

    def counted() -> tuple[dict[str, object], Iterator[str]]:
        measured = run(Options(plan, phase, bandwidth))
        return chain_data(measured), chain_lines(measured)

    shared.count("chain", counted, as_json=as_json, baseline=baseline)


def chain_data(c: "Chain") -> dict[str, object]:
    """Return what `--json` prints."""
    from k3tool.bench.chain import PRIOR

    names = ("packets", "critical_path")
    prior = {name: dict(zip(names, row, strict=True)) for name, row in PRIOR.items() if c.has_prior}
    return {**asdict(c), "prior": prior}


def chain_lines(c: "Chain") -> Iterator[str]:
    """Yield what a person reads."""
    from k3tool.bench.chain import HANDOFF_US

    yield f"{c.phase}, {c.target}, TP {c.tp}"
    yield f"packets          {c.packets:8}   {_beside(c, 0, 'packets')}"
    yield f"critical path    {c.critical_path:8}   {_beside(c, 1, 'hand-offs')}"
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
    most = ", ".join(f"{op} {n / 1e6:.0f}" for op, n in list(c.reread_by_op.items())[:3])
    yield f"read again       {c.reread_total / 1e6:8.1f}   MB by slices, from caches: {most}"
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


def _beside(c: "Chain", which: int, unit: str) -> str:
    from k3tool.bench.chain import PRIOR

    if not c.has_prior:
        return unit
    rows = ", ".join(f"{row[which]} {name}" for name, row in PRIOR.items())
    return f"{unit}; the starting system: {rows}"
