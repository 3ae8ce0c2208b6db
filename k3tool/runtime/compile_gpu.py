"""Compile every op body for the GPU targets and say what came out.

No GPU is needed. A target whose compiler is absent is NOT RUN, never a pass. Fails on a missing
body (naming the op), a warning, a spill, and on text that the arithmetic contract forbids.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from k3tool.errors import K3Error, TargetError, UnsoundError
from k3tool.runtime import gpu_source
from k3tool.runtime.gpu_compilers import TARGETS, Compiled, find_compiler, needs


@dataclass(frozen=True, slots=True)
class Outcome:
    """One target and phase: PASS, FAIL or NOT RUN, and the exit code of the failure, else 0."""

    target: str
    phase: str
    status: str
    exit_code: int
    detail: tuple[str, ...]
    ops: tuple[str, ...]
    source_digest: str
    compiled: Compiled | None


def compile_target(target: str) -> list[Outcome]:
    """Compile all op bodies of `target`, a phase with its own set of ops at a time.

    Raises TargetError for a target that nobody knows.
    """
    compiler = find_compiler(target)
    kind = target.partition(":")[0]
    outcomes = []
    detail: tuple[str, ...]
    for phase, ops in gpu_source.phases(kind).items():
        if compiler is None:
            detail, code = (f"needs {needs(target)}",), TargetError.exit_code
            outcomes.append(Outcome(target, phase, "NOT RUN", code, detail, ops, "", None))
            continue
        source = gpu_source.op_bodies(kind, phase)
        try:
            compiled = compiler(source, target)
        except K3Error as error:
            detail, code = (error.text(),), K3Error.exit_code
            outcomes.append(Outcome(target, phase, "FAIL", code, detail, ops, source.digest, None))
            continue
        detail = judge(compiled)
        status, code = ("FAIL", UnsoundError.exit_code) if detail else ("PASS", 0)
        outcomes.append(Outcome(target, phase, status, code, detail, ops, source.digest, compiled))
    return outcomes


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
    fields = ("target", "phase", "status", "source_digest")
    row: dict[str, object] = {name: getattr(outcome, name) for name in fields}
    row |= {"detail": list(outcome.detail), "ops": list(outcome.ops)}
    if outcome.compiled is not None:
        row["compiler"] = outcome.compiled.compiler
        row["kernels"] = [asdict(kernel) for kernel in outcome.compiled.kernels]
    return json.dumps(row)


def _as_text(outcome: Outcome) -> str:
    phases = gpu_source.phases_label(outcome.target.partition(":")[0], outcome.phase)
    if outcome.status == "NOT RUN":
        return f"NOT RUN: {outcome.target} {phases} ({'; '.join(outcome.detail)})"
    compiler = f", {outcome.compiled.compiler}" if outcome.compiled else ""
    lines = [
        f"{outcome.status} {outcome.target} {phases}: {len(outcome.ops)} ops{compiler}",
        *(f"  {detail}" for detail in outcome.detail),
    ]
    for k in outcome.compiled.kernels if outcome.compiled else ():
        kept = f" ({k.scalar_spills} scalars kept in lanes)" if k.scalar_spills else ""
        lines.append(
            f"  {k.name}: registers {k.registers}, spills {k.spills}{kept},"
            f" stack {k.stack_bytes} B, shared {k.shared_bytes} B, code {k.code_bytes} B"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="compile_gpu", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="an absent compiler is no failure, as long as another target was compiled",
    )
    options = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    for target in options.target or TARGETS:
        for outcome in compile_target(target):
            outcomes.append(outcome)
            print(_as_json(outcome) if options.json else _as_text(outcome), flush=True)
    return exit_code(outcomes, options.allow_missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
