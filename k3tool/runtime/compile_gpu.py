"""Compile the GPU interpreters and say what came out.

No GPU is needed. A target whose compiler is absent is NOT RUN, never a pass. Fails on a missing
body (naming the op), a warning, a spill, an object that does not say what it is, and on text that
the arithmetic contract forbids.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from k3tool.errors import K3Error, TargetError, UnsoundError
from k3tool.isa.stream import load_isa
from k3tool.isa.table import ALL_PHASES
from k3tool.runtime import gpu_source
from k3tool.runtime.gpu_compilers import TARGETS, Compiled, find_compiler, needs
from k3tool.runtime.gpu_object import check_build, read_identity
from k3tool.targets import BUILDS, Build, get_build


@dataclass(frozen=True, slots=True)
class Outcome:
    """A target's phases of equal ops: PASS, FAIL or NOT RUN, and the failure's exit code."""

    target: str
    phases: tuple[str, ...]
    source: str
    status: str
    exit_code: int
    detail: tuple[str, ...]
    ops: tuple[str, ...]
    source_digest: str
    compiled: Compiled | None


def all_ops(target: str) -> dict[str, tuple[str, ...]]:
    """Return phase -> every op of the table that the target serves: what any program may use."""
    return {phase: gpu_source.op_names(target.partition(":")[0], phase) for phase in ALL_PHASES}


def compile_target(target: str, ops: Mapping[str, tuple[str, ...]] | None = None) -> list[Outcome]:
    """Compile the interpreters of `target`, one for each set of ops; `ops` by phase, default all.

    Of a program's ops the build that serves them, of all ops every build.
    Raises TargetError for a target that nobody knows.
    """
    find_compiler(target)
    outcomes: list[Outcome] = []
    for phases, names in gpu_source.builds(ops or all_ops(target)).items():
        every = BUILDS[target, phases[0]]
        chosen = every if ops is None else (get_build(target, phases[0], names),)
        outcomes += [_compile(target, phases, names, build) for build in chosen]
    return outcomes


def _compile(target: str, phases: tuple[str, ...], ops: tuple[str, ...], build: Build) -> Outcome:
    compiler = find_compiler(target)
    code = TargetError.exit_code
    made = Outcome(target, phases, build.source, "NOT RUN", code, (), ops, "", None)
    if compiler is None:
        return replace(made, detail=(f"needs {needs(target)}",))
    source = gpu_source.interpreter(target, phases, ops, build)
    made = replace(made, source_digest=source.digest)
    try:
        compiled = compiler(source, target)
        check_build(read_identity(compiled.object_bytes, target), target, phases, ops, build)
    except K3Error as error:
        return replace(made, status="FAIL", exit_code=K3Error.exit_code, detail=(error.text(),))
    detail = judge(compiled)
    status, code = ("FAIL", UnsoundError.exit_code) if detail else ("PASS", 0)
    return replace(made, status=status, exit_code=code, detail=detail, compiled=compiled)


def judge(compiled: Compiled) -> tuple[str, ...]:
    """Return what makes `compiled` unfit: forbidden text and spills."""
    spilled = tuple(
        f"{kernel.name}: got {kernel.spills} spilled, need 0"
        for kernel in compiled.kernels
        if kernel.spills
    )
    return compiled.findings + spilled


def exit_code(outcomes: Sequence[Outcome], allow_missing: bool) -> int:
    """Return the gravest code; NOT RUN counts unless allowed and something else was compiled."""
    codes = {outcome.exit_code for outcome in outcomes}
    if allow_missing and any(outcome.compiled for outcome in outcomes):
        codes.discard(TargetError.exit_code)
    gravest = (UnsoundError.exit_code, K3Error.exit_code, TargetError.exit_code)
    return next((code for code in gravest if code in codes), 0)


def _as_json(outcome: Outcome) -> str:
    fields = ("target", "source", "status", "source_digest")
    row: dict[str, object] = {name: getattr(outcome, name) for name in fields}
    row |= {name: list(getattr(outcome, name)) for name in ("phases", "detail", "ops")}
    if outcome.compiled is not None:
        row["compiler"] = outcome.compiled.compiler
        row["kernels"] = [asdict(kernel) for kernel in outcome.compiled.kernels]
    return json.dumps(row)


def _as_text(outcome: Outcome) -> str:
    phases = "=".join(outcome.phases)
    if outcome.status == "NOT RUN":
        return (
            f"NOT RUN: {outcome.target} {phases} of {outcome.source} ({'; '.join(outcome.detail)})"
        )
    compiler = f", {outcome.compiled.compiler}" if outcome.compiled else ""
    lines = [
        f"{outcome.status} {outcome.target} {phases} of {outcome.source}: "
        f"{len(outcome.ops)} ops{compiler}",
        *(f"  {detail}" for detail in outcome.detail),
    ]
    for k in outcome.compiled.kernels if outcome.compiled else ():
        kept = f" ({k.scalar_spills} scalars kept in lanes)" if k.scalar_spills else ""
        lines.append(
            f"  {k.name}: registers {k.registers}, spills {k.spills}{kept},"
            f" stack {k.stack_bytes} B, shared {k.shared_bytes} B, code {k.code_bytes} B"
        )
    return "\n".join(lines)


_COLUMNS = ("target", "phases", "source", "ops", "kernel", "registers", "spills", "stack B",
            "shared B", "code B", "compiler")  # fmt: skip


def _as_markdown(outcome: Outcome) -> str:
    """Return a row for each kernel, of what docs/gpu-compiled.md keeps."""
    first = [outcome.target, " ".join(outcome.phases), outcome.source, str(len(outcome.ops))]
    if outcome.compiled is None:
        return " | ".join(["", *first, outcome.status, *[""] * 5, *outcome.detail, ""]).strip()
    rows = []
    for k in outcome.compiled.kernels:
        numbers = (k.registers, k.spills, k.stack_bytes, k.shared_bytes, k.code_bytes)
        cells = [*first, k.name, *map(str, numbers), outcome.compiled.compiler]
        rows.append(" | ".join(["", *cells, ""]).strip())
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="compile_gpu", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--isa", type=Path, help="only the opcodes of this program; default: all")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object a line")
    form.add_argument("--markdown", action="store_true", help="rows of a table")
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="an absent compiler is no failure, as long as another target was compiled",
    )
    options = parser.parse_args(arguments)
    try:
        ops = gpu_source.program_ops(load_isa(options.isa)) if options.isa else None
    except K3Error as error:
        print(error.text("compile_gpu"), file=sys.stderr)
        return error.exit_code
    show = _as_json if options.json else _as_markdown if options.markdown else _as_text
    if options.markdown:
        print(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    outcomes: list[Outcome] = []
    for target in options.target or TARGETS:
        for outcome in compile_target(target, ops):
            outcomes.append(outcome)
            print(show(outcome), flush=True)
    return exit_code(outcomes, options.allow_missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
