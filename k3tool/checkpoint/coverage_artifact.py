"""The coverage artifact: what `inspect -o` writes. Apart, because HDF5 takes long to load."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from k3tool.artifact import Dataset, InputRef, write_artifact
from k3tool.checkpoint.coverage import Coverage
from k3tool.checkpoint.findings import Finding
from k3tool.checkpoint.scan_library import CODE_SHARE
from k3tool.errors import printable

if TYPE_CHECKING:
    from k3tool.checkpoint.values import Values

COVERAGE_SCHEMA = 1


def write_coverage(path: Path, coverage: Coverage, values: "Values | None" = None) -> str:
    """Write a coverage artifact, with what was seen in the values if they were read.

    Returns its digest.
    """
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
        **_findings("findings", findings),
    }
    if values is not None:
        datasets |= _values(values)
    attrs = {
        "whole": coverage.is_whole,
        "vision_tensors": coverage.vision.found,
        "vision_bytes": coverage.vision.n_bytes,
    }
    source = coverage.identity or "unknown: a file could not be read"
    kind = "checkpoint" if coverage.tp is None else "shards"
    inputs = [InputRef("checkpoint", kind, printable(coverage.path.name), source)]
    return write_artifact(path, "coverage", COVERAGE_SCHEMA, datasets, attrs, inputs)


def _values(values: "Values") -> dict[str, Dataset]:
    """Return the columns of `values/`: a row for each module of each layer that was read."""
    rows = list(values.places.items())

    def column(numbers: Iterable[float], dtype: str, unit: str = "") -> Dataset:
        return Dataset(np.array([*numbers], dtype=dtype), ("place",), unit)

    layers = (-1 if layer is None else layer for (layer, _), _ in rows)
    product = (np.nan if v.product_absmax is None else v.product_absmax for _, v in rows)
    codes = np.array([v.codes for _, v in rows], dtype="<u8").reshape(-1, 2, 16)
    scales = np.array([v.scales for _, v in rows], dtype="<u8").reshape(-1, 256)
    return {
        "values/layer": column(layers, "<i8", "0-based, -1 outside"),
        "values/module": Dataset([module for (_, module), _ in rows], ("place",)),
        "values/tensors": column((v.n_tensors for _, v in rows), "<u8", "tensors"),
        "values/bytes": column((v.n_bytes for _, v in rows), "<u8", "bytes"),
        "values/zero_rows": column((v.n_zero_rows for _, v in rows), "<u8", "rows"),
        "values/nonfinite": column((v.n_nonfinite for _, v in rows), "<u8", "elements"),
        "values/absmax": column((v.absmax for _, v in rows), "<f4"),
        "values/product_absmax": column(product, "<f8", "|code x scale|, NaN without"),
        "values/codes": Dataset(codes, ("place", "nibble", "code"), f"codes in 1/{CODE_SHARE}"),
        "values/scales": Dataset(scales, ("place", "byte"), "groups"),
        **_findings("values/findings", values.findings),
    }


def _findings(group: str, findings: Sequence[Finding]) -> dict[str, Dataset]:
    """Return a column a field. HDF5 holds no zero byte and no name that is not UTF-8."""
    return {
        f"{group}/{key}": Dataset(
            [printable(getattr(entry, key)) for entry in findings], ("finding",)
        )
        for key in Finding._fields
    }
