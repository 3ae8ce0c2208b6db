"""Compare a measurement with an earlier one of the same thing on the same machine.

The earlier one is what `--json` printed then. Another benchmark, other settings or another machine
are refused: their numbers would be compared as if they meant something. The two did not run in
turn, so what else the machine did then and now is in the result; `bench decode --versus` runs two
interpreters in turn.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
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

    None: that one does not have it; `ratio` too where it was 0 before.
    """

    name: str
    before: float | None
    now: float | None
    ratio: float | None
    is_apart: bool


def ratio_of(now: float, before: float) -> float | None:
    """Return now over before; None where that is no number, which JSON could not say either."""
    ratio = now / before if before else math.inf
    return ratio if math.isfinite(ratio) else None


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
    found = read_printed(path, now, "measured values", lambda data: fault(_MEASURED, data) is None)
    for name in _SAME:
        require_same(path, name, found.get(name), now[name])
    return found


def read_printed(
    path: Path, now: Mapping[str, Any], what: str, is_one: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return an earlier result of the command `now` names, if it `is_one`: has `what` it prints.

    Raises: ArtifactError where the file is none.
    """
    need = f"what bench {now['bench']} --json printed"
    hint = f"k3tool bench {now['bench']} ... --json > FILE writes one"
    try:
        found = json.loads(read_regular(path, f"earlier {what}", is_fetched=False))
    except (ValueError, RecursionError):
        raise ArtifactError(str(path), got="no JSON", need=need, hint=hint) from None
    if not isinstance(found, dict) or not is_one(found):
        raise ArtifactError(str(path), got=f"no {what}", need=need, hint=hint)
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
    """Return each measured value beside the earlier one; what only one of them has comes too.

    Some rows are there only where a run gave cause: shares of the budgets that a device bounded.

    Raises: ArtifactError where the earlier measurement has no such value.
    """
    old = {_what(row): row for row in before["measured"]}
    new = {_what(row): row for row in rows}
    if not old.keys() & new.keys():
        got = f"{len(old)} values of other names or units"
        raise ArtifactError(f"{path}: measured", got=got, need=f"the {len(rows)} measured here")
    whats = [*new, *(what for what in old if what not in new)]
    return [_change(what[0], old.get(what), new.get(what)) for what in whats]


def _what(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["name"], row["unit"]


def _change(name: str, was: Mapping[str, Any] | None, row: Mapping[str, Any] | None) -> Change:
    if was is None or row is None:
        before, now = (None if one is None else one["median"] for one in (was, row))
        return Change(name, before, now, None, False)
    ratio = ratio_of(row["median"], was["median"])
    is_apart = row["most"] < was["least"] or was["most"] < row["least"]
    return Change(name, was["median"], row["median"], ratio, is_apart)


def change_lines(changes: Sequence[Change]) -> list[str]:
    """Return the comparison as a table."""
    columns = [Column("against the baseline", "left"), Column("before"), Column("now"),
               Column("now / before"), Column("spreads", "left")]  # fmt: skip
    rows = []
    for c in changes:
        values = ["-" if value is None else number_text(value) for value in (c.before, c.now)]
        ratio = "-" if c.ratio is None else f"{c.ratio:.3f}"
        is_both = c.before is not None and c.now is not None
        spreads = "apart" if c.is_apart else "overlap" if is_both else "-"
        rows.append((c.name, *values, ratio, spreads))
    return Table(columns, rows).text_lines()
