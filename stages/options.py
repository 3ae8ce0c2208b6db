"""Options that several commands share: the same word means the same thing everywhere."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from k3tool.errors import UsageError, excluded, quoted
from k3tool.model.config_fields import MOST_LAYERS
from k3tool.model.graph import MODES
from stages.refusals import name_of, unfit

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class PathOption(click.Path):
    """A path as it was given; what stands there is for the reader to say, in its own words."""

    def __init__(self) -> None:
        """Leave out click's own looks at the file."""
        super().__init__(path_type=Path, readable=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse an empty text, which as a path would mean the current folder."""
        if str(value) == "":
            need = "a name; the current folder is ."
            raise unfit(param, ctx, got="an empty path", need=need)
        return super().convert(value, param, ctx)


class Finite(click.FloatRange):
    """A number in a range; neither nan, which passes any comparison, nor inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse what is no finite number."""
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            raise unfit(param, ctx, got=number, need="a finite number")
        return super().convert(number, param, ctx)


PATH = PathOption()
POSITIVE = click.IntRange(min=1)
_LAYER = re.compile("[0-9]{1,9}")  # no more: a range is expanded before a model is known


def together(*options: Decorator) -> Decorator:
    """Return several options as one, in the order in which help lists them."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def output(what: str, *, required: bool = True) -> Decorator:
    """Return `-o/--output`, the one place a command writes to."""
    return click.option(
        "-o", "--output", type=PATH, required=required, help=f"Where to write {what}."
    )


def as_json(what: str = "the result as JSON on stdout") -> Decorator:
    """Return `--json` as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what}.")


def verbose(what: str = "Say more on stderr.") -> Decorator:
    """Return `-v/--verbose`; `what` says what more there is, and where it goes."""
    return click.option("-v", "--verbose", is_flag=True, help=what)


def tp(*, required: bool = False, default: int | None = None) -> Decorator:
    """Return `--tp`; whether a degree is legal is the model config's to say."""
    return click.option(
        "--tp",
        type=click.IntRange(min=1),
        required=required,
        default=default,
        show_default=default is not None,
        metavar="N",
        help="Tensor-parallel degree: 1, 2, 4 or 8, where the model's shape allows it.",
    )


def shards() -> Decorator:
    """Return `--shards`, which may be given several times; see folders_of."""
    return click.option(
        "--shards",
        type=PATH,
        multiple=True,
        metavar="FOLDER",
        help="A folder of the same model, beside SOURCE or in its place; once for each device. "
        "A weight file may lie in one of them, or in several: of copies --memory reads the one "
        "that is soonest there, else the first is used.",
    )


def folders_of(source: Path | None, shards: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return SOURCE and the folders of --shards. Raises: UsageError where there is none."""
    found = (*(() if source is None else (source,)), *shards)
    if not found:
        need = "a checkpoint or shards folder, or --shards"
        hint = "k3tool sample CKPT writes a small checkpoint to try"
        raise UsageError("SOURCE", got="none", need=need, hint=hint)
    return found


def numerics(default: str | None = "f32") -> Decorator:
    """Return `--numerics`, the mode of the arithmetic contract; None: what a given program says."""
    return click.option(
        "--numerics",
        type=click.Choice(MODES),
        default=default,
        show_default=default is not None,
        help="What activations are between ops: binary32, or rounded to bf16 where the released "
        "model rounds." + ("" if default else " Default: f32, or what --isa or --plan says."),
    )


def given_names() -> dict[str, str]:
    """Return the options that the user gave to this command: name of the parameter, as written.

    A default tells nothing: `--gen 16` and no `--gen` are the same value.
    """
    ctx = click.get_current_context()
    return {
        str(one.name): name_of(one)
        for one in ctx.command.params
        if isinstance(one, click.Option)
        and one.expose_value  # --traceback is every command's
        and ctx.get_parameter_source(str(one.name)) is not ParameterSource.DEFAULT
    }


def refuse_beside(*options: str, beside: str, why: str = "") -> None:
    """Refuse the first of `options`, by parameter, that was given `beside` an excluding one.

    Raises: UsageError naming both as they are written.
    """
    given = given_names()
    for option in options:
        if option in given and beside in given:
            raise excluded(given[option], given[beside], why)


def force() -> Decorator:
    """Return `--force`."""
    return click.option("--force", is_flag=True, help="Replace what this command wrote before.")


def layer_list(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Parse 0-based layers and ranges, `0,3-5`, into a sorted tuple; None where nothing is given.

    A click callback, not a type: click's generic types differ between its versions.
    """
    if value is None:
        return None
    layers: set[int] = set()
    for part in value.split(","):
        first, _, last = part.partition("-")
        bounds = _LAYER.fullmatch(first), _LAYER.fullmatch(last or first)
        if None in bounds or not int(first) <= int(last or first) < MOST_LAYERS:
            need = f"a layer or a range such as 3-5, below {MOST_LAYERS}"
            raise unfit(param, ctx, got=quoted(part), need=need)
        layers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(layers))
