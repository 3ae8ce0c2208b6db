"""`k3tool verify blocks`: ops and sub-layers of chosen layers against NumPy, on real weights."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from k3tool.blocks.check import MOST_TOKENS, Terms, check_layer, noise_rms
from k3tool.blocks.models import chosen_layers, opened
from k3tool.errors import UsageError
from k3tool.runtime.interpreter import LEAVES, check_leaves, load
from k3tool.runtime.options import parse_ids
from k3tool.tables import bytes_text, count_text
from k3tool.verdict import require
from stages import options as common
from stages.verify import shared


@dataclass(frozen=True, slots=True)
class Options:
    """Which layers of what to check; `folders` are one model's. See the command for the rest."""

    folders: tuple[Path, ...]
    layers: tuple[int, ...] | None = None
    against: Path | None = None
    prompt: tuple[int, ...] | None = None
    numerics: str = "f32"
    tokens: int = 3
    plain: bool = False
    leaves: str = "auto"
    interpreter: Path | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Result(shared.Result):
    """The checks, which layers were checked, what was read of them and what came into them."""

    layers: tuple[int, ...]
    read_bytes: int
    input: str


def run(options: Options, say: Callable[[str], None] | None = None) -> Result:
    """Make the checks; `say` gets progress in words.

    Raises: UsageError for layers, ids or counts that do not fit; ArtifactError for inputs;
    UnsoundError where the interpreter traps; TargetError where it cannot run.
    """
    tokens = options.tokens if options.prompt is None else len(options.prompt) - 1
    if not 2 <= tokens <= MOST_TOKENS:
        name = "--tokens" if options.prompt is None else "--ids"
        extra = 0 if options.prompt is None else 1
        need = f"{2 + extra} to {MOST_TOKENS + extra} tokens: some in one step, and one decoded"
        raise UsageError(name, got=f"{tokens + extra}", need=need)
    found = load(options.interpreter, any_source=options.interpreter is not None)
    check_leaves(found, options.leaves)
    checks, read_bytes = [], 0
    with opened(options.folders, options.against, options.prompt) as model:
        layers = chosen_layers(model.config, options.layers)
        rms = noise_rms(model.against[0])
        threads = max(1, len(os.sched_getaffinity(0)) // len(model.folders))
        terms = Terms(
            options.numerics, tokens, options.plain, found.path, options.leaves, threads
        )  # fmt: skip
        for layer in layers:
            outcome = check_layer(model, layer, terms, rms, say or (lambda text: None))
            checks += outcome.checks
            read_bytes += outcome.read_bytes
    noise = f"seeded noise of rms {rms:.3g} (that of embedded tokens), in bf16"
    came = noise if options.prompt is None else f"embedded ids as prefix, blocks of {noise}"
    made = shared.result_of(checks, strict=options.strict)
    return Result(made.checks, made.sound, layers, read_bytes, came)


@click.command("blocks", short_help="Check ops and sub-layers of chosen layers against NumPy.")
@click.argument("source", type=common.PATH, required=False)
@common.shards()
@click.option("--layers", metavar="LIST", callback=common.layer_list,
              help="Layers to check, such as 0,3-5. Default: the first of each kind, and the "
              "last.")  # fmt: skip
@click.option("--against", type=common.PATH, metavar="CKPT",
              help="Take the reference's weights from here instead: a checkpoint that shards were "
              "made of, say.")  # fmt: skip
@click.option("--ids", metavar="1,2,3",
              help="Embed these ids as what comes into each layer, instead of noise.")  # fmt: skip
@click.option("--tokens", type=common.POSITIVE, default=3, show_default=True,
              help="Positions in the prefill step; one more is decoded. Not with --ids, "
              "which say how many.")  # fmt: skip
@click.option("--plain", is_flag=True,
              help="Without fusions: every primitive op, and every point of a layer.")  # fmt: skip
@common.numerics(default="f32")
@click.option("--leaves", type=click.Choice(LEAVES), default="auto", show_default=True,
              help="Instruction set of the op bodies.")  # fmt: skip
@shared.strict()
@common.as_json()
def command(
    source: Path | None, shards: tuple[Path, ...], layers: tuple[int, ...] | None,
    against: Path | None, ids: str | None, tokens: int, plain: bool, numerics: str | None,
    leaves: str, strict: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run chosen layers one by one, and hold every op and sub-layer against NumPy in float64.

    SOURCE is a checkpoint or shards (every rank is run); only tensors of the chosen layers are
    read, of experts those that tokens choose. A layer is compiled as in a run, and gets seeded
    noise or embedded ids. Each op is compared on the engine's own inputs; inputs and outputs of
    sub-layers are compared with the model's graph, run from the layer's input. Each line says how
    many tolerances the worst value is off, and where.

    \b
    Example:
      k3tool verify blocks CKPT
      k3tool verify blocks SHARDS --layers 0,3,5-7 --against CKPT
    """
    common.refuse_beside("tokens", beside="ids", why="the ids say how many")
    folders = common.folders_of(source, shards)
    options = Options(
        folders, layers, against, None if ids is None else parse_ids(ids), numerics or "f32",
        tokens, plain, leaves, strict=strict,
    )  # fmt: skip
    result = run(options, lambda text: click.echo(text, err=True))
    if as_json:
        more = {"layers": result.layers, "read_bytes": result.read_bytes, "input": result.input}
        shared.show_json(result, more)
    else:
        click.echo(f"input of each layer: {result.input}")
        shared.show_lines(result)
        read = bytes_text(result.read_bytes)
        click.echo(f"{count_text(len(result.layers), 'layer')}: {read} of tensors read", err=True)
    require(result.checks, strict=strict)
