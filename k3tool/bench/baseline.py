"""Compare a measurement with an earlier one of the same thing on the same machine.

The earlier one is what `--json` printed then. Another benchmark, other settings or another machine
are refused: their numbers would be compared as if they meant something. The two did not run in
turn, so what else the machine did then and now is in the result; `bench decode --versus` runs two
interpreters in turn.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from k3tool.bench.shapes import ROW, Rows, fault
from k3tool.checkpoint.regular_file import read_regular
from k3tool.errors import ArtifactError, quoted
from k3tool.tables import Column, Table, number_text

_SAME = ("bench", "machine", "settings")
_MEASURED = {"measured": Rows(ROW)}


class Change(NamedTuple):
    """One measured value then and now. `is_apart`: the runs' ends do not overlap.

    `ratio` is None where it was 0 before: JSON has no other number for that.
    """

    name: str
    before: float
    now: float
    ratio: float | None
    is_apart: bool


def machine() -> dict[str, Any]:
    """Return what has to be equal for two measurements to be comparable."""
    return {"cpu": cpu_model(), "cpus": len(os.sched_getaffinity(0))}


def cpu_model() -> str:
    """Return the CPU's name as the system gives it."""
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "unknown CPU"


def read_baseline(path: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return an earlier measurement; `now` says what is about to be measured, by the names of
    `_SAME`.

    Raises: ArtifactError where the file is none, or of something else.
    """
    need = f"what bench {now['bench']} --json printed"
    try:
        found = json.loads(read_regular(path, "an earlier measurement", is_fetched=False))
    except (ValueError, RecursionError):
        raise ArtifactError(str(path), got="no JSON", need=need) from None
    if not isinstance(found, dict) or fault(_MEASURED, found) is not None:
        raise ArtifactError(str(path), got="no measured values", need=need)
    for name in _SAME:
        require_same(path, name, found.get(name), now[name])
    return found


def require_same(path: Path, name: str, got: object, need: object) -> None:
    """Refuse another value, naming the first field of it that differs. Raises: ArtifactError."""
    if isinstance(got, dict) and isinstance(need, dict):
        for key in sorted(got.keys() | need.keys()):
            require_same(path, f"{name}.{key}", got.get(key), need.get(key))
    elif got != need:
        hint = "measure that again with these settings, or compare with another file"
        raise ArtifactError(f"{path}: {name}", got=quoted(got), need=quoted(need), hint=hint)


def compare(
    path: Path, before: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[Change]:
    """Return each measured value beside the earlier one.

    Raises: ArtifactError where the earlier measurement has other values.
    """
    old = before["measured"]
    if [_what(row) for row in old] != [_what(row) for row in rows]:
        got = f"{len(old)} values of other names or units"
        raise ArtifactError(f"{path}: measured", got=got, need=f"the {len(rows)} measured here")
    return [
        Change(
            row["name"], was["median"], row["median"],
            row["median"] / was["median"] if was["median"] else None,
            row["most"] < was["least"] or was["most"] < row["least"],
        )
        for row, was in zip(rows, old, strict=True)
    ]  # fmt: skip


def _what(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["name"], row["unit"]


def change_lines(changes: Sequence[Change]) -> list[str]:
    """Return the comparison as a table."""
    columns = [Column("against the baseline", "left"), Column("before"), Column("now"),
               Column("now / before"), Column("spreads", "left")]  # fmt: skip
    rows = [
        (c.name, number_text(c.before), number_text(c.now),
         "-" if c.ratio is None else f"{c.ratio:.3f}",
         "apart" if c.is_apart else "overlap")
        for c in changes
    ]  # fmt: skip
    return Table(columns, rows).text_lines()
