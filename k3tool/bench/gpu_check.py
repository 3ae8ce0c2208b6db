"""`make gpu`: what only a device can show, against the CPU's bits, and a page that says what ran.

Without a device it prints NOT RUN, writes nothing and ends with 5. What has not been written is
NOT RUN by name, on every page.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k3tool.atomic import atomic_path
from k3tool.bench.frame import interleave, spread
from k3tool.errors import K3Error, TargetError, UsageError, listed
from k3tool.model.config import K3Config
from k3tool.revision import tool_version
from k3tool.runtime.build import ROOT
from k3tool.runtime.cache import open_source, program
from k3tool.runtime.gpu_device import builds_of, find_device
from k3tool.runtime.gpu_runtime import Device
from k3tool.runtime.gpu_source import builds, program_ops
from k3tool.runtime.options import RunOptions
from k3tool.runtime.run import RunResult, run_model
from k3tool.tables import Column, Table
from k3tool.targets import get_target
from k3tool.verdict import Check, failed, is_sound, not_run, passed, summary

PROMPT = (3, 1, 4, 1, 5, 9, 2)
ORACLES = ("tiny13", "tiny_tp8")
MEASURED, REPEATS = 4, 3
SANITIZERS = ("memcheck", "racecheck")
_SANITIZED_SECONDS = 600.0  # a step is some hundred times longer there
NOT_WRITTEN = (
    ("batch 8", "a run has one sequence"),
    ("hand-off against a grid-wide barrier and launches in a graph", "not written"),
    ("GEMV bf16 and MXFP4 as a share of the copy bandwidth", "not written"),
    ("tokens per second against a graph of launches, one for each op", "not written"),
    ("anatomy of a token and ablation of bodies", "not written"),
    ("ranks on several devices", "not written: a run has one"),
)
Open = Callable[[str], Device]
Print = Callable[[str], None]


class Case(NamedTuple):
    """One comparison: a model, how it is run, and in words."""

    model: Path
    given: dict[str, Any]

    @property
    def name(self) -> str:
        """Return it in words."""
        words = " ".join(f"{key} {value}" for key, value in self.given.items())
        return f"bits of {self.model.name}, {words}"


class Row(NamedTuple):
    """Tokens a second of a case that ran, device and CPU."""

    case: Case
    device: RunResult
    cpu: RunResult


@dataclass(frozen=True, slots=True)
class Asked:
    """What to check: small `models` in every way, a `large` one at TP 1."""

    target: str
    models: tuple[Path, ...]
    large: Path | None
    cache: Path
    gen: int = 8
    workgroups: int | None = None


def cases(asked: Asked) -> Iterator[Case]:
    """Yield prefill in one step and in chunks, by decode, one rank and two."""
    for model in asked.models:
        yield Case(model, {"tp": 1})
        yield Case(model, {"tp": 1, "chunk": 3, "numerics": "bf16"})
        yield Case(model, {"tp": 1, "prefill": "decode"})
        if _has_degree(model, 2):
            yield Case(model, {"tp": 2})
    if asked.large is not None:
        yield Case(asked.large, {"tp": 1})
        yield Case(asked.large, {"tp": 1, "numerics": "bf16"})


def _has_degree(model: Path, tp: int) -> bool:
    try:
        K3Config.load(model / "config.json").check_tp(tp)
    except UsageError:
        return False
    return True


def check(asked: Asked, open_device: Open, say: Print) -> tuple[list[Check], list[Row]]:
    """Run every case on a device and on the CPU. Raises: TargetError where no device is."""
    checks: list[Check] = []
    rows: list[Row] = []
    _compile(asked, open_device(asked.target))

    def add(one: Check) -> None:
        checks.append(one)
        say(f"{one.status} {one.name}: {one.detail}")

    for case in cases(asked):
        try:
            row = _run(asked, case, open_device(asked.target))
        except K3Error as error:
            add(failed(case.name, error.text().replace("\n", "; ")))
            continue
        rows.append(row)
        found = difference(row.device, row.cpu)
        tokens = f"{len(row.device.tokens)} tokens and every logit"
        add(failed(case.name, found) if found else passed(case.name, tokens))
    if asked.large is None:
        add(not_run("bits of k3-slice", "no --large: k3tool sample DIR --preset k3-slice"))
    for tool in SANITIZERS:
        add(_sanitize(asked, tool))
    for name, reason in NOT_WRITTEN:
        add(not_run(name, reason))
    return checks, rows


def difference(found: RunResult, want: RunResult) -> str:
    """Return where two runs first differ, empty where all tokens and logits have equal bits."""
    if found.tokens != want.tokens:
        pairs = zip(found.tokens, want.tokens, strict=False)
        step = next((i for i, (a, b) in enumerate(pairs) if a != b), len(found.tokens))
        got, need = (listed(run.tokens[step : step + 1]) for run in (found, want))
        return f"token {step}: got {got}, need {need}"
    for name in ("prefill", "steps"):
        a, b = (np.asarray(getattr(run, name)).view("<u4") for run in (found, want))
        wrong = np.argwhere(a != b)
        if len(wrong):
            row, column = wrong[0].tolist()
            return f"{len(wrong)} of {a.size} logits differ, first {name} {row}, id {column}"
    return ""


def _options(asked: Asked, case: Case) -> RunOptions:
    return RunOptions(
        case.model, PROMPT, asked.gen, cache=asked.cache, ignore_eos=True, logits=True,
        workgroups=asked.workgroups, **case.given,
    )  # fmt: skip


def _run(asked: Asked, case: Case, device: Device) -> Row:
    options = _options(asked, case)
    on_device = run_model(replace(options, target=asked.target), device=device)
    return Row(case, on_device, run_model(options))


def _compile(asked: Asked, device: Device) -> None:
    """Compile all programs' interpreters at once: one after the other takes longer than the runs.

    Raises: what a compiler or a checkpoint is refused with.
    """
    needed: dict[tuple[tuple[str, ...], tuple[str, ...]], None] = {}
    try:
        for case in cases(asked):
            options = replace(_options(asked, case), target=asked.target)
            isa = program(open_source(options), options, lambda text: None).isa
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


def _sanitize(asked: Asked, tool: str) -> Check:
    """Run a few steps below a sanitizer; its own exit code tells a finding from a refusal."""
    name = f"compute-sanitizer {tool}"
    found = shutil.which("compute-sanitizer")
    if found is None or get_target(asked.target).family != "cuda":
        return not_run(name, "no compute-sanitizer" if found is None else "for CUDA alone")
    command = [
        found, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m",
        "k3tool.bench.gpu_check", "--target", asked.target, "--cache", str(asked.cache),
        "--one-run", str(asked.models[0]),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
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


def measure(asked: Asked, open_device: Open) -> str:
    """Return decode's tokens a second in one launch and in one for each op, in turn, in words.

    Raises: what a run is refused with.
    """
    model = asked.large or asked.models[-1]
    options = RunOptions(
        model, PROMPT, 1 + MEASURED * asked.gen, target=asked.target, tp=1, cache=asked.cache,
        workgroups=asked.workgroups, ignore_eos=True,
    )  # fmt: skip

    def rate(is_each: bool) -> float:
        each = replace(options, is_launch_per_op=is_each)
        found = run_model(each, device=open_device(asked.target)).decode_tokens_per_second
        assert found is not None
        return found

    paired = interleave(lambda: rate(True), lambda: rate(False), REPEATS)
    one, each = spread(paired.second), spread(paired.first)
    return (
        f"{model.name}, one sequence: {one.text()} tokens a second in one launch, {each.text()} in "
        f"one for each op: {paired.ratio.text()} times as many"
    )


# ---- the page -----------------------------------------------------------------------------------


def page(
    asked: Asked, device: str, checks: Sequence[Check], rows: Sequence[Row], measured: str
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
        "",
        measured,
    ]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--target", default="cuda:sm_90a", help="default: %(default)s")
    parser.add_argument("--large", type=Path, help="a k3-slice checkpoint")
    parser.add_argument("--cache", type=Path, help="where programs and objects are kept")
    parser.add_argument("--strict", action="store_true", help="NOT RUN fails")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "gpu-results.md")
    parser.add_argument("--one-run", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], open_device: Open = find_device, **small: Any) -> int:
    """Run the command line and return its exit code; `small` changes what a test asks for."""
    given = _parse(arguments)
    models = tuple(ROOT / "tests" / "data" / "oracle" / name for name in ORACLES)
    with tempfile.TemporaryDirectory() as folder:
        asked = Asked(given.target, models, given.large, given.cache or Path(folder))
        asked = replace(asked, **small)
        try:
            if given.one_run is not None:
                _run_once(replace(asked, models=(given.one_run,)))
                return 0
            device = open_device(asked.target)
            words = f"{device.name} ({device.arch}, {device.n_units} units, {device.driver})"
            device.close()
            checks, rows = check(asked, open_device, lambda line: print(line, flush=True))
            is_held = is_sound(checks, strict=given.strict)
            measured = measure(asked, open_device) if is_held else "Nothing was measured."
        except TargetError as error:
            print(f"NOT RUN: {error.text('gpu')}")
            return error.exit_code
        except K3Error as error:
            print(error.text("gpu"), file=sys.stderr)
            return error.exit_code
    print(measured)
    print(summary(checks))
    with atomic_path(given.output) as temporary:
        temporary.write_text("\n".join(page(asked, words, checks, rows, measured)) + "\n")
    return 0 if is_held else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
