"""Say of one tensor where it lies, what it has to be, and what each rank gets of it."""

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import ArtifactError, printable
from k3tool.model.config import K3Config
from k3tool.model.vision import is_vision
from k3tool.model.weight_slices import rank_slice
from k3tool.model.weights import TensorSpec, find_spec

_NUMBER, _DOT = re.compile(r"\d+"), re.compile(r"\.")
_MOST_NAMES = 3
# To compare texts takes the product of their lengths; a model has 50 forms of some 70 letters.
_MOST_FORMS, _MOST_LETTERS = 1000, 200


def tensor_value(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Return a tensor's facts as plain values, in the order in which they are printed.

    `name` may lack the layout's prefix. Raises: ArtifactError if there is no such tensor.
    """
    names = checkpoint.index.weight_map
    full = next((each for each in (name, checkpoint.config.prefix + name) if each in names), None)
    if full is None:
        near = nearest_names(name, names)
        hint = f"near it: {', '.join(near)}" if near else f"names are such as {min(names)}"
        raise ArtifactError(
            f"{checkpoint.path}: {name}", got="absent", need="a tensor of this name", hint=hint
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
        lines += [f"{word:<8}  {printable(str(text))}" for word, text in items]
    return lines


def nearest_names(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three names: those that hold all of `name`, else the most similar ones.

    Compared are forms without numbers, of which there are few; of a form the first name with the
    numbers asked for, if it is there.
    """
    numbers, asked = _NUMBER.findall(name), _NUMBER.sub("#", name)
    forms: dict[str, str] = {}
    fits: dict[str, tuple[bool, bool]] = {}
    for each in names:
        form = _NUMBER.sub("#", each)
        fit = (name in each, _NUMBER.findall(each)[: len(numbers)] == numbers)
        if fit > fits.get(form, (False, False)) or form not in forms:
            forms[form], fits[form] = each, fit
    found = [form for form in forms if asked in form]
    likely = [form for form in forms if len(form) <= _MOST_LETTERS][:_MOST_FORMS]
    if not found and len(asked) <= _MOST_LETTERS:
        # A leaf as it is written without its layer is unlike every whole name.
        ends = {form[i:]: form for form in likely for i in (0, *_starts(form))}
        found = list(dict.fromkeys(ends[e] for e in difflib.get_close_matches(asked, ends)))
    return [forms[form] for form in sorted(found, key=len)[:_MOST_NAMES]]


def _starts(form: str) -> Iterator[int]:
    """Yield where the words of a name begin, after the first."""
    return (match.end() for match in _DOT.finditer(form))
