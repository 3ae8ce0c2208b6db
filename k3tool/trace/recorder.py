"""Record a trace while a run goes on: what a rank is told, and what it has written.

A rank gets a table of cells in a memory file and writes a word a cell and step to a file beside the
trace that is to be (layout: kernels_cpu/hashes.h); the trace is put together from these at the end.
Memory is bounded at any length. A disk that is full ends the trace, and the run goes on.
"""

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from k3tool.atomic import TEMPORARY
from k3tool.errors import K3Error
from k3tool.isa.stream import Isa
from k3tool.isa.table import ALL_PHASES
from k3tool.trace.kept import Kept
from k3tool.trace.results import NOT_KEPT, Array, Results, cells_of_rank, results_of_stream

MAGIC = 0x3148334B
HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u4"), ("n_entries", "<u4", 2), ("n_cells", "<u4", 2), ("first_kept", "<u4"),
        ("n_kept", "<u4"), ("kept_words", "<u4"), ("error", "<u4"), ("reserved", "<u4"),
    ]
)  # fmt: skip
STEP_DTYPE = np.dtype(
    [
        ("phase", "<u4"), ("n_tokens", "<u4"), ("position", "<u4"), ("head_from", "<u4"),
        ("n_cells", "<u4"), ("reserved", "<u4", 3),
    ]
)  # fmt: skip
assert HEADER_DTYPE.itemsize == 40
assert STEP_DTYPE.itemsize == 32


class Step(NamedTuple):
    """One step of a run: `hashes` (R, C), a row a rank."""

    phase: str
    n_tokens: int
    position: int
    head_from: int
    hashes: Array

    @property
    def end(self) -> int:
        """Return the position behind the step's last token."""
        return self.position + self.n_tokens


@dataclass(frozen=True, slots=True)
class _RankFiles:
    table: int
    hashes: int
    kept: int  # -1: no values are kept


class Recorder:
    """The files of a trace that is being written; a context manager, gone with it.

    `results` are those of each phase's program; `kept_rows` where in a kept row each kept result of
    a phase begins.
    """

    def __init__(self, path: Path, isa: Isa, kept: Kept | None = None) -> None:
        """Make every rank's table and files. Raises: K3Error where they cannot be written."""
        self.path, self.isa, self.kept = path, isa, kept
        self.results: dict[str, Results] = {
            name: results_of_stream(isa, stream) for name, stream in isa.streams.items()
        }
        self.kept_rows, self.kept_words = self._lay_out()
        self._ranks: list[_RankFiles] = []
        self._has_ended = False
        try:
            for rank in range(isa.tp):
                self._ranks.append(self._open(rank))
        except OSError as error:
            self.close()
            raise K3Error(str(path), got=error.strerror, need="a writable file") from None

    def _lay_out(self) -> tuple[dict[str, Array], int]:
        """Return where kept results begin: at one place for a value, whichever phase writes it."""
        places: dict[tuple[str, int], int] = {}
        rows, words = {}, 0
        for phase, found in self.results.items():
            row = np.full(len(found.results), NOT_KEPT, np.int64)
            for index, result in enumerate(found.results):
                if self.kept is None or not self.kept.takes(result.layer):
                    continue
                key = (result.name, result.words)
                if key not in places:
                    places[key] = words
                    words += result.words
                row[index] = places[key]
            rows[phase] = row
        return rows, words

    def _open(self, rank: int) -> _RankFiles:
        n_kept = 0 if self.kept is None else self.kept.last - self.kept.first + 1
        table = os.memfd_create("k3")
        with open(table, "wb", closefd=False) as file:
            file.write(self._table(rank, n_kept))
        hashes = self._beside()
        kept = -1
        if n_kept and self.kept_words:
            kept = self._beside()
            os.posix_fallocate(kept, 0, 4 * n_kept * self.kept_words)  # a mapped write cannot fail
        return _RankFiles(table, hashes, kept)

    def _beside(self) -> int:
        """Return a file without a name on the disk that the trace goes to."""
        folder = self.path.absolute().parent
        descriptor, name = tempfile.mkstemp(suffix=TEMPORARY, prefix=".trace-hashes.", dir=folder)
        os.unlink(name)
        os.set_inheritable(descriptor, False)
        return descriptor

    def _table(self, rank: int, n_kept: int) -> bytes:
        header = np.zeros(1, HEADER_DTYPE)
        header["magic"], header["kept_words"], header["n_kept"] = MAGIC, self.kept_words, n_kept
        header["first_kept"] = 0 if self.kept is None else self.kept.first
        firsts, cells = b"", b""
        for index, phase in enumerate(ALL_PHASES):
            if phase not in self.isa.streams:
                firsts += bytes(4)
                continue
            stream, found = self.isa.streams[phase], self.results[phase]
            header["n_entries"][0, index] = len(stream.queues.entries)
            header["n_cells"][0, index] = found.n_cells
            firsts += found.first.tobytes()
            cells += cells_of_rank(self.isa, stream, found, rank, self.kept_rows[phase]).tobytes()
        head = header.tobytes() + firsts
        return head + bytes(len(head) % 8) + cells

    # -- what a rank is given ----------------------------------------------

    def arguments(self, rank: int) -> tuple[list[str], list[int]]:
        """Return a rank's options, and the descriptors that it inherits."""
        files = self._ranks[rank]
        words = ["--hash-table", str(files.table), "--hashes", str(files.hashes)]
        passed = [files.table, files.hashes]
        if files.kept >= 0:
            words += ["--kept", str(files.kept)]
            passed.append(files.kept)
        return words, passed

    # -- what a driver writes for ranks that cannot: those on a device -------

    @property
    def has_ended(self) -> bool:
        """Return whether the driver can write no more of it."""
        return self._has_ended

    def write(self, head: Array, sums: Array) -> None:
        """Append a step: STEP_DTYPE and (R, C) hashes. A file that takes no more ends the trace."""
        if self._has_ended:
            return
        try:
            for files, row in zip(self._ranks, sums, strict=True):
                data = head.tobytes() + np.ascontiguousarray(row, "<u8").tobytes()
                if os.write(files.hashes, data) != len(data):  # the reader drops what is cut
                    raise OSError(errno.ENOSPC, "")
        except OSError as error:
            self.end(error.errno or errno.EIO)

    def end(self, error: int) -> None:
        """End the trace with an errno, as a rank says it: in the table that it was given."""
        self._has_ended = True
        fields = HEADER_DTYPE.fields
        assert fields is not None
        os.pwrite(self._ranks[0].table, error.to_bytes(4, "little"), int(fields["error"][1]))

    def keep(self, rank: int, position: int, place: int, words: Array) -> None:
        """Keep a result's row, whose first word is number `place` of a kept row."""
        assert self.kept is not None
        at = (position - self.kept.first) * self.kept_words + place
        os.pwrite(self._ranks[rank].kept, np.ascontiguousarray(words, "<u4").tobytes(), 4 * at)

    # -- what ranks have written ----------------------------------------------

    @property
    def error(self) -> int:
        """Return the errno that ended the trace of some rank, 0 where none did."""
        heads = [os.pread(f.table, HEADER_DTYPE.itemsize, 0) for f in self._ranks]
        return max(int(np.frombuffer(head, HEADER_DTYPE)[0]["error"]) for head in heads)

    def steps(self) -> Iterator[Step]:
        """Yield the steps that every rank has written whole."""
        at = [0] * len(self._ranks)
        while True:
            heads = [_read(f.hashes, STEP_DTYPE.itemsize, at[r]) for r, f in enumerate(self._ranks)]
            if not all(heads) or len({bytes(head) for head in heads}) > 1:
                return
            head = np.frombuffer(heads[0], STEP_DTYPE)[0]
            phase = ALL_PHASES[min(int(head["phase"]), len(ALL_PHASES) - 1)]
            n_cells = int(head["n_cells"])
            if phase not in self.results or n_cells != self.results[phase].n_cells:
                return  # a device that gives what was never written
            n_bytes = 8 * n_cells
            rows = [
                _read(f.hashes, n_bytes, at[r] + STEP_DTYPE.itemsize)
                for r, f in enumerate(self._ranks)
            ]
            if any(len(row) != n_bytes for row in rows):
                return
            at = [a + STEP_DTYPE.itemsize + n_bytes for a in at]
            hashes = np.stack([np.frombuffer(row, "<u8") for row in rows])
            yield Step(phase, int(head["n_tokens"]),
                       int(head["position"]), int(head["head_from"]), hashes)  # fmt: skip

    def cut(self, n_steps: int) -> None:
        """Drop all steps behind the first `n_steps`: their room on the disk is free again."""
        size = 0
        for number, step in enumerate(self.steps()):
            if number == n_steps:
                break
            size += STEP_DTYPE.itemsize + step.hashes[0].nbytes
        for files in self._ranks:
            os.ftruncate(files.hashes, size)

    def kept_values(self, phase: str, index: int) -> list[Array]:
        """Return a kept result's rows on every rank, (positions, words) bits; none if not kept."""
        start = int(self.kept_rows[phase][index])
        if start == NOT_KEPT or self.kept is None:
            return []
        words = self.results[phase].results[index].words
        n_kept = self.kept.last - self.kept.first + 1
        out = []
        for files in self._ranks:
            size = 4 * n_kept * self.kept_words
            with mmap.mmap(files.kept, size, access=mmap.ACCESS_READ) as data:
                rows = np.frombuffer(data, "<u4").reshape(n_kept, self.kept_words)
                out.append(rows[:, start : start + words].copy())
                del rows
        return out

    def kept_whole(self, phase: str, index: int) -> Array | None:
        """Return a kept result's bits over all ranks, (positions, columns); None if partial."""
        result = self.results[phase].results[index]
        ranks = self.kept_values(phase, index)
        if result.place == "partial" or not ranks:
            return None
        if result.place == "replicated":
            return ranks[0]
        runs = [rank.reshape(len(rank), result.n_runs, -1) for rank in ranks]
        return np.concatenate(runs, axis=2).reshape(len(ranks[0]), -1)

    # -- the end ----------------------------------------------

    def close(self) -> None:
        """Close the files; what is not in the trace by now is gone."""
        for files in self._ranks:
            for descriptor in (files.table, files.hashes, files.kept):
                if descriptor >= 0:
                    os.close(descriptor)
        self._ranks = []

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()


def _read(descriptor: int, n_bytes: int, at: int) -> bytes:
    """Return bytes of a file, empty where it ends before: what a full disk has cut is no step."""
    parts: list[bytes] = []
    while n_bytes > 0:
        part = os.pread(descriptor, n_bytes, at)
        if not part:
            return b""
        parts.append(part)
        n_bytes, at = n_bytes - len(part), at + len(part)
    return b"".join(parts)
