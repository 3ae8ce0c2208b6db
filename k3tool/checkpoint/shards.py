"""Open what shard wrote: one folder per rank and the artifact that says where each byte came from.

Schema 1 of kind `shards`. Root attributes: `tp`, `checkpoint_identity`. Datasets: `ranks` u4 [R];
`rank_identity` str [R]; `source_files`, `rank_files` str; `tensors/*` with one row per tensor in
file order (see k3tool.checkpoint.shard_provenance); `dropped/{name,file,bytes}`; `files/{name,
sha256}` for the config and side files beside the rank folders.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from k3tool.artifact import Artifact, InputRef, open_artifact
from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import ArtifactError
from k3tool.model.config import K3Config

SHARDS_NAME = "shards.h5"
SHARDS_SCHEMA = 1
# Files beside the weights that a run may want: end tokens and the tokenizer.
SIDE_FILES = (
    "generation_config.json", "tiktoken.model", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip


def rank_folder_name(rank: int, tp: int) -> str:
    """Return the folder name of a rank."""
    return f"rank-{rank:02d}-of-{tp:02d}"


@dataclass(frozen=True, slots=True)
class Shards:
    """A finished shards folder: its degree, the ranks it holds, what it was made from."""

    path: Path
    config: K3Config
    tp: int
    ranks: tuple[int, ...]
    identity: str
    digest: str
    rank_identities: Mapping[int, str]

    @classmethod
    def open(cls, path: str | Path, eps_overrides: Mapping[str, float] | None = None) -> "Shards":
        """Open a shards folder. Raises: ArtifactError naming what is absent, cut or stale."""
        path = Path(path)
        with open_artifact(path / SHARDS_NAME, "shards", SHARDS_SCHEMA) as artifact:
            ranks = tuple(int(rank) for rank in artifact.read("ranks"))
            identities = dict(zip(ranks, artifact.read("rank_identity"), strict=True))
            _check_files(path, artifact)
            config = K3Config.load(path / "config.json", eps_overrides)
            return cls(
                path=path,
                config=config,
                tp=int(artifact.attrs["tp"]),
                ranks=ranks,
                identity=str(artifact.attrs["checkpoint_identity"]),
                digest=artifact.digest,
                rank_identities=identities,
            )

    @property
    def n_ranks(self) -> int:
        """Return the number of ranks of the group, held here or not."""
        return self.tp

    def rank_path(self, rank: int) -> Path:
        """Return the folder of a rank."""
        return self.path / rank_folder_name(rank, self.tp)

    def rank(self, rank: int) -> Checkpoint:
        """Open one rank's folder. Raises: ArtifactError if it is absent or not what was written."""
        if rank not in self.rank_identities:
            raise ArtifactError(
                f"{self.path}: rank {rank}", got=f"ranks {list(self.ranks)}", need="this rank here"
            )
        checkpoint = Checkpoint.open(self.rank_path(rank))
        if checkpoint.identity != self.rank_identities[rank]:
            checkpoint.close()
            raise ArtifactError(
                str(self.rank_path(rank)),
                got=f"identity {checkpoint.identity[:16]}..",
                need=f"{self.rank_identities[rank][:16]}.. by {SHARDS_NAME}",
                hint="files were changed after sharding: shard again",
            )
        return checkpoint

    def as_input(self, role: str) -> InputRef:
        """Return these shards as an input of another artifact."""
        return InputRef(role, "shards", self.path.name, self.digest)


def _check_files(path: Path, artifact: Artifact) -> None:
    """Refuse a config or side file edited after sharding: eps and end tokens live there."""
    names, digests = artifact.read("files/name"), artifact.read("files/sha256")
    for name, need in zip(names, digests, strict=True):
        got = (
            hashlib.sha256((path / name).read_bytes()).hexdigest()
            if (path / name).is_file()
            else "no such file"
        )
        if got != need:
            raise ArtifactError(
                str(path / name),
                got=got[:16],
                need=f"{need[:16]} by {SHARDS_NAME}",
                hint="files were changed after sharding: shard again",
            )
