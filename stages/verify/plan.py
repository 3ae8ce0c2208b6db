"""`k3tool verify plan`: prove plans and their streams on their own bytes."""

from dataclasses import dataclass
from pathlib import Path

import click

from k3tool.artifact import open_artifact
from k3tool.compiler.checks import is_proved, require_proved, verify_program, verify_stream
from k3tool.progress import waiting
from k3tool.verdict import Check, is_sound, require
from stages import options as common
from stages.verify import shared

_WRITE_ANEW = "write it anew: k3tool compile-plan for a plan, k3tool emit-isa for its streams"


@dataclass(frozen=True, slots=True)
class Options:
    """Which plans and streams to prove, in any order."""

    files: tuple[Path, ...]
    strict: bool = False


def run(options: Options) -> shared.Result:
    """Make the checks. Raises: ArtifactError for damaged or unrelated inputs."""
    checks = _programs(options.files)
    sound = is_sound(checks, strict=options.strict) and is_proved(checks)
    return shared.Result(tuple(checks), sound)


def _programs(files: tuple[Path, ...]) -> list[Check]:
    """Check plans, each with the stream emitted from it where that is given too."""
    kinds: dict[str, list[Path]] = {"plan": [], "isa": []}
    for path in files:
        with open_artifact(path, tuple(kinds)) as file:
            kinds[file.kind].append(path)
    plans, streams = kinds["plan"], kinds["isa"]
    if len(plans) == 1 and len(streams) <= 1:
        return verify_program(plans[0], *streams)
    checks = [check for path in plans for check in verify_program(path)]
    return checks + [check for path in streams for check in verify_stream(path)]


@click.command("plan", short_help="Prove a plan and its stream on their own bytes.")
@click.argument("files", metavar="PLAN [ISA]...", type=common.PATH, nargs=-1, required=True)
@shared.strict("Changes nothing here: a check that was NOT RUN fails with it or without.")
@common.as_json()
def command(files: tuple[Path, ...], strict: bool, as_json: bool) -> None:
    """Prove a plan and its stream on their own bytes: checks A to G.

    A: what is executed is the model's graph. B: each element is written by one slice. C: no live
    buffers overlap. D: counters order every access, no interleaving locks. E: the wire form. F: all
    of it again from the emitted instructions. G: the ranks together. Without ISA the stream is
    emitted in memory. A check that did not run is a failure here.

    A file says itself whether it is a plan or a stream, so their order does not matter. A stream is
    compared with its plan where there is one of each; of more files each is proved on its own.

    \b
    Example:
      k3tool verify plan plan.h5
      k3tool verify plan plan.h5 isa.h5
    """
    with waiting("proving"):
        result = run(Options(files, strict))
    if as_json:
        shared.show_json(result)
    else:
        shared.show_lines(result)
    require_proved(result.checks, "checks", hint=_WRITE_ANEW)
    require(result.checks, strict=strict)
