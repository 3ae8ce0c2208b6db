"""What all benchmarks share: paired, interleaved runs, ratios with their spread, one report form.

A ratio of two medians hides that the machine was slower in one half of the runs; here each run of
one side is divided by the run of the other side beside it, and the median of those is the result.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from k3tool.bench.baseline import cpu_model
from k3tool.tables import Column, Table, number_text


class Spread(NamedTuple):
    """A median with the smallest and the largest of `n` values."""

    median: float
    least: float
    most: float
    n: int

    def text(self, digits: int = 3) -> str:
        """Return the median and, in brackets, the ends."""
        median, least, most = (number_text(value, digits) for value in self[:3])
        return f"{median} [{least} .. {most}]"


def spread(values: Sequence[float]) -> Spread:
    """Return median and ends of some values, of which there must be one."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


class Paired(NamedTuple):
    """The values of two sides, run by run beside each other."""

    first: list[float]
    second: list[float]

    @property
    def ratio(self) -> Spread:
        """Return second over first."""
        return spread([b / a for a, b in zip(self.first, self.second, strict=True)])


def interleave(
    first: Callable[[], float], second: Callable[[], float], repeats: int, warm_up: int = 1
) -> Paired:
    """Run two sides in turn, the one that goes first changing each time; warm-up runs not kept."""
    result = Paired([], [])
    for number in range(warm_up + repeats):
        if number % 2:
            b, a = second(), first()
        else:
            a, b = first(), second()
        if number >= warm_up:
            result.first.append(a)
            result.second.append(b)
    return result


def rows_of_both(
    what: str, seconds: Paired, scale: float = 1e3, unit: str = "ms"
) -> list[tuple[str, Spread, str]]:
    """Return the rows of another interpreter's time for something, this one's, and their ratio."""
    other, this = (spread([scale * one for one in side]) for side in seconds)
    return [
        (f"{what}, the other interpreter", other, unit),
        (f"{what}, this one in turn", this, unit),
        (f"{what}, this / the other interpreter", seconds.ratio, "times"),
    ]


def other_line(versus: object) -> str:
    """Return what another interpreter ran, for a definition."""
    return f"the other interpreter: {versus}, same program, weights and threads; in turn"


@dataclass(frozen=True, slots=True)
class Limit:
    """A number that was to be reached: `at_most` or `at_least`."""

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_held(self) -> bool:
        """Return whether it was reached."""
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    @property
    def bound(self) -> str:
        """Return what was to be reached, in words."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:g}"

    def text(self) -> str:
        """Return it in one line."""
        held = "held" if self.is_held else "MISSED"
        return f"{held}: {self.name} {number_text(self.value)}, {self.bound}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; the bound that it does not have is None."""
        bounds = {"at_most": self.at_most, "at_least": self.at_least}
        return {"name": self.name, "value": self.value, "held": self.is_held, **bounds}


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What is measured, in words, before the numbers; then rows and limits."""

    name: str
    definition: Sequence[str]
    rows: Sequence[tuple[str, Spread, str]]
    limits: Sequence[Limit] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    appendix: Sequence[str] = ()  # text behind the limits; its numbers are among the facts
    not_judged: str = ""  # why there are no limits although the benchmark has some

    def __post_init__(self) -> None:
        """Hold names apart: a program that reads the JSON, or compares two, finds rows by them."""
        names = [name for name, _, _ in self.rows]
        assert len(set(names)) == len(names), names
        assert all(name == name.strip() for name in names), names

    def lines(self) -> list[str]:
        """Return the report as text."""
        table = Table(
            [Column("measured", "left"), Column("median"), Column("least"), Column("most"),
             Column("n"), Column("unit", "left")],
            [
                (name, *map(number_text, s[:3]), str(s.n), unit) for name, s, unit in self.rows
            ],
        )  # fmt: skip
        limits = [limit.text() for limit in self.limits]
        if self.not_judged:
            limits.append(f"NOT RUN: {self.not_judged}")
        behind = ["", *self.appendix] if self.appendix else []
        return [
            f"bench {self.name}",
            *self.definition,
            "",
            *table.text_lines(),
            "",
            *limits,
            *behind,
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "bench": self.name,
            "definition": list(self.definition),
            "measured": [{"name": n, "unit": unit, **s._asdict()} for n, s, unit in self.rows],
            "limits": [limit.as_dict() for limit in self.limits],
            "not_judged": self.not_judged,
            **self.facts,
        }


class ChildRun(NamedTuple):
    """One process from start to end: wall time, its own peak memory, exit code."""

    seconds: float
    peak_bytes: int
    exit_code: int


# Linux counts into a process's peak what the process it was started from had then, so a small one
# stands in between; it also takes the time, without its own start.
_STARTER = """
import os, sys, time
out = int(sys.argv[1])
os.set_inheritable(out, False)
start = time.perf_counter()
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(pid, 0)
seconds = time.perf_counter() - start
os.write(out, f"{seconds} {usage.ru_maxrss} {os.waitstatus_to_exitcode(status)}".encode())
"""


def run_child(arguments: Sequence[str], stdout: int) -> ChildRun:
    """Run a process and wait for it alone: RUSAGE_CHILDREN would be the largest of all children.

    `stdout` is a descriptor; stderr is this process's.
    """
    read, write = os.pipe()
    with open(read, "rb") as answer:
        command = [sys.executable, "-I", "-S", "-c", _STARTER, str(write), *arguments]
        try:
            subprocess.run(command, stdout=stdout, pass_fds=[write], check=True)
        finally:
            os.close(write)
        seconds, peak_kib, exit_code = answer.read().split()
    return ChildRun(float(seconds), int(peak_kib) * 1024, int(exit_code))


def machine_line() -> str:
    """Return what the numbers depend on: CPU, how many, how busy it was at the end."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"machine: {cpu_model()}, {os.cpu_count()} CPUs, load {load}"
