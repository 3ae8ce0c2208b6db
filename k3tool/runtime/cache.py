"""Build what a run is missing (shards, plan, streams) into a cache, and find it again.

A cache entry is named by the identities of everything that changes it: the checkpoint, the options,
the op table and the compiler's own sources. An entry that does not open is built again; artifacts
that a user names are refused instead.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3tool.artifact import InputRef, open_artifact
from k3tool.canonical import canonical_json
from k3tool.checkpoint.names import SHARDS_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shard_copy import RefusedValueError
from k3tool.checkpoint.shard_space import require_least_space
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.checkpoint.shards import SHARDS_SCHEMA, Shards
from k3tool.checkpoint.spread import open_spread, require_apart, require_used
from k3tool.checkpoint.whole import require_whole
from k3tool.compiler.checks import check_program, require_proved, verify_program
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.meaning import model_of
from k3tool.compiler.plan import Plan, load_plan
from k3tool.compiler.proved import save_proved_isa, save_proved_plan
from k3tool.errors import ArtifactError, K3Error, TargetError, UnsoundError, UsageError
from k3tool.fields import params_of
from k3tool.isa.emit import emit
from k3tool.isa.stream import Isa, load_isa
from k3tool.isa.table import isa_hash
from k3tool.memory import require_memory
from k3tool.model.config import K3Config
from k3tool.model.sizes import rank_bytes
from k3tool.progress import at_step, progress_of
from k3tool.runtime.budget import compile_bytes, fit, run_floor
from k3tool.runtime.build import ROOT
from k3tool.runtime.cache_entry import locked, remove_shards, require_no_folder
from k3tool.runtime.finite import state_key
from k3tool.runtime.options import RunOptions, check_fixed, context_of, logits_bytes
from k3tool.runtime.weights import RankWeights
from k3tool.tables import bytes_text
from k3tool.targets import BATCH, DEFAULT_CHUNK, MOST_RANKS, Target, get_target

Say = Callable[[str], None]
_COMPILER_FOLDERS = ("compiler", "isa", "model")
# What a budget pins, prices and limits of targets, and which theorems Coq has checked.
_COMPILER_FILES = ("k3tool/runtime/budget.py", "k3tool/targets.py", "proofs/proved.json")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint or shards folder that has been opened but not hashed."""

    path: Path
    config: K3Config
    tp: int
    checkpoint: Checkpoint | None
    shards: Shards | None

    @property
    def identity(self) -> str:
        """Return the checkpoint's identity, wherever it comes from."""
        if self.shards is not None:
            return self.shards.identity
        assert self.checkpoint is not None
        return self.checkpoint.identity

    def as_input(self) -> InputRef:
        """Return the source as an input of a plan."""
        if self.shards is not None:
            return self.shards.as_input("shards")
        assert self.checkpoint is not None
        return self.checkpoint.as_input()


@dataclass(frozen=True, slots=True)
class Program:
    """The streams to run: `name` is their file's, `made` is given, built or reused."""

    isa: Isa
    name: str
    made: str


@dataclass(frozen=True, slots=True)
class Weights:
    """Every rank's weights; `made` is in place, given, built or reused."""

    ranks: list[RankWeights]
    made: str


def open_source(options: RunOptions) -> Source:
    """Open what the user named and settle the TP degree.

    Raises: ArtifactError when it is neither; UsageError for an illegal degree, before any weight is
    read.
    """
    path, folders = options.source, (options.source, *options.beside)
    require_apart(folders)
    if os.path.exists(path / SHARDS_NAME):
        shards = Shards.open_spread(folders, options.eps)
        if options.tp not in (None, shards.tp):
            raise UsageError("--tp", got=options.tp, need=f"{shards.tp}, the shards' degree")
        return Source(path, shards.config, shards.tp, None, shards)
    alone = len(folders) == 1
    checkpoint = Checkpoint.open(path, options.eps) if alone else open_spread(folders, options.eps)
    if checkpoint.tp is not None:
        raise ArtifactError(
            str(path), got="one rank of shards", need="a checkpoint or a whole shards folder",
            hint=f"k3tool run {path.parent}",
        )  # fmt: skip
    tp = options.tp or _program_tp(options) or 1
    if tp > 1 and not alone:
        got = f"{len(folders)} folders of a checkpoint at --tp {tp}"
        raise UsageError("--shards", got=got, need="folders of shards, or --tp 1")
    try:
        checkpoint.config.check_tp(tp)
    except UsageError:  # a damaged config may allow no degree: what inspect says comes first
        require_whole(checkpoint)
        raise
    return Source(path, checkpoint.config, tp, checkpoint, None)


def _program_tp(options: RunOptions) -> int | None:
    """Return the TP degree of the plan or streams that the user gave, None where there are none."""
    for path, kind in ((options.isa, "isa"), (options.plan, "plan")):
        if path is not None:
            with open_artifact(path, kind) as file:
                return params_of(file).count("tp", least=1, most=MOST_RANKS)
    return None


def default_cache() -> Path:
    """Return where missing stages are built unless a folder is named; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "k3tool"


def cache_folder(options: RunOptions) -> Path:
    """Return the cache folder, created. Raises: K3Error where none can be made."""
    folder = options.cache or default_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise K3Error(str(folder), got=error.strerror, need="a writable folder") from None
    return folder


# -- weights -----------------------------------------------------------------------------------


def rank_weights(source: Source, options: RunOptions, say: Say, note: Say) -> Weights:
    """Return every rank's weights: a checkpoint in place at TP 1, else shards, made if missing.

    `note` is told before a second copy of the weights is written: how large, and where.
    """
    if source.checkpoint is not None and source.tp == 1:
        return Weights([RankWeights(source.checkpoint, 1)], "in place")
    shards, made = source.shards, "given"
    if shards is None:
        shards, made = _cached_shards(source, cache_folder(options), say, note)
    ranks = [RankWeights(shards.rank(rank), shards.tp) for rank in range(shards.tp)]
    require_used([rank.folder for rank in ranks], shards.folders)
    return Weights(ranks, made)


def require_copy_space(source: Source, options: RunOptions) -> None:
    """Refuse at once a run whose shards have to be made and will not fit. Raises: K3Error."""
    if source.checkpoint is None or source.tp == 1:
        return
    path = cache_folder(options) / _shards_key(source.checkpoint, source.tp)
    if not path.exists():
        require_least_space(source.config, source.tp, path, range(source.tp))


def _shards_key(checkpoint: Checkpoint, tp: int) -> str:
    return f"shards-{state_key(checkpoint)}-tp{tp}-schema{SHARDS_SCHEMA}"


def _cached_shards(source: Source, folder: Path, say: Say, note: Say) -> tuple[Shards, str]:
    assert source.checkpoint is not None
    key = _shards_key(source.checkpoint, source.tp)
    path = folder / key
    with locked(folder, key, f"shards of tp {source.tp}") as entry:
        is_damaged = False
        if os.path.lexists(path):
            try:
                shards = Shards.open(path)
                for rank in range(shards.tp):
                    shards.rank(rank).close()
            except ArtifactError as error:
                say(f"cached shards are built again: {error}")
                is_damaged = True
            else:
                if shards.identity == source.identity:
                    say(f"shards from the cache: {path}")
                    return shards, "reused"
        with entry.building():
            if is_damaged:
                remove_shards(path)
            _make_shards(source, path, note)
        return Shards.open(path), "built"


def _make_shards(source: Source, path: Path, note: Say) -> None:
    copied = source.tp * rank_bytes(source.config, source.tp).total
    note(f"writing a copy of the weights for {source.tp} ranks: {bytes_text(copied)} to {path}")
    try:
        with progress_of("shard") as progress:
            shard_checkpoint(source.path, source.tp, path, force=True, progress=progress)
    except RefusedValueError as error:  # run answers alike at every degree, by whoever meets it
        raise UnsoundError(error.object, got=error.got, need=error.need, hint=error.hint) from None


# -- program -----------------------------------------------------------------------------------


def program(source: Source, options: RunOptions, say: Say) -> Program:
    """Return the streams to run: the user's own, checked, or from the cache, or newly compiled.

    Raises: ArtifactError for an artifact of another model or build; TargetError for another target;
    UnsoundError for one that does not prove itself on its own bytes: with a digest that matches, a
    wrong handle or a swapped rank still gives fluent tokens.
    """
    at_step("proving the program")
    if options.isa is not None:
        isa = load_isa(options.isa)
        _check_given(isa, source, options, str(options.isa))
        require_proved(check_program(isa, str(options.isa)), str(options.isa))
        return Program(isa, options.isa.name, "given")
    if options.plan is not None:
        plan = load_plan(options.plan)
        isa = emit(plan, str(plan.params["target"]), options.plan.name)
        _check_given(isa, source, options, str(options.plan))
        require_proved(verify_program(options.plan), str(options.plan))
        return Program(isa, f"emitted in memory from {options.plan.name}", "given as a plan")
    return _cached_program(source, options, say)


def _cached_program(source: Source, options: RunOptions, say: Say) -> Program:
    folder = cache_folder(options)
    target = get_target(options.target)
    settings = _settings(source, options, target)
    reserved = logits_bytes(options, source.config)
    budget = {}
    if options.memory_bytes is not None:
        budget = {"memory": options.memory_bytes - reserved}
    eps = dict(sorted(source.config.eps.items()))
    unnamed = source.as_input()._replace(name="")  # a renamed folder holds the same checkpoint
    identity = canonical_json([settings | budget, eps, unnamed, isa_hash(), _compiler_hash()])
    key = "program-" + hashlib.sha256(identity.encode()).hexdigest()[:24]
    path, plan_path = folder / f"{key}.isa.h5", folder / f"{key}.plan.h5"
    with locked(folder, key, f"a program of tp {source.tp}") as entry:
        if path.exists():
            try:
                isa = load_isa(path)
                _check_foreign(isa, source, target.name, str(path))
                _check_settings(isa, settings, str(path))
            except ArtifactError as error:
                say(f"a cached program is built again: {error}")
            else:
                say(f"program from the cache: {path}")
                return Program(isa, path.name, "reused")
        say(f"compiling: {path}")
        at_step("compiling")
        with entry.building():
            require_no_folder(path)
            require_no_folder(plan_path)
            require_memory(compile_bytes(source.config), "compiling")
            plan = save_proved_plan(_compiled(source, options, settings, reserved), plan_path)
            save_proved_isa(emit(plan, target.name, plan_path.name), path)
        return Program(load_isa(path), path.name, "built")


def _settings(source: Source, options: RunOptions, target: Target) -> dict[str, Any]:
    """Return what a program is compiled for, as compile_plan takes it."""
    return {
        "tp": source.tp,
        "target": target.name,
        "workgroups": options.workgroups or _workgroups(target, source.tp // options.devices),
        "chunk": options.chunk or DEFAULT_CHUNK,
        "batch": options.batch or BATCH,
        "ctx": context_of(options, source.config),
        "without": sorted(options.without),
        "numerics": options.numerics or "f32",
    }


def _compiled(
    source: Source, options: RunOptions, settings: Mapping[str, Any], reserved: int
) -> Plan:
    """Return the plan; under a budget of which so many bytes are `reserved`, one that fits."""

    def compile_chunk(chunk: int) -> Plan:
        return compile_plan(
            source.config, inputs=[source.as_input()], checkpoint_identity=source.identity,
            **{**settings, "chunk": chunk},
        )  # fmt: skip

    if options.memory_bytes is None:
        return compile_chunk(settings["chunk"])
    is_copied = source.shards is None and source.tp > 1
    floor = run_floor(source.config, source.tp, is_copied=is_copied)
    return fit(compile_chunk, settings["chunk"], options.memory_bytes, reserved, floor)


def _workgroups(target: Target, ranks: int) -> int:
    """Return a rank's workgroups: on a GPU those of `ranks` are resident on a device at once."""
    ranks = 1 if target.family == "cpu" else max(1, ranks)
    return max(1, target.workgroups // ranks)


def _compiler_hash() -> str:
    """Return a hash of the sources that turn a config into streams: they are an input as well."""
    digest = hashlib.sha256()
    folders = [ROOT / "k3tool" / folder for folder in _COMPILER_FOLDERS]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    for path in [*paths, *(ROOT / name for name in _COMPILER_FILES)]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _check_settings(isa: Isa, settings: dict[str, Any], name: str) -> None:
    """Refuse a cache entry that is not what its key says: a file may have been put in its place."""
    for key in ("workgroups", "chunk", "batch"):
        fewer = key == "chunk" and isa.residency is not None and isa.params[key] < settings[key]
        if isa.params[key] != settings[key] and not fewer:
            raise ArtifactError(f"{name}: {key}", got=isa.params[key], need=settings[key])
    _check_mode(isa, settings["numerics"], name)
    if int(isa.params["ctx"]) < int(settings["ctx"]):  # compiled ones are rounded up to pages
        raise ArtifactError(f"{name}: ctx", got=isa.params["ctx"], need=settings["ctx"])


def _check_mode(isa: Isa, mode: str, name: str, hint: str | None = None) -> None:
    got = isa.params["numerics"]["mode"]
    if got != mode:
        raise ArtifactError(f"{name}: numerics", got=got, need=mode, hint=hint)


def _check_given(isa: Isa, source: Source, options: RunOptions, name: str) -> None:
    """Refuse options that say otherwise than given streams, and streams of other weights."""
    if source.shards is not None:
        options = replace(options, tp=None)  # the shards' own: a file is at fault, no option
    check_fixed(options, isa.params, dict(source.config.eps))
    if options.numerics is not None:
        hint = f"leave --numerics out, or compile a plan with --numerics {options.numerics}"
        _check_mode(isa, options.numerics, name, hint)
    _check_foreign(isa, source, options.target, name)


def _check_foreign(isa: Isa, source: Source, target: str, name: str) -> None:
    """Refuse streams that were not made for these weights, or for another target."""
    if isa.target != target:
        raise TargetError(f"{name}: target", got=isa.target, need=target)
    if isa.tp != source.tp:
        hint = f"compile a plan with --tp {source.tp}"
        raise ArtifactError(f"{name}: tp", got=isa.tp, need=source.tp, hint=hint)
    made_for = str(isa.params["checkpoint_identity"])
    if made_for != source.identity:
        raise ArtifactError(
            f"{name}: checkpoint", got=f"{made_for[:16]}.." if made_for else "none, only a config",
            need=f"{source.identity[:16]}.. of {source.path}",
            hint=_recompile(source),
        )  # fmt: skip
    _check_config(isa, source, name)


def _recompile(source: Source) -> str:
    """Return the command that makes a program for this source; shards know their degree."""
    degree = f" --tp {source.tp}" if source.shards is None else ""
    return f"k3tool compile-plan {source.path}{degree} -o plan.h5"


def _check_config(isa: Isa, source: Source, name: str) -> None:
    """Refuse streams of another config: the identity is words of a file, these are what ran."""
    found = model_of(isa.params)
    if found is None:
        raise ArtifactError(f"{name}: config", got="none", need=f"that of {source.path}")
    made, own = found.config_dict, source.config.config_dict
    if canonical_json(made) != canonical_json(own):
        parts = [{**config, **config.get("text_config", {})} for config in (made, own)]
        differ = sorted(
            key for key in {**parts[0], **parts[1]}
            if key != "text_config" and parts[0].get(key) != parts[1].get(key)
        )  # fmt: skip
        field = differ[0] if differ else "text_config"
        raise ArtifactError(
            f"{name}: config: {field}", got=parts[0].get(field), need=parts[1].get(field),
            hint=_recompile(source),
        )  # fmt: skip
