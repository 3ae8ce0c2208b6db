"""Logits from files of any origin: npz, safetensors, lines of JSON. Rows are mapped, not loaded.

Arrays are (positions, vocabulary), binary16, 32 or 64 or bf16. Their names say what rows are:
`prefill` the prompt's positions from 0, `steps` those that tokens were chosen from (the first is
the prompt's last position again), `logits` positions from 0 or those of an array `positions`. Of a
file with several sets, `NAME.prefill` and so on, one is chosen by name. A line of JSON has
`position` and `logits`. Everything else is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.checkpoint.headers import DTYPES, TensorInfo, read_header
from k3tool.checkpoint.json_text import json_fault, json_kind, parse_json
from k3tool.checkpoint.regular_file import open_regular, unreadable
from k3tool.compare.npz import Archive
from k3tool.compare.spill import Spill
from k3tool.errors import ArtifactError, hinted, listed, quoted

Array = npt.NDArray[Any]
NEED = "logits: an npz archive, safetensors or lines of JSON"
SECTIONS = ("prefill", "steps", "logits")
_FLOATS = ("F16", "F32", "F64", "BF16")
_SHOWN = 4  # names of another file's arrays
_MOST_LINE_BYTES = 1 << 28  # a row of 160,000 numbers of 20 digits is 4 MB
_MOST_POSITION = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of one kind. `rows` (P, V) as stored; `positions` (P,), None where it is not known."""

    name: str
    rows: Array
    positions: Array | None
    is_bf16: bool = False

    def block(self, start: int, stop: int) -> Array:
        """Return rows as float64."""
        rows = self.rows[start:stop]
        if self.is_bf16:
            return (rows.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return rows.astype(np.float64)

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Logits:
    """One file's rows, by section; all of one vocabulary."""

    name: str
    kind: str
    sections: Mapping[str, Section]

    @property
    def vocab_size(self) -> int:
        """Return the columns of every row."""
        return int(next(iter(self.sections.values())).rows.shape[1])


@hinted("docs/verify.md says what of such a file is read")
def read_logits(path: Path, name: str | None = None) -> Logits:
    """Read one file of logits; its first bytes say of which kind. `name` chooses among sets.

    Raises: ArtifactError naming the file and what is damaged, absent or of another form.
    """
    with open(open_regular(path, NEED, is_fetched=False), "rb") as file:
        start = file.read(16)
    if start.startswith(b"PK"):
        with Archive(path) as archive:
            return _of_arrays(path, "npz", archive.names(), archive.read, name)
    if start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{":
        return _of_lines(path, name)
    if len(start) > 8 and start[8:9] == b"{":
        infos = {info.name: info for info in read_header(path).infos()}

        def read(key: str) -> tuple[Array, bool]:
            return _mapped(path, infos[key])

        return _of_arrays(path, "safetensors", list(infos), read, name)
    raise ArtifactError(str(path), got="another file" if start else "an empty file", need=NEED)


# -- arrays by name --------------------------------------------------------------------------------


def _of_arrays(
    path: Path, kind: str, names: list[str], read: Callable[[str], tuple[Array, bool]],
    chosen: str | None,
) -> Logits:  # fmt: skip
    prefix = _prefix(path, names, chosen)
    found: dict[str, Section] = {}
    n_prompt: int | None = None
    for section in SECTIONS:
        if prefix + section not in names:
            continue
        rows, is_bf16 = read(prefix + section)
        place = f"{path}: {prefix}{section}"
        if rows.dtype.kind != "f" and not is_bf16:
            raise ArtifactError(place, got=rows.dtype.name, need="floats")
        rows = _two_axes(place, rows)
        positions: Array | None = np.arange(len(rows))
        if section == "prefill":
            n_prompt = len(rows)
        elif section == "steps":
            positions = None if n_prompt is None else n_prompt - 1 + np.arange(len(rows))
        elif f"{prefix}positions" in names:
            positions = _positions(path, read(f"{prefix}positions")[0], len(rows))
        found[section] = Section(section, rows, positions, is_bf16)
    return _checked(path, Logits(str(path), kind, found))


def _prefix(path: Path, names: list[str], chosen: str | None) -> str:
    """Return what stands before the sections' names: nothing, or the set's name and a dot."""
    sets = sorted({name.rpartition(".")[0] for name in names if name.split(".")[-1] in SECTIONS})
    if not sets:
        first, rest = listed(names[:_SHOWN]), len(names) - _SHOWN  # a checkpoint has thousands
        got = f"{first} and {rest} more" if rest > 0 else first
        raise ArtifactError(f"{path}: arrays", got=got, need="prefill, steps or logits")
    if chosen is None and len(sets) > 1:
        raise ArtifactError(
            f"{path}: sets", got=listed(each or "one without a name" for each in sets),
            need="one of them", hint="name it with --name",
        )  # fmt: skip
    if chosen is not None and chosen not in sets:
        need = f"a set of {chosen} (--name)"
        raise ArtifactError(f"{path}: sets", got=listed(each or '""' for each in sets), need=need)
    one = sets[0] if chosen is None else chosen
    return f"{one}." if one else ""


def _two_axes(place: str, rows: Array) -> Array:
    """Return (positions, vocabulary); a first axis of 1, a batch of one, may stand before them."""
    if rows.ndim == 3 and rows.shape[0] == 1:
        rows = rows[0]
    if rows.ndim != 2:
        got = "x".join(map(str, rows.shape)) or "one number"
        raise ArtifactError(place, got=got, need="positions x vocabulary")
    return rows


def _positions(path: Path, values: Array, n_rows: int) -> Array:
    place = f"{path}: positions"
    if values.dtype.kind not in "iu" or values.shape != (n_rows,):
        got = f"{values.dtype.name} {'x'.join(map(str, values.shape))}"
        raise ArtifactError(place, got=got, need=f"{n_rows} integers, one a row of logits")
    whole = np.array(values, np.int64)
    if len(set(whole.tolist())) != n_rows or (n_rows and whole.min() < 0):
        raise ArtifactError(place, got="one twice or below 0", need="each position once")
    return whole


def _checked(path: Path, found: Logits) -> Logits:
    widths = {section.rows.shape[1] for section in found.sections.values()}
    if len(widths) != 1 or min(widths) < 2:
        need = "one vocabulary in all arrays, of at least two ids"
        raise ArtifactError(f"{path}: vocabulary", got=listed(widths), need=need)
    return found


def _mapped(path: Path, info: TensorInfo) -> tuple[Array, bool]:
    if info.dtype not in _FLOATS and info.dtype not in ("I32", "I64", "U32"):
        need = f"logits in {listed(_FLOATS)}"
        raise ArtifactError(f"{path}: {info.name}", got=info.dtype, need=need)
    dtype = np.dtype(DTYPES[info.dtype])
    if info.n_bytes == 0:
        return np.zeros(info.shape, dtype), False
    rows = np.memmap(path, dtype, "r", info.offset, info.shape)
    return rows, info.dtype == "BF16"


# -- lines -----------------------------------------------------------------------------------------


def _of_lines(path: Path, name: str | None) -> Logits:
    if name is not None:
        raise ArtifactError(f"{path}: sets", got="lines of JSON, which have none", need="no --name")
    positions: list[int] = []
    spill: Spill | None = None
    n_vocab = 0
    try:
        with open(open_regular(path, NEED, is_fetched=False), "rb") as file:
            for line, raw in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES), b""), 1):
                if not raw.strip():
                    continue
                place = f"{path}: line {line}"
                position, row = _row(place, raw)
                if spill is None:
                    n_vocab = len(row)
                    spill = Spill(np.dtype([("logits", "<f8", (n_vocab,))]))
                if len(row) != n_vocab:
                    need = f"{n_vocab}, as in the first line"
                    raise ArtifactError(f"{place}: logits", got=f"{len(row)} numbers", need=need)
                positions.append(position)
                spill.append((row,))
    except OSError as error:
        raise unreadable(path, NEED, error) from None
    assert spill is not None, "the first line begins with a brace"
    where = _positions(path, np.array(positions, np.int64), len(positions))
    section = Section("logits", spill.rows()["logits"], where)
    return _checked(path, Logits(str(path), "JSONL", {"logits": section}))


def _row(place: str, raw: bytes) -> tuple[int, list[float]]:
    need = "an object with position and logits"
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise ArtifactError(place, got=f"invalid JSON ({json_fault(error)})", need=need) from None
    if not isinstance(value, dict):
        raise ArtifactError(place, got=json_kind(value), need=need)
    if not {"position", "logits"} <= set(value):
        raise ArtifactError(place, got=f"keys {listed(value)}", need=need)
    position, row = value["position"], value["logits"]
    if type(position) is not int or not 0 <= position <= _MOST_POSITION:
        raise ArtifactError(place, got=f"position {quoted(position)}", need="an integer from 0")
    if not isinstance(row, list) or not all(type(each) in (int, float) for each in row):
        raise ArtifactError(f"{place}: logits", got=json_kind(row), need="a list of numbers")
    return position, row
