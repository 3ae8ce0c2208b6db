"""`k3tool verify`: one line per check, a verdict, exit code 4 unless all that ran passed."""

from dataclasses import asdict, dataclass
from pathlib import Path

import click

from k3tool.artifact import canonical_json, open_artifact
from k3tool.checkpoint.names import SHARDS_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.checkpoint.shards import Shards
from k3tool.checkpoint.whole import require_whole
from k3tool.compiler.checks import is_proved, require_proved, verify_program, verify_stream
from k3tool.errors import ArtifactError
from k3tool.isa.coverage import check_handlers, check_weights, producible_ops
from k3tool.isa.stream import Isa, load_isa
from k3tool.model.config import K3Config
from k3tool.model.weights import expected_leaves
from k3tool.runtime.interpreter import handlers
from k3tool.runtime.tokens import read_tokens, verify_ranks
from k3tool.verdict import Check, is_sound, not_run, passed, require, summary
from stages import options as common


@dataclass(frozen=True, slots=True)
class Options:
    """What to verify: `what` is ranks, plan or coverage, `files` its artifacts."""

    what: str
    files: tuple[Path, ...]
    strict: bool = False
    weights: Path | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """All checks in order, and whether they amount to a pass."""

    checks: tuple[Check, ...]
    sound: bool


def run(options: Options) -> Result:
    """Make the checks. Raises: ArtifactError for damaged or unrelated inputs."""
    if options.what == "ranks":
        checks = verify_ranks([read_tokens(path) for path in options.files])
    elif options.what == "plan":
        checks = _programs(options.files)
    else:
        assert options.what == "coverage", options.what
        checks = [check for path in options.files for check in _coverage(path, options.weights)]
    sound = is_sound(checks, strict=options.strict)
    return Result(tuple(checks), sound and (options.what != "plan" or is_proved(checks)))


def _programs(files: tuple[Path, ...]) -> list[Check]:
    """Check plans, each with the stream emitted from it where that is given too."""
    kinds: dict[str, list[Path]] = {"plan": [], "isa": []}
    for path in files:
        with open_artifact(path) as file:
            if file.kind not in kinds:
                raise ArtifactError(str(path), got=f"kind {file.kind}", need="kind plan or isa")
            kinds[file.kind].append(path)
    plans, streams = kinds["plan"], kinds["isa"]
    if len(plans) == 1 and len(streams) <= 1:
        return verify_program(plans[0], *streams)
    checks = [check for path in plans for check in verify_program(path)]
    return checks + [check for path in streams for check in verify_stream(path)]


def _coverage(path: Path, weights: Path | None) -> list[Check]:
    isa = load_isa(path)
    leaves, bound = None, _bound(isa)
    if weights is not None:
        config, made_of, tp = _open_model(weights)
        _require_related(path, isa, made_of)
        if tp not in (None, isa.tp):
            hint = f"compile a plan with --tp {tp}, or give the weights of that degree"
            raise ArtifactError(f"{path}: tp", got=isa.tp, need=tp, hint=hint)
        leaves = expected_leaves(config)
    every_kind = K3Config.from_dict(preset_config(PRESETS["tiny"]), "the sample's config")
    own = handlers(isa.target)
    handled = check_handlers(isa, own, producible_ops(every_kind))
    return [bound, *check_weights(isa, leaves), *handled]


def _bound(isa: Isa) -> Check:
    """Say which checkpoint a program is of: names alone do not tell whose weights it will read."""
    name, identity = "program bound to a checkpoint", str(isa.params["checkpoint_identity"])
    if not identity:
        return not_run(name, "compiled from a config only: it is bound to no checkpoint")
    return passed(name, f"{identity[:16]}..")


def _open_model(path: Path) -> tuple[K3Config, dict[str, str], int | None]:
    """Return a checkpoint's or shards' config, by kind the digests it can be known by, and the TP
    degree it is split to: None for a checkpoint that is whole, which serves programs of any.

    Raises: ArtifactError, in the words of inspect or of run, for weights that neither would read.
    """
    if (path / SHARDS_NAME).exists():
        shards = Shards.open(path)
        for rank in range(shards.tp):  # all that a run would read
            shards.rank(rank).close()
        made_of = {"shards": shards.digest, "checkpoint": shards.identity}
        return shards.config, made_of, shards.tp
    with Checkpoint.open(path) as checkpoint:
        require_whole(checkpoint)
        return checkpoint.config, {"checkpoint": checkpoint.identity}, checkpoint.tp


def _require_related(path: Path, isa: Isa, made_of: dict[str, str]) -> None:
    """Refuse a program that was made from other weights."""
    refs = [(f"{ref.kind} {ref.name}", ref.kind, ref.content_sha256) for ref in isa.inputs]
    identity = str(isa.params["checkpoint_identity"])
    if identity:  # of shards the inputs say only which shards
        refs.append(("checkpoint", "checkpoint", identity))
    for what, kind, got in refs:
        need = made_of.get(kind, got)
        if got != need:
            raise ArtifactError(
                f"{path}: {what}",
                got=f"{got[:16]}..",
                need=f"{need[:16]}.. of --weights",
                hint="give the weights that the plan was compiled from",
            )


def _report(options: Options, as_json: bool) -> None:
    result = run(options)
    if as_json:
        rows = [asdict(check) for check in result.checks]
        click.echo(canonical_json({"checks": rows, "sound": result.sound}))
    else:
        for check in result.checks:
            click.echo(f"{check.status:<7} {check.name}: {check.detail}")
        click.echo(f"{'PASS' if result.sound else 'FAIL'}: {summary(result.checks)}")
    if options.what == "plan":
        require_proved(result.checks, options.what)
    require(result.checks, options.what, strict=options.strict)


def _strict(what: str = "Fail when a check was NOT RUN.") -> common.Decorator:
    return click.option("--strict", is_flag=True, help=what)


@click.group("verify")
def command() -> None:
    """Compare token streams, and check plans, weights and handlers.

    One line per check: PASS, FAIL or NOT RUN. Nothing compared is a failure.

    \b
    Example:
      k3tool verify ranks tokens-tp8.h5
      k3tool verify plan plan.h5
    """


@command.command("ranks", short_help="Compare ranks, and runs of any TP degree, bit by bit.")
@click.argument("files", type=common.PATH, nargs=-1, required=True)
@_strict()
@common.as_json()
def ranks(files: tuple[Path, ...], strict: bool, as_json: bool) -> None:
    """Compare the ranks inside each tokens.h5, then every file with the first.

    Files may be of any TP degree; they have to answer one prompt from one checkpoint. The first
    difference is shown with step, ranks, ids and margins.

    \b
    Example:
      k3tool verify ranks tp1.h5 tp8.h5
    """
    _report(Options("ranks", files, strict), as_json)


@command.command("plan", short_help="Prove a plan and its stream on their own bytes.")
@click.argument("files", metavar="PLAN [ISA]...", type=common.PATH, nargs=-1, required=True)
@_strict("Changes nothing here: a check that was NOT RUN fails with it or without.")
@common.as_json()
def plan(files: tuple[Path, ...], strict: bool, as_json: bool) -> None:
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
    _report(Options("plan", files, strict), as_json)


@command.command("coverage", short_help="Every weight read, every opcode handled?")
@click.argument("files", type=common.PATH, nargs=-1, required=True)
@click.option(
    "--weights", type=common.PATH, help="The checkpoint or shards the plan was made from."
)
@_strict()
@common.as_json()
def coverage(files: tuple[Path, ...], weights: Path | None, strict: bool, as_json: bool) -> None:
    """Check that a program reads every weight and that its interpreter handles every opcode.

    Handlers are asked of the interpreter that would run the program; one that no graph and no rule
    can reach is reported.

    \b
    Example:
      k3tool verify coverage isa.h5 --weights SHARDS
    """
    _report(Options("coverage", files, strict, weights), as_json)
