"""The options of whoever starts ranks: `run` and `serve` mean the same by the same words."""

from collections.abc import Callable, Mapping
from typing import Any

import click

from k3tool.errors import UsageError
from k3tool.runtime.budget import PRESETS
from k3tool.runtime.copying import CHOICES
from k3tool.runtime.foresee import preset_bytes
from k3tool.runtime.interpreter import LEAVES
from k3tool.runtime.options import RunOptions, parse_size
from k3tool.targets import DEFAULT_CHUNK, DEFAULT_CONTEXT, get_target
from stages import options as common

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    common.shards(),
    common.tp(),
    click.option(
        "--threads", type=common.POSITIVE, metavar="N",
        help="Threads per rank. Default: cores / ranks.",
    ),
    click.option(
        "--chunk", type=common.POSITIVE, help=f"Prompt tokens in a step. Default: {DEFAULT_CHUNK}."
    ),
    click.option(
        "--ctx", type=common.POSITIVE,
        help=f"Positions to compile for. Default: {DEFAULT_CONTEXT}, or what the run needs.",
    ),
    click.option(
        "--workgroups", type=common.POSITIVE,
        help=f"Workgroups of the program. Default: {get_target('cpu').workgroups}; on a GPU its "
        "units, shared out among the ranks.",
    ),
    click.option("--target", default="cpu", show_default=True, help="What to run on."),
    click.option(
        "--devices", type=common.POSITIVE, default=1, show_default=True,
        help="GPUs that the ranks are shared out among, as many on each.",
    ),
    common.numerics(default=None),
    click.option(
        "--leaves", type=click.Choice(LEAVES), default="auto", show_default=True,
        help="Instruction set of the op bodies; the bits are the same.",
    ),
    click.option(
        "--weights", type=click.Choice(CHOICES), default="auto", show_default=True,
        help="Read them into memory first, or use them as files are mapped; auto copies for a "
        "long run where there is room.",
    ),
    click.option(
        "--memory", metavar="SIZE",
        help="Run in this much memory (8GB), ranks and driver together; weights that do not fit "
        "are read as they are needed.",
    ),
    click.option(
        "--preset", type=click.Choice([*PRESETS, "auto"]),
        help="A --memory by name; auto is what this machine's limits leave.",
    ),
    click.option(
        "--cache", type=common.PATH,
        help="Where missing stages are built. Default: $XDG_CACHE_HOME/k3tool, or "
        "~/.cache/k3tool.",
    ),
    click.option("--isa", type=common.PATH, help="Run these streams (isa.h5)."),
    click.option("--plan", type=common.PATH, help="Emit and run this plan (plan.h5)."),
    click.option(
        "--deadline", type=float, default=60.0, show_default=True, metavar="SECONDS",
        help="Stop when no rank has got anywhere for so long.",
    ),
)  # fmt: skip


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add SOURCE and the options of an engine to a command."""
    command = common.together(*_OPTIONS)(command)
    return click.argument("source", type=common.PATH, required=False)(command)


def run_options(given: Mapping[str, Any], **more: Any) -> RunOptions:
    """Return a run's options from what engine_options took from the command line.

    Raises: UsageError for no SOURCE, or for a budget that is none or is given twice.
    """
    kept = dict(given)
    folders = common.folders_of(kept.pop("source"), kept.pop("shards"))
    memory = memory_of(kept.pop("memory"), kept.pop("preset"))
    return RunOptions(
        source=folders[0], beside=folders[1:], memory_bytes=memory,
        deadline_seconds=kept.pop("deadline"), **kept, **more,
    )  # fmt: skip


def memory_of(size: str | None, preset: str | None) -> int | None:
    """Return the bytes of `--memory` or `--preset`. Raises: UsageError for both, or no size."""
    if size is not None and preset is not None:
        raise UsageError("--preset", got="also --memory", need="one of the two")
    if preset is not None:
        return preset_bytes(preset)
    return None if size is None else parse_size(size)
