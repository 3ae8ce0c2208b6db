"""`bench inspect`: the whole report against stock safetensors merely listing the names."""

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from k3tool.bench.frame import (
    BenchReport,
    Limit,
    Paired,
    Spread,
    interleave,
    machine_line,
    run_child,
    spread,
)
from k3tool.errors import K3Error

MOST_TIMES_STOCK = 4.0
MOST_PEAK_MB = 500.0
# Prints the seconds of listing alone, without the interpreter's start and the import.
_STOCK = """
import glob, sys, time
from safetensors import safe_open
start, count = time.perf_counter(), 0
for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    with safe_open(path, "numpy") as file:
        count += len(file.keys())
print("names", count, "seconds", time.perf_counter() - start)
"""


def bench_inspect(checkpoints: Mapping[str, Path], repeats: int) -> BenchReport:
    """Measure inspect's report of checkpoints, each under its label.

    Raises: K3Error if a side fails.
    """
    rows: list[tuple[str, Spread, str]] = []
    limits: list[Limit] = []
    for label, checkpoint in checkpoints.items():
        more = _measure(label and f", {label}", checkpoint, repeats)
        rows += more[0]
        limits += more[1]
    definition = [
        f"{', '.join(map(str, checkpoints.values()))}: wall time of fresh processes, interleaved,",
        "one warm-up each, files in the page cache; ratios are medians of paired runs; peak is the",
        "child's own (wait4)",
        machine_line(),
    ]
    return BenchReport("inspect", definition, rows, limits)


def _measure(
    label: str, checkpoint: Path, repeats: int
) -> tuple[list[tuple[str, Spread, str]], list[Limit]]:
    listing: list[float] = []
    peaks: list[float] = []

    def stock() -> float:
        seconds, output, _ = _run([sys.executable, "-c", _STOCK, str(checkpoint)])
        found = re.search(r"seconds ([0-9.e-]+)", output)
        assert found, output
        listing.append(float(found[1]))
        return seconds

    def inspect() -> float:
        command = [sys.executable, "-m", "stages.cli", "inspect", str(checkpoint), "--json"]
        seconds, _, peak = _run(command)
        peaks.append(peak / 1e6)
        return seconds

    whole = interleave(stock, inspect, repeats)
    alone = Paired(listing[-repeats:], whole.second)
    rows = [
        (f"stock safetensors lists all names, process{label}", spread(whole.first), "s"),
        (f"stock safetensors lists all names, listing alone{label}", spread(alone.first), "s"),
        (f"k3tool inspect --json, process{label}", spread(whole.second), "s"),
        (f"inspect / stock process{label}", whole.ratio, "times"),
        (f"inspect / stock listing alone{label}", alone.ratio, "times"),
        (f"peak memory of inspect{label}", spread(peaks[-repeats:]), "MB"),
    ]
    ratio, peak = alone.ratio.median, max(peaks)
    limits = [
        Limit(f"inspect / stock listing alone{label}", ratio, at_most=MOST_TIMES_STOCK),
        Limit(f"peak memory of inspect, MB{label}", peak, at_most=MOST_PEAK_MB),
    ]
    return rows, limits


def _run(command: list[str]) -> tuple[float, str, int]:
    with tempfile.TemporaryFile() as output:
        child = run_child(command, output.fileno())
        output.seek(0)
        text = output.read().decode()
    if child.exit_code != 0:
        raise K3Error(" ".join(command[:4]), got=f"exit code {child.exit_code}", need="0")
    return child.seconds, text, child.peak_bytes


def drop_cache(paths: list[Path]) -> None:
    """Ask the system to forget files' pages, so that the next read comes from the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
