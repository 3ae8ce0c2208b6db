"""What the subcommands of `k3tool verify` share: how checks are reported, and `--strict`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import click

from k3tool.artifact import canonical_json
from k3tool.verdict import Check, is_sound, require, summary
from stages import options as common


@dataclass(frozen=True, slots=True)
class Result:
    """All checks in order, and whether they amount to a pass."""

    checks: tuple[Check, ...]
    sound: bool


def result_of(checks: Sequence[Check], *, strict: bool) -> Result:
    """Return checks with what they amount to."""
    return Result(tuple(checks), is_sound(checks, strict=strict))


def strict(what: str = "Fail when a check was NOT RUN.") -> common.Decorator:
    """Return `--strict`."""
    return click.option("--strict", is_flag=True, help=what)


def show_json(result: Result, more: Mapping[str, object] | None = None) -> None:
    """Print checks, verdict and what else a command has to say as one JSON object."""
    rows = [asdict(check) for check in result.checks]
    click.echo(canonical_json({"checks": rows, "sound": result.sound, **(more or {})}))


def show_lines(result: Result) -> None:
    """Print one line per check and the total."""
    for check in result.checks:
        click.echo(line(check))
    click.echo(total(result))


def line(check: Check) -> str:
    """Return a check as a line."""
    return f"{check.status:<7} {check.name}: {check.detail}"


def total(result: Result) -> str:
    """Return the last line: the verdict and how many checks passed, failed or were not run."""
    return f"{'PASS' if result.sound else 'FAIL'}: {summary(result.checks)}"


def report(result: Result, what: str, *, strict: bool, as_json: bool) -> None:
    """Print a result. Raises: UnsoundError (exit 4) unless the checks amount to a pass."""
    if as_json:
        show_json(result)
    else:
        show_lines(result)
    require(result.checks, what, strict=strict)
