"""Options and output that several subcommands of bench share."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3tool.atomic import Output, check_outputs
from k3tool.errors import UnsoundError, UsageError
from k3tool.targets import get_target
from stages import options as common
from stages.refusals import unfit

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


def repeats_option(default: int = 7, what: str = "Runs of each side") -> common.Decorator:
    """Return `--repeats`, of `what`."""
    return click.option(
        "--repeats", type=click.IntRange(min=1), default=default, show_default=True, metavar="N",
        help=f"{what} that are kept, after one to warm up.",
    )  # fmt: skip


def distinct(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Refuse a value that an option was given twice: it would be measured twice, as two things.

    A click callback.
    """
    twice = next((one for one in value if value.count(one) > 1), None)
    if twice is not None:
        raise unfit(param, ctx, got=f"{twice} more than once", need="each value once")
    return value


def strict_option() -> common.Decorator:
    """Return `--strict`."""
    return click.option("--strict", is_flag=True, help="Exit code 4 if a limit is missed.")


def baseline_option(where: str = " on this machine") -> common.Decorator:
    """Return `--baseline`; `where` the earlier one has to be from."""
    return click.option(
        "--baseline", type=common.PATH, metavar="FILE",
        help=f"Compare with what --json printed earlier, with the same settings{where}.",
    )  # fmt: skip


def threads_option() -> common.Decorator:
    """Return `--threads`."""
    return click.option(
        "--threads", type=click.IntRange(1, 1024), metavar="N",
        help="Threads, of each rank. Default: one a CPU this process may use.",
    )  # fmt: skip


def versus_option() -> common.Decorator:
    """Return `--versus`."""
    return click.option(
        "--versus", type=common.PATH, metavar="K3-CPU",
        help="Another build's interpreter, timed in turn with this one.",
    )  # fmt: skip


def page_option() -> common.Decorator:
    """Return `--report` as the parameter `page`."""
    return click.option(
        "--report", "page", type=common.PATH, metavar="FILE",
        help="Write a page with pictures of this; bench report draws more.",
    )  # fmt: skip


def page_outputs(page: Path | None) -> list[Output]:
    """Return what --report is to write, if anything. Raises: TargetError without matplotlib."""
    if page is None:
        return []
    from k3tool.bench.page import MARK
    from k3tool.bench.pictures import require_matplotlib

    require_matplotlib()
    return [Output("--report", page, "report", MARK)]


def check_page(page: Path | None, inputs: Sequence[Path]) -> None:
    """Refuse a page that cannot be written, before anything is measured.

    Raises: as page_outputs; UsageError for what may not be written over.
    """
    check_outputs(page_outputs(page), inputs)


def write_page(page: Path | None, said: dict[str, Any]) -> None:
    """Write the page of what --json prints."""
    if page is None:
        return
    from k3tool.bench import report
    from k3tool.bench.gathered import Gathered

    report.write_page(Gathered([("this run", said)]), page)


# Parameters that say how often something is measured and what becomes of the numbers, not what.
_NO_SETTINGS = frozenset(
    {"strict", "as_json", "baseline", "repeats", "cache", "chrome_trace", "page"}
)
_INPUTS = frozenset({"plan", "isa", "trace", "source"})  # of counts: two of them are compared


def settings(without: frozenset[str] = frozenset()) -> dict[str, object]:
    """Return what this command was asked to measure: its parameters as plain values."""

    def plain(value: object) -> object:
        if isinstance(value, Path):
            return str(value.absolute())
        return [plain(one) for one in value] if isinstance(value, tuple) else value

    params: dict[str, Any] = click.get_current_context().params
    left_out = _NO_SETTINGS | without
    return {name: plain(value) for name, value in params.items() if name not in left_out}


def count(
    name: str,
    run: Callable[[], tuple[dict[str, Any], Iterable[str]]],
    *,
    as_json: bool,
    baseline: Path | None,
    is_measured: bool = False,
) -> dict[str, Any]:
    """Count and print; compare with earlier counts, which are looked at first.

    `run` returns what --json prints of the counts, and the lines that a person reads. They depend
    on the machine where some of their inputs are measured.

    Raises: ArtifactError for a baseline of something else.
    """
    from k3tool.bench.baseline import machine
    from k3tool.bench.count_baseline import compare_counts, count_lines, read_counts

    what = {"bench": name, "settings": settings(_INPUTS)}
    if is_measured:
        what["machine"] = machine()
    before = None if baseline is None else read_counts(baseline, what)
    data, found = run()
    # Keys become texts, as they are in a file.
    said: dict[str, Any] = json.loads(json.dumps(data | what))
    lines = list(found)
    if before is not None:
        changes = compare_counts(before, said)
        lines += ["", *count_lines(changes)]
        said["against"] = [change.as_dict() for change in changes]
    click.echo(json.dumps(said, indent=1, sort_keys=True) if as_json else "\n".join(lines))
    return said


def measure(
    name: str,
    run: Callable[[], "BenchReport"],
    *,
    strict: bool,
    as_json: bool,
    baseline: Path | None,
    after: Callable[[dict[str, Any]], None] | None = None,
) -> "BenchReport":
    """Measure and print; compare with an earlier measurement, which is looked at first.

    `after` gets what --json prints, before limits are judged.

    Raises: ArtifactError for a baseline of something else; UnsoundError under `strict` if a limit
    is missed, or limits were not judged.
    """
    from k3tool.bench.baseline import change_lines, compare, machine, read_baseline

    what = {"bench": name, "machine": machine(), "settings": settings()}
    before = None if baseline is None else read_baseline(baseline, what)
    report = run()
    said = report.as_dict() | what
    lines = list(report.lines())
    if baseline is not None and before is not None:
        changes = compare(baseline, before, said["measured"])
        said["against"] = [change._asdict() for change in changes]
        lines += ["", *change_lines(changes)]
    click.echo(json.dumps(said, indent=1) if as_json else "\n".join(lines))
    if after is not None:
        after(said)
    if strict:
        _require_limits(report)
    return report


def _require_limits(report: "BenchReport") -> None:
    if not report.limits and not report.not_judged:  # nothing to judge is not all held
        got, hint = "no limit with these settings", "leave out --strict"
        raise UnsoundError("limits", got=got, need="a limit to judge", hint=hint)
    if report.not_judged:
        hint = "leave out --strict, or measure what its limits are for"
        raise UnsoundError("limits", got=report.not_judged, need="judged limits", hint=hint)
    for limit in report.limits:
        if not limit.is_held:
            got, hint = (
                f"{limit.value:.3g}",
                "measure again where nothing else runs; see docs/bench.md",
            )
            raise UnsoundError(limit.name, got=got, need=limit.bound, hint=hint)
