"""Where a rank's weights lie on disk: the bytes behind each weight row of a handle table.

At TP 1 a checkpoint is used where it is; above that, a rank folder of shards. It checks dtype and
shape of every tensor against the weight table and reads no data.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from k3tool.checkpoint.headers import TensorInfo
from k3tool.checkpoint.reader import Checkpoint
from k3tool.compiler.plan import Tensor
from k3tool.errors import ArtifactError
from k3tool.model.weights import TensorSpec, dtype_fault, find_spec, rank_spec, shape_fault


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


@dataclass(frozen=True, slots=True)
class RankWeights:
    """One rank's folder: a checkpoint at TP 1, else a rank of shards."""

    folder: Checkpoint
    tp: int

    def tensor(self, tensor: Tensor) -> TensorBytes:
        """Return the bytes of a weight row. Raises: ArtifactError naming file and tensor."""
        found = self._find(tensor.source)
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
        """Return every expert's bytes of an experts row, by expert id."""
        n_experts = tensor.local[0]
        rows = []
        for expert in range(n_experts):
            base = tensor.source.replace("{E}", str(expert))
            rows.append(
                ExpertBytes(self._find(f"{base}.weight_packed"), self._find(f"{base}.weight_scale"))
            )
        return rows

    def _find(self, name: str) -> TensorBytes:
        info = self.folder.tensor_info(name)
        spec = find_spec(self.folder.config, name)
        where = f"{self.folder.path / info.file}: {name}"
        if spec is None:
            raise ArtifactError(where, got="a name the model does not have", need="a weight")
        self._check(spec, info, where)
        size = self.folder.header(info.file).size
        path = str(Path(self.folder.path, info.file).resolve())
        return TensorBytes(path, info.offset, info.n_bytes, size)

    def _check(self, spec: TensorSpec, info: TensorInfo, where: str) -> None:
        local = spec if self.tp == 1 and self.folder.tp is None else rank_spec(spec, self.tp)
        hint = f"k3tool inspect {self.folder.path}"
        if need := dtype_fault(local, info.dtype):
            raise ArtifactError(f"{where}: dtype", got=info.dtype, need=need, hint=hint)
        if need := shape_fault(local, info.shape):
            raise ArtifactError(f"{where}: shape", got=list(info.shape), need=need, hint=hint)
