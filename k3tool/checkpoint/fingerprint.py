"""The fingerprint artifact: 128 bits of every tensor's bytes, to tell later what has changed place.

It finds accidents (a swapped expert, a part fetched from another version), not forgeries: the hash
is quick, not cryptographic. Its pieces and keys are part of its meaning; see values.py and
kernels_cpu/scan.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from k3tool.artifact import Dataset, InputRef, open_artifact, write_artifact
from k3tool.fields import column, texts

FINGERPRINT_SCHEMA = 1


def write_fingerprint(path: Path, fingerprints: Mapping[str, str], name: str, identity: str) -> str:
    """Write fingerprints (hex, by tensor) and return the artifact's digest.

    `name` and `identity` are the checkpoint's.
    """
    names = sorted(fingerprints)
    raw = b"".join(bytes.fromhex(fingerprints[each]) for each in names)
    hashes = np.frombuffer(raw, dtype=np.uint8).reshape(len(names), 16)
    datasets = {
        "tensors/name": Dataset(names, ("tensor",)),
        "tensors/fingerprint": Dataset(hashes, ("tensor", "byte")),
    }
    inputs = [InputRef("checkpoint", "checkpoint", name, identity)]
    return write_artifact(path, "fingerprint", FINGERPRINT_SCHEMA, datasets, inputs=inputs)


def read_fingerprint(path: Path) -> dict[str, str]:
    """Return the recorded fingerprints by tensor. Raises: ArtifactError."""
    with open_artifact(path, "fingerprint", FINGERPRINT_SCHEMA) as artifact:
        names = texts(artifact, "tensors/name")
        hashes = column(artifact, "tensors/fingerprint", "u1", 16, n_rows=len(names))
        return {name: row.tobytes().hex() for name, row in zip(names, hashes, strict=True)}
