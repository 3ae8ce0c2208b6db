"""The weights of one layer: where the engine maps them, and as float64 for the reference.

Tables that stand for what comes into the layer lie in a file of their own. Of a checkpoint only
tensors of the layer are read, of experts only those that tokens choose; nothing is kept, so memory
holds one matrix at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.checkpoint.reader import Checkpoint
from k3tool.compiler.plan import Tensor
from k3tool.errors import UnsoundError
from k3tool.model.config import K3Config
from k3tool.model.config_fields import MXFP4_GROUP
from k3tool.model.nodes import WeightLeaf
from k3tool.model.weight_slices import rank_slice
from k3tool.model.weights import Split, find_spec
from k3tool.ref.formats import FP4_VALUES, SCALE_BIAS, SCALE_LIMIT, Array, decode_bf16
from k3tool.runtime.weights import RankWeights, TensorBytes

_AT_ONCE = 1 << 19  # values that are decoded together: they stay in a cache
_FACTORS = np.ldexp(1.0, np.arange(256) - SCALE_BIAS)  # of a scale byte
_PAIRS = np.stack([np.tile(FP4_VALUES, 16), np.repeat(FP4_VALUES, 16)], axis=1)  # of a byte


class Tables:
    """Tables of bf16 rows in one file, by leaf name; a rank has all of one, or its rows."""

    def __init__(self, path: Path, tables: Mapping[str, Array]) -> None:
        """Write the file. Shapes: tables[name] (rows, width) u2 bits."""
        self.path, self.tables = path, dict(tables)
        self._offsets: dict[str, int] = {}
        with path.open("wb") as file:
            for name, table in self.tables.items():
                self._offsets[name] = file.tell()
                file.write(np.ascontiguousarray(table, "<u2").tobytes())
                file.write(bytes(-file.tell() % 64))
            self._size = file.tell()

    def place(self, tensor: Tensor, rank: int) -> TensorBytes:
        """Return where a rank's part of a table lies."""
        shift = rank * tensor.n_bytes if tensor.split == "rows" else 0
        at = self._offsets[tensor.source] + shift
        return TensorBytes(str(self.path), at, tensor.n_bytes, self._size)


class LayerWeights(RankWeights):
    """A rank's weights for its image: tables, and the checkpoint's own."""

    def __init__(self, folder: Checkpoint, tp: int, rank: int, tables: Tables) -> None:
        """Take an open folder; nothing is read."""
        super().__init__(folder, tp)
        self._rank, self._tables = rank, tables

    def tensor(self, tensor: Tensor) -> TensorBytes:
        """Return the bytes of a weight row."""
        if tensor.source in self._tables.tables:
            return self._tables.place(tensor, self._rank)
        return super().tensor(tensor)

    def copies(self, path: str) -> list[tuple[str, int]]:
        """Return a file that was asked for, and its copies."""
        return [(path, 0)] if path == str(self._tables.path) else super().copies(path)


class Source:
    """Tensors of a checkpoint or of all ranks' shards, whole, and what of them has been read."""

    def __init__(self, folders: Sequence[Checkpoint], config: K3Config, tables: Tables) -> None:
        """Take open folders: one, or every rank's."""
        self._folders, self.config, self._tables = folders, config, tables
        self.read_bytes: dict[str, int] = {}

    def read(self, name: str, rank: int | None = None) -> Any:
        """Return a tensor as it is stored: joined, or a rank's part."""
        if name in self._tables.tables:
            table = self._tables.tables[name]
            if rank is None or not name.endswith(".weight"):
                return table
            return np.split(table, len(self._folders))[rank]
        if rank is not None:
            return self._counted(name, self._folders[rank], rank)
        parts = [self._counted(name, folder, r) for r, folder in enumerate(self._folders)]
        spec = find_spec(self.config, name)
        assert spec is not None, name
        if len(parts) == 1 or spec.split is Split.REPLICATE:
            return parts[0]
        axis = rank_slice(spec, len(parts), 0).axis
        assert axis is not None, spec
        return np.concatenate(parts, axis=axis)

    def part(self, name: str, rank: int | None, tp: int) -> Any:
        """Return what a rank of `tp` has of a tensor that is whole here."""
        found = self.read(name)
        if rank is None:
            return found
        if name in self._tables.tables:
            return np.split(found, tp)[rank] if name.endswith(".weight") else found
        spec = find_spec(self.config, name)
        assert spec is not None, name
        cut = rank_slice(spec, tp, rank)
        if cut.axis is None:
            return found
        return found[cut.start : cut.stop] if cut.axis == 0 else found[:, cut.start : cut.stop]

    def _counted(self, name: str, folder: Checkpoint, rank: int) -> Any:
        found = folder.read(name)
        self.read_bytes[f"{rank}/{name}"] = found.nbytes
        return found

    def matrix(self, leaf: WeightLeaf) -> Any:
        """Return a whole weight in float64, without the padding behind live heads."""
        bits = self.read(leaf.source)
        return numbers(bits[: leaf.shape[0]] if leaf.split == "live_rows" else bits)


def numbers(bits: Any) -> Any:
    """Return stored values as float64; a large matrix as one that is decoded when it is used."""
    if bits.dtype != np.uint16:
        return bits.astype(np.float64)
    if bits.ndim != 2 or bits.size <= _AT_ONCE:
        return decode_bf16(bits)
    return Matrix(bits.shape, lambda first, end: decode_bf16(bits[first:end]))


class Matrix:
    """A matrix in float64 of which memory holds some rows at a time, for `x @ m.T`."""

    __array_ufunc__ = None  # NumPy leaves products to it

    def __init__(self, shape: tuple[int, ...], rows: Callable[[int, int], Array]) -> None:
        """Take the shape (R, K) and what decodes rows."""
        self.shape = shape
        self._rows = rows

    @property
    def T(self) -> "_Transposed":
        """Return the right side of a product."""
        return _Transposed(self)

    def reshape(self, *shape: int) -> Array:
        """Return all of it in another shape."""
        return self._rows(0, self.shape[0]).reshape(*shape)

    def product(self, x: Array) -> Array:
        """Return x @ m.T. Shapes: x (T, K) -> (T, R)."""
        out = np.empty((len(x), self.shape[0]))
        step = max(1, _AT_ONCE // self.shape[1])
        for first in range(0, self.shape[0], step):
            end = min(first + step, self.shape[0])
            # Not x @ rows.T: for a few tokens BLAS wakes threads that wait longer than they work.
            out[:, first:end] = np.einsum("tk,rk->tr", x, self._rows(first, end))
        return out


class _Transposed:
    """The right side of a product with a Matrix."""

    __array_ufunc__ = None

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix

    def __rmatmul__(self, x: Array) -> Array:
        return self._matrix.product(x)


class Experts:
    """One matrix of every expert of a layer; each is read and decoded when it is asked for."""

    def __init__(self, source: Source, name: str, rank: int | None = None) -> None:
        """Take the stored name, which holds `{E}`."""
        self._source, self._name, self._rank = source, name, rank

    def __getitem__(self, expert: int) -> Matrix:
        """Return the (R, K) matrix of one expert. Raises: UnsoundError as `run` does."""
        name = self._name.replace("{E}", str(expert))
        packed, scale = (
            self._source.read(f"{name}.{part}", self._rank)
            for part in ("weight_packed", "weight_scale")
        )
        if int(scale.max(initial=0)) >= SCALE_LIMIT:
            raise UnsoundError(f"{name}.weight_scale", got=int(scale.max()), need="at most 252")
        shape = (len(packed), 2 * packed.shape[1])
        return Matrix(shape, lambda a, b: decode_pairs(packed[a:b], scale[a:b]))


def decode_pairs(packed: Any, scale: Any) -> Array:
    """Return what ref.formats.decode_mxfp4 does, a byte at a time: a test holds them equal.

    Shapes: packed (R, K/2) u1, scale (R, K/32) u1 -> (R, K) float64.
    """
    rows = len(packed)
    values = np.take(_PAIRS, packed, axis=0).reshape(rows, -1, MXFP4_GROUP)
    values *= _FACTORS[scale][..., None]
    if not scale.all():
        values[scale == 0] = 0.0  # not -0: numerics rule 4
    matrix: Array = values.reshape(rows, -1)
    return matrix


class LayerLeaves(Mapping[str, Any]):
    """The leaves of a layer's graph by name, whole, as the reference takes them."""

    def __init__(self, source: Source, leaves: Mapping[str, WeightLeaf]) -> None:
        """Take the graph's leaves."""
        self._source, self._leaves = source, leaves

    def __getitem__(self, name: str) -> Any:
        """Return a weight in float64, or a matrix of experts that is read expert by expert."""
        leaf = self._leaves[name]
        if leaf.dtype == "mxfp4":
            return Experts(self._source, leaf.source)
        return self._source.matrix(leaf)

    def __iter__(self) -> Iterator[str]:
        """Yield all names."""
        return iter(self._leaves)

    def __len__(self) -> int:
        """Return the number of leaves."""
        return len(self._leaves)
