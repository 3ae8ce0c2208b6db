"""Typed access to an artifact's parameters, attributes and columns; nothing is read without it.

A file with a right digest may still hold anything: a hand-made one, or another version's. What is
absent or of another type is refused by file and field (ArtifactError), never by a traceback. What
the values mean is the reader's to check.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from k3tool.artifact import Array, Artifact
from k3tool.errors import ArtifactError, quoted

REMAKE = "make the file again with its stage"
MOST = 2**63 - 1  # of a number that is held in 64 bits


@dataclass(frozen=True, slots=True)
class Fields:
    """Named values of one file; `where` says in messages which file, and what they are to it."""

    values: Mapping[str, object]
    where: str

    def count(self, name: str, least: int = 0, most: int = MOST) -> int:
        """Return an integer in [least, most]; JSON's true is none."""
        value = self._value(name, f"an integer from {least}")
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, value, f"an integer from {least}")
        if not least <= value <= most:
            bound = "" if most == MOST else f" to {most}"
            self.refuse(name, value, f"an integer from {least}{bound}")
        return value

    def text(self, name: str) -> str:
        """Return a string, which may be empty."""
        value = self._value(name, "a text")
        if not isinstance(value, str):
            self.refuse(name, value, "a text")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._value(name, "true or false")
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings."""
        value = self._value(name, "a list of texts")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(name, value, "a list of texts")
        return tuple(value)

    def text_table(self, name: str) -> dict[str, str]:
        """Return a table of strings by name."""
        table = self._table(name, "a table of texts")
        if not all(isinstance(item, str) for item in table.values()):
            self.refuse(name, table, "a table of texts")
        return {key: str(item) for key, item in table.items()}

    def number_table(self, name: str) -> dict[str, float]:
        """Return a table of finite numbers by name."""
        need = "a table of finite numbers"
        table = self._table(name, need)
        out: dict[str, float] = {}
        for key, item in table.items():
            if isinstance(item, bool) or not isinstance(item, int | float):
                self.refuse(f"{name}: {key}", item, need)
            if not _is_finite(item):
                self.refuse(f"{name}: {key}", item, need)
            out[key] = float(item)
        return out

    def present(self, name: str) -> object:
        """Return a value of any type that is there: one that is only compared."""
        return self._value(name, "a value")

    def refuse(self, name: str, got: object, need: str) -> NoReturn:
        """Raise for a value. Raises: ArtifactError naming file and field."""
        raise ArtifactError(f"{self.where}: {name}", got=quoted(got), need=need, hint=REMAKE)

    def _table(self, name: str, need: str) -> dict[str, object]:
        value = self._value(name, need)
        if not isinstance(value, dict):
            self.refuse(name, value, need)
        return value

    def _value(self, name: str, need: str) -> object:
        if name not in self.values:
            raise ArtifactError(f"{self.where}: {name}", got="absent", need=need, hint=REMAKE)
        return self.values[name]


def _is_finite(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond all floats
        return False


def params_of(file: Artifact) -> Fields:
    """Return the options that an artifact says it was made with."""
    return Fields(file.params, f"{file.path}: params")


def attrs_of(file: Artifact) -> Fields:
    """Return an artifact's own attributes."""
    return Fields(file.attrs, str(file.path))


# -- columns -----------------------------------------------------------------------------------


def column(
    file: Artifact, name: str, dtype: npt.DTypeLike, *widths: int, n_rows: int | None = None
) -> Array:
    """Return a dataset of exactly this dtype and shape (n_rows, *widths); None: any length.

    Raises: ArtifactError naming file and dataset.
    """
    data, need = file.read(name), np.dtype(dtype)
    shape = (len(data) if data.ndim else 0, *widths)
    _require(file, name, data, n_rows, data.dtype == need and data.shape == shape,
             f"{need.name}[{', '.join(str(n) for n in ('n', *widths))}]")  # fmt: skip
    return np.ascontiguousarray(data)


def texts(file: Artifact, name: str, n_rows: int | None = None) -> list[str]:
    """Return a dataset of strings, one axis. Raises: ArtifactError naming file and dataset."""
    data = file.read(name)
    _require(file, name, data, n_rows, data.dtype.kind == "O" and data.ndim == 1, "texts[n]")
    return [str(item) for item in data]


def _require(
    file: Artifact, name: str, data: Array, n_rows: int | None, good: bool, need: str
) -> None:
    got = f"{'texts' if data.dtype.kind == 'O' else data.dtype.name}{list(data.shape)}"
    if not good:
        raise ArtifactError(f"{file.path}: {name}", got=got, need=need, hint=REMAKE)
    if n_rows is not None and len(data) != n_rows:
        raise ArtifactError(f"{file.path}: {name}", got=got, need=f"{n_rows} rows", hint=REMAKE)
