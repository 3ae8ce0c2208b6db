"""`k3tool bench roofline`: the least time of a token, by bytes, operations and hand-offs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3tool.targets import BATCH, DEFAULT_CONTEXT
from stages import options as common
from stages.bench import shared

if TYPE_CHECKING:
    from k3tool.bench.roofline import Roofline


@dataclass(frozen=True, slots=True)
class Options:
    """The model, the step and the device; `bandwidth` in GB/s and `handoff_us` in its place."""

    source: Path
    tp: int | None = None
    batch: int = BATCH
    ctx: int = DEFAULT_CONTEXT
    numerics: str = "f32"
    device: str = "measured"
    bandwidth: float | None = None
    handoff_us: float | None = None


def run(options: Options) -> "Roofline":
    """Count, after measuring where the device is this machine.

    Raises: UsageError for a device, degree or length that cannot be; ArtifactError for the source.
    """
    from k3tool.bench.devices import MEASURED, get_device, with_figures
    from k3tool.bench.measured import this_machine
    from k3tool.bench.roofline import Asked, check_length, roofline
    from k3tool.runtime.foresee import model_of

    config, tp = model_of(options.source, options.tp)
    check_length(config, options.ctx)
    named = None if options.device == MEASURED else get_device(options.device)
    device = with_figures(
        this_machine() if named is None else named,
        None if options.bandwidth is None else options.bandwidth * 1e9,
        options.handoff_us,
    )
    asked = Asked(tp, options.batch, options.ctx, options.numerics)
    return roofline(config, asked, device)


@click.command("roofline")
@click.argument("source", type=common.PATH)
@common.tp()
@click.option("--batch", type=common.POSITIVE, default=BATCH, show_default=True, metavar="N",
              help="Sequences in a step.")  # fmt: skip
@click.option("--ctx", type=common.POSITIVE, default=DEFAULT_CONTEXT, show_default=True,
              metavar="N", help="Positions that each token sees, its own too.")  # fmt: skip
@common.numerics()
@click.option("--device", default="measured", show_default=True, metavar="NAME",
              help="MI355X, MI325X, MI300X, H100, H200, B200, or this machine, measured now.",
              )  # fmt: skip
@click.option("--bandwidth", type=common.Finite(min=0.001), metavar="GB/s",
              help="Read bandwidth in place of the device's.")  # fmt: skip
@click.option("--handoff-us", type=common.Finite(min=0.0), metavar="US",
              help="Cost of a hand-off in place of the device's.")  # fmt: skip
@shared.page_option()
@shared.baseline_option("")
@common.as_json()
def command(source: Path, tp: int | None, batch: int, ctx: int, numerics: str, device: str,
            bandwidth: float | None, handoff_us: float | None, page: Path | None, as_json: bool,
            baseline: Path | None) -> None:  # fmt: skip
    """Say the least time that a decode step can take.

    That is what it must read, compute and hand over. SOURCE is a config.json, a checkpoint or a
    shards folder; no weight is read. Bytes and operations are counted by module from the weight
    table and the states, packets and hand-offs of the program that is compiled for them; formula,
    inputs and their sources stand beside the numbers.

    \b
    Example:
      k3tool bench roofline config.json --tp 8 --device MI355X
      k3tool bench roofline CKPT --ctx 32000 --json
    """
    from k3tool.bench.devices import MEASURED
    from k3tool.bench.roofline import as_dict, lines

    def counted() -> tuple[dict[str, Any], Iterator[str]]:
        found = run(Options(source, tp, batch, ctx, numerics, device, bandwidth, handoff_us))
        return as_dict(found), lines(found)

    shared.check_page(page, [source])
    said = shared.count(
        "roofline", counted, as_json=as_json, baseline=baseline, is_measured=device == MEASURED
    )
    shared.write_page(page, said)
