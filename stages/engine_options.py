"""The options of whoever starts ranks: `run` and `serve` mean the same by the same words."""

from collections.abc import Callable, Mapping
from typing import Any

import click

from k3tool.errors import excluded
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
    click.option("--target", default="cpu", show_default=True,
        help="What to run on. A GPU takes none of --memory, --preset, --threads, --leaves "
        "and --weights.",
    ),
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
        "long run where there is room. Under --memory auto alone.",
    ),
    click.option(
        "--memory", metavar="SIZE",
        help="Run in this much memory (8GB), ranks and driver together; weights that do not fit "
        "are read as they are needed. Not with --isa or --plan, which have their own.",
    ),
    click.option(
        "--preset", type=click.Choice([*PRESETS, "auto"]),
        help="A --memory by name, in its place, so not with --isa or --plan; auto is what this "
        "machine's limits leave.",
    ),
    click.option(
        "--cache", type=common.PATH,
        help="Where missing stages are built. Default: $XDG_CACHE_HOME/k3tool, or "
        "~/.cache/k3tool.",
    ),
    click.option("--isa", type=common.PATH, help="Run these streams (isa.h5)."),
    click.option(
        "--plan", type=common.PATH, help="Emit and run this plan (plan.h5); not with --isa."
    ),
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
    _check_together(kept)
    memory = memory_of(kept.pop("memory"), kept.pop("preset"))
    return RunOptions(
        source=folders[0], beside=folders[1:], memory_bytes=memory,
        deadline_seconds=kept.pop("deadline"), **kept, **more,
    )  # fmt: skip


def _check_together(given: Mapping[str, Any]) -> None:
    """Refuse two programs, and a budget beside what has its own or none, by the name it was given.

    Raises: UsageError.
    """
    if given["isa"] is not None and given["plan"] is not None:
        raise excluded("--plan", "--isa")
    budget = next((name for name in ("memory", "preset") if given[name] is not None), None)
    if budget is None:
        return
    for other in ("isa", "plan"):
        if given[other] is not None:
            raise excluded(f"--{budget}", f"--{other}", "a plan has its own budget")
    if get_target(given["target"]).family != "cpu":
        raise excluded(f"--{budget}", f"--target {given['target']}", "a GPU has no use for it")


def memory_of(size: str | None, preset: str | None) -> int | None:
    """Return the bytes of `--memory` or `--preset`. Raises: UsageError for both, or no size."""
    if size is not None and preset is not None:
        raise excluded("--preset", "--memory")
    if preset is not None:
        return preset_bytes(preset)
    return None if size is None else parse_size(size)
