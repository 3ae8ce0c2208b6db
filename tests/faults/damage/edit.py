"""Small edits of a checkpoint folder: tensors, headers and index, each as a person might make them.

Independent of the library's own reader and writer on purpose: what is tested must not write the
input it is tested with.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
LAYERS = "language_model.model.layers."
ITEM_BYTES = {"BF16": 2, "F16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4}  # others: 1


def shard_name(number: int) -> str:
    """Return the name of the oracle's file of this number, 1 to 11."""
    return f"model-{number:05d}-of-000011.safetensors"


class Tensor(NamedTuple):
    """One tensor as stored."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Raw(NamedTuple):
    """One file in its three parts."""

    header: bytes
    data: bytes

    @classmethod
    def read(cls, path: Path) -> "Raw":
        """Split a whole file."""
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        return cls(raw[8:start], raw[start:])

    def write(self, path: Path) -> None:
        """Join the parts again, with a length word that fits."""
        path.write_bytes(len(self.header).to_bytes(8, "little") + self.header + self.data)


# -- whole files of tensors --------------------------------------------------------------------


def load(path: Path) -> dict[str, Tensor]:
    """Return a file's tensors in stored order."""
    raw = Raw.read(path)
    header = json.loads(raw.header)
    header.pop("__metadata__", None)
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {
        name: Tensor(entry["dtype"], tuple(entry["shape"]), raw.data[slice(*entry["data_offsets"])])
        for name, entry in entries
    }


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [offset, offset + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        offset += len(data)
    data = b"".join(tensor.data for tensor in tensors.values())
    Raw(json.dumps(header).encode(), data).write(path)


@contextmanager
def tensors(path: Path) -> Iterator[dict[str, Tensor]]:
    """Yield a file's tensors and write back what the block made of them."""
    held = load(path)
    yield held
    save(path, held)


@contextmanager
def edit_json(path: Path) -> Iterator[Any]:
    """Yield a JSON file's value and write back what the block made of it."""
    value = json.loads(path.read_text())
    yield value
    path.write_text(json.dumps(value))


def file_of(folder: Path, name: str) -> Path:
    """Return the file that the index gives for a tensor."""
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def all_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files."""
    return sorted(folder.glob("*.safetensors"))


# -- one tensor, with index and total size kept true -------------------------------------------


def count_total(folder: Path) -> None:
    """Set the index's total size to what the files hold."""
    total = sum(len(tensor.data) for path in all_files(folder) for tensor in load(path).values())
    with edit_json(folder / INDEX) as index:
        index["metadata"]["total_size"] = total


def change(folder: Path, name: str, make: Callable[[Tensor], Tensor]) -> None:
    """Replace one tensor by what `make` makes of it."""
    with tensors(file_of(folder, name)) as held:
        held[name] = make(held[name])
    count_total(folder)


def remove(folder: Path, *names: str) -> None:
    """Take tensors out of files and index."""
    for path in {file_of(folder, name) for name in names}:
        with tensors(path) as held:
            for name in names:
                held.pop(name, None)
    with edit_json(folder / INDEX) as index:
        for name in names:
            del index["weight_map"][name]
    count_total(folder)


def add(folder: Path, name: str, tensor: Tensor, number: int = 2) -> None:
    """Put one more tensor at the end of a file, and into the index."""
    with tensors(folder / shard_name(number)) as held:
        held[name] = tensor
    with edit_json(folder / INDEX) as index:
        index["weight_map"][name] = shard_name(number)
    count_total(folder)


def rename(folder: Path, new_name: Callable[[str], str]) -> None:
    """Rename tensors everywhere."""
    for path in all_files(folder):
        save(path, {new_name(name): tensor for name, tensor in load(path).items()})
    with edit_json(folder / INDEX) as index:
        index["weight_map"] = {new_name(n): file for n, file in index["weight_map"].items()}


def rename_one(folder: Path, old: str, new: str) -> None:
    """Rename one tensor everywhere."""
    rename(folder, lambda name: new if name == old else name)


def redtype(folder: Path, name: str, dtype: str) -> None:
    """Store the same bytes under another dtype of the same size."""
    change(folder, name, lambda tensor: tensor._replace(dtype=dtype))


def reshape(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    """Store a tensor in another shape, cut or zero-filled to its size."""

    def make(tensor: Tensor) -> Tensor:
        n_bytes = int(np.prod(shape)) * ITEM_BYTES.get(tensor.dtype, 1)
        return Tensor(tensor.dtype, shape, tensor.data[:n_bytes].ljust(n_bytes, b"\0"))

    change(folder, name, make)


def transpose(folder: Path, name: str) -> None:
    """Store a matrix transposed."""

    def make(tensor: Tensor) -> Tensor:
        code = {1: "u1", 2: "<u2", 4: "<u4"}[ITEM_BYTES.get(tensor.dtype, 1)]
        array = np.frombuffer(tensor.data, code).reshape(tensor.shape).T
        return Tensor(tensor.dtype, array.shape, array.tobytes())

    change(folder, name, make)


def poke(folder: Path, name: str, index: int, data: bytes) -> None:
    """Overwrite bytes of one tensor in place, from its `index`-th item of that size on."""

    def make(tensor: Tensor) -> Tensor:
        start = index * len(data)
        new = tensor.data[:start] + data + tensor.data[start + len(data) :]
        assert len(new) == len(tensor.data), (name, index)
        return tensor._replace(data=new)

    with tensors(file_of(folder, name)) as held:
        held[name] = make(held[name])


# -- headers -----------------------------------------------------------------------------------


@contextmanager
def edit_header(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a file's header and write back what the block made of it, data untouched."""
    raw = Raw.read(path)
    header = json.loads(raw.header)
    yield header
    raw._replace(header=json.dumps(header).encode()).write(path)


def header_bytes(path: Path, make: Callable[[bytes], bytes]) -> None:
    """Replace a file's header text, data untouched."""
    raw = Raw.read(path)
    raw._replace(header=make(raw.header)).write(path)


def length_word(path: Path, length: int) -> None:
    """Overwrite the length word alone."""
    with path.open("r+b") as file:
        file.write(length.to_bytes(8, "little"))


def pad_header(path: Path, n_bytes: int) -> None:
    """Pad a header with spaces to a length."""
    header_bytes(path, lambda text: text.ljust(n_bytes, b" "))
