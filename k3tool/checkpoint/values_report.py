"""Say in tables and lines what a look at the values found, one line a module or one a layer."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from k3tool.checkpoint.coverage_report import Section, finding_lines
from k3tool.checkpoint.values import PlaceValues, Values
from k3tool.ref.formats import SCALE_LIMIT
from k3tool.tables import Column, Table, bytes_text


def values_sections(values: Values, *, by_layer: bool, every_finding: bool) -> list[Section]:
    """Return the tables of values and scales, and what is wrong."""
    groups = _by_module(values)
    if by_layer:
        groups = {_label(place): seen for place, seen in values.places.items()}
    scales = {label: group for label, group in groups.items() if group.scales.any()}
    sections = [Section("Values", _values_table(groups))]
    if scales:
        sections.append(Section("Scales and codes", _scales_table(scales)))
    lines = finding_lines(values.findings, every_finding)
    return [*sections, Section("Value findings", None, lines)]


def values_json(values: Values) -> dict[str, Any]:
    """Return everything as plain values, layer by layer."""
    return {
        "bytes": values.n_bytes,
        "places": [
            {
                "layer": layer,
                "module": module,
                "tensors": seen.n_tensors,
                "bytes": seen.n_bytes,
                "absmax": seen.absmax if np.isfinite(seen.absmax) else None,
                "nonfinite": seen.n_nonfinite,
                "zero_rows": seen.n_zero_rows,
                "low_codes": _codes(seen.low_codes),
                "high_codes": _codes(seen.high_codes),
                "scales": {str(b): int(seen.scales[b]) for b in np.nonzero(seen.scales)[0]},
            }
            for (layer, module), seen in values.places.items()
        ],
        "findings": [{**each._asdict(), "hint": each.next_step} for each in values.findings],
    }


def _label(place: tuple[int | None, str]) -> str:
    return place[1] if place[0] is None else f"{place[0]} {place[1]}"


def _by_module(values: Values) -> dict[str, PlaceValues]:
    groups: dict[str, PlaceValues] = {}
    for (_, module), seen in values.places.items():
        groups.setdefault(module, PlaceValues()).merge(seen)
    return groups


def _values_table(groups: Mapping[str, PlaceValues]) -> Table:
    rows = [
        (
            label,
            f"{seen.n_tensors:,}",
            bytes_text(seen.n_bytes),
            f"{seen.absmax:.4g}" if seen.absmax_bits else "",
            f"{seen.n_nonfinite:,}",
            f"{seen.n_zero_rows:,}",
        )
        for label, seen in groups.items()
    ]
    titles = ("tensors", "read", "absmax", "not finite", "zero rows")
    return Table([Column("values", "left"), *map(Column, titles)], rows)


def _scales_table(groups: Mapping[str, PlaceValues]) -> Table:
    rows = []
    for label, seen in groups.items():
        counts = seen.scales
        used, total = np.nonzero(counts)[0], int(counts.sum())
        middle = int(np.searchsorted(np.cumsum(counts), (total + 1) // 2))
        high = int(counts[SCALE_LIMIT:].sum())
        rows.append(
            (
                label, f"{total:,}", f"{used[0]}..{used[-1]}", str(middle), f"{int(counts[0]):,}",
                f"{high:,}", f"{int(counts[255]):,}",
                f"{seen.low_codes.bit_count()}, {seen.high_codes.bit_count()} of 16",
            )
        )  # fmt: skip
    titles = ("groups", "range", "median", "0", f"{SCALE_LIMIT} up", "255", "codes low, high")
    return Table([Column("scales", "left"), *map(Column, titles)], rows)


def _codes(mask: int) -> list[int]:
    return [code for code in range(16) if mask >> code & 1]
