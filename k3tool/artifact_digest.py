"""What an artifact holds and how that is hashed: datasets, their stored form, the content digest.

It knows no HDF5 library: `k3tool.artifact` reads and writes the files.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3tool.canonical import canonical_json

Array = npt.NDArray[Any]
_UNHASHED = ("k3.content_sha256", "k3.tool")


@dataclass(frozen=True, slots=True)
class Dataset:
    """Hold one array with the words a reader needs: axis names, unit and logical dtype.

    `data` is numeric, boolean or an array or list of str. `dtype` defaults to the NumPy name and is
    given where NumPy has none (`bf16` in u2, `mxfp4` and `e8m0` in u1).
    """

    data: Array | Sequence[str]
    axes: tuple[str, ...]
    unit: str = ""
    dtype: str = ""


def stored_array(name: str, dataset: Dataset) -> Array:
    """Return the array as it is stored: strings as object, numbers little-endian C order.

    Shapes: any, the same; what is neither texts nor numbers is our bug (AssertionError).
    """
    data = np.asarray(dataset.data)
    if data.size == 0 and not isinstance(dataset.data, np.ndarray):
        data = data.astype(object)  # an empty list here is an empty list of strings
    if data.dtype.kind in "UO":
        data = data.astype(object)
        assert all(isinstance(item, str) for item in data.flat), f"{name}: not all strings"
    else:
        assert data.dtype.kind in "biuf", f"{name}: {data.dtype}"
        data = np.ascontiguousarray(data, dtype=data.dtype.newbyteorder("<")).reshape(data.shape)
    assert len(dataset.axes) == data.ndim, f"{name}: axes {dataset.axes} of shape {data.shape}"
    return data


def words_of(dataset: Dataset, stored: Array) -> dict[str, str]:
    """Return the attributes of a dataset: its axes, unit and logical dtype, as texts."""
    plain = "str" if stored.dtype.kind == "O" else stored.dtype.name
    return {
        "axes": canonical_json(list(dataset.axes)),
        "unit": dataset.unit,
        "dtype": dataset.dtype or plain,
    }


def content_sha256(
    roots: Mapping[str, object],
    datasets: Iterable[tuple[str, Array, Mapping[str, str]]],
) -> str:
    """Return the content digest of root attributes and datasets, these in the order of names."""
    digest = Digest(roots)
    for name, data, words in datasets:
        digest.add(name, data, words)
    return digest.hexdigest()


class Digest:
    """The content digest of an artifact, of datasets as they come in the order of their names."""

    def __init__(self, roots: Mapping[str, object]) -> None:
        """Take the root attributes, all but the digest itself."""
        self._sha256 = hashlib.sha256()
        hashed = {name: value for name, value in roots.items() if name not in _UNHASHED}
        inputs = json.loads(str(roots["k3.inputs"]))
        # An input's name is a label: renaming a folder changes no content.
        hashed["k3.inputs"] = [{k: v for k, v in entry.items() if k != "name"} for entry in inputs]
        self._put(canonical_json(hashed).encode())

    def _put(self, data: bytes) -> None:
        self._sha256.update(len(data).to_bytes(8, "little"))  # ("ab","c") is not ("a","bc")
        self._sha256.update(data)

    def add(self, name: str, data: Array, words: Mapping[str, str]) -> None:
        """Add a dataset."""
        self._put(canonical_json([name, dict(words), list(data.shape)]).encode())
        if data.dtype.kind == "O":
            self._put(b"str")
            for item in data.flat:
                self._put(item.encode())
        else:
            self._put(data.dtype.str.encode())
            self._sha256.update(bytes_of(data))

    def hexdigest(self) -> str:
        """Return the digest so far."""
        return self._sha256.hexdigest()


def bytes_of(data: Array | bytes) -> memoryview:
    """Return the bytes of an array in C order, without a copy where it is contiguous."""
    if isinstance(data, bytes):
        return memoryview(data)
    return memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
