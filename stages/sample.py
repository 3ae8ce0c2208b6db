"""`k3tool sample`: write a small synthetic checkpoint in the released on-disk layout."""

import json
from dataclasses import dataclass
from pathlib import Path

import click

from k3tool.checkpoint.sample_presets import PRESETS
from k3tool.checkpoint.sample_writer import SampleInfo, write_sample
from stages import options


@dataclass(frozen=True, slots=True)
class Options:
    """Where to write which shape, and the seed of its values."""

    output: Path
    preset: str = "tiny"
    seed: int = 0


def run(opts: Options) -> SampleInfo:
    """Write the checkpoint; see k3tool.checkpoint.sample_writer.write_sample."""
    return write_sample(opts.output, opts.preset, opts.seed)


@click.command(name="sample")
@click.argument("output", type=options.PATH)
@click.option(
    "--preset",
    type=click.Choice(sorted(PRESETS)),
    default="tiny",
    show_default=True,
    help="Which shape.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the values."
)
@options.as_json()
def command(output: Path, preset: str, seed: int, as_json: bool) -> None:
    """Write a synthetic checkpoint to try the pipeline on, legal at TP 8.

    Random weights in the released layout: its tokens mean nothing. Same preset and seed, same
    bytes.

    \b
    Example:
      k3tool sample CKPT
      k3tool inspect CKPT
    """
    info = run(Options(output, preset, seed))
    if as_json:
        click.echo(json.dumps({**info._asdict(), "path": str(info.path)}))
        return
    degrees = ", ".join(map(str, info.legal_tp))
    click.echo(
        f"sample {info.path}: {info.preset}, {info.n_tensors} tensors in {info.n_files} files, "
        f"{info.total_bytes} bytes, legal at TP {degrees}"
    )
