"""`k3tool inspect`: say whether a checkpoint is whole; the exit code is the answer."""

import json
import os
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3tool.atomic import artifact_output, check_outputs
from k3tool.checkpoint.coverage import Coverage, coverage_of
from k3tool.checkpoint.coverage_report import (
    json_value,
    markdown_lines,
    report_sections,
    text_lines,
)
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.tensor_report import tensor_lines, tensor_value
from k3tool.errors import ArtifactError, UnsoundError, UsageError, incomplete
from k3tool.model.config import K3Config
from k3tool.model.graph import weight_leaves
from k3tool.progress import progress_of, waiting
from k3tool.tables import bytes_text
from stages import options

if TYPE_CHECKING:  # NumPy's and HDF5's loading is most of what a small report takes
    from k3tool.checkpoint.values import Values


@dataclass(frozen=True, slots=True)
class Options:
    """What to inspect and where to write the coverage artifact, if anywhere.

    `values` reads the data too, of `layers` or all, with `jobs` threads (None: one a CPU).
    `fingerprint` is written and `against` compared; both need `values`.
    """

    checkpoint: Path
    output: Path | None = None
    values: bool = False
    layers: tuple[int, ...] | None = None
    jobs: int | None = None
    fingerprint: Path | None = None
    against: Path | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The comparison, the config it used, the digest of the artifact if one was written, values."""

    coverage: Coverage
    config: K3Config
    digest: str | None
    values: "Values | None" = None

    @property
    def exit_code(self) -> int:
        """Return the answer as a number: what shard would refuse comes before values."""
        if not self.coverage.is_whole:
            return ArtifactError.exit_code
        return UnsoundError.exit_code if self.values and self.values.findings else 0


@waiting("reading headers")
def run(opts: Options) -> Result:
    """Inspect a checkpoint or rank folder.

    Raises: ArtifactError on a bad config or index; UsageError on layers that do not exist.
    """
    wanted = (("coverage", opts.output, "-o"), ("fingerprint", opts.fingerprint, "--fingerprint"))
    outputs = [artifact_output(path, kind, option) for kind, path, option in wanted if path]
    check_outputs(outputs, [opts.checkpoint, *([opts.against] if opts.against else [])])
    jobs = opts.jobs or os.cpu_count() or 1
    if opts.values:
        from k3tool.checkpoint.values import require_threads

        require_threads(jobs)
    with Checkpoint.open(opts.checkpoint) as checkpoint:
        check_layers(checkpoint.config, opts.layers)
        coverage = coverage_of(checkpoint, weight_leaves(checkpoint.config))
        values = _look_at_values(checkpoint, opts, coverage, jobs) if opts.values else None
        digest = None
        if opts.output:
            # HDF5 takes as long to load as the rest of a small report to make.
            from k3tool.checkpoint.coverage_artifact import write_coverage

            digest = write_coverage(opts.output, coverage, values)
        return Result(coverage, checkpoint.config, digest, values)


def _look_at_values(
    checkpoint: Checkpoint, opts: Options, coverage: Coverage, jobs: int
) -> "Values":
    from k3tool.checkpoint.fingerprint import (
        compare_fingerprints,
        read_fingerprint,
        write_fingerprint,
    )
    from k3tool.checkpoint.value_targets import Targets
    from k3tool.checkpoint.values import ValueScan

    recorded = read_fingerprint(opts.against) if opts.against else None
    targets = Targets(checkpoint, opts.layers)
    wanted = recorded is not None or opts.fingerprint is not None
    scan = ValueScan(checkpoint, targets, n_bytes=targets.n_bytes, jobs=jobs, fingerprint=wanted)
    with progress_of("values") as progress:
        values = scan.run(lambda done: progress(done, targets.n_bytes))
    if recorded is not None:
        values.findings += compare_fingerprints(
            values.fingerprints, recorded, checkpoint.index.weight_map
        )
    if opts.fingerprint is not None:
        identity = coverage.identity or "unknown: a file could not be read"
        write_fingerprint(opts.fingerprint, values.fingerprints, checkpoint.path.name, identity)
    return values


def as_dict(result: Result, layers: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Return the result as plain values for `--json`."""
    facts = {**json_value(result.coverage, result.config, layers), "digest": result.digest}
    if result.values is not None:
        from k3tool.checkpoint.values_report import values_json

        facts["values"] = values_json(result.values)
    return facts


def check_layers(config: K3Config, layers: tuple[int, ...] | None) -> None:
    """Refuse layers that the model does not have. Raises: UsageError."""
    absent = sorted(set(layers or ()) - set(config.layers))
    if absent:
        need = f"layers 0 to {config.num_hidden_layers - 1}"
        raise UsageError("--layers", got=absent[0], need=need)


def report(result: Result, layers: tuple[int, ...] | None, verbose: bool, markdown: bool) -> str:
    """Return the text a person reads; lines are cut only where a terminal would wrap them."""
    sections = report_sections(result.coverage, result.config, layers=layers, every_finding=verbose)
    if result.values is not None:
        from k3tool.checkpoint.values_report import values_sections

        by_layer = layers is not None or verbose
        verdict = sections.pop()
        sections += values_sections(result.values, by_layer=by_layer, every_finding=verbose)
        sections.append(verdict._replace(lines=[*verdict.lines, values_verdict(result.values)]))
    if markdown:
        return "\n".join(markdown_lines(sections))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join(text_lines(sections, width))


def values_verdict(values: "Values") -> str:
    """Return the line after the verdict: what was read, and how many of what."""
    read = f"values of {bytes_text(values.n_bytes)}"
    if not values.findings:
        return f"{read}: sound"
    counts = Counter(finding.kind for finding in values.findings)
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{read}: not sound: {listed}"


_OF_THE_REPORT = (
    "layers", "values", "fingerprint", "against", "jobs", "markdown", "output", "verbose",
)  # fmt: skip


@click.command(name="inspect")
@click.argument("checkpoint", type=options.PATH)
@click.option(
    "--layers",
    callback=options.layer_list,
    metavar="LIST",
    help="Show these layers module by module, such as 3-5.",
)
@click.option(
    "--tensor",
    metavar="NAME",
    help="Show one tensor: file, shape, ranks. Takes --json, and no other option.",
)
@click.option("--values", is_flag=True, help="Read the data too and look at every value.")
@click.option(
    "--fingerprint",
    type=options.PATH,
    metavar="FILE",
    help="With --values: write what tells tensors apart later.",
)
@click.option(
    "--against",
    type=options.PATH,
    metavar="FILE",
    help="With --values: compare with a fingerprint written before.",
)
@click.option("--jobs", type=options.POSITIVE, help="Threads of --values. Default: one a CPU.")
@click.option("--markdown", is_flag=True, help="Print the report as markdown; not with --json.")
@options.output("a coverage artifact", required=False)
@options.as_json()
@options.verbose("Also list every finding and every layer, on stdout.")
@click.pass_context
def command(
    ctx: click.Context,
    checkpoint: Path,
    layers: tuple[int, ...] | None,
    tensor: str | None,
    values: bool,
    fingerprint: Path | None,
    against: Path | None,
    jobs: int | None,
    markdown: bool,
    output: Path | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Say whether a checkpoint is whole: exit code 0, or 3 with what is wrong.

    Compares the tensors the model needs with the index, the headers of all files and the weights
    the operator graph reads. Reads config, index, all headers and, for the identity, a sample of
    the data (1 MiB of a large file): a terabyte takes seconds. With `--values` all data: exit code
    4 if the checkpoint is whole and its values must not be trusted.

    \b
    Example:
      k3tool inspect CKPT
      k3tool inspect CKPT --layers 3-5
      k3tool inspect CKPT --tensor lm_head.weight
      k3tool inspect CKPT --json -o coverage.h5
      k3tool inspect CKPT --values --fingerprint before.h5
      k3tool inspect CKPT --values --against before.h5
    """
    options.refuse_beside("markdown", beside="as_json")
    if tensor is not None:
        options.refuse_beside(*_OF_THE_REPORT, beside="tensor", why="of one there is no report")
        with Checkpoint.open(checkpoint) as opened:
            facts = tensor_value(opened, tensor)
        click.echo(json.dumps(facts, indent=1) if as_json else "\n".join(tensor_lines(facts)))
        return
    only_with = {"--fingerprint": fingerprint, "--against": against, "--jobs": jobs}
    for option, given in only_with.items():
        if given is not None and not values:
            raise incomplete(option, "--values", "it reads the data")
    result = run(Options(checkpoint, output, values, layers, jobs, fingerprint, against))
    if as_json:
        click.echo(json.dumps(as_dict(result, layers), indent=1))
    else:
        click.echo(report(result, layers, verbose, markdown))
    ctx.exit(result.exit_code)
