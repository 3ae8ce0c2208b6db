"""`make gpu`: what only a device can show, against the CPU's bits, and a page that says what ran.

Without a device it prints NOT RUN, writes nothing and ends with 5. A part that there was no time
for is NOT RUN by name, and so is what needs a second device.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3tool.atomic import atomic_path
from k3tool.bench import gpu_parts
from k3tool.bench.gpu_bits import (
    PROMPT,
    Asked,
    Case,
    Row,
    batches,
    cases,
    options_of,
    run_batch,
    run_case,
)
from k3tool.errors import K3Error, TargetError
from k3tool.revision import tool_version
from k3tool.runtime.build import ROOT
from k3tool.runtime.cache import open_source, program
from k3tool.runtime.gpu_device import builds_of, find_device, find_devices
from k3tool.runtime.gpu_runtime import Device, Devices
from k3tool.runtime.gpu_source import builds, program_ops
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import run_model
from k3tool.tables import Column, Table
from k3tool.targets import get_target
from k3tool.verdict import Check, failed, is_sound, not_run, passed, summary

ORACLES = ("tiny13", "tiny_tp8")
SANITIZERS = ("memcheck", "racecheck")
SECONDS = 290.0
_SANITIZED_SECONDS = 600.0  # a step is some hundred times longer there
_LEAST_SECONDS = 10.0  # nothing is begun with less
APART = "bits of two ranks on two devices"
Open = Callable[[str], Device]
OpenSeveral = Callable[[str, int], Devices]
Print = Callable[[str], None]


class Clock:
    """How much is left of the time that a page may take."""

    def __init__(self, seconds: float) -> None:
        """Start."""
        self._seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self._end - time.monotonic()

    def lacks(self, seconds: float = _LEAST_SECONDS) -> str:
        """Return why a part of so many seconds is not begun, empty where it is."""
        if self.left >= seconds:
            return ""
        return f"{max(self.left, 0):.0f} s were left of {self._seconds:g} s"


def check(
    asked: Asked,
    open_device: Open,
    say: Print,
    clock: Clock | None = None,
    open_several: OpenSeveral = find_devices,
) -> tuple[list[Check], list[Row]]:
    """Run every case on a device and on the CPU. Raises: TargetError where no device is."""
    checks: list[Check] = []
    rows: list[Row] = []
    clock = clock or Clock(SECONDS)
    _compile(asked, open_device(asked.target))

    def judged(name: str, run: Callable[[], str], detail: str) -> None:
        late = clock.lacks()
        if late:
            one = not_run(name, late)
        else:
            try:
                found = run()
                one = failed(name, found) if found else passed(name, detail)
            except K3Error as error:
                one = failed(name, error.text().replace("\n", "; "))
        checks.append(one)
        say(f"{one.status} {one.name}: {one.detail}")

    for case in cases(asked):

        def run(case: Any = case) -> str:
            row, found = run_case(asked, case, open_device(asked.target))
            rows.append(row)
            return found

        judged(case.name, run, f"{asked.gen} tokens and every logit")
    for case in batches(asked):

        def run_several(case: Any = case) -> str:
            return run_batch(asked, case, open_device(asked.target))

        judged(case.name, run_several, f"{asked.gen} tokens of each sequence and every logit")
    found = _apart(asked, open_several, clock)
    checks.append(found)
    say(f"{found.status} {found.name}: {found.detail}")
    if asked.large is None:
        checks.append(
            not_run("bits of k3-slice", "no --large: k3tool sample DIR --preset k3-slice")
        )
    return checks, rows


def _apart(asked: Asked, open_several: OpenSeveral, clock: Clock) -> Check:
    """Compare two ranks on two devices; NOT RUN where there are no two that reach each other."""
    late = clock.lacks()
    if late:
        return not_run(APART, late)
    try:
        devices = open_several(asked.target, 2)
    except TargetError as error:
        return not_run(APART, error.text().replace("\n", "; "))
    try:
        _, found = run_case(asked, Case(asked.models[-1], {"tp": 2, "devices": 2}), devices)
    except K3Error as error:
        return failed(APART, error.text().replace("\n", "; "))
    detail = f"{asked.gen} tokens of {asked.models[-1].name} and every logit"
    return failed(APART, found) if found else passed(APART, detail)


def _compile(asked: Asked, device: Device) -> None:
    """Compile all programs' interpreters at once: one after the other takes longer than the runs.

    Raises: what a compiler or a checkpoint is refused with.
    """
    needed: dict[tuple[tuple[str, ...], tuple[str, ...]], None] = {}
    try:
        for case in [*cases(asked), *batches(asked)]:
            options = replace(options_of(asked, case), target=asked.target)
            isa = program(open_source(options), options, lambda text: None).isa
            needed |= dict.fromkeys(builds(program_ops(isa)).items())
        for isa in gpu_parts.programs(asked):
            needed |= dict.fromkeys(builds(program_ops(isa)).items())
        with concurrent.futures.ThreadPoolExecutor() as pool:
            made = [
                pool.submit(device.build, asked.target, phases, ops, asked.cache)
                for phases, ops in needed
            ]
            for one in made:
                one.result()
    finally:
        device.close()


# ---- what is measured, and what other tools look at ---------------------------------------------


def measure(
    parts: Iterable[gpu_parts.Part], clock: Clock, say: Print
) -> tuple[list[Check], list[str]]:
    """Run the parts that there is time for; return a check of each and the lines of all."""
    checks: list[Check] = []
    lines: list[str] = []
    for part in parts:
        late = clock.lacks(part.seconds)
        if late:
            one = not_run(part.name, late)
        else:
            try:
                found = part.run()
                lines += ["", f"## {part.name[0].upper()}{part.name[1:]}", "", *found]
                one = passed(part.name, "below")
            except K3Error as error:
                one = failed(part.name, error.text().replace("\n", "; "))
        checks.append(one)
        say(f"{one.status} {one.name}: {one.detail}")
    return checks, lines


def sanitize(asked: Asked, tool: str, clock: Clock) -> Check:
    """Run a few steps below a sanitizer; its own exit code tells a finding from a refusal."""
    name = f"compute-sanitizer {tool}"
    found = shutil.which("compute-sanitizer")
    if found is None or get_target(asked.target).family != "cuda":
        return not_run(name, "no compute-sanitizer" if found is None else "for CUDA alone")
    late = clock.lacks()
    if late:
        return not_run(name, late)
    command = [
        found, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m",
        "k3tool.bench.gpu_check", "--target", asked.target, "--cache", str(asked.cache),
        "--one-run", str(asked.models[0]),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=clock.left
        )
    except subprocess.TimeoutExpired as error:
        return not_run(name, f"took longer than {error.timeout:.0f} s")
    if done.returncode == 0:
        return passed(name, f"a prompt and a token of {asked.models[0].name}")
    said = (done.stdout + done.stderr).strip().splitlines() or ["nothing said"]
    return failed(name, f"exit code {done.returncode}: {said[-1]}")


def _run_once(asked: Asked) -> None:
    """What a sanitizer looks at: a prompt and one token."""
    run_model(
        RunOptions(
            asked.models[0], PROMPT[:2], 2, target=asked.target, cache=asked.cache,
            ignore_eos=True, deadline_seconds=_SANITIZED_SECONDS,
        )
    )  # fmt: skip


# ---- the page -----------------------------------------------------------------------------------


def page(
    asked: Asked, device: str, checks: Sequence[Check], rows: Sequence[Row], measured: Sequence[str]
) -> list[str]:
    """Return the page in lines of markdown."""
    rates = Table(
        [Column("case", "left"), Column("prefill"), Column("CPU"), Column("decode"), Column("CPU")],
        [
            (
                row.case.name,
                *(
                    "" if rate is None else f"{rate:.1f}"
                    for rate in (
                        row.device.prefill_tokens_per_second, row.cpu.prefill_tokens_per_second,
                        row.device.decode_tokens_per_second, row.cpu.decode_tokens_per_second,
                    )
                ),
            )
            for row in rows
        ],
    )  # fmt: skip
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return [
        "# On a GPU",
        "",
        f"Written by `make gpu` on {today} ({tool_version()}) on {device}.",
        "A run begins with the canaries of the arithmetic; bits are compared with the CPU's run.",
        "",
        *(f"* {line}" for line in builds_of(asked.target)),
        "",
        *Table(
            [Column("check", "left"), Column("state", "left"), Column("detail", "left")],
            [(one.name, one.status, one.detail) for one in checks],
        ).markdown_lines(),
        "",
        "Tokens a second, as `run` counts them; the host takes part in every token.",
        "",
        *rates.markdown_lines(),
        *measured,
    ]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--target", default="cuda:sm_90a", help="default: %(default)s")
    parser.add_argument("--large", type=Path, help="a k3-slice checkpoint")
    parser.add_argument("--cache", type=Path, help="where programs and objects are kept")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="default: %(default)s")
    parser.add_argument("--strict", action="store_true", help="NOT RUN fails")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "gpu-results.md")
    parser.add_argument("--one-run", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(
    arguments: Sequence[str], open_device: Open = find_device,
    open_several: OpenSeveral = find_devices, **small: Any,
) -> int:  # fmt: skip
    """Run the command line and return its exit code; `small` changes what a test asks for."""
    given = _parse(arguments)
    models = tuple(ROOT / "tests" / "data" / "oracle" / name for name in ORACLES)

    def say(line: str) -> None:
        print(line, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        clock, sizes = Clock(given.seconds), small.pop("sizes", gpu_parts.FULL)
        asked = Asked(given.target, models, given.large, given.cache or Path(folder))
        asked = replace(asked, **small)
        try:
            if given.one_run is not None:
                _run_once(replace(asked, models=(given.one_run,)))
                return 0
            device = open_device(asked.target)
            words = f"{device.name} ({device.arch}, {device.n_units} units, {device.driver})"
            asked = replace(asked, units=device.n_units)
            device.close()
            checks, rows = check(asked, open_device, say, clock, open_several)
            measured = ["", "Nothing was measured."]
            if is_sound(checks, strict=False):  # numbers of what is wrong are none
                found, measured = measure(gpu_parts.parts(asked, open_device, sizes), clock, say)
                checks += found
            checks += [sanitize(asked, tool, clock) for tool in SANITIZERS]
        except TargetError as error:
            print(f"NOT RUN: {error.text('gpu')}")
            return error.exit_code
        except K3Error as error:
            print(error.text("gpu"), file=sys.stderr)
            return error.exit_code
    print(summary(checks))
    with atomic_path(given.output) as temporary:
        temporary.write_text("\n".join(page(asked, words, checks, rows, measured)) + "\n")
    return 0 if is_sound(checks, strict=given.strict) else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
