"""Open what shard wrote: one folder per rank and the artifacts that say where each byte came from.

`shards.h5`, schema 2 of kind `shards`, is the same on every node and for every choice of ranks.
Root attributes: `tp`, `checkpoint_identity`. Datasets: `source_files`, `rank_files`, `dtypes`,
`splits` str; `tensors/*` with one row per tensor in file order (see
k3tool.checkpoint.shard_provenance); `dropped/{name,file,offset,bytes,reason}`;
`files/{name,sha256}` for the config and side files beside the rank folders.

`rank-03-of-08/rank.h5`, schema 1 of kind `rank`, is what one rank adds; its input is shards.h5.
Root attributes: `tp`, `rank`, `identity` (of the rank's folder). Datasets, in the rows of
shards.h5: `tensors/sha256` u1 [n, 32], `tensors/max_scale` u1 [n]. So rank folders written on
several machines are one set as soon as they lie in one folder.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from k3tool.artifact import Artifact, InputRef, open_artifact
from k3tool.checkpoint.names import RANK_FOLDER, RANK_NAME, SHARDS_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.regular_file import read_regular
from k3tool.checkpoint.side_files import SIDE_FILES
from k3tool.checkpoint.spread import require_same_files
from k3tool.errors import ArtifactError, listed, quoted
from k3tool.fields import attrs_of, texts
from k3tool.model.config import K3Config
from k3tool.targets import MOST_RANKS

SHARDS_SCHEMA = 2
RANK_SCHEMA = 1


def rank_folder_name(rank: int, tp: int) -> str:
    """Return the folder name of a rank."""
    return f"rank-{rank:02d}-of-{tp:02d}"


def rank_folders(path: Path) -> list[str]:
    """Return the names of the rank folders in a folder, sorted."""
    return sorted(entry.name for entry in path.iterdir() if RANK_FOLDER.fullmatch(entry.name))


@dataclass(frozen=True, slots=True)
class Shards:
    """A shards folder: its degree, the ranks it holds, what it was made from.

    `digest` is that of shards.h5 and does not depend on which ranks are held here. `folders` are
    those that the same shards lie in, `path` first: copies, or their files split.
    """

    path: Path
    config: K3Config
    tp: int
    ranks: tuple[int, ...]
    identity: str
    digest: str
    rank_identities: Mapping[int, str]
    folders: tuple[Path, ...] = ()

    @classmethod
    def open(cls, path: str | Path, eps_overrides: Mapping[str, float] | None = None) -> "Shards":
        """Open a shards folder. Raises: ArtifactError naming what is absent, cut or stale."""
        path = Path(path)
        with open_artifact(path / SHARDS_NAME, "shards", SHARDS_SCHEMA) as artifact:
            fields = attrs_of(artifact)
            tp = fields.count("tp", least=1, most=MOST_RANKS)
            for fault in file_faults(path, artifact):
                raise fault
            identities = _rank_identities(path, tp, artifact.digest)
            config = K3Config.load(path / "config.json", eps_overrides)
            return cls(
                path=path,
                config=config,
                tp=tp,
                ranks=tuple(sorted(identities)),
                identity=fields.text("checkpoint_identity"),
                digest=artifact.digest,
                rank_identities=identities,
                folders=(path,),
            )

    @classmethod
    def open_spread(
        cls, folders: Sequence[Path], eps_overrides: Mapping[str, float] | None = None
    ) -> "Shards":
        """Open shards that lie in several folders.

        Raises: ArtifactError naming a folder that holds others. Files are compared by `rank`.
        """
        first, *others = (cls.open(folder, eps_overrides) for folder in folders)
        identities = dict(first.rank_identities)
        for other in others:
            _require_same(other, first)
            for rank, identity in other.rank_identities.items():
                if identities.setdefault(rank, identity) != identity:
                    raise ArtifactError(
                        str(other.rank_path(rank) / RANK_NAME), got=f"identity {identity[:16]}..",
                        need=f"{identities[rank][:16]}.. as in the other folders",
                    )  # fmt: skip
        ranks = tuple(sorted(identities))
        return replace(first, ranks=ranks, rank_identities=identities, folders=tuple(folders))

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
            missing = [rank for rank in range(self.tp) if rank not in self.rank_identities]
            raise ArtifactError(
                f"{self.path}: rank {rank}",
                got=f"only ranks {listed(self.ranks)} of {self.tp}",
                need=f"ranks {listed(missing)} too",
                hint=f"put the rank folders of the other nodes here, or: k3tool shard CHECKPOINT "
                f"--tp {self.tp}{''.join(f' --rank {r}' for r in missing)} -o {self.path}",
            )
        name = rank_folder_name(rank, self.tp)
        folders = [folder / name for folder in self.folders]
        path = next(folder for folder in folders if (folder / RANK_NAME).exists())
        checkpoint = Checkpoint.open(path, folders=folders)
        if len(folders) > 1:
            require_same_files(checkpoint)
        if checkpoint.identity != self.rank_identities[rank]:
            checkpoint.close()
            raise ArtifactError(
                str(path),
                got=f"identity {checkpoint.identity[:16]}..",
                need=f"{self.rank_identities[rank][:16]}.. by {RANK_NAME}",
                hint="files were changed after sharding: shard again",
            )
        return checkpoint

    def as_input(self, role: str) -> InputRef:
        """Return these shards as an input of another artifact."""
        return InputRef(role, "shards", self.path.name, self.digest)


def _require_same(other: Shards, first: Shards) -> None:
    """Refuse shards that are not the first folder's. Raises: ArtifactError."""
    for what, got, need in (
        ("tp", str(other.tp), str(first.tp)),
        ("checkpoint", f"{other.identity[:16]}..", f"{first.identity[:16]}.."),
        (SHARDS_NAME, f"{other.digest[:16]}..", f"{first.digest[:16]}.."),
    ):
        if got != need:
            raise ArtifactError(
                f"{other.path}: {what}", got=got, need=f"{need}, that of {first.path}",
                hint="name folders of the same shards",
            )  # fmt: skip


def _rank_identities(path: Path, tp: int, digest: str) -> dict[int, str]:
    """Return the identity of each rank held here, refusing one that belongs to other shards."""
    identities: dict[int, str] = {}
    for fault in degree_faults(path, tp):
        raise fault
    for name in rank_folders(path):
        rank = int(name.split("-")[1])
        identities[rank] = rank_identity(path, rank, tp, digest)
    if not identities:
        raise ArtifactError(str(path), got="no rank folder", need="at least one of them")
    return identities


def degree_faults(path: Path, tp: int) -> Iterator[ArtifactError]:
    """Yield the refusal of each rank folder of another degree."""
    own = {rank_folder_name(rank, tp) for rank in range(tp)}
    for name in rank_folders(path):
        if name not in own:
            yield ArtifactError(
                str(path / name), got="a rank of another degree", need=f"tp {tp}",
                hint="move it into a folder of its own",
            )  # fmt: skip


def rank_identity(path: Path, rank: int, tp: int, digest: str) -> str:
    """Return the identity that a rank's folder was written with.

    Raises: ArtifactError for a folder of other shards than those of `digest`.
    """
    folder = path / rank_folder_name(rank, tp)
    with open_artifact(folder / RANK_NAME, "rank", RANK_SCHEMA) as artifact:
        fields = attrs_of(artifact)
        made_for = [ref.content_sha256 for ref in artifact.inputs]
        own_rank = fields.count("rank", most=MOST_RANKS)
        if made_for != [digest] or own_rank != rank:
            of = f"shards {made_for[0][:16]}.." if made_for else "no shards"
            raise ArtifactError(
                str(folder),
                got=f"rank {own_rank} of {of}",
                need=f"rank {rank} of {digest[:16]}.. by {SHARDS_NAME}",
                hint="it was made from another checkpoint or with other options: shard again",
            )
        return fields.text("identity")


def file_faults(path: Path, artifact: Artifact) -> Iterator[ArtifactError]:
    """Yield the refusal of each config or side file that was edited, taken away or added.

    eps and end tokens live there, and a run reads what is there now.
    """
    names = texts(artifact, "files/name")
    digests = texts(artifact, "files/sha256", len(names))
    for name, need in zip(names, digests, strict=True):
        if name != Path(name).name:  # a path, or one out of the folder
            where = f"{artifact.path}: files/name"
            raise ArtifactError(where, got=quoted(name), need="names of files beside it")
        try:
            got = hashlib.sha256(read_regular(path / name, "a side file")).hexdigest()[:16]
        except ArtifactError as error:
            got = str(error.got)
        if got != need[:16]:
            yield ArtifactError(
                str(path / name),
                got=got,
                need=f"{need[:16]} by {SHARDS_NAME}",
                hint="files were changed after sharding: shard again",
            )
    for name in SIDE_FILES:
        if name not in names and os.path.lexists(path / name):
            yield ArtifactError(
                str(path / name), got="a file that was added after sharding",
                need=f"the files that {SHARDS_NAME} names",
                hint="put it into the checkpoint and shard again, or move it away",
            )  # fmt: skip
