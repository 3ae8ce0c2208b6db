"""Arrays of an npz archive as maps: stored members where they lie, compressed ones from a copy.

NumPy's own reader takes a member into memory as a whole. Each member is read once to the end, which
checks its CRC, before any of it is used. Pickled members are refused, never loaded.
"""

import contextlib
import errno
import math
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from k3tool.atomic import system_words
from k3tool.checkpoint.regular_file import open_regular, unreadable
from k3tool.errors import ArtifactError, K3Error

Array = npt.NDArray[Any]
_BLOCK_BYTES = 1 << 20
_LOCAL_HEADER_BYTES = 30
_NEED = "an npz archive"
_REMAKE = "the file was cut or altered: write it again"
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError,
           ValueError, struct.error)  # fmt: skip


class Archive:
    """An open archive. Raises: ArtifactError where it is none, or damaged."""

    def __init__(self, path: Path) -> None:
        """Open it and read its directory."""
        self._path = path
        self._file = open(open_regular(path, _NEED), "rb")  # noqa: SIM115 - closed by close
        try:
            self._zip = zipfile.ZipFile(self._file)
        except (*_DAMAGE, OSError):
            self._file.close()
            got = "a damaged archive"
            raise ArtifactError(str(path), got=got, need=_NEED, hint=_REMAKE) from None

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the archive; maps stay."""
        self._zip.close()
        self._file.close()

    def names(self) -> list[str]:
        """Return the arrays' names. Raises: ArtifactError where one stands twice."""
        names = self._zip.namelist()
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ArtifactError(str(self._path), got=f"{twice[0]} twice", need="each array once")
        return [name.removesuffix(".npy") for name in names if name.endswith(".npy")]

    def read(self, name: str) -> tuple[Array, bool]:
        """Return an array of floats or integers, mapped, and False: NumPy has no bf16.

        Raises: ArtifactError naming array and fault; K3Error when no copy can be written.
        """
        place = f"{self._path}: {name}"
        info = self._zip.getinfo(f"{name}.npy")
        with contextlib.ExitStack() as stack:
            copy = None
            if info.compress_type != zipfile.ZIP_STORED:
                copy = stack.enter_context(_temporary())
            try:
                with self._zip.open(info) as member:
                    shape, is_fortran, dtype = _header(member)
                    n_header = member.tell()
                    n_bytes = _drain(member, copy)
            except (*_DAMAGE, OSError) as error:
                if isinstance(error, OSError) and error.errno != errno.EINVAL:
                    raise unreadable(self._path, _NEED, error) from None
                got, need = "damaged", "an intact array"  # EINVAL: a place before the file's start
                raise ArtifactError(place, got=got, need=need, hint=_REMAKE) from None
            if dtype.kind not in "fiu" or (is_fortran and len(shape) > 1):
                got = f"{dtype.name}{' by columns' if is_fortran else ''}"
                raise ArtifactError(place, got=got, need="numbers by rows")
            whole = math.prod(shape) * dtype.itemsize
            if n_bytes != whole:
                raise ArtifactError(place, got=f"{n_bytes} bytes", need=f"{whole} by its header")
            if whole == 0:
                return np.zeros(shape, dtype), False
            if copy is not None:
                return np.memmap(copy, dtype, "r", 0, shape), False
            at = self._data_at(info) + n_header
            return np.memmap(self._path, dtype, "r", at, shape), False

    def _data_at(self, info: zipfile.ZipInfo) -> int:
        """Return where a member's bytes begin: its local header has lengths of its own."""
        self._file.seek(info.header_offset)
        local = self._file.read(_LOCAL_HEADER_BYTES)
        n_name, n_extra = struct.unpack("<HH", local[26:30])
        return info.header_offset + _LOCAL_HEADER_BYTES + int(n_name) + int(n_extra)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(member)
    raise ValueError(version)


def _temporary() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise _no_room(error) from None


def _drain(member: IO[bytes], copy: IO[bytes] | None) -> int:
    """Read a member to its end, where its CRC is checked, and return how many bytes that was."""
    n_bytes = 0
    while block := member.read(_BLOCK_BYTES):
        n_bytes += len(block)
        if copy is not None:
            try:
                copy.write(block)
                copy.flush()
            except OSError as error:
                raise _no_room(error) from None
    return n_bytes


def _no_room(error: OSError) -> K3Error:
    return K3Error(
        tempfile.gettempdir(), got=system_words(error), need="room for a copy of an array",
        hint="free some room there, or name another folder in TMPDIR",
    )  # fmt: skip
