"""`k3tool inspect`: say whether a checkpoint is whole; the exit code is the answer."""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from k3tool.checkpoint.coverage import Coverage, coverage_of
from k3tool.checkpoint.coverage_report import (
    json_value,
    markdown_lines,
    report_sections,
    text_lines,
)
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.tensor_report import tensor_lines, tensor_value
from k3tool.errors import ArtifactError, UsageError
from k3tool.model.config import K3Config
from k3tool.model.graph import weight_leaves
from stages import options


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

    @property
    def exit_code(self) -> int:
        """Return the answer as a number."""
        return 0 if self.coverage.is_whole else ArtifactError.exit_code


def run(opts: Options) -> Result:
    """Inspect a checkpoint or rank folder. Raises: ArtifactError on a bad config or index."""
    with Checkpoint.open(opts.checkpoint) as checkpoint:
        coverage = coverage_of(checkpoint, weight_leaves(checkpoint.config))
        digest = None
        if opts.output:
            # HDF5 takes as long to load as the rest of a small report to make.
            from k3tool.checkpoint.coverage_artifact import write_coverage

            digest = write_coverage(opts.output, coverage)
        return Result(coverage, checkpoint.config, digest)


def as_dict(result: Result, layers: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Return the result as plain values for `--json`."""
    return {**json_value(result.coverage, result.config, layers), "digest": result.digest}


def check_layers(config: K3Config, layers: tuple[int, ...] | None) -> None:
    """Refuse layers that the model does not have. Raises: UsageError."""
    absent = sorted(set(layers or ()) - set(config.layers))
    if absent:
        need = f"layers 0 to {config.num_hidden_layers - 1}"
        raise UsageError("--layers", got=absent[0], need=need)


def report(result: Result, layers: tuple[int, ...] | None, verbose: bool, markdown: bool) -> str:
    """Return the text a person reads; lines are cut only where a terminal would wrap them."""
    sections = report_sections(result.coverage, result.config, layers=layers, every_finding=verbose)
    if markdown:
        return "\n".join(markdown_lines(sections))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join(text_lines(sections, width))


@click.command(name="inspect")
@click.argument("checkpoint", type=options.PATH)
@click.option(
    "--layers",
    callback=options.layer_list,
    metavar="LIST",
    help="Show these layers module by module, such as 3-5.",
)
@click.option("--tensor", metavar="NAME", help="Show one tensor: file, shape, ranks.")
@click.option("--markdown", is_flag=True, help="Print the report as markdown.")
@options.output("a coverage artifact", required=False)
@options.as_json()
@options.verbose()
@click.pass_context
def command(
    ctx: click.Context,
    checkpoint: Path,
    layers: tuple[int, ...] | None,
    tensor: str | None,
    markdown: bool,
    output: Path | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Say whether a checkpoint is whole: exit code 0, or 3 with what is wrong.

    Compares the tensors the model needs with the index, the headers of all files and the weights
    the operator graph reads. Headers only: a terabyte takes seconds.

    \b
    Example:
      k3tool inspect CKPT
      k3tool inspect CKPT --layers 3-5
      k3tool inspect CKPT --tensor lm_head.weight
      k3tool inspect CKPT --json -o coverage.h5
    """
    if tensor is not None:
        with Checkpoint.open(checkpoint) as opened:
            facts = tensor_value(opened, tensor)
        click.echo(json.dumps(facts, indent=1) if as_json else "\n".join(tensor_lines(facts)))
        return
    result = run(Options(checkpoint, output))
    check_layers(result.config, layers)
    if as_json:
        click.echo(json.dumps(as_dict(result, layers), indent=1))
    else:
        click.echo(report(result, layers, verbose, markdown))
    ctx.exit(result.exit_code)
