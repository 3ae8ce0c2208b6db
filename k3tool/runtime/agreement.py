"""Compare what the ranks of a step say, and name who differs."""

from typing import Any

import numpy.typing as npt

from k3tool.errors import K3Error, UnsoundError

Array = npt.NDArray[Any]
_SAME_ON_ALL = ("kind", "step", "phase", "position", "n_tokens", "id", "best", "second", "slot",
                "digest")  # fmt: skip


def agreed(rows: Array) -> Array:
    """Return all ranks' records of a step, if they agree.

    Shapes: rows (ranks,) of RECORD_DTYPE. Raises: UnsoundError naming who differs, and in what.
    """
    keys = [tuple(row[name].tobytes() for name in _SAME_ON_ALL) for row in rows]
    if len(set(keys)) > 1:
        raise _disagreement(rows, keys)
    return rows


def _disagreement(rows: Array, keys: list[tuple[bytes, ...]]) -> K3Error:
    """Name the ranks that differ from what most say; on a tie from what rank 0 says."""
    common = max(keys, key=lambda key: (keys.count(key), key == keys[0]))
    reference = rows[keys.index(common)]
    bad = [index for index, key in enumerate(keys) if key != common]
    row = rows[bad[0]]
    fields = [name for name in _SAME_ON_ALL if row[name].tobytes() != reference[name].tobytes()]
    name = "id" if "id" in fields else fields[0]
    text = ("{:#x}" if name == "digest" else "{}").format
    ranks = ", ".join(map(str, bad))
    return UnsoundError(
        f"rank {ranks}: step {row['step']}, position {row['position']}: {', '.join(fields)}",
        got=text(row[name]),
        need=f"{text(reference[name])} as on {len(keys) - len(bad)} of {len(keys)} ranks",
        hint="k3tool verify coverage; shard again if weights on disk changed",
    )
