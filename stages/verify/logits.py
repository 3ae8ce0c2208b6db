"""`k3tool verify logits`: a run's logits against logits from elsewhere."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from k3tool.compare.logits import (
    LogitsComparison,
    Tolerances,
    compare_logits,
    place,
)
from k3tool.compare.logits_files import Array, read_logits
from k3tool.tables import Column, Table
from k3tool.terminal import print_table
from stages import options as common
from stages.verify import shared

_SHOWN = 10  # positions, without --all
_ABOVE_ZERO = common.Finite(min=0.0, min_open=True)
_DEFAULT = Tolerances()


@dataclass(frozen=True, slots=True)
class Options:
    """What to compare: `name` chooses among several sets of arrays in the reference."""

    run: Path
    reference: Path
    name: str | None = None
    tolerances: Tolerances = _DEFAULT
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Result(shared.Result):
    """The checks and the numbers of every position."""

    found: LogitsComparison


def run(options: Options) -> Result:
    """Compare.

    Raises: UsageError for one file given as both; ArtifactError for damaged inputs, another
    vocabulary or prompt.
    """
    shared.require_apart((options.run, options.reference))
    ours = read_logits(options.run)
    reference = read_logits(options.reference, options.name)
    found = compare_logits(ours, reference, options.tolerances)
    made = shared.result_of(found.checks, strict=options.strict)
    return Result(made.checks, made.sound, found)


def position_table(found: LogitsComparison, *, everything: bool) -> Table:
    """Return one row a position, in order: all of them, or those that are furthest off."""
    rows = found.positions
    if not everything and len(rows) > _SHOWN:
        furthest = np.argsort(rows["max_abs"], kind="stable")[-_SHOWN:]
        rows = rows[np.sort(furthest)]
    titles = ("position", "step", "max", "at id", "rms/dev", "KL", "run", "ref", "margin")
    return Table(
        [Column(title) for title in titles], [_cells(row, found.deviation) for row in rows]
    )


def _cells(row: Array, deviation: float) -> list[str]:
    relative = row["rms"] / deviation if deviation else math.nan
    flip = "" if row["run_id"] == row["reference_id"] else " !"
    return [
        str(row["position"]) if row["position"] >= 0 else "-",
        str(row["row"]) if row["step"] else "-",
        f"{row['max_abs']:.2e}", str(row["at"]), f"{relative:.2e}", f"{row['kl']:.2e}",
        f"{row['run_id']}{flip}", f"{row['reference_id']}{flip}", f"{row['reference_margin']:.3g}",
    ]  # fmt: skip


def _json(result: Result, tolerances: Tolerances) -> dict[str, object]:
    names = result.found.positions.dtype.names or ()
    rows = [
        {name: _plain(row[name].item()) for name in names} | {"place": place(row)}
        for row in result.found.positions
    ]
    return {
        "positions": rows,
        "deviation": _plain(result.found.deviation),
        "tolerances": asdict(tolerances),
    }


def _plain(value: float) -> float | None:
    return None if not math.isfinite(value) else value  # JSON has neither NaN nor infinity


@click.command("logits", short_help="Compare logits with another engine's.")
@click.argument("run_file", metavar="RUN", type=common.PATH)
@click.argument("reference", metavar="REFERENCE", type=common.PATH)
@click.option("--name", metavar="NAME", help="The set of arrays in REFERENCE: NAME.prefill, ...")
@click.option("--max-abs", type=_ABOVE_ZERO, default=_DEFAULT.max_abs, show_default=True,
              metavar="LOGITS", help="Largest difference of one logit.")  # fmt: skip
@click.option("--rms", type=_ABOVE_ZERO, default=_DEFAULT.rms, show_default=True, metavar="RATIO",
              help="Of a position, over the standard deviation of REFERENCE's logits.")  # fmt: skip
@click.option("--kl", type=_ABOVE_ZERO, default=_DEFAULT.kl, show_default=True, metavar="NATS",
              help="KL(reference || run) of a position.")  # fmt: skip
@click.option("--flips", type=click.IntRange(min=0), default=_DEFAULT.flips, show_default=True,
              metavar="N", help="Positions that may have another choice.")  # fmt: skip
@click.option("--all", "everything", is_flag=True,
              help=f"Show every position, not the {_SHOWN} furthest off.")  # fmt: skip
@shared.strict()
@common.as_json()
def command(
    run_file: Path, reference: Path, name: str | None, max_abs: float, rms: float, kl: float,
    flips: int, everything: bool, strict: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compare RUN, the npz that run --logits wrote, with REFERENCE, logits from elsewhere.

    REFERENCE is an npz archive, safetensors or lines of JSON. Each position has its largest
    difference, the rms, KL(reference || run) and both choices; a position that one side lacks is
    NOT RUN, a value that is not finite fails. The defaults are what a right binary32 implementation
    keeps against the released code in float64: docs/verify.md has formats and bounds.

    \b
    Example:
      k3tool run CKPT --ids 1,2,3 --gen 8 --logits logits.npz
      k3tool verify logits logits.npz reference.npz
    """
    tolerances = Tolerances(max_abs, rms, kl, flips)
    result = run(Options(run_file, reference, name, tolerances, strict))
    if not as_json and len(result.found.positions):
        print_table(position_table(result.found, everything=everything))
        click.echo()
    more = _json(result, tolerances) if as_json else None
    shared.report(result, strict=strict, as_json=as_json, more=more)
