"""What a file of measurements has to hold before anything is drawn from it.

A shape is a type of JSON as a value: a text, a number, a list of one shape, fields with theirs.
Fields beyond those are nobody's concern. It knows no file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number above `least`; a whole list of rows divides by it where it is positive."""

    least: float = -math.inf
    may_be_null: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """A list of at least `least` values of one shape."""

    of: Any
    least: int = 0


TEXT, FLAG = "text", "flag"
NUMBER, COUNT, POSITIVE = Number(), Number(-1e-300), Number(0.0)
MAYBE = Number(0.0, may_be_null=True)
_BOUND = Number(may_be_null=True)

_OP = {"op": TEXT, "seconds": COUNT, "n_bytes": COUNT, "operations": COUNT}
STEP = {
    "ops": Rows(_OP, 1), "handoff": COUNT, "idle": COUNT, "wall": POSITIVE, "n_workers": POSITIVE,
}  # fmt: skip
_PEAKS = {"peaks": {"f32": POSITIVE, "pairs": MAYBE}}
ROW = {"name": TEXT, "unit": TEXT, "median": NUMBER, "least": NUMBER, "most": NUMBER, "n": COUNT}
_LIMIT = {"name": TEXT, "value": NUMBER, "held": FLAG, "at_most": _BOUND, "at_least": _BOUND}
MEASURED: dict[str, Any] = {
    "definition": Rows(TEXT), "measured": Rows(ROW), "limits": Rows(_LIMIT),
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "decode": {
        **MEASURED, "settings": {"numerics": TEXT, "chunk": POSITIVE}, "read_bandwidth": POSITIVE,
        "anatomy": STEP, "prefill_anatomy": STEP | _PEAKS,
    },
    "prefill": {
        **MEASURED, "settings": {"numerics": TEXT},
        "chunks": Rows({"chunk": POSITIVE, "anatomy": STEP | _PEAKS}, 1),
        "read_bandwidth": POSITIVE,
    },
    "roofline": {
        "device": {"name": TEXT, "handoff_us": COUNT, "f32_ops": POSITIVE, "bf16_ops": MAYBE},
        "bandwidth": POSITIVE, "numerics": TEXT, "tp": POSITIVE, "rank_bytes": POSITIVE,
        "ops": Rows({"op": TEXT, "packets": COUNT, "n_bytes": COUNT, "operations": COUNT}, 1),
        "modules": Rows({"module": TEXT, "rank_bytes": COUNT, "operations": COUNT}),
        "floors_ms": {"bytes": COUNT, "operations": COUNT, "hand-offs": COUNT},
    },
    "budgets": {
        **MEASURED, "resident": {"step_seconds": POSITIVE},
        "budgets": Rows({"memory_bytes": POSITIVE, "step_seconds": POSITIVE}, 1),
    },
}  # fmt: skip
SLICE = {"name": TEXT, "ts": NUMBER, "dur": COUNT, "tid": COUNT, "args": {"layer": NUMBER}}
TIMELINE = {
    "otherData": {
        "checkpoint": TEXT, "numerics": TEXT, "context": COUNT, "workers": Number(0.5),
        "step_us": POSITIVE,
    },
}  # fmt: skip
PREDICTED = {"memory_bytes": POSITIVE, "seconds": Rows(POSITIVE, 2)}


def fault(shape: Any, value: object, where: str = "") -> tuple[str, str] | None:
    """Return where a value is not of a shape, and what is needed there; None where it is."""
    if isinstance(shape, Number):
        return None if _is_number(shape, value) else (where, "a number")
    if isinstance(shape, Rows):
        if not isinstance(value, list) or len(value) < shape.least:
            return where, f"a list of {shape.least} or more" if shape.least else "a list"
        found = (fault(shape.of, one, f"{where}[{at}]") for at, one in enumerate(value))
        return next((one for one in found if one is not None), None)
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            return where, "fields"
        dot = "." if where else ""
        found = (fault(of, value.get(name), f"{where}{dot}{name}") for name, of in shape.items())
        return next((one for one in found if one is not None), None)
    if shape == FLAG:
        return None if isinstance(value, bool) else (where, "true or false")
    return None if isinstance(value, str) else (where, "a text")


def _is_number(shape: Number, value: object) -> bool:
    if value is None:
        return shape.may_be_null
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and value > shape.least
    except OverflowError:  # whole numbers of JSON have no end
        return False
