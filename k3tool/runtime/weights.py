"""Where a rank's weights lie on disk: the bytes behind each weight row of a handle table.

At TP 1 a checkpoint is used where it is; above that, a rank folder of shards. It checks dtype and
shape of every tensor against the weight table and reads no data.
"""

from typing import NamedTuple

from k3tool.checkpoint.reader import Checkpoint
from k3tool.compiler.plan import Tensor
from k3tool.errors import ArtifactError
from k3tool.model.weight_slices import dtype_fault, rank_spec, shape_fault
from k3tool.model.weights import TensorSpec, find_spec


class TensorBytes(NamedTuple):
    """A tensor's bytes in a file; `file_bytes` is the size of the whole file by its header."""

    path: str
    offset: int
    n_bytes: int
    file_bytes: int


class ExpertBytes(NamedTuple):
    """The two parts of one expert's matrix."""

    packed: TensorBytes
    scale: TensorBytes


class RankWeights:
    """One rank's folder: a checkpoint at TP 1, else a rank of shards."""

    def __init__(self, folder: Checkpoint, tp: int) -> None:
        """Take an open folder; nothing is read before a tensor is asked for."""
        self.folder = folder
        self.tp = tp
        self._paths: dict[str, tuple[str, int]] = {}
        self._copies: dict[str, list[tuple[str, int]]] = {}

    def tensor(self, tensor: Tensor) -> TensorBytes:
        """Return the bytes of a weight row. Raises: ArtifactError naming file and tensor."""
        found = self._find(tensor.source, self._spec(tensor.source))
        if found.n_bytes < tensor.n_bytes or (
            found.n_bytes > tensor.n_bytes and tensor.split != "live_rows"
        ):
            raise ArtifactError(
                f"{self.folder.path}: {tensor.source}",
                got=f"{found.n_bytes} bytes",
                need=f"{tensor.n_bytes} by the plan",
            )
        # The released A_log is padded behind the live heads, which come first: map a prefix.
        return found._replace(n_bytes=tensor.n_bytes)

    def experts(self, tensor: Tensor) -> list[ExpertBytes]:
        """Return every expert's bytes of an experts row, by expert id.

        All experts of a matrix have one spec; looking each of half a million up would take minutes.
        """
        parts = [f"{tensor.source}.{part}" for part in ("weight_packed", "weight_scale")]
        specs = [(name, self._spec(name.replace("{E}", "0"))) for name in parts]
        return [
            ExpertBytes(*(self._find(name.replace("{E}", str(e)), spec) for name, spec in specs))
            for e in range(tensor.local[0])
        ]

    def _spec(self, name: str) -> TensorSpec:
        """Return what this folder has to hold under a name."""
        spec = find_spec(self.folder.config, name)
        if spec is None:
            raise ArtifactError(
                f"{self.folder.path}: {name}", got="a name the model does not have", need="a weight"
            )
        return spec if self.folder.tp is None else rank_spec(spec, self.tp)

    def _find(self, name: str, spec: TensorSpec) -> TensorBytes:
        info = self.folder.tensor_info(name)
        need_dtype, need_shape = dtype_fault(spec, info.dtype), shape_fault(spec, info.shape)
        if need_dtype or need_shape:
            raise ArtifactError(
                f"{self.folder.path / info.file}: {name}",
                got=f"{info.dtype} {list(info.shape)}",
                need=need_dtype or need_shape,
                hint=f"k3tool inspect {self.folder.path}",
            )
        path, file_bytes = self._file(info.file)
        return TensorBytes(path, info.offset, info.n_bytes, file_bytes)

    def _file(self, name: str) -> tuple[str, int]:
        if name not in self._paths:
            folders = self.folder.folders
            found = [(str((folders[n] / name).resolve()), n) for n in self.folder.places(name)]
            path = found[0][0] if found else str(self.folder.file_path(name).resolve())
            self._paths[name] = path, self.folder.header(name).size
            self._copies[path] = found or [(path, 0)]
        return self._paths[name]

    def copies(self, path: str) -> list[tuple[str, int]]:
        """Return (path, number of its folder) of a file that was asked for, and of its copies."""
        return self._copies[path]
