"""Say of one tensor where it lies, what it has to be, and what each rank gets of it."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import ArtifactError
from k3tool.model.config import K3Config
from k3tool.model.vision import is_vision
from k3tool.model.weights import TensorSpec, find_spec, rank_slice

_NUMBER = re.compile(r"\d+")


def tensor_value(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Return a tensor's facts as plain values, in the order in which they are printed.

    `name` may lack the layout's prefix. Raises: ArtifactError if there is no such tensor.
    """
    names = checkpoint.index.weight_map
    full = next((each for each in (name, checkpoint.config.prefix + name) if each in names), None)
    if full is None:
        near = _nearest(name, names)
        raise ArtifactError(
            f"{checkpoint.path}: {name}",
            got="absent",
            need="a tensor of this name",
            hint=f"the nearest is {near}" if near else None,
        )
    info = checkpoint.tensor_info(full)
    spec = find_spec(checkpoint.config, full)
    facts: dict[str, Any] = {
        "name": full,
        "file": info.file,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "offset": info.offset,
        "bytes": info.n_bytes,
    }
    if spec is None:
        return {**facts, "module": "vision" if is_vision(full) else "unknown", "read by": "nobody"}
    return {
        **facts,
        "needed": f"{spec.dtype} {list(spec.shape)}",
        "module": spec.row.module,
        "leaf": spec.leaf,
        "read by": spec.row.claimed_by,
        "split": str(spec.split),
        "ranks": {} if checkpoint.tp else _ranks(checkpoint.config, spec),
    }


def _ranks(config: K3Config, spec: TensorSpec) -> dict[str, str]:
    """Return what each rank of each degree gets: rows or columns, half-open."""
    lines = {}
    for tp in config.legal_tp():
        parts = [rank_slice(spec, tp, rank) for rank in range(tp)]
        axis = parts[0].axis
        what = {None: "all of it", 0: "rows", 1: "columns"}[axis]
        ranges = "" if axis is None else " ".join(f"[{p.start}, {p.stop})" for p in parts)
        lines[f"TP {tp}"] = f"{what} {ranges}".rstrip()
    return lines


def tensor_lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts one a line."""
    lines = []
    for key, value in facts.items():
        items = value.items() if isinstance(value, dict) else [(key, value)]
        lines += [f"{word:<8}  {text}" for word, text in items]
    return lines


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar name, comparing forms without numbers: there are few of those."""
    numbers = _NUMBER.findall(name)
    forms: dict[str, str] = {}
    same: dict[str, str] = {}
    for each in names:
        form = _NUMBER.sub("#", each)
        forms.setdefault(form, each)
        if _NUMBER.findall(each) == numbers:
            same.setdefault(form, each)
    found = difflib.get_close_matches(_NUMBER.sub("#", name), forms, n=1)
    return (same.get(found[0]) or forms[found[0]]) if found else None
