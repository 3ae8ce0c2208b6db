"""A checkpoint's identity: what can be hashed in seconds of 1.56 TB.

Hash of (file name, size, header bytes) of every file, config and index. It does not see altered
tensor bytes; shard hashes those as it reads them.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from k3tool.checkpoint.headers import read_header_bytes


def checkpoint_identity(folder: Path, files: Iterable[str], config: bytes, index: bytes) -> str:
    """Return the identity in hex. Raises: ArtifactError naming a file that cannot be read."""
    digest = hashlib.sha256()

    def put(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    put(config)
    put(index)
    for name in sorted(files):
        raw, size = read_header_bytes(folder / name)
        put(name.encode())
        put(size.to_bytes(8, "little"))
        put(raw)
    return digest.hexdigest()
