"""What a rank is asked for, and the bytes of it (layout: kernels_cpu/steps.h)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3tool.runtime.engine import StepToken
from k3tool.runtime.records import NO_INDEX

STEP, SAVE, RESTORE = 1, 2, 3
REQUEST_DTYPE = np.dtype(
    [
        ("kind", "<u4"), ("n", "<u4"), ("phase", "<u4"), ("n_wanted", "<u4"),
        ("head_from", "<u4"), ("row", "<u4"), ("number", "<u4"), ("reserved", "<u4"),
    ]
)  # fmt: skip
SPAN_DTYPE = np.dtype(
    [("handle", "<u4"), ("reserved", "<u4"), ("offset", "<u8"), ("bytes", "<u8"), ("at", "<u8")]
)
assert REQUEST_DTYPE.itemsize == 32
assert SPAN_DTYPE.itemsize == 32


@dataclass(frozen=True, slots=True)
class Step:
    """One step: `phase` is the program that runs it, an index of ALL_PHASES.

    The head runs on tokens from `head_from` on, a choice is made after the last `n_wanted`. `row`
    is where the first of the head's logits go in what is kept of them, None: nowhere. Records and
    faults call the step `number`.
    """

    phase: int
    tokens: Sequence[StepToken]
    n_wanted: int
    head_from: int
    row: int | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a private tensor, and where they lie among the bytes of a saved slot."""

    handle: int
    offset: int
    n_bytes: int
    at: int


def encode_step(step: Step) -> bytes:
    """Return a step as a rank reads it."""
    head = np.zeros(1, REQUEST_DTYPE)
    row = NO_INDEX if step.row is None else step.row
    head[0] = (
        STEP, len(step.tokens), step.phase, step.n_wanted, step.head_from, row, step.number, 0
    )  # fmt: skip
    rows = np.array([(t.id, t.position, t.slot) for t in step.tokens], "<u4")
    return head.tobytes() + rows.tobytes()


def encode_spans(kind: int, spans: Sequence[Span]) -> bytes:
    """Return a request to copy spans out of a rank (SAVE) or into it (RESTORE)."""
    head = np.zeros(1, REQUEST_DTYPE)
    head["kind"], head["n"] = kind, len(spans)
    rows = np.zeros(len(spans), SPAN_DTYPE)
    for row, span in zip(rows, spans, strict=True):
        row["handle"], row["offset"], row["bytes"], row["at"] = (
            span.handle, span.offset, span.n_bytes, span.at
        )  # fmt: skip
    return head.tobytes() + rows.tobytes()
