"""The coverage artifact: what `inspect -o` writes. Apart, because HDF5 takes long to load."""

from pathlib import Path

import numpy as np

from k3tool.artifact import Dataset, InputRef, write_artifact
from k3tool.checkpoint.coverage import Coverage
from k3tool.checkpoint.findings import Finding

COVERAGE_SCHEMA = 1


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
