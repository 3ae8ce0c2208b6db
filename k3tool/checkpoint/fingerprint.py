"""The fingerprint artifact: 128 bits of every tensor's bytes, to tell later what has changed place.

It finds accidents (a swapped expert, a part fetched from another version), not forgeries: the hash
is quick, not cryptographic. Its pieces and keys are part of its meaning: value_targets.py,
kernels_cpu/scan.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from k3tool.artifact import Dataset, InputRef, open_artifact, write_artifact
from k3tool.checkpoint.findings import Finding
from k3tool.errors import printable
from k3tool.fields import column, texts

FINGERPRINT_SCHEMA = 1


def write_fingerprint(path: Path, fingerprints: Mapping[str, str], name: str, identity: str) -> str:
    """Write fingerprints (hex, by tensor) and return the artifact's digest.

    `name` and `identity` are the checkpoint's. Names are written as they are printed: HDF5 holds no
    zero byte.
    """
    by_name = {printable(each): finger for each, finger in fingerprints.items()}
    names = sorted(by_name)
    raw = b"".join(bytes.fromhex(by_name[each]) for each in names)
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


def compare_fingerprints(
    found: Mapping[str, str], recorded: Mapping[str, str], files: Mapping[str, str]
) -> list[Finding]:
    """Return what differs from a record: other bytes, another tensor's bytes, nothing recorded.

    `files` says where each tensor lies, for the message.
    """
    names: dict[str, list[str]] = {}
    for name, finger in recorded.items():
        names.setdefault(finger, []).append(name)
    findings = []
    for name, finger in found.items():
        written, file = printable(name), files.get(name, "")  # the index may lack it
        if recorded.get(written) == finger:
            continue
        if written not in recorded:
            got, need = "a tensor without a recorded fingerprint", "one that was recorded"
            findings.append(Finding("not recorded", file, name, got, need))
        elif finger in names:
            got = f"the bytes that {names[finger][0]} had"
            findings.append(Finding("swapped", file, name, got, "its own, as recorded"))
        else:
            got = f"fingerprint {finger[:12]}.."
            findings.append(
                Finding("changed", file, name, got, f"{recorded[written][:12]}.. as recorded")
            )
    return findings
