"""Read an image back (written by k3tool.runtime.image), for memory that another process cannot map.

`k3-cpu` maps the file; a GPU's loader takes it apart. Its layout: image_layout.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.runtime import image_layout as layout

Array = npt.NDArray[Any]
_ROWS: dict[str, Any] = {
    "phase": layout.PHASE_DTYPE, "tensor": layout.TENSOR_DTYPE, "expert": layout.EXPERT_DTYPE,
    "file": layout.FILE_DTYPE,
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
    header = np.frombuffer(image, layout.HEADER_DTYPE, 1)[0]
    table = np.frombuffer(
        image, layout.SECTION_DTYPE, int(header["n_sections"]), layout.HEADER_DTYPE.itemsize
    )
    sections = {}
    for row in table:
        kind, at = layout.SECTIONS[int(row["kind"]) - 1], int(row["offset"])
        dtype = np.dtype(_ROWS.get(kind, f"V{int(row['elem_bytes'])}"))
        sections[kind, int(row["phase"])] = np.frombuffer(image, dtype, int(row["count"]), at)
    return ImageView(header, sections, tuple(image_paths(image)))


def image_paths(image: bytes) -> list[str]:
    """Return the paths of an image's files, in the order that faults count them."""
    header = np.frombuffer(image, layout.HEADER_DTYPE, 1)[0]
    table = np.frombuffer(
        image, layout.SECTION_DTYPE, int(header["n_sections"]), layout.HEADER_DTYPE.itemsize
    )
    rows = {layout.SECTIONS[int(row["kind"]) - 1]: row for row in table}
    text, files = rows["text"], rows["file"]
    names = image[int(text["offset"]) :][: int(text["count"])]
    found = np.frombuffer(image, layout.FILE_DTYPE, int(files["count"]), int(files["offset"]))
    return [os.fsdecode(names[int(at) :].split(b"\0", 1)[0]) for at in found["path_offset"]]


def start_bytes(images: Sequence[bytes], copied: int) -> int:
    """Return the bytes that all ranks read before their first step, `copied` of them as copies.

    Under a budget at most: the ring need not be full when a step starts.
    """
    headers = [np.frombuffer(image, layout.HEADER_DTYPE, 1)[0] for image in images]
    return copied + sum(int(h["pinned_bytes"]) + int(h["ring_bytes"]) for h in headers)
