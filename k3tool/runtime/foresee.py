"""What a run under a memory budget would hold, read and take, for a checkpoint or a config alone.

It compiles and counts; it starts no rank and reads no weight but to measure the device.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.names import SHARDS_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.shards import Shards
from k3tool.compiler.compile import compile_plan
from k3tool.compiler.plan import Plan
from k3tool.errors import UsageError
from k3tool.isa.table import PAGE_TOKENS
from k3tool.memory import rooms
from k3tool.model.config import K3Config
from k3tool.runtime.budget import (
    FETCH_QUEUES,
    LOAD_QUEUES,
    PRESETS,
    Floor,
    budget_ends,
    fit,
    least_running,
    run_floor,
)
from k3tool.runtime.devices import held_bytes, joint_rate, open_ranks, share_out
from k3tool.runtime.prediction import Prediction, predict
from k3tool.targets import BATCH, DEFAULT_CHUNK, DEFAULT_CONTEXT, get_target

CONFIG_NAME = "config.json"
# From folders to their devices' rates, None where there is none to measure, and memory's.
Measure = Callable[[Sequence[Path]], tuple[list[float | None], float]]
LEAST_RATE, MOST_RATE = 1e3, 1e15  # bytes a second: no device is outside, and seconds are finite
AUTO_SHARE = 0.95  # of what the limits leave: the rest is the system's


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A budget's split, and seconds a token: with everything overlapped, and with nothing.

    Rates are bytes a second; None where there is nothing to measure and none was given. Where
    weights lie in several folders, `folders` has for each of them (path, rate, a token's bytes of
    all ranks), and `storage_rate` is what they give together. The least budget is the larger of
    what ranks need to run and what the step `before_ranks` takes.
    """

    memory_bytes: int
    least_running_bytes: int
    before_ranks_bytes: int
    before_ranks: str
    prediction: Prediction
    storage_rate: float | None
    memory_rate: float | None
    folders: tuple[tuple[str, float, int], ...] = ()

    @property
    def least(self) -> tuple[int, str]:
        """Return the least budget there is for this, and the step that sets it."""
        before = self.before_ranks_bytes, self.before_ranks
        return max(before, (self.least_running_bytes, "running"))

    @property
    def seconds(self) -> tuple[float, float] | None:
        """Return the range of a token's time, None where a rate is unknown."""
        if self.storage_rate is None or self.memory_rate is None:
            return None
        return self.prediction.seconds(self.storage_rate, self.memory_rate)


def preset_bytes(name: str) -> int:
    """Return a preset's budget; `auto` is what the limits leave, a control group's too."""
    if name == "auto":
        return int(min(rooms()).n_bytes * AUTO_SHARE)
    return PRESETS[name]


def foresee(
    source: Path,
    memory_bytes: int,
    *,
    tp: int | None = None,
    chunk: int | None = None,
    ctx: int | None = None,
    storage_rate: float | None = None,
    memory_rate: float | None = None,
    numerics: str = "f32",
    workgroups: int | None = None,
    measure: Measure | None = None,
    beside: Sequence[Path] = (),
) -> Foreseen:
    """Fit a budget and count. `measure` is asked for (storage, memory) rates that were not given.

    `beside` are more folders of the same weights; `storage_rate` is then each one's.

    Raises: UsageError for a rate, degree or length that cannot be; TargetError when the budget is
    below the minimum; ArtifactError for the source.
    """
    check_rate("--storage-rate", storage_rate)
    check_rate("--memory-rate", memory_rate)
    _check_fits(source, tp, ctx)
    ranks = open_ranks((source, *beside)) if beside else []
    compiler = functools.cache(_compiler(source, tp, ctx, numerics, workgroups))
    floor = _floor(source, tp)
    plan = fit(compiler, DEFAULT_CHUNK if chunk is None else chunk, memory_bytes, floor=floor)
    least = least_running(compiler), floor.before_bytes, floor.before
    counted = memory_bytes, *least, predict(plan)
    folders, rates = (source, *beside), [storage_rate] * (1 + len(beside))
    if measure is not None and None in (storage_rate, memory_rate):
        found = measure(folders)
        rates = found[0] if storage_rate is None else rates
        memory_rate = found[1] if memory_rate is None else memory_rate
    known = [rate for rate in rates if rate is not None]
    if len(rates) == 1 or len(known) < len(rates):
        joint = rates[0] if len(rates) == 1 else None
        return Foreseen(*counted, joint, memory_rate)
    parts = share_out(held_bytes(plan, ranks), known)
    named = zip(map(str, folders), known, parts, strict=True)
    joint = joint_rate(parts, known)
    return Foreseen(*counted, joint, memory_rate, tuple(named))


def check_rate(option: str, rate: float | None) -> None:
    """Refuse a rate in bytes a second that no device has. Raises: UsageError."""
    if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:  # NaN is in no range either
        need = f"GB/s from {LEAST_RATE / 1e9:g} to {MOST_RATE / 1e9:g}"
        raise UsageError(option, got=f"{rate / 1e9:g}", need=need)


def _check_fits(source: Path, tp: int | None, ctx: int | None) -> None:
    """Refuse what a run would refuse too: another degree than the shards', too many positions."""
    config, degree = model_of(source, tp)
    if tp not in (None, degree):
        raise UsageError("--tp", got=tp, need=f"{degree}, the shards'")
    limit = config.max_position_embeddings
    if ctx is not None and ctx > limit:
        raise UsageError("--ctx", got=ctx, need=f"at most max_position_embeddings = {limit}")


def ends(source: Path, tp: int | None) -> tuple[int, int]:
    """Return the least budget of a run, and the least that keeps all of a model in memory.

    Of a small model the two are one: what compiling takes. Raises: ArtifactError for the source.
    """
    floor = _floor(source, tp)
    least, full = budget_ends(_compiler(source, tp, None), DEFAULT_CHUNK)
    return max(least, floor.n_bytes), max(full, floor.n_bytes)


def _floor(source: Path, tp: int | None) -> Floor:
    config, degree = model_of(source, tp)
    is_copied = degree > 1 and not os.path.exists(source / SHARDS_NAME)
    return run_floor(config, degree, is_copied=is_copied)


def context_bytes(source: Path, tp: int | None) -> int:
    """Return the bytes that one more position takes in the caches of one rank."""
    pages = [
        sum(
            t.n_bytes
            for t in _compiler(source, tp, n * PAGE_TOKENS)(1).tensors
            if t.role == "state"
        )
        for n in (1, 2)
    ]
    return (pages[1] - pages[0]) // PAGE_TOKENS


def _compiler(
    source: Path, tp: int | None, ctx: int | None, numerics: str = "f32",
    workgroups: int | None = None,
) -> Callable[[int], Plan]:  # fmt: skip
    """Return what compiles for a number of prompt tokens in a step."""
    config, degree = model_of(source, tp)
    target = get_target("cpu")
    limit = config.max_position_embeddings

    def compile_chunk(tokens: int) -> Plan:
        return compile_plan(
            config, tp=degree, target=target.name, workgroups=workgroups or target.workgroups,
            chunk=tokens, batch=BATCH, ctx=min(limit, DEFAULT_CONTEXT if ctx is None else ctx),
            numerics=numerics,
        )  # fmt: skip

    return compile_chunk


def model_of(source: Path, tp: int | None) -> tuple[K3Config, int]:
    """Return config and degree of shards, of a checkpoint, or of a config.json alone."""
    if os.path.exists(source / SHARDS_NAME):
        shards = Shards.open(source)
        return shards.config, shards.tp
    alone = source if os.path.isfile(source) else source / CONFIG_NAME
    if os.path.exists(alone) and not os.path.exists(source / INDEX_NAME):
        config = K3Config.load(alone)
    else:
        with Checkpoint.open(source) as checkpoint:
            config = checkpoint.config
    config.check_tp(tp or 1)
    return config, tp or 1


def measured_rates(folders: Sequence[Path]) -> tuple[list[float | None], float]:
    """Return this machine's rates: of the devices that hold each folder's weights, of its memory.

    None for a folder without weights, or whose files all have holes: no device is read for a hole.
    """
    from k3tool.bench.io import storage_rate
    from k3tool.bench.probe import Probe

    depth = LOAD_QUEUES + FETCH_QUEUES
    storage = [storage_rate(folder, depth) if folder.is_dir() else None for folder in folders]
    with Probe() as probe:
        probe.choose_read(1)
        return storage, probe.read()
