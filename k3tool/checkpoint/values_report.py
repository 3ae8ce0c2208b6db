"""Say in tables and lines what a look at the values found, one line a module or one a layer."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from k3tool.checkpoint.coverage_report import Section, finding_lines
from k3tool.checkpoint.scan_library import CODE_SHARE, PART_BYTES
from k3tool.checkpoint.values import PlaceValues, Values
from k3tool.ref.formats import FP4_VALUES, SCALE_LIMIT
from k3tool.tables import Column, Table, bytes_text

CODES_NOTE = (
    f"codes of the first {PART_BYTES >> 10} KiB of every {PART_BYTES * CODE_SHARE >> 10} KiB of a "
    "tensor; everything else is of all bytes"
)


def values_sections(values: Values, *, by_layer: bool, every_finding: bool) -> list[Section]:
    """Return the tables of values and scales, and what is wrong."""
    groups = _by_module(values)
    if by_layer:
        groups = {_label(place): seen for place, seen in values.places.items()}
    scales = {label: group for label, group in groups.items() if group.scales.any()}
    sections = [Section("Values", _values_table(groups))]
    if scales:
        sections.append(Section("Scales", _scales_table(scales)))
        sections.append(Section("Codes", _codes_table(scales), [CODES_NOTE]))
    lines = finding_lines(values.findings, every_finding)
    return [*sections, Section("Value findings", None, lines)]


def values_json(values: Values) -> dict[str, Any]:
    """Return everything as plain values, layer by layer."""
    return {
        "bytes": values.n_bytes,
        "code_share": CODE_SHARE,
        "places": [
            {
                "layer": layer,
                "module": module,
                "tensors": seen.n_tensors,
                "bytes": seen.n_bytes,
                "absmax": seen.absmax if np.isfinite(seen.absmax) else None,
                "nonfinite": seen.n_nonfinite,
                "zero_rows": seen.n_zero_rows,
                "product_absmax": seen.product_absmax,
                "codes": _codes(seen),
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
                "" if seen.product_absmax is None else f"{seen.product_absmax:.4g}",
            )
        )  # fmt: skip
    titles = ("groups", "range", "median", "0", f"{SCALE_LIMIT} up", "255", "absmax")
    return Table([Column("scales", "left"), *map(Column, titles)], rows)


def _codes_table(groups: Mapping[str, PlaceValues]) -> Table:
    """Return the share of each E2M1 code, 0 to 7 positive and 8 to 15 negative, in thousandths.

    Codes are counted in one part of CODE_SHARE of each tensor; see scan_library.
    """
    rows = []
    for label, seen in groups.items():
        for half, counts in zip(("low", "high"), seen.codes, strict=True):
            total = max(1, int(counts.sum()))
            rows.append((label, half, *(_share(int(count), total) for count in counts)))
    codes = [Column(f"{sign}{value:g}") for sign in "+-" for value in FP4_VALUES[:8]]
    return Table([Column("codes, 1/1000", "left"), Column("nibble", "left"), *codes], rows)


def _share(count: int, total: int) -> str:
    return "0" if not count else f"{1000 * count / total:.0f}" if count * 2000 >= total else "<1"


def _codes(seen: PlaceValues) -> dict[str, list[int]] | None:
    """Return how often each code stands in low and in high nibbles; None where there are none."""
    if not seen.codes.any():
        return None
    return {"low": seen.codes[0].tolist(), "high": seen.codes[1].tolist()}
