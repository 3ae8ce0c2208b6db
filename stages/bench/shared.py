"""Options and output that several subcommands of bench share."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from k3tool.errors import UnsoundError, UsageError
from k3tool.targets import get_target
from stages import options as common

if TYPE_CHECKING:
    from k3tool.bench.frame import BenchReport


def phase_option() -> common.Decorator:
    """Return `--phase`."""
    return click.option(
        "--phase", type=click.Choice(["decode", "prefill"]),
        help="Which phase. Default: decode, or the only one.",
    )  # fmt: skip


def chosen_phase(phase: str | None, names: Iterable[str]) -> str:
    """Return the phase to measure: decode, or the only one, unless one is named.

    Raises: UsageError for one that a program was made without.
    """
    have = list(names)
    if phase is None:
        return have[0] if len(have) == 1 else "decode"
    if phase not in have:
        raise UsageError("--phase", got=phase, need=" or ".join(have))
    return phase


def bandwidth_option() -> common.Decorator:
    """Return `--bandwidth`, None where the data sheet is to say."""
    return click.option(
        "--bandwidth", type=common.Finite(min=1.0), metavar="GB/s",
        help="Memory bandwidth to assume. Default: the target's data sheet.",
    )  # fmt: skip


def bytes_per_s(target: str, given: float | None) -> float:
    """Return bytes a second; a CPU has no one number and is taken as the 100 GB/s of a desktop."""
    return (get_target(target).peak_bytes_per_s or 1e11) if given is None else given * 1e9


def repeats_option(default: int = 7) -> common.Decorator:
    """Return `--repeats`."""
    return click.option(
        "--repeats", type=click.IntRange(min=1), default=default, show_default=True, metavar="N",
        help="Runs of each side that are kept, after one to warm up.",
    )  # fmt: skip


def strict_option() -> common.Decorator:
    """Return `--strict`."""
    return click.option("--strict", is_flag=True, help="Exit code 4 if a limit is missed.")


def show(report: "BenchReport", *, strict: bool, as_json: bool) -> None:
    """Print a measurement.

    Raises: UnsoundError under `strict` if one of its limits is missed, or they were not judged.
    """
    click.echo(json.dumps(report.as_dict(), indent=1) if as_json else "\n".join(report.lines()))
    if strict and report.not_judged:
        raise UnsoundError(f"bench {report.name}", got=report.not_judged, need="judged limits")
    for limit in report.limits:
        if strict and not limit.is_held:
            got = f"{limit.value:.3g}"
            raise UnsoundError(f"bench {report.name}: {limit.name}", got=got, need=limit.bound)
