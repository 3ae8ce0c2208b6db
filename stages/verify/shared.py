"""What the subcommands of `k3tool verify` share: how checks are reported, and `--strict`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from k3tool.canonical import canonical_json
from k3tool.errors import UsageError
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


def require_apart(files: Sequence[Path]) -> None:
    """Refuse a file that comes twice: it equals itself, and nothing would have been compared.

    Raises: UsageError naming both.
    """
    seen: dict[tuple[int, int], Path] = {}
    for path in files:
        try:
            entry = os.stat(path)
        except OSError:
            continue  # the reader says what is wrong with it
        first = seen.setdefault((entry.st_dev, entry.st_ino), path)
        if first is not path:
            got = "the same file" if first == path else f"the same file as {first}"
            need, hint = "each file once: it equals itself", "name the file of another run"
            raise UsageError(str(path), got=got, need=need, hint=hint)


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


def report(
    result: Result, *, strict: bool, as_json: bool,
    more: Mapping[str, object] | None = None,
) -> None:  # fmt: skip
    """Print a result; `more` goes into its JSON.

    Raises: UnsoundError (exit 4) unless the checks amount to a pass.
    """
    if as_json:
        show_json(result, more)
    else:
        show_lines(result)
    require(result.checks, strict=strict)
