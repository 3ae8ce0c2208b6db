"""How fast this machine reads weights, in a few seconds: its storage and its memory.

A look, not a benchmark: `bench io` and `bench gemv` measure with repeats and a spread.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from k3tool.bench.io import measure_io
from k3tool.checkpoint.stand_in import has_hole
from k3tool.errors import K3Error
from k3tool.isa.table import LOAD_BLOCK_BYTES
from k3tool.memory import rooms
from k3tool.runtime.budget import FETCH_QUEUES, LOAD_QUEUES
from k3tool.tables import bytes_text

DEPTH = LOAD_QUEUES + FETCH_QUEUES  # reads at a time, as a run under a budget has them
MOST_BYTES, MOST_SECONDS = 512 << 20, 2.0
TEMPORARY_BYTES, SPARE_BYTES = 128 << 20, 1 << 30


class Rate(NamedTuple):
    """Bytes a second, None where nothing could be measured, and in words what was read or why not.

    Through the page cache counts as not measured: that is memory's rate, not a device's.
    """

    value: float | None
    detail: str


def storage_of(folder: Path, block_bytes: int) -> Rate:
    """Return what the device below a folder's weights gives; the largest file is read."""
    files = sorted(folder.rglob("*.safetensors"), key=lambda file: -file.stat().st_size)
    file = next((file for file in files if not has_hole(file)), None)
    if file is None:
        return Rate(None, "no weight file without holes, which are read from no device")
    return _read(file, block_bytes, f"of {file.name}")


def storage_at(place: Path, block_bytes: int) -> Rate:
    """Return what the device below a folder gives, by a temporary file there, which is removed."""
    stat = os.statvfs(place)
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return Rate(None, f"{place} may not be written")
    if stat.f_bavail * stat.f_frsize < TEMPORARY_BYTES + SPARE_BYTES:
        return Rate(None, f"{place} has less than {bytes_text(SPARE_BYTES)} to spare")
    part = os.urandom(16 << 20)  # no file system packs it
    with tempfile.NamedTemporaryFile(dir=place, prefix=".k3tool-doctor-") as file:
        end = time.monotonic() + MOST_SECONDS
        for _ in range(TEMPORARY_BYTES // len(part)):
            file.write(part)
            file.flush()
            os.fsync(file.fileno())
            if time.monotonic() > end:
                break
        return _read(Path(file.name), block_bytes, f"of a temporary file in {place}")


def _read(file: Path, block_bytes: int, what: str) -> Rate:
    """Read a small part first: it says how much can be read in the time."""
    size = file.stat().st_size
    block = min(block_bytes, size)
    try:
        small = min(block, LOAD_BLOCK_BYTES)
        first = measure_io(file, small, DEPTH, DEPTH * small)
        n_bytes = max(block, int(min(MOST_BYTES, first.rate * MOST_SECONDS, size)))
        found = measure_io(file, block, DEPTH, n_bytes)
    except K3Error as error:
        return Rate(None, f"{error.object}: got {error.got}, need {error.need}")
    read = f"{bytes_text(found.n_bytes)} {what} in reads of {bytes_text(block)}, {DEPTH} at a time"
    if not found.is_direct:
        return Rate(None, f"{read}: only through the page cache, no device's rate")
    return Rate(found.rate, f"{found.rate / 1e9:.2f} GB/s: {read}, around the page cache")


def memory() -> Rate:
    """Return memory's rate where there is room for what is walked."""
    from k3tool.bench.probe import CACHES, LEAST_BYTES, Probe, last_level_cache_bytes

    need = max(LEAST_BYTES, CACHES * last_level_cache_bytes())
    least = min(rooms(), default=None)
    if least is not None and least.n_bytes < 2 * need:
        return Rate(None, f"{bytes_text(least.n_bytes)} left, need {bytes_text(2 * need)} to read")
    try:
        with Probe(n_bytes=need) as probe:
            way = probe.choose_read(1)
            rate = probe.read()
    except K3Error as error:
        return Rate(None, f"{error.object}: got {error.got}, need {error.need}")
    return Rate(rate, f"{rate / 1e9:.1f} GB/s over {bytes_text(need)}: {way}")
