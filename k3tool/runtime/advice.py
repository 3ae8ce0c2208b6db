"""Which memory budget of this machine a model fits in, and the command to type next.

It compiles and counts, as ``k3tool.runtime.foresee`` does; it reads no weight and runs nothing.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3tool.checkpoint.names import SHARDS_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.checkpoint.whole import require_whole
from k3tool.model.config import K3Config
from k3tool.model.sizes import rank_bytes
from k3tool.model.weight_slices import n_bytes
from k3tool.model.weights import Where, layer_rows
from k3tool.runtime.budget import PRESETS
from k3tool.runtime.build import ROOT
from k3tool.runtime.foresee import ends, preset_bytes
from k3tool.runtime.machine import INTERPRETER
from k3tool.tables import bytes_text, count_text
from k3tool.verdict import Check, failed, not_run, passed

_IDS = "--ids 1,2,3 --gen 16"
# One expert of the release, which is looked at where no config says another size.
RELEASED_EXPERT_BYTES = 17_547_264
SAMPLE = "ckpt"


@dataclass(frozen=True, slots=True)
class Model:
    """What was named: a checkpoint, shards of `tp` ranks, or a config alone (no weights)."""

    source: Path
    config: K3Config
    tp: int
    has_weights: bool


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


def open_model(source: Path) -> Model:
    """Return what a run would open, refused in the same words. Raises: ArtifactError."""
    if (source / SHARDS_NAME).exists():
        shards = Shards.open(source)
        for rank in range(shards.tp):
            shards.rank(rank).close()
        return Model(source, shards.config, shards.tp, True)
    if os.path.isfile(source):
        return Model(source, K3Config.load(source), 1, False)
    with Checkpoint.open(source) as checkpoint:
        require_whole(checkpoint)
        return Model(source, checkpoint.config, checkpoint.tp or 1, True)


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
    least, all_bytes = ends(model.source, None)
    if room < least:
        return Advice(least, all_bytes, room, None, False)
    if all_bytes <= room:
        return Advice(least, all_bytes, room, None, True)
    named = [name for name, n in PRESETS.items() if least <= n <= room]
    return Advice(least, all_bytes, room, named[-1] if named else "auto", True)


def model_checks(model: Model, advice: Advice) -> list[Check]:
    """Return what the model is, whether it fits, and what each preset would be."""
    weights = rank_bytes(model.config, model.tp).total * model.tp
    kind = "weights" if model.has_weights else "a config, no weights here"
    what = f"{count_text(model.config.num_hidden_layers, 'layer')}, {bytes_text(weights)} ({kind})"
    degrees = ", ".join(map(str, model.config.legal_tp()))
    checks = [passed("model", f"{what}, --tp {degrees}; shown for --tp {model.tp}")]
    room = bytes_text(advice.room_bytes)
    if not advice.fits:
        return [*checks, failed("fits", f"got {room}, need at least {_least(advice)}")]
    how = f"--preset {advice.preset}" if advice.preset else "as a whole, no budget needed"
    span = f"from {bytes_text(advice.least_bytes)}, all of it in {bytes_text(advice.all_bytes)}"
    checks.append(passed("fits", f"{how}: {room} here; {span}"))
    return checks + [_preset_check(name, PRESETS[name], advice) for name in PRESETS]


def _least(advice: Advice) -> str:
    return f"{bytes_text(advice.least_bytes)} for this model, whatever is read as it goes"


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
    source = shlex.quote(str(model.source))
    if not advice.fits:  # what another machine would need, at the least budget there is
        rates = "--storage-rate 10 --memory-rate 100"
        return f"k3tool run {source} --memory {advice.least_bytes} --plan-only {rates}"
    if not model.has_weights:
        given = (("--storage-rate", storage), ("--memory-rate", memory))
        rates = "".join(f" {name} {rate / 1e9:.3g}" for name, rate in given if rate)
        return f"k3tool run {source} --preset {advice.preset or 'auto'} --plan-only{rates}"
    budget = f" --preset {advice.preset}" if advice.preset else ""
    return f"k3tool run {source}{budget} {_IDS}"


def _rebuild() -> str:
    if (ROOT / "Makefile").is_file():
        return f"make -C {shlex.quote(str(ROOT))} build"
    return "install k3tool again"
