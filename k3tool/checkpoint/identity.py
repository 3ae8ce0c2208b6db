"""A checkpoint's identity: what can be hashed in a second of 1.56 TB.

Hash of config, index and, for every file, its name, size, header bytes and a sample of its data
(all of it in a small file). Headers alone are not enough: a model trained further has the same
headers, and a cache keyed by them would serve the old model's shards. A change that the sample
misses in a large file is not seen here; shard hashes every byte as it reads it.
"""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from k3tool.checkpoint.headers import read_header_bytes
from k3tool.errors import ArtifactError

WHOLE_FILE_BYTES = 64 << 20  # files up to this size are hashed whole
N_SAMPLES, SAMPLE_BYTES = 64, 16 << 10  # 64 reads a file: under a second for 96 files on an SSD
N_THREADS = 4  # reads of a sample wait for the disk, hashing runs beside them


class FileParts(NamedTuple):
    """What is known of one file: its size, the sha256 of its header, where its data start."""

    file: str
    size: int
    header_sha256: str
    data_start: int


def checkpoint_identity(folder: Path, files: Iterable[str], config: bytes, index: bytes) -> str:
    """Return the identity in hex. Raises: ArtifactError naming a file that cannot be read."""
    parts = []
    for file in files:
        raw, size = read_header_bytes(folder / file)
        parts.append(FileParts(file, size, hashlib.sha256(raw).hexdigest(), 8 + len(raw)))
    placed = [(folder / one.file, one) for one in parts]
    return identity_of_parts(placed, config, hashlib.sha256(index).hexdigest())


def identity_of_parts(
    files: Iterable[tuple[Path, FileParts]], config: bytes, index_sha256: str
) -> str:
    """Return the identity of a checkpoint whose headers have been read; its files lie anywhere.

    Raises: ArtifactError naming a file that cannot be read.
    """
    with ThreadPoolExecutor(N_THREADS) as pool:
        lines = sorted(pool.map(lambda file: file_line(*file), files))
    text = "\n".join([hashlib.sha256(config).hexdigest(), index_sha256, *lines])
    return hashlib.sha256(text.encode()).hexdigest()


def file_line(path: Path, parts: FileParts) -> str:
    """Return one file's line of the identity: equal for two copies. Raises: ArtifactError."""
    sample = _sample_sha256(path, parts)
    return f"{parts.file} {parts.size} {parts.header_sha256} {sample}"


def _sample_sha256(path: Path, parts: FileParts) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            for offset, length in sample_ranges(parts.data_start, parts.size):
                file.seek(offset)
                digest.update(file.read(length))
    except OSError as error:
        raise ArtifactError(
            str(path), got=error.strerror or str(error), need="a readable file"
        ) from None
    return digest.hexdigest()


def sample_ranges(start: int, size: int) -> list[tuple[int, int]]:
    """Return (offset, length) of the data bytes to hash: all, or evenly spaced, ends included."""
    if size <= WHOLE_FILE_BYTES:
        return [(offset, min(1 << 20, size - offset)) for offset in range(start, size, 1 << 20)]
    last = size - SAMPLE_BYTES
    return [
        (start + (last - start) * index // (N_SAMPLES - 1), SAMPLE_BYTES)
        for index in range(N_SAMPLES)
    ]
