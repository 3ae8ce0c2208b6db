"""Open a checkpoint folder, or one rank of our shards, and read tensors or bytes of them.

Opening reads config and index only; a file's header is read when a tensor of it is first asked for.
Arrays hold stored bits: bf16 as uint16, MXFP4 and E8M0 as uint8. No conversion happens here.
"""

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from k3tool.checkpoint.headers import DTYPES, Header, HeaderReader, TensorInfo
from k3tool.checkpoint.identity import FileParts, identity_of_parts
from k3tool.checkpoint.index import Index, read_index
from k3tool.checkpoint.json_text import parse_json
from k3tool.checkpoint.regular_file import read_regular, require_folder
from k3tool.checkpoint.shard_sources import State, change, state_of
from k3tool.checkpoint.unfinished import refuse_unfinished
from k3tool.errors import ArtifactError, listed, printable, quoted
from k3tool.model.config import K3Config

if TYPE_CHECKING:
    from k3tool.artifact import InputRef

Array = npt.NDArray[Any]
MAX_PREAD_BYTES = 1 << 30  # one read() stops at 2^31 - 4096 on Linux and fails above it on macOS


class Checkpoint:
    """A folder of safetensors files with a config; a context manager.

    `tp` and `rank` are None for a checkpoint and set for a rank folder of our shards, whose split
    tensors are narrower than the config says.
    """

    def __init__(
        self, path: Path, config: K3Config, config_bytes: bytes, index: Index,
        folders: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        """Take parsed parts; use `open`."""
        self.path = path
        self.folders = tuple(folders) or (path,)
        self.config = config
        self.index = index
        self._config_bytes = config_bytes
        self._headers: dict[str, Header] = {}
        self._states: dict[str, State | None] = {}  # of those files, before
        self._header_reader = HeaderReader()
        self._descriptors: dict[str, int] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._descriptors)
        self._identity: str | None = None
        self.tp, self.rank = self._rank_position()

    @classmethod
    def open(
        cls, path: str | Path, eps_overrides: Mapping[str, float] | None = None,
        folders: Sequence[Path] = (),
    ) -> "Checkpoint":  # fmt: skip
        """Open a folder. Raises: ArtifactError naming what is absent, mixed or damaged.

        `folders` are all that the files may lie in, `path` among them; which of them are there
        and the same is for k3tool.checkpoint.spread to check.
        """
        path = Path(path)
        need = "a checkpoint folder"
        if not os.path.lexists(path):
            with contextlib.suppress(OSError):  # what the system says of the name comes below
                refuse_unfinished(path, need)
        require_folder(path, need, "name the folder that config.json lies in")
        if not os.path.lexists(path / "config.json"):
            raise ArtifactError(str(path), got="no config.json", need=need, hint=_folder_hint(path))
        if os.path.exists(path / "shards.h5"):
            raise ArtifactError(
                str(path),
                got="a folder of rank shards",
                need="a checkpoint or one rank folder",
                hint=_folder_hint(path),
            )
        config = K3Config.load(path / "config.json", eps_overrides)
        index = read_index(path)
        _check_prefix(path, config, index)
        config_bytes = read_regular(path / "config.json", "the checkpoint's config.json")
        return cls(path, config, config_bytes, index, folders)

    # -- what is there -------------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """Return the checkpoint's identity (k3tool.checkpoint.identity), computed once."""
        if self._identity is None:
            files = [(self.file_path(file), self.file_parts(file)) for file in self.index.files]
            self._identity = identity_of_parts(files, self._config_bytes, self.index.sha256)
        return self._identity

    def as_input(self, role: str = "checkpoint") -> "InputRef":
        """Return this checkpoint as an input of an artifact; its folder's name is only a label."""
        from k3tool.artifact import InputRef  # HDF5 loads with it, and inspect does without

        return InputRef(role, "checkpoint", printable(self.path.resolve().name), self.identity)

    @property
    def config_bytes(self) -> bytes:
        """Return config.json as stored."""
        return self._config_bytes

    def names(self) -> list[str]:
        """Return all tensor names, sorted."""
        return sorted(self.index.weight_map)

    def header(self, file: str) -> Header:
        """Return one file's header, read once. Raises: ArtifactError naming the file."""
        if file not in self._headers:
            path = self.file_path(file)
            self._states[file] = state_of(path)
            self._headers[file] = self._header_reader.read(path)
        return self._headers[file]

    def require_unchanged(self, what: str) -> None:
        """Refuse files that are not those whose headers were read, which was when `what` began.

        Who opens them by name later would read others by these headers. Raises: ArtifactError.
        """
        for file, before in self._states.items():
            path = self.file_path(file)
            now = state_of(path)
            if now != before:
                raise ArtifactError(
                    str(path), got=change(before, now, what), need="the file that was there then",
                    hint="do it again when nobody writes there any more",
                )  # fmt: skip

    def file_parts(self, file: str) -> FileParts:
        """Return what one file adds to the identity, but for its sample."""
        h = self.header(file)
        return FileParts(h.file, h.size, h.sha256, h.data_start)

    def places(self, file: str) -> list[int]:
        """Return which of `folders` hold a file, in their order."""
        return [n for n, folder in enumerate(self.folders) if os.path.lexists(folder / file)]

    def file_path(self, file: str) -> Path:
        """Return where a file is read: in the first folder that holds it."""
        if len(self.folders) == 1:
            return self.path / file
        found = self.places(file)
        return (self.folders[found[0]] if found else self.path) / file

    def tensor_info(self, name: str) -> TensorInfo:
        """Return where a tensor lies. Raises: ArtifactError naming file and tensor."""
        file = self.index.weight_map.get(name)
        if file is None:
            raise ArtifactError(f"{self.path}: {name}", got="absent", need="a tensor of this name")
        info = self.header(file).tensors.get(name)
        if info is None:
            raise ArtifactError(
                f"{self.file_path(file)}: {name}",
                got="absent",
                need="the tensor its index promises",
            )
        return info

    def _rank_position(self) -> tuple[int | None, int | None]:
        """Return (tp, rank) from the first file's metadata, where our shard writer put them."""
        first = self.index.files[0]
        try:
            text = self.header(first).metadata.get("k3", "{}")
        except ArtifactError:
            return None, None  # coverage and reads say it, beside what else is wrong
        try:
            entry = parse_json(text)
            tp, rank = entry.get("tp"), entry.get("rank")
        except (ValueError, AttributeError):
            tp = rank = text
        if tp is None and rank is None:
            return None, None
        legal = self.config.legal_tp()
        if type(tp) is int and tp in legal and type(rank) is int and 0 <= rank < tp:
            return tp, rank
        raise ArtifactError(
            f"{self.file_path(first)}: __metadata__.k3",
            got=quoted(text),
            need=f"the shard writer's JSON, tp one of {listed(legal)} and rank below tp",
            hint="shard again, or leave this key out of the metadata",
        )

    # -- reading -------------------------------------------------------------------------------

    def read(self, name: str) -> Array:
        """Return a whole tensor in its stored shape."""
        info = self.tensor_info(name)
        out = np.empty(info.shape, dtype=DTYPES[info.dtype])
        self.read_into(info, info.offset, out.reshape(-1).view(np.uint8).data)
        return out

    def read_into(self, info: TensorInfo, offset: int, target: memoryview) -> None:
        """Fill `target` from a file offset, looping over short reads; threads may share a reader.

        Raises: ArtifactError naming file and tensor.
        """
        descriptor = self._descriptor(info.file)
        done = 0
        while done < len(target):
            piece = target[done : done + MAX_PREAD_BYTES]
            try:
                count = os.preadv(descriptor, [piece], offset + done)
            except OSError as error:
                raise ArtifactError(
                    f"{self.file_path(info.file)}: {info.name}",
                    got=error.strerror or str(error),
                    need="a readable file",
                ) from None
            if count == 0:
                raise ArtifactError(
                    f"{self.file_path(info.file)}: {info.name}",
                    got=f"end of file at byte {offset + done}",
                    need=f"{len(target) - done} more bytes",
                    hint="the file became shorter: fetch it again",
                )
            done += count

    def prefetch(self, info: TensorInfo, offset: int, n_bytes: int) -> None:
        """Ask the system to fetch bytes at a file offset while the caller does something else."""
        with contextlib.suppress(OSError):  # advice; a file system may not take it
            os.posix_fadvise(self._descriptor(info.file), offset, n_bytes, os.POSIX_FADV_WILLNEED)

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            try:
                opened = os.open(path := self.file_path(file), os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ArtifactError(
                    str(path), got=error.strerror or str(error), need="a readable file"
                ) from None
            if self._descriptors.setdefault(file, opened) != opened:
                os.close(opened)  # another thread came first
        return self._descriptors[file]

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        _close_all(self._descriptors)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close all files."""
        self.close()


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def _folder_hint(path: Path) -> str:
    """Return what to name instead of a folder that holds checkpoints or ranks of one."""
    for what, pattern in (("rank folder", "rank-*-of-*"), ("snapshot", "snapshots/*")):
        found = sorted(str(entry) for entry in path.glob(pattern) if entry.is_dir())
        if found:
            return f"name one {what}, such as {found[0]}"
    inside = sorted(str(entry.parent) for entry in path.glob("*/config.json"))
    return f"name {inside[0]}" if inside else "name the folder that config.json lies in"


def _check_prefix(path: Path, config: K3Config, index: Index) -> None:
    """Refuse a config of one layout with names of the other: half of the tensors would be absent.

    The released layout nests the text model in config and names; a text-only export does neither.
    """
    nested = "language_model."
    wrong = ("model.", "lm_head.") if config.prefix else (nested,)
    starts = {name[:6] for name in index.weight_map}  # a loop over all names only if one is wrong
    if not any(start.startswith(tuple(word[:6] for word in wrong)) for start in starts):
        return
    for name in index.weight_map:
        if config.prefix and name.startswith(("model.", "lm_head.")):
            need = f"{nested}{name}, because config.json nests text_config"
        elif not config.prefix and name.startswith(nested):
            need = f"{name[len(nested) :]}, because config.json is flat (kimi_linear)"
        else:
            continue
        raise ArtifactError(
            str(path / index.weight_map[name]), got=f"a tensor {name}", need=need,
            hint="export names and config.json in one layout",
        )  # fmt: skip
