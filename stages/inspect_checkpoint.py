"""`k3tool inspect`: say whether a checkpoint is whole; the exit code is the answer."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from k3tool.checkpoint.coverage import Coverage, ModuleCount, check_coverage
from k3tool.checkpoint.coverage_artifact import write_coverage
from k3tool.checkpoint.findings import FINDING_KINDS
from k3tool.errors import ArtifactError
from k3tool.model.config import K3Config
from k3tool.model.graph import weight_leaves
from stages import options

FINDINGS_SHOWN = 20  # of each kind, unless -v


@dataclass(frozen=True, slots=True)
class Options:
    """What to inspect and where to write the coverage artifact, if anywhere."""

    checkpoint: Path
    output: Path | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The comparison, the config it used, and the digest of the artifact if one was written."""

    coverage: Coverage
    config: K3Config
    digest: str | None


def run(opts: Options) -> Result:
    """Inspect a checkpoint or rank folder. Raises: ArtifactError on a bad config or index."""
    config = K3Config.load(opts.checkpoint / "config.json")
    coverage = check_coverage(opts.checkpoint, weight_leaves(config))
    digest = write_coverage(opts.output, coverage) if opts.output else None
    return Result(coverage, config, digest)


# -- output ------------------------------------------------------------------------------------


def as_dict(result: Result) -> dict[str, Any]:
    """Return the result as plain values for `--json`."""
    coverage = result.coverage
    return {
        "whole": coverage.is_whole,
        "checkpoint": str(coverage.path),
        "identity": coverage.identity,
        "tp": coverage.tp,
        "rank": coverage.rank,
        "files": coverage.n_files,
        "index": "headers" if coverage.from_headers else "index file",
        "tensors": {"expected": coverage.expected, "indexed": coverage.n_tensors},
        "bytes": coverage.n_bytes,
        "legal_tp": result.config.legal_tp(),
        "eps": dict(result.config.eps),
        "vision": coverage.vision._asdict(),
        "idle": coverage.idle,
        "modules": [row._asdict() for row in coverage.modules],
        "findings": [finding._asdict() for finding in coverage.findings],
        "digest": result.digest,
    }


def table_lines(result: Result) -> list[str]:
    """Return the table a person reads: one line per layer and one for what is outside them."""
    lines = [f"{'layer':>7}  {'modules':<34} {'tensors':>15} {'GB':>10}  state"]
    by_layer: dict[int | None, list[ModuleCount]] = {}
    for row in result.coverage.modules:
        by_layer.setdefault(row.layer, []).append(row)
    for layer, rows in by_layer.items():
        label = "-" if layer is None else str(layer)
        lines.append(_table_line(label, rows))
    lines.append(_table_line("all", result.coverage.modules, "text model"))
    vision = result.coverage.vision
    if vision.expected or vision.found:
        counts = f"{vision.found}/{vision.expected}"
        lines.append(
            f"{'-':>7}  {'vision':<34} {counts:>15} {vision.n_bytes / 1e9:>10.3f}  dropped"
        )
    return lines


def _table_line(label: str, rows: list[ModuleCount], modules: str = "") -> str:
    expected, sound = sum(row.expected for row in rows), sum(row.sound for row in rows)
    modules = modules or " ".join(dict.fromkeys(row.module for row in rows))
    counts, n_bytes = f"{sound}/{expected}", sum(row.n_bytes for row in rows)
    state = "whole" if sound == expected else f"{expected - sound} not sound"
    return f"{label:>7}  {modules:<34} {counts:>15} {n_bytes / 1e9:>10.3f}  {state}"


def finding_lines(coverage: Coverage, verbose: bool) -> list[str]:
    """Return one line per finding, capped per kind unless verbose."""
    lines: list[str] = []
    shown: Counter[str] = Counter()
    for finding in coverage.findings:
        shown[finding.kind] += 1
        if verbose or shown[finding.kind] <= FINDINGS_SHOWN:
            lines.append(f"{finding.kind}: {finding.text()}")
    if verbose:
        return lines
    more = [kind for kind in FINDING_KINDS if shown[kind] > FINDINGS_SHOWN]
    return lines + [f"{kind}: {shown[kind] - FINDINGS_SHOWN} more (-v shows all)" for kind in more]


def verdict_line(coverage: Coverage) -> str:
    """Return the last line: whole, or how many of what."""
    source = "headers (no index file)" if coverage.from_headers else "index"
    if coverage.is_whole:
        return (
            f"whole: {coverage.expected} tensors in {coverage.n_files} files by {source}, "
            f"identity {coverage.identity}"
        )
    counts = Counter(finding.kind for finding in coverage.findings)
    listed = ", ".join(f"{counts[kind]} {kind}" for kind in FINDING_KINDS if counts[kind])
    return f"not whole: {listed}"


@click.command(name="inspect")
@click.argument("checkpoint", type=options.PATH)
@options.output("a coverage artifact", required=False)
@options.as_json()
@options.verbose()
@click.pass_context
def command(
    ctx: click.Context, checkpoint: Path, output: Path | None, as_json: bool, verbose: bool
) -> None:
    """Say whether a checkpoint is whole: exit code 0, or 3 with what is wrong.

    Compares the tensors the model needs with the index, the headers of all files and the weights
    the operator graph reads. Headers only: a terabyte takes seconds.

    \b
    Example:
      k3tool inspect CKPT
      k3tool inspect CKPT --json -o coverage.h5
    """
    result = run(Options(checkpoint, output))
    if as_json:
        click.echo(json.dumps(as_dict(result), indent=1))
    else:
        lines = [*table_lines(result), *finding_lines(result.coverage, verbose)]
        click.echo("\n".join([*lines, verdict_line(result.coverage)]))
    if not result.coverage.is_whole:
        ctx.exit(ArtifactError.exit_code)
