"""Hashes of what ranks on a device wrote: their memory is read, and the driver hashes it.

A device runs one launch for each instruction then, and this reads what it wrote before the next one
may write over it. The definition is that of kernels_cpu/hashes.c, and so are the files: a trace
does not know where its run was.

Letters: T tokens of a step, W words of a row on one rank, C cells of a phase, R ranks.
"""

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from k3tool.isa.stream import Isa
from k3tool.isa.table import ALL_PHASES, PAGE_TOKENS
from k3tool.runtime.digest import mix
from k3tool.runtime.requests import Step
from k3tool.trace.recorder import STEP_DTYPE, Recorder
from k3tool.trace.results import ALL_RUNS, NOT_KEPT, Array, Result, Results

# From (rank, handle, first byte, bytes) to what lies there in the rank's memory.
Read = Callable[[int, int, int, int], bytes]
_BLOCK_WORDS = 1 << 20  # rows that are hashed at once; a word takes some 40 bytes meanwhile


class _Cells(NamedTuple):
    """The cells of one result, (N,) each: `number` among the phase's, and what they cover."""

    number: Array
    lo: Array
    hi: Array
    run: Array
    unit0: Array
    unit1: Array


@dataclass(frozen=True, slots=True)
class _Phase:
    """A phase's results by instruction, and the cells of each."""

    found: Results
    by_inst: dict[int, list[int]]
    cells: list[_Cells]


class Downloads:
    """What a recorder is given by a driver whose ranks cannot write: begin, take each, end."""

    def __init__(self, recorder: Recorder, read: Read) -> None:
        """Keep where hashes go, and how a rank's memory is read once a launch has ended."""
        self._recorder, self._read, self._isa = recorder, read, recorder.isa
        self._phases = {name: _of_phase(self._isa, name, f) for name, f in recorder.results.items()}
        self._step = Step(0, (), 0, 0)
        self._sums = np.zeros((0, 0), np.uint64)

    @property
    def _name(self) -> str:
        return ALL_PHASES[self._step.phase]

    def begin(self, step: Step) -> None:
        """Take the step that is about to run."""
        self._step = step
        n_cells = self._phases[ALL_PHASES[step.phase]].found.n_cells
        self._sums = np.zeros((self._isa.tp, n_cells), np.uint64)

    def take(self, inst: int) -> None:
        """Read and hash what an instruction wrote; on every rank it must have ended."""
        if self._recorder.has_ended:
            return
        phase = self._phases[self._name]
        for number in phase.by_inst.get(inst, ()):
            cells = phase.cells[number]
            for rank in range(self._isa.tp):
                self._sums[rank, cells.number] = self._hash(rank, number, cells)

    def end(self) -> None:
        """Give the step's hashes to the recorder: the ranks have said that it was whole."""
        step, first = self._step, self._step.tokens[0]
        follows = [(t.slot, t.position) for t in step.tokens]
        if follows != [(first.slot, first.position + i) for i in range(len(follows))]:
            self._recorder.end(errno.ENOTSUP)  # rows take their numbers from one sequence
            return
        head = np.zeros(1, STEP_DTYPE)
        head["phase"], head["n_tokens"] = step.phase, len(follows)
        head["position"], head["head_from"] = first.position, step.head_from
        head["n_cells"] = self._sums.shape[1]
        self._recorder.write(head, self._sums)

    # -- one result on one rank ------------------------------------------------------------------

    def _hash(self, rank: int, number: int, cells: _Cells) -> Array:
        """Return the hashes of a result's cells."""
        result = self._phases[self._name].found.results[number]
        local = result.words // result.n_runs
        shift = rank * local if result.place == "sharded" else 0
        column = np.arange(result.words, dtype=np.uint64)
        keys = column // local * result.run_cols + column % local + shift
        by_column = np.zeros(result.words, np.uint64)
        by_token = np.zeros(len(self._step.tokens), np.uint64)
        for token, words in self._rows(rank, result):
            at = slice(token, token + len(words))
            positions = np.array([t.position for t in self._step.tokens[at]], np.uint64)
            self._keep(rank, number, positions, words)
            key = (positions << np.uint64(32))[:, None] + keys[: words.shape[1]]
            mixed = mix(words.astype(np.uint64) ^ mix(key))
            by_column[: words.shape[1]] += mixed.sum(axis=0, dtype=np.uint64)
            by_token[at] = mixed.sum(axis=1, dtype=np.uint64)
        if result.rows in ("tokens", "cache"):
            return _between(by_token, cells.unit0, cells.unit1)
        runs = by_column.reshape(result.n_runs, local)
        if result.rows == "pages":
            return _between(runs.sum(axis=1, dtype=np.uint64), cells.unit0, cells.unit1)
        whole = _between(runs.sum(axis=0, dtype=np.uint64), cells.lo, cells.hi)
        is_all = cells.run == ALL_RUNS
        start = np.where(is_all, 0, cells.run.astype(np.int64)) * local
        return np.where(is_all, whole, _between(by_column, start + cells.lo, start + cells.hi))

    def _rows(self, rank: int, result: Result) -> Iterator[tuple[int, Array]]:
        """Yield (first token, its and the next tokens' rows); of pages only those it sees."""
        tokens, words = self._step.tokens, result.words
        first = self._step.head_from if result.rows == "head" else 0
        each = 1 if result.rows == "pages" else max(1, _BLOCK_WORDS // words)
        for token in range(first, len(tokens), each):
            n, row, width = min(each, len(tokens) - token), token, words
            if result.rows == "cache":  # slots' pages lie in order: RankMemory's page table
                pages = int(self._isa.params["pages_per_slot"])
                row = tokens[token].slot * pages * PAGE_TOKENS + tokens[token].position
            if result.rows == "pages":
                seen = min(tokens[token].position // PAGE_TOKENS + 1, result.n_runs)
                width = seen * (words // result.n_runs)
            data = self._read(rank, result.handle, 4 * (result.base + row * words), 4 * n * width)
            yield token, np.frombuffer(data, "<u4").reshape(n, width)

    def _keep(self, rank: int, number: int, positions: Array, rows: Array) -> None:
        """Keep the values of positions that were asked for."""
        kept, place = self._recorder.kept, int(self._recorder.kept_rows[self._name][number])
        if kept is None or place == NOT_KEPT:
            return
        for position, row in zip(positions.tolist(), rows, strict=True):
            if kept.first <= position <= kept.last:
                self._recorder.keep(rank, position, place, row)


def _of_phase(isa: Isa, name: str, found: Results) -> _Phase:
    """Return a phase's results and cells by what is asked for."""
    by_inst: dict[int, list[int]] = {}
    for number, result in enumerate(found.results):
        by_inst.setdefault(result.inst, []).append(number)
    entries = isa.streams[name].queues.entries
    ends = found.first.astype(np.int64)
    entry = np.repeat(np.arange(len(entries)), ends[1:] - ends[:-1])
    unit0, unit1 = (entries[key][entry].astype(np.int64) for key in ("unit0", "unit1"))
    lo, hi = found.lo.astype(np.int64), found.hi.astype(np.int64)
    order = np.argsort(found.result, kind="stable")
    ends = np.searchsorted(found.result[order], np.arange(len(found.results) + 1))
    cells = [
        _Cells(at, lo[at], hi[at], found.run[at], unit0[at], unit1[at])
        for at in (order[first:end] for first, end in pairwise(ends.tolist()))
    ]
    return _Phase(found, by_inst, cells)


def _between(numbers: Array, first: Array, end: Array) -> Array:
    """Return sums modulo 2^64 of numbers (N,) from `first` to `end`, as far as there are any."""
    upto = np.zeros(len(numbers) + 1, np.uint64)
    np.cumsum(numbers, out=upto[1:], dtype=np.uint64)
    last = len(numbers)
    return upto[np.minimum(end, last)] - upto[np.minimum(first, last)]
