"""`bench inspect`: the whole report against stock safetensors merely listing the names."""

import os
import re
import sys
import tempfile
from pathlib import Path

from k3tool.bench.frame import (
    BenchReport,
    Limit,
    Paired,
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


def bench_inspect(checkpoint: Path, repeats: int) -> BenchReport:
    """Measure inspect's report of a checkpoint. Raises: K3Error if a side fails."""
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
        ("stock safetensors lists all names, process", spread(whole.first), "s"),
        ("stock safetensors lists all names, listing alone", spread(alone.first), "s"),
        ("k3tool inspect --json, process", spread(whole.second), "s"),
        ("inspect / stock process", whole.ratio, "times"),
        ("inspect / stock listing alone", alone.ratio, "times"),
        ("peak memory of inspect", spread(peaks), "MB"),
    ]
    definition = [
        f"{checkpoint}: wall time of fresh processes, interleaved, one warm-up each, files in the",
        "page cache; ratios are medians of paired runs; peak is the child's own (wait4)",
        machine_line(),
    ]
    limits = [
        Limit("inspect / stock listing alone", alone.ratio.median, at_most=MOST_TIMES_STOCK),
        Limit("peak memory of inspect, MB", max(peaks), at_most=MOST_PEAK_MB),
    ]
    return BenchReport("inspect", definition, rows, limits)


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
