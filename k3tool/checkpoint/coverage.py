"""Compare what the model expects, what the index says, what the headers hold, what the graph reads.

It reads headers only, and reports everything it finds instead of stopping at the first fault.
Values are not looked at.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from k3tool.artifact import Dataset, InputRef, write_artifact
from k3tool.checkpoint.headers import Header, TensorInfo, read_header
from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import ArtifactError
from k3tool.model.vision import expected_vision, is_vision
from k3tool.model.weights import (
    TensorSpec,
    dtype_fault,
    expected_leaves,
    expected_tensors,
    idle_leaves,
    rank_spec,
    shape_fault,
)

COVERAGE_SCHEMA = 1
# What can be wrong, in the order of a report. Any of them means: not whole.
FINDING_KINDS = (
    "damaged file", "missing file", "unlisted file", "missing", "unindexed", "mis-placed",
    "mis-typed", "mis-shaped", "unclaimed", "total_size", "unread leaf", "unknown leaf",
)  # fmt: skip


class Finding(NamedTuple):
    """One thing that is wrong; `file` and `name` are empty where they mean nothing."""

    kind: str
    file: str
    name: str
    got: str
    need: str


class ModuleCount(NamedTuple):
    """Tensors of one module of one layer (None: outside the layers): expected, sound, bytes."""

    layer: int | None
    module: str
    expected: int
    sound: int
    n_bytes: int


class VisionCount(NamedTuple):
    """The image side, which nobody reads: tensors described by the config, found, bytes found."""

    expected: int
    found: int
    n_bytes: int


@dataclass(slots=True)
class Coverage:
    """The comparison's result. `identity` is None when a file could not be read.

    `idle` names leaves that the release stores and no formula reads.
    """

    path: Path
    tp: int | None
    rank: int | None
    n_files: int
    n_tensors: int
    from_headers: bool
    identity: str | None = None
    modules: list[ModuleCount] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    vision: VisionCount = field(default_factory=lambda: VisionCount(0, 0, 0))
    idle: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return whether every expected tensor is there, sound and read, and nothing else is."""
        return not self.findings

    @property
    def expected(self) -> int:
        """Return how many tensors the text model has."""
        return sum(row.expected for row in self.modules)

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the text model's sound tensors."""
        return sum(row.n_bytes for row in self.modules)


def check_coverage(path: str | Path, claimed: Iterable[str]) -> Coverage:
    """Compare a checkpoint or rank folder with the weight table and the graph's `claimed` leaves.

    Raises: ArtifactError when config or index cannot be read at all.
    """
    with Checkpoint.open(path) as checkpoint:
        coverage = Coverage(
            path=checkpoint.path,
            tp=checkpoint.tp,
            rank=checkpoint.rank,
            n_files=len(checkpoint.index.files),
            n_tensors=len(checkpoint.index.weight_map),
            from_headers=checkpoint.index.from_headers,
        )
        headers = _read_headers(checkpoint, coverage)
        held = {name: info for header in headers.values() for name, info in header.tensors.items()}
        if not any(finding.kind.endswith("file") for finding in coverage.findings):
            coverage.identity = checkpoint.identity
        expected = _check_expected(checkpoint, coverage, headers, held)
        _check_others(checkpoint, coverage, held, expected)
        _check_total_size(checkpoint, coverage, held)
        _check_graph(checkpoint, coverage, set(claimed))
        coverage.idle = sorted(idle_leaves(checkpoint.config))
        coverage.findings.sort(key=lambda f: (FINDING_KINDS.index(f.kind), f.file, f.name))
        return coverage


def _read_headers(checkpoint: Checkpoint, coverage: Coverage) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    listed = set(checkpoint.index.files)
    for name in sorted(listed | {path.name for path in checkpoint.path.glob("*.safetensors")}):
        if not (checkpoint.path / name).exists():
            coverage.findings.append(
                Finding("missing file", name, "", "absent", "a file of the index")
            )
            continue
        try:
            headers[name] = (
                checkpoint.header(name)
                if name in listed
                else _unlisted(checkpoint.path / name, coverage)
            )
        except ArtifactError as error:
            coverage.findings.append(
                Finding("damaged file", name, "", f"{error.object}: {error.got}", str(error.need))
            )
    return headers


def _unlisted(path: Path, coverage: Coverage) -> Header:
    coverage.findings.append(
        Finding("unlisted file", path.name, "", "not in the index", "no file beside the index's")
    )
    return read_header(path)


def _check_expected(
    checkpoint: Checkpoint,
    coverage: Coverage,
    headers: dict[str, Header],
    held: dict[str, TensorInfo],
) -> set[str]:
    """Count and check the tensors of the text model; return their names."""
    names: set[str] = set()
    counts: dict[tuple[int | None, str], list[int]] = {}
    for released in expected_tensors(checkpoint.config):
        spec = rank_spec(released, checkpoint.tp) if checkpoint.tp else released
        count = counts.setdefault((spec.layer, spec.row.module), [0, 0, 0])
        count[0] += 1
        names.add(spec.name)
        finding = _check_one(checkpoint, spec, headers, held)
        if finding is not None:
            coverage.findings.append(finding)
        else:
            count[1] += 1
            count[2] += held[spec.name].n_bytes
    coverage.modules = [ModuleCount(*key, *count) for key, count in counts.items()]
    return names


def _check_one(
    checkpoint: Checkpoint,
    spec: TensorSpec,
    headers: dict[str, Header],
    held: dict[str, TensorInfo],
) -> Finding | None:
    """Return what is wrong with one expected tensor, or None if it is sound."""
    file = checkpoint.index.weight_map.get(spec.name)
    info = held.get(spec.name)
    if info is None:
        got = "absent" if file is None or file in headers else "in a file that cannot be read"
        return Finding("missing", file or "", spec.name, got, f"{spec.dtype} {list(spec.shape)}")
    if file is None:
        return Finding("unindexed", info.file, spec.name, "absent from the index", info.file)
    if info.file != file:
        return Finding("mis-placed", file, spec.name, f"found in {info.file}", file)
    if need := dtype_fault(spec, info.dtype):
        return Finding("mis-typed", file, spec.name, info.dtype, need)
    if need := shape_fault(spec, info.shape):
        return Finding("mis-shaped", file, spec.name, str(list(info.shape)), need)
    return None


def _check_others(
    checkpoint: Checkpoint, coverage: Coverage, held: dict[str, TensorInfo], expected: set[str]
) -> None:
    """Find tensors that nobody reads, and count the image side apart."""
    weight_map = checkpoint.index.weight_map
    n_vision, vision_bytes = 0, 0
    for name in sorted((weight_map.keys() | held.keys()) - expected):
        info = held.get(name)
        if is_vision(name):
            n_vision += 1
            vision_bytes += info.n_bytes if info else 0
        else:
            file = info.file if info else weight_map[name]
            got = f"{info.dtype} {list(info.shape)}" if info else "only in the index"
            coverage.findings.append(Finding("unclaimed", file, name, got, "a tensor of the model"))
    described = sum(1 for _ in expected_vision(checkpoint.config))
    coverage.vision = VisionCount(0 if checkpoint.tp else described, n_vision, vision_bytes)


def _check_total_size(
    checkpoint: Checkpoint, coverage: Coverage, held: dict[str, TensorInfo]
) -> None:
    total = checkpoint.index.total_size
    found = sum(info.n_bytes for info in held.values())
    if total is not None and total != found:
        # With tensors absent this follows from them; it stands here to catch what they do not.
        coverage.findings.append(
            Finding("total_size", "", "", f"{found} bytes by the headers", f"{total} by the index")
        )


def _check_graph(checkpoint: Checkpoint, coverage: Coverage, claimed: set[str]) -> None:
    expected = expected_leaves(checkpoint.config)
    if not claimed:
        raise ArtifactError("operator graph", got="no weight leaves", need="at least one")
    for leaf in sorted(expected - claimed):
        coverage.findings.append(
            Finding("unread leaf", "", leaf, "no node reads it", "a node of the operator graph")
        )
    for leaf in sorted(claimed - expected):
        coverage.findings.append(
            Finding("unknown leaf", "", leaf, "read by the graph", "a row of the weight table")
        )


def write_coverage(path: Path, coverage: Coverage) -> str:
    """Write a coverage artifact and return its digest."""
    rows, findings = coverage.modules, coverage.findings
    layers = [-1 if row.layer is None else row.layer for row in rows]

    def column(values: list[int], unit: str = "") -> Dataset:
        return Dataset(np.array(values, dtype="<i8"), ("module",), unit)

    datasets = {
        "modules/layer": column(layers, "0-based, -1 outside"),
        "modules/module": Dataset([row.module for row in rows], ("module",)),
        "modules/expected": column([row.expected for row in rows], "tensors"),
        "modules/sound": column([row.sound for row in rows], "tensors"),
        "modules/bytes": column([row.n_bytes for row in rows], "bytes"),
        **{
            f"findings/{key}": Dataset([getattr(entry, key) for entry in findings], ("finding",))
            for key in Finding._fields
        },
    }
    attrs = {
        "whole": coverage.is_whole,
        "vision_tensors": coverage.vision.found,
        "vision_bytes": coverage.vision.n_bytes,
    }
    source = coverage.identity or "unknown: a file could not be read"
    kind = "checkpoint" if coverage.tp is None else "shards"
    inputs = [InputRef("checkpoint", kind, coverage.path.name, source)]
    return write_artifact(path, "coverage", COVERAGE_SCHEMA, datasets, attrs, inputs)
