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
from k3tool.isa.table import SPECS
from k3tool.runtime import gpu_source
from k3tool.runtime.gpu_compilers import TARGETS, Compiled, find_compiler, needs


@dataclass(frozen=True, slots=True)
class TargetResult:
    """One target's outcome: PASS, FAIL or NOT RUN, and the exit code of the failure, else 0."""

    target: str
    status: str
    exit_code: int
    detail: tuple[str, ...]
    n_ops: int
    source_digest: str
    compiled: Compiled | None


def compile_target(target: str) -> TargetResult:
    """Compile all op bodies of `target` and judge the result.

    Raises TargetError for a target that nobody knows.
    """
    compiler = find_compiler(target)
    kind = target.partition(":")[0]
    n_ops = sum(kind in spec.targets for spec in SPECS.values())
    if compiler is None:
        detail = (f"needs {needs(target)}",)
        return TargetResult(target, "NOT RUN", TargetError.exit_code, detail, n_ops, "", None)
    source = gpu_source.op_bodies(kind)
    try:
        compiled = compiler(source, target)
    except K3Error as error:
        detail = (error.text(),)
        return TargetResult(target, "FAIL", K3Error.exit_code, detail, n_ops, source.digest, None)
    problems = judge(compiled)
    status, code = ("FAIL", UnsoundError.exit_code) if problems else ("PASS", 0)
    return TargetResult(target, status, code, problems, n_ops, source.digest, compiled)


def judge(compiled: Compiled) -> tuple[str, ...]:
    """Return what makes `compiled` unfit: forbidden text and spills."""
    spilled = tuple(
        f"{kernel.name}: got {kernel.spills} spilled, need 0"
        for kernel in compiled.kernels
        if kernel.spills
    )
    return compiled.findings + spilled


def exit_code(results: Sequence[TargetResult], allow_missing: bool) -> int:
    """Return the gravest code; NOT RUN counts unless allowed and something else was compiled."""
    codes = {result.exit_code for result in results}
    if allow_missing and any(result.compiled for result in results):
        codes.discard(TargetError.exit_code)
    gravest = (UnsoundError.exit_code, K3Error.exit_code, TargetError.exit_code)
    return next((code for code in gravest if code in codes), 0)


def _as_json(result: TargetResult) -> str:
    row = {name: getattr(result, name) for name in ("target", "status", "n_ops", "source_digest")}
    row["detail"] = list(result.detail)
    if result.compiled is not None:
        row["compiler"] = result.compiled.compiler
        row["kernels"] = [asdict(kernel) for kernel in result.compiled.kernels]
    return json.dumps(row)


def _as_text(result: TargetResult) -> str:
    if result.status == "NOT RUN":
        return f"NOT RUN: {result.target} ({'; '.join(result.detail)})"
    compiler = result.compiled.compiler if result.compiled else ""
    lines = [f"{result.status} {result.target} {compiler}: {result.n_ops} ops".replace(" :", ":")]
    lines += [f"  {detail}" for detail in result.detail]
    for kernel in result.compiled.kernels if result.compiled else ():
        lines.append(
            f"  {kernel.name:18} registers {kernel.registers:3}  spills {kernel.spills}"
            f"  stack {kernel.stack_bytes} B  shared {kernel.shared_bytes} B"
            f"  code {kernel.code_bytes} B"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="compile_gpu", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object a target")
    parser.add_argument(
        "--allow-missing", action="store_true",
        help="an absent compiler is no failure, as long as another target was compiled",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    results = []
    for target in options.target or TARGETS:
        results.append(compile_target(target))
        print(_as_json(results[-1]) if options.json else _as_text(results[-1]), flush=True)
    return exit_code(results, options.allow_missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
