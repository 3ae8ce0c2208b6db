"""Which memory budget of this machine a model fits in, and the command to type next.

It compiles and counts, as ``k3tool.runtime.foresee`` does; it reads no weight and runs nothing.
Whether a model's own files are whole is asked as a run asks it, in the same words.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3tool.checkpoint.shard_space import require_least_space
from k3tool.checkpoint.stand_in import is_stand_in
from k3tool.checkpoint.whole import require_whole
from k3tool.errors import K3Error
from k3tool.model.config import K3Config
from k3tool.model.sizes import rank_bytes
from k3tool.model.weight_slices import n_bytes
from k3tool.model.weights import Where, layer_rows
from k3tool.runtime.budget import PRESETS
from k3tool.runtime.build import ROOT
from k3tool.runtime.cache import Source, open_source, require_copy_space
from k3tool.runtime.foresee import ends, preset_bytes
from k3tool.runtime.machine import INTERPRETER, sentence
from k3tool.runtime.options import RunOptions
from k3tool.runtime.text_checks import tokenizer_check
from k3tool.tables import bytes_text, count_text, have_text, need_text, size_option
from k3tool.verdict import Check, failed, not_run, passed

_IDS = "--ids 1,2,3 --gen 16"
COPY = "copy of the weights"  # the check of room for what a run at --tp N writes first
# One expert of the release, which is looked at where no config says another size.
RELEASED_EXPERT_BYTES = 17_547_264
WEIGHTS = "weights"
SAMPLE = "ckpt"


@dataclass(frozen=True, slots=True)
class Model:
    """What was named: a checkpoint, shards of `tp` ranks, or a config alone (no weights).

    `weights` is "weights", or why there are none to run. `opened` is what a run opens, None for a
    config alone.
    """

    source: Path
    config: K3Config
    tp: int
    weights: str = WEIGHTS
    opened: Source | None = None

    @property
    def has_weights(self) -> bool:
        """Return whether there is something to run."""
        return self.weights == WEIGHTS

    @property
    def degree_option(self) -> str:
        """Return `--tp N` as a command needs it; shards have their own."""
        of_shards = self.opened is not None and self.opened.shards is not None
        return "" if of_shards or self.tp == 1 else f" --tp {self.tp}"


@dataclass(frozen=True, slots=True)
class Advice:
    """A model's least budget and the one that holds all of it, in bytes of all ranks and driver.

    `preset` is None where no budget is needed or none is enough: `fits` says which.
    """

    least_bytes: int
    all_bytes: int
    room_bytes: int
    preset: str | None
    fits: bool


def open_model(source: Path, tp: int | None = None) -> Model:
    """Return what a run would open, refused in the same words.

    Raises: ArtifactError; UsageError for a degree that the model, or its shards, do not have.
    """
    if os.path.isfile(source):
        config = K3Config.load(source)
        config.check_tp(tp or 1)
        return Model(source, config, tp or 1, "a config, no weights here")
    opened = open_source(RunOptions(source, (), 1, tp=tp))
    ranks = [opened.checkpoint] if opened.checkpoint is not None else []
    if opened.shards is not None:
        ranks = [opened.shards.rank(rank) for rank in range(opened.tp)]
    else:
        require_whole(ranks[0])
    stands_in = is_stand_in(ranks)
    for rank in ranks:
        rank.close()
    weights = "holes for data: a stand-in" if stands_in else WEIGHTS
    return Model(source, opened.config, opened.tp, weights, opened)


def own_checks(model: Model, cache: Path) -> list[Check]:
    """Return whether what a run loads beside weights is whole, and what it writes has room."""
    if model.opened is None:
        return []
    checks = [tokenizer_check(model.source, model.config, cache)]
    if model.opened.checkpoint is not None and model.tp > 1 and model.has_weights:
        checks.append(_copy_check(model, model.opened, cache))
    return checks


def _copy_check(model: Model, opened: Source, cache: Path) -> Check:
    n_bytes = rank_bytes(model.config, model.tp).total * model.tp
    try:
        if cache.is_dir():
            require_copy_space(opened, RunOptions(model.source, (), 1, tp=model.tp, cache=cache))
        else:  # asking makes no folder
            require_least_space(model.config, model.tp, cache / "shards", range(model.tp))
    except K3Error as error:
        return failed(COPY, sentence(error))
    return passed(COPY, f"{bytes_text(n_bytes)} for {model.tp} ranks fit in the cache's disk")


def expert_bytes(config: K3Config) -> int:
    """Return the bytes of one expert at TP 1, the release's where a model has none."""
    for layer in config.layers:
        sizes = [
            n_bytes(spec.shape, spec.dtype)
            for spec, _ in layer_rows(config, layer)
            if spec.row.where is Where.EXPERT
        ]
        if sizes:
            return sum(sizes)
    return RELEASED_EXPERT_BYTES


def advise(model: Model, room_bytes: int | None = None) -> Advice:
    """Return which budget to give. `room_bytes` is what the limits leave, asked for if None.

    A model that fits as a whole is run without a budget: its weights are mapped, and bits are the
    same. Below that the largest preset that fits, or `auto` where none does.
    """
    room = preset_bytes("auto") if room_bytes is None else room_bytes
    least, all_bytes = ends(model.source, model.tp)
    if room < least:
        return Advice(least, all_bytes, room, None, False)
    if all_bytes <= room:
        return Advice(least, all_bytes, room, None, True)
    named = [name for name, n in PRESETS.items() if least <= n <= room]
    return Advice(least, all_bytes, room, named[-1] if named else "auto", True)


def model_checks(model: Model, advice: Advice) -> list[Check]:
    """Return what the model is, whether it fits, and what each preset would be."""
    weights = rank_bytes(model.config, model.tp).total * model.tp
    n_layers = count_text(model.config.num_hidden_layers, "layer")
    what = f"{n_layers}, {bytes_text(weights)} ({model.weights})"
    degrees = ", ".join(map(str, model.config.legal_tp()))
    checks = [passed("model", f"{what}, --tp {degrees}; shown for --tp {model.tp}")]
    room = bytes_text(advice.room_bytes)
    if not advice.fits:
        return [
            *checks,
            failed("fits", f"got {have_text(advice.room_bytes)}, need at least {_least(advice)}"),
        ]
    how = f"--preset {advice.preset}" if advice.preset else "as a whole, no budget needed"
    span = f"from {need_text(advice.least_bytes)}, all of it in {need_text(advice.all_bytes)}"
    checks.append(passed("fits", f"{how}: {room} here; {span}"))
    return checks + [_preset_check(name, PRESETS[name], advice) for name in PRESETS]


def _least(advice: Advice) -> str:
    return f"{need_text(advice.least_bytes)} for this model, whatever is read as it goes"


def _preset_check(name: str, n: int, advice: Advice) -> Check:
    label = f"preset {name}"
    if n < advice.least_bytes:
        return not_run(label, f"{bytes_text(n)} is less than the model's least")
    if n > advice.room_bytes:
        return not_run(label, f"{bytes_text(n)} is more than is here")
    fits = "holds all of it" if n >= advice.all_bytes else "fits"
    return passed(label, f"{bytes_text(n)} {fits}")


def next_command(
    model: Model | None, advice: Advice | None, storage: float | None, memory: float | None,
    broken: Sequence[Check] = (),
) -> str:  # fmt: skip
    """Return one line to type next: it does what it says on this machine, in this folder.

    Rates are bytes a second, for a config alone, whose device cannot be asked.
    """
    if any(check.name == INTERPRETER for check in broken):
        return _rebuild()
    if model is None or advice is None:
        if os.path.exists(SAMPLE):
            return f"k3tool doctor {SAMPLE}"
        return f"k3tool sample {SAMPLE} && k3tool run {SAMPLE} {_IDS}"
    names = {check.name for check in broken}
    source = shlex.quote(str(model.source))
    degree = "" if COPY in names else model.degree_option  # at TP 1 nothing is copied
    if not advice.fits:  # what another machine would need, at the least budget there is
        rates, least = "--storage-rate 10 --memory-rate 100", size_option(advice.least_bytes)
        return f"k3tool run {source}{degree} --memory {least} --plan-only {rates}"
    if not model.has_weights:
        given = (("--storage-rate", storage), ("--memory-rate", memory))
        rates = "".join(f" {name} {rate / 1e9:.3g}" for name, rate in given if rate)
        return f"k3tool run {source}{degree} --preset {advice.preset or 'auto'} --plan-only{rates}"
    budget = f" --preset {advice.preset}" if advice.preset else ""
    return f"k3tool run {source}{degree}{budget} {_IDS}"


def _rebuild() -> str:
    if (ROOT / "Makefile").is_file():
        return f"make -C {shlex.quote(str(ROOT))} build"
    return "install k3tool again"
