"""How fast a device gives whole blocks around the page cache, read as a run under a budget reads.

The rate that a run's storage share is compared with has the same block size and the same number of
readers; it decides neither.
"""

import subprocess
from pathlib import Path
from typing import NamedTuple

from k3tool.checkpoint.stand_in import has_hole
from k3tool.errors import K3Error, UsageError
from k3tool.isa.table import LOAD_BLOCK_BYTES, MOST_IO_QUEUES
from k3tool.runtime.interpreter import load


class IoRate(NamedTuple):
    """One pass: bytes, seconds, and whether they came around the page cache."""

    n_bytes: int
    seconds: float
    is_direct: bool

    @property
    def rate(self) -> float:
        """Return bytes a second."""
        return self.n_bytes / self.seconds


def measure_io(path: Path, block_bytes: int, depth: int, n_bytes: int) -> IoRate:
    """Read up to `n_bytes` of one file in blocks, each once, by `depth` threads.

    Raises: UsageError for a depth it does not have; K3Error when the file cannot be read so.
    """
    if not 0 < depth <= MOST_IO_QUEUES:
        raise UsageError("--depth", got=depth, need=f"1 to {MOST_IO_QUEUES}")
    arguments = ["--measure-io", str(path), str(block_bytes), str(depth), str(n_bytes)]
    done = subprocess.run(
        [str(load().path), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        name, _, got = done.stderr.strip().rpartition(": ")
        need = f"a file of at least {block_bytes} bytes"
        raise K3Error(name or str(path), got=got, need=need, hint="give a smaller --block")
    count, ns, direct = map(int, done.stdout.split())
    return IoRate(count, ns / 1e9, bool(direct))


def largest_file(path: Path) -> Path:
    """Return a file itself, or the largest weight file below a folder. Raises: UsageError."""
    if path.is_file():
        return path
    found = sorted(path.rglob("*.safetensors"), key=lambda file: (-file.stat().st_size, file))
    if not found:
        got = "no weight file" if path.is_dir() else "no such file"
        need, hint = "a file, or a folder of weight files", "name a checkpoint, or a large file"
        raise UsageError(str(path), got=got, need=need, hint=hint)
    return found[0]


def storage_rate(folder: Path, depth: int, n_bytes: int = 256 << 20) -> float | None:
    """Return bytes a second of the device below a folder, at the block size of LOAD.

    None where it holds no weight file without holes.
    """
    files = sorted(folder.rglob("*.safetensors"), key=lambda file: -file.stat().st_size)
    file = next((file for file in files if not has_hole(file)), None)
    if file is None:
        return None
    block = min(LOAD_BLOCK_BYTES, file.stat().st_size)
    return measure_io(file, block, depth, n_bytes).rate
