"""`k3tool verify coverage`: every weight read, every opcode handled?"""

from dataclasses import dataclass
from pathlib import Path

import click

from k3tool.checkpoint.names import SHARDS_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.sample_presets import PRESETS, preset_config
from k3tool.checkpoint.shards import Shards
from k3tool.checkpoint.whole import require_whole
from k3tool.errors import ArtifactError
from k3tool.isa.coverage import check_handlers, check_weights, producible_ops
from k3tool.isa.stream import Isa, load_isa
from k3tool.model.config import K3Config
from k3tool.model.weights import expected_leaves
from k3tool.runtime.interpreter import handlers
from k3tool.verdict import Check, not_run, passed
from stages import options as common
from stages.verify import shared


@dataclass(frozen=True, slots=True)
class Options:
    """Which streams to check, and the weights they were made for."""

    files: tuple[Path, ...]
    strict: bool = False
    weights: Path | None = None


def run(options: Options) -> shared.Result:
    """Make the checks. Raises: ArtifactError for damaged or unrelated inputs."""
    checks = [check for path in options.files for check in _coverage(path, options.weights)]
    return shared.result_of(checks, strict=options.strict)


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


@click.command("coverage", short_help="Every weight read, every opcode handled?")
@click.argument("files", type=common.PATH, nargs=-1, required=True)
@click.option(
    "--weights", type=common.PATH, help="The checkpoint or shards the plan was made from."
)
@shared.strict()
@common.as_json()
def command(files: tuple[Path, ...], weights: Path | None, strict: bool, as_json: bool) -> None:
    """Check that a program reads every weight and that its interpreter handles every opcode.

    Handlers are asked of the interpreter that would run the program; one that no graph and no rule
    can reach is reported.

    \b
    Example:
      k3tool verify coverage isa.h5 --weights SHARDS
    """
    result = run(Options(files, strict, weights))
    shared.report(result, strict=strict, as_json=as_json)
