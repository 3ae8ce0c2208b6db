"""Read an image back (written by k3tool.runtime.image), for memory that another process cannot map.

`k3-cpu` maps the file; a GPU's loader takes it apart. The layout stays image.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.runtime import image as written

Array = npt.NDArray[Any]
_ROWS: dict[str, Any] = {
    "phase": written.PHASE_DTYPE, "tensor": written.TENSOR_DTYPE, "expert": written.EXPERT_DTYPE,
    "file": written.FILE_DTYPE,
    "queue": "<u4", "expect": "<u4", "prompt": "<u4", "stop": "<u4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ImageView:
    """An image in parts: `sections` by kind and phase (0 where a kind has none)."""

    header: Any
    sections: dict[tuple[str, int], Array]
    paths: tuple[str, ...]


def view_image(image: bytes) -> ImageView:
    """Return the parts of an image that `build_image` made; nothing is copied."""
    header = np.frombuffer(image, written.HEADER_DTYPE, 1)[0]
    table = np.frombuffer(
        image, written.SECTION_DTYPE, int(header["n_sections"]), written.HEADER_DTYPE.itemsize
    )
    sections = {}
    for row in table:
        kind, at = written.SECTIONS[int(row["kind"]) - 1], int(row["offset"])
        dtype = np.dtype(_ROWS.get(kind, f"V{int(row['elem_bytes'])}"))
        sections[kind, int(row["phase"])] = np.frombuffer(image, dtype, int(row["count"]), at)
    return ImageView(header, sections, tuple(written.image_paths(image)))
