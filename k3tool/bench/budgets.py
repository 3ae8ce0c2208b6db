"""One model in several memory budgets: one hash of all logits, and no more memory than was given.

Budgets go from the least to the least that keeps every weight, by equal factors. Each run is a
process of its own, so that its driver is counted too. Two controls stand beside them: the same
meter must find the mapped model above the least budget, and another prompt must change the hash.
"""

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from k3tool.bench.frame import BenchReport, Limit, machine_line, spread
from k3tool.bench.io import largest_file, measure_io
from k3tool.bench.memory_watch import MemoryWatch
from k3tool.checkpoint.headers import read_header_bytes
from k3tool.errors import K3Error, UsageError
from k3tool.isa.table import LOAD_BLOCK_BYTES
from k3tool.page_cache import cached_bytes, evict
from k3tool.runtime.budget import FETCH_QUEUES, LOAD_QUEUES
from k3tool.runtime.foresee import ends, model_of
from k3tool.tables import Column, Table, bytes_text, have_text, need_text

DEVICE_BYTES = 256 << 20  # of a pass over the device
IO_BOUND = 2.0  # storage time over the resident run's step, from which on a budget counts as bound
SHARE_BAR, CACHED_BAR = 0.85, 0.05


@dataclass(frozen=True, slots=True)
class Asked:
    """What to run; `command` starts k3tool, `count` is how many budgets, each run `repeats` times.

    `source` and `beside` are the folders that the model lies in.
    """

    source: Path
    command: tuple[str, ...]
    count: int
    ids: tuple[int, ...]
    gen: int
    tp: int
    cache: Path | None
    numerics: str
    beside: tuple[Path, ...] = ()
    repeats: int = 1

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return all folders of the model."""
        return (self.source, *self.beside)


@dataclass(frozen=True, slots=True)
class Found:
    """One run. `peak_bytes` is of driver and ranks together, `device_rate` bytes a second.

    `step_seconds` is the time of all steps, `steps` their number; `memory_bytes` None: no budget.
    """

    memory_bytes: int | None
    peak_bytes: int
    digest: str
    step_seconds: float
    read_bytes: int
    cached_bytes: int
    device_rate: float | None

    @property
    def device_share(self) -> float | None:
        """Return the rate of its reads over the device's."""
        if self.device_rate is None:
            return None
        return self.read_bytes / self.step_seconds / self.device_rate


def bench_budgets(asked: Asked) -> BenchReport:
    """Run them all.

    Raises: UsageError for a model that any budget holds; K3Error where a run fails; what the runs
    themselves refuse.
    """
    least, full = ends(asked.source, asked.tp)
    total = tensor_bytes(_weight_files(asked))
    if total <= least:
        raise UsageError(
            str(asked.source), got=f"tensors of {have_text(total)}", need=f"more than the least "
            f"budget of a run, {need_text(least)}: what any budget holds proves nothing",
            hint="k3tool sample CKPT --preset mid",
        )  # fmt: skip
    config, _ = model_of(asked.source, asked.tp)
    kept = (len(asked.ids) + asked.gen - 1) * config.vocab_size * 4  # the logits
    factor = (full / least) ** (1 / max(1, asked.count - 1))
    sizes = [round(least * factor**index) + kept for index in range(asked.count)]
    control = _run(asked, None, ids=(*asked.ids[:-1], (asked.ids[-1] + 1) % config.vocab_size))
    resident = _run(asked, None)
    rows = [_run(asked, size) for size in sizes for _ in range(asked.repeats)]
    return report(asked, resident, control, rows)


# -- one run -------------------------------------------------------------------------------------


def _run(asked: Asked, memory: int | None, ids: tuple[int, ...] | None = None) -> Found:
    files = _weight_files(asked)
    if memory is not None:
        evict(files)
    before = None if memory is None else _device_rate(asked)
    with tempfile.TemporaryDirectory() as folder:
        logits = Path(folder) / "logits.npz"
        command = [
            *asked.command, "run", *_shards(asked), "--tp", str(asked.tp), "--ignore-eos",
            "--ids", ",".join(map(str, ids or asked.ids)), "--gen", str(asked.gen),
            "--numerics", asked.numerics, "--logits", str(logits), "--json",
        ]  # fmt: skip
        command += [] if memory is None else ["--memory", str(memory)]
        command += [] if asked.cache is None else ["--cache", str(asked.cache)]
        events, peak = _watched(command, asked.tp)
        with np.load(logits) as kept:
            bits = kept["prefill"].tobytes() + kept["steps"].tobytes()
    digest, cached = hashlib.sha256(bits).hexdigest(), cached_bytes(files)
    end = events[-1]
    if end.get("event") != "end":
        raise K3Error("a run", got="no end of a run", need="all of its tokens")
    n_decoded = len(end["tokens"]) - 1
    parts = ((len(asked.ids), "prefill"), (n_decoded, "decode"))
    seconds = sum(n / end[f"{name}_tokens_per_second"] for n, name in parts if n)
    reading = end["reading"] or {"n_bytes": 0}
    rate = None if before is None else (before + _device_rate(asked)) / 2
    return Found(memory, peak, digest, seconds, reading["n_bytes"], cached, rate)


def _shards(asked: Asked) -> list[str]:
    return [word for folder in asked.folders for word in ("--shards", str(folder))]


def _watched(command: Sequence[str], tp: int) -> tuple[list[dict[str, Any]], int]:
    """Run a command; return its events and the peak of it and its children."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watch = MemoryWatch(process.pid)
    watch.start()
    try:
        out, err = process.communicate()
    finally:
        watch.stop()
    if process.returncode:
        lines = [line for line in err.splitlines() if not line.startswith("program ")]
        hint = next((line[8:] for line in lines if line.startswith("  hint: ")), None)
        got = lines[0] if lines else "nothing said"
        raise K3Error("a run", got=got, need="exit code 0", hint=hint)
    events = [json.loads(line) for line in out.splitlines()]
    peak = watch.peak.total
    if tp == 1:  # the kernel's own mark of the one rank misses no moment
        peak = max(peak, watch.own_beside + events[-1]["peak_memory_bytes"])
    return events, peak


def _weight_files(asked: Asked) -> list[Path]:
    return sorted(file for folder in asked.folders for file in folder.rglob("*.safetensors"))


def tensor_bytes(files: Sequence[Path]) -> int:
    """Return the bytes of all tensors, as inspect counts them: files without their headers."""
    found = (read_header_bytes(file) for file in files)
    return sum(size - 8 - len(header) for header, size in found)


def _device_rate(asked: Asked) -> float:
    """Return the rate of all folders' devices, each read while the others are."""

    def rate(folder: Path) -> float:
        file = largest_file(folder)
        block = min(LOAD_BLOCK_BYTES, file.stat().st_size)
        return measure_io(file, block, LOAD_QUEUES + FETCH_QUEUES, DEVICE_BYTES).rate

    with ThreadPoolExecutor(len(asked.folders)) as pool:
        return sum(pool.map(rate, asked.folders))


# -- the report ----------------------------------------------------------------------------------


def report(asked: Asked, resident: Found, control: Found, rows: Sequence[Found]) -> BenchReport:
    """Return the report of some runs, the mapped one and the control beside them."""
    seconds = min(resident.step_seconds, control.step_seconds)  # one may have met a cold cache
    shares = _bound_shares(rows, seconds)
    total = tensor_bytes(_weight_files(asked))
    of_budget = [row.peak_bytes / (row.memory_bytes or 1) for row in rows]
    same = sum(row.digest == resident.digest for row in rows)
    least = rows[0].memory_bytes or 1
    limits = [
        Limit("budgets that give the resident hash of all logits", same, at_least=len(rows)),
        Limit("largest peak over its budget", max(of_budget), at_most=1.0),
        Limit("largest share of the tensors in the page cache after a run",
              max(row.cached_bytes for row in rows) / total, at_most=CACHED_BAR),
        Limit("control: the mapped model's peak over the least budget",
              resident.peak_bytes / least, at_least=1.0),
        Limit("control: another prompt gives the same hash",
              int(control.digest == resident.digest), at_most=0),
    ]  # fmt: skip
    if shares:
        name = "least median share of the device's rate, of a budget's runs"
        limits.append(Limit(name, min(shares), at_least=SHARE_BAR))
    rates = [row.device_rate / 1e9 for row in rows if row.device_rate is not None]
    return BenchReport(
        name="budgets",
        definition=_definition(asked, len(shares)),
        rows=[
            ("peak over budget", spread(of_budget), "share"),
            ("device", spread(rates), "GB/s"),
            *([("of the device, by I/O-bound budget", spread(shares), "share")] if shares else []),
        ],
        limits=limits,
        facts={
            "resident": asdict(resident), "control": asdict(control),
            "budgets": [asdict(row) | {"device_share": row.device_share} for row in rows],
        },
        appendix=_table(resident, rows),
    )  # fmt: skip


def _bound_shares(rows: Sequence[Found], mapped_seconds: float) -> list[float]:
    """Return the median share of each budget that the device bounds in most of its runs.

    The rate of a device that others use too swings within a run; no one run decides.
    """
    found: dict[int | None, list[tuple[float, float]]] = {}
    for row in rows:
        if row.device_rate is not None and row.device_share is not None:
            reading = row.read_bytes / row.device_rate
            found.setdefault(row.memory_bytes, []).append((reading, row.device_share))
    return [
        median(share for _, share in runs)
        for runs in found.values()
        if median(reading for reading, _ in runs) >= IO_BOUND * mapped_seconds
    ]


def _definition(asked: Asked, n_bound: int) -> list[str]:
    return [
        f"{asked.source}, TP {asked.tp}, mode {asked.numerics}: {len(asked.ids)} prompt tokens, "
        f"{asked.gen} generated, in {asked.count} budgets from the least to all weights kept, each "
        f"run {asked.repeats} times",
        "peak: PSS of driver and ranks together, sampled; at TP 1 also the rank's own mark",
        "page cache: bytes of the weight files in it after a run that began with none, over those "
        "of all tensors, as inspect counts them; what a run reads for the checkpoint's identity is "
        "dropped again",
        f"device: O_DIRECT, blocks of {bytes_text(LOAD_BLOCK_BYTES)}, "
        f"{LOAD_QUEUES + FETCH_QUEUES} at a time, before and after each run",
        f"I/O-bound ({n_bound} of them): reading at the device's rate takes {IO_BOUND:g} times the "
        "mapped model's steps or more",
        machine_line(),
    ]


def _table(resident: Found, rows: Sequence[Found]) -> list[str]:
    titles = ("budget", "peak", "hash", "steps", "read", "in page cache", "of the device")
    lines = []
    for row in (*rows, resident):
        share = "" if row.device_share is None else f"{row.device_share:.2f}"
        budget = "none: mapped" if row.memory_bytes is None else bytes_text(row.memory_bytes)
        lines.append(
            [budget, bytes_text(row.peak_bytes), row.digest[:16], f"{row.step_seconds:.2f} s",
             bytes_text(row.read_bytes), bytes_text(row.cached_bytes), share]
        )  # fmt: skip
    return Table([Column(title) for title in titles], lines).text_lines()
