"""`bench shard`: splitting against a plain copy, in bytes written a second on one disk.

The source has the release's widths, fewer layers and experts, and random bytes without holes; it is
out of the page cache before every run. Peak memory is that of the process which shards.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from k3tool.atomic import fsync
from k3tool.bench.frame import BenchReport, Limit, interleave, machine_line, run_child, spread
from k3tool.bench.inspect_headers import drop_cache
from k3tool.bench.source import RELEASED_WIDTHS, sized_config, write_source
from k3tool.checkpoint.sample_presets import Preset
from k3tool.checkpoint.shard_space import free_bytes
from k3tool.errors import K3Error, UsageError
from k3tool.tables import bytes_text, have_text, need_text

ROOT = Path(__file__).resolve().parents[2]
LEAST_SHARE = 0.8
MOST_MEMORY_GB = 1.2


def bench_shard(
    folder: Path,
    size: int,
    tp: int = 2,
    jobs: int | None = None,
    repeats: int = 5,
    preset: Preset = RELEASED_WIDTHS,
) -> BenchReport:
    """Measure in `folder`, whose disk is the one measured; everything written is removed again.

    Raises: UsageError where the folder has not the room; K3Error when a command fails.
    """
    vocab_bytes = 4 * preset.text["vocab_size"] * preset.text["hidden_size"]
    need = 3 * size + vocab_bytes * tp  # source and one output
    if free_bytes(folder) < need:  # before the config: the bytes may need more experts than it has
        got, hint = f"{have_text(free_bytes(folder))} free", "free some, or give a smaller --size"
        raise UsageError(str(folder), got=got, need=need_text(need), hint=hint)
    config, raw = sized_config(size, preset)
    work = Path(tempfile.mkdtemp(prefix=".bench-", dir=folder))
    try:
        largest = write_source(work / "source", config, raw)
        return _measure(_Sides(work, tp, jobs), largest, repeats)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _measure(sides: "_Sides", largest: int, repeats: int) -> BenchReport:
    # No run to warm up: every run starts with a cold source and ends with its bytes on the disk.
    paired = interleave(sides.copy, sides.shard, repeats, warm_up=0)
    n_source, n_shards = _tree_bytes(sides.source), sides.shard_bytes
    peak = max(sides.peaks)
    definition = [
        "bytes written a second, until all are on the disk; the source is read from the disk;",
        f"source {bytes_text(n_source)} of the release's widths without holes, largest tensor "
        f"{bytes_text(largest)};",
        f"cp -r --reflink=never --sparse=never and fsync of each file, against shard --tp "
        f"{sides.tp}: {bytes_text(n_shards)}",
        machine_line(),
    ]
    rows = [
        ("cp", spread(paired.first), "GB/s"),
        ("shard", spread(paired.second), "GB/s"),
        ("shard / cp", paired.ratio, "times"),
        ("peak memory of shard", spread([peak / 1e9 for peak in sides.peaks]), "GB"),
    ]
    limits = [
        Limit("shard / cp", paired.ratio.median, at_least=LEAST_SHARE),
        Limit("peak memory, GB", peak / 1e9, at_most=MOST_MEMORY_GB),
    ]
    return BenchReport("shard", definition, rows, limits)


# -- the two sides -----------------------------------------------------------------------------


class _Sides:
    """Both ways to write the source's bytes; each returns GB/s and removes what it wrote."""

    def __init__(self, work: Path, tp: int, jobs: int | None) -> None:
        self.source, self._out = work / "source", work / "out"
        self.tp, self._jobs = tp, jobs
        self.peaks: list[int] = []
        self.shard_bytes = 0

    def copy(self) -> float:
        start = self._start()
        command = ["cp", "-r", "--reflink=never", "--sparse=never"]
        done = subprocess.run([*command, str(self.source), str(self._out)], check=False)
        _require(done.returncode, "cp")
        for path in (*self._out.iterdir(), self._out):
            fsync(path)
        return self._end(time.perf_counter() - start)

    def shard(self) -> float:
        """Run the command as a user does, its start included."""
        self._start()
        program = [sys.executable, "-m", "stages.cli", "shard", str(self.source)]
        options = ["--tp", str(self.tp), "-o", str(self._out), "--json"]
        options += [] if self._jobs is None else ["--jobs", str(self._jobs)]
        with open(os.devnull, "wb") as nowhere, contextlib.chdir(ROOT):
            run = run_child([*program, *options], nowhere.fileno())
        _require(run.exit_code, "k3tool shard")
        self.peaks.append(run.peak_bytes)
        self.shard_bytes = _tree_bytes(self._out)
        return self._end(run.seconds)

    def _start(self) -> float:
        drop_cache(list(self.source.iterdir()))
        return time.perf_counter()

    def _end(self, seconds: float) -> float:
        n_bytes = _tree_bytes(self._out)
        shutil.rmtree(self._out)
        return n_bytes / seconds / 1e9


def _require(code: int, command: str) -> None:
    if code:
        raise K3Error(command, got=f"exit code {code}", need="0")


def _tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
