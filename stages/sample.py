"""`k3tool sample`: write a small synthetic checkpoint, or a stand-in of the released one."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from k3tool.checkpoint.released_layout import RELEASED_DATA, write_released
from k3tool.checkpoint.sample_presets import PRESETS
from k3tool.checkpoint.sample_writer import SampleInfo, write_sample
from k3tool.errors import excluded, incomplete, printable
from k3tool.tables import bytes_text
from stages import options


@dataclass(frozen=True, slots=True)
class Options:
    """Where to write which shape, and the seed of its values.

    `released` asks for the stand-in of the released checkpoint, made from config and index in
    `data`, with real bytes in `fill_layers` only, and with experts `shuffled` inside each layer.
    """

    output: Path
    preset: str | None = None  # tiny; the released layout has a shape of its own
    seed: int = 0
    released: bool = False
    data: Path | None = None  # this checkout's
    fill_layers: tuple[int, ...] = ()
    shuffled: bool = False


def run(opts: Options, say: Callable[[str], None] | None = None) -> SampleInfo:
    """Write the checkpoint; see write_sample and write_released in k3tool.checkpoint.

    `say` hears of each file of a small model.
    """
    if opts.released and opts.preset is not None:
        raise excluded("--preset", "--layout released", "the release has a shape of its own")
    if opts.released:
        return write_released(
            opts.output, opts.data or RELEASED_DATA, opts.fill_layers, opts.seed,
            shuffled=opts.shuffled,
        )  # fmt: skip
    if opts.data is not None:
        raise incomplete("--data", "--layout released", "a preset has a config of its own")
    if opts.fill_layers:
        raise incomplete("--fill-layers", "--layout released", "a small model's all have values")
    if opts.shuffled:
        raise incomplete("--shuffle-experts", "--layout released")
    return write_sample(opts.output, opts.preset or "tiny", opts.seed, say)


@click.command(name="sample")
@click.argument("output", type=options.PATH)
@click.option(
    "--layout",
    type=click.Choice(["small", "released"]),
    default="small",
    show_default=True,
    help="A small model, or the released checkpoint's files with holes for data.",
)
@click.option(
    "--preset",
    type=click.Choice(sorted(PRESETS)),
    help="Which shape: tiny takes 8 MB, wide 23 MB, mid 3 GB, k3-slice 8 GB. Not with "
    "--layout released. Default: tiny.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the values."
)
@click.option(
    "--fill-layers",
    callback=options.layer_list,
    metavar="LIST",
    help="With --layout released: layers that get random values, such as 0,3-5 (17 GB each).",
)
@click.option(
    "--shuffle-experts",
    is_flag=True,
    help="With --layout released: store each layer's experts in an order of its own, drawn from "
    "the seed.",
)
@click.option(
    "--data",
    type=options.PATH,
    help="With --layout released: folder of its config and index. Default: "
    "this checkout's tests/data.",
)
@options.as_json()
def command(
    output: Path,
    layout: str,
    preset: str | None,
    seed: int,
    fill_layers: tuple[int, ...] | None,
    shuffle_experts: bool,
    data: Path | None,
    as_json: bool,
) -> None:
    """Write a synthetic checkpoint to try the pipeline on, legal at TP 8.

    Random weights in the released layout: its tokens mean nothing. Same preset and seed, same
    bytes. With `--layout released` the 96 files of the release with true headers and sizes, 1.56 TB
    of holes that take 140 MB of disk: to look at and plan for, not to run.

    \b
    Example:
      k3tool sample CKPT
      k3tool inspect CKPT
      k3tool sample BIG --layout released --fill-layers 0
    """

    def say(text: str) -> None:
        if sys.stderr.isatty():
            click.echo(text, err=True)

    released = layout == "released"
    opts = Options(output, preset, seed, released, data, fill_layers or (), shuffle_experts)
    info = run(opts, say)
    if as_json:
        click.echo(json.dumps({**info._asdict(), "path": str(info.path)}))
        return
    degrees = ", ".join(map(str, info.legal_tp))
    click.echo(
        f"sample {printable(str(info.path))}: {info.preset}, "
        f"{info.n_tensors} tensors in {info.n_files} files, {bytes_text(info.total_bytes)}, "
        f"legal at TP {degrees}"
    )
