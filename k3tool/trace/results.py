"""What the instructions of a program write: results, and the part of each that a slice writes.

A result has the name of its graph value, which is the same in every program of a model, so results
of two programs can be compared by it. Its columns have numbers over all ranks: a row is `n_runs`
runs (the experts of a token, the pages of a softmax, else one), a run's columns are divided over
ranks.

Letters: E entries of a phase's queues, C cells (what one entry writes of one result).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3tool.compiler.plan import Tensor
from k3tool.compiler.record_checks import results_of
from k3tool.isa.columns import spec_of
from k3tool.isa.op_spec import NO_HANDLE, WORD_HANDLES, WORD_UNIT_COLS, WORD_UNITS, OpSpec
from k3tool.isa.stream import Isa, Stream
from k3tool.isa.table import PAGE_TOKENS, Op

Array = npt.NDArray[Any]

# Where a result is, and so with what it can be compared. "replicated": whole on every rank;
# "sharded": a rank's columns; "partial": a term of a sum over ranks, which at another TP degree is
# another number.
PLACES = ("replicated", "sharded", "partial")
# Which rows a slice writes: K3HashRows of kernels_cpu/hashes.h.
ROWS = ("columns", "head", "tokens", "cache", "pages")
CELL_DTYPE = np.dtype(
    [
        ("handle", "<u4"), ("rows", "<u4"), ("base", "<u8"), ("row_words", "<u4"), ("col0", "<u4"),
        ("n_cols", "<u4"), ("n_runs", "<u4"), ("run_words", "<u4"), ("key0", "<u4"),
        ("key_run", "<u4"), ("kept0", "<u4"),
    ]
)  # fmt: skip
assert CELL_DTYPE.itemsize == 48
NOT_KEPT = ALL_RUNS = 0xFFFFFFFF
# The ops that multiply by the experts of a token, whose results lie side by side in a row.
_PER_EXPERT = frozenset({Op.MOE_UP_MXFP4, Op.MOE_GLU_MXFP4, Op.MOE_GLU_TOPK})


class Result(NamedTuple):
    """One value that an instruction writes; `inst` is its packet in the phase's program.

    `n_runs` runs of `run_cols` columns over all ranks make a row; `words` are those of a row on one
    rank. `base` is where the first token's row begins in the tensor, in words.
    """

    name: str
    op: str
    inst: int
    place: str
    rows: str
    n_runs: int
    run_cols: int
    words: int
    handle: int
    base: int = 0

    @property
    def layer(self) -> int | None:
        """Return the layer that the value belongs to, None outside of layers."""
        return layer_of(self.name)

    @property
    def width(self) -> int:
        """Return the columns of a row over all ranks."""
        return self.n_runs * self.run_cols


@dataclass(frozen=True, slots=True)
class Results:
    """All results of a phase, in the order of its instructions, and its cells.

    `result` [C] says which result, `slice` [C] which slice, `lo` and `hi` [C] which columns of a
    run on one rank, `run` [C] which run, ALL_RUNS where it is the same columns of all; `first`
    [E + 1] where an entry's cells begin.
    """

    results: tuple[Result, ...]
    result: Array
    slice: Array
    lo: Array
    hi: Array
    run: Array
    first: Array

    @property
    def n_cells(self) -> int:
        """Return the number of cells."""
        return len(self.result)


def layer_of(name: str) -> int | None:
    """Return the layer in a graph value's name."""
    words = name.split(".")
    return int(words[1]) if words[0] == "layers" and words[1].isdecimal() else None


def results_of_stream(isa: Isa, stream: Stream) -> Results:
    """Return what a phase's instructions write, on every rank the same but for its columns."""
    found = list(_results(isa, stream))
    by_inst: dict[int, list[int]] = {}
    for index, result in enumerate(found):
        by_inst.setdefault(result.inst, []).append(index)
    rows: list[tuple[int, int, int, int, int]] = []
    first = np.zeros(len(stream.queues.entries) + 1, "<u4")
    records = stream.instructions[0]
    for entry, e in enumerate(stream.queues.entries):
        inst = int(e["inst"])
        spec = spec_of(int(records[inst][0]) & 0xFFFF)
        assert spec is not None, records[inst][0]
        parts = [found[i] for i in by_inst.get(inst, ())]
        cut = _cut(spec, records[inst], parts, isa.tp, int(e["unit0"]), int(e["unit1"]))
        rows += [(by_inst[inst][i], int(e["slice"]), lo, hi, run) for i, lo, hi, run in cut]
        first[entry + 1] = len(rows)
    table = np.array(rows, "<u4").reshape(-1, 5)
    columns = [np.ascontiguousarray(column) for column in table.T]
    return Results(tuple(found), columns[0], columns[1], columns[2], columns[3], columns[4], first)


def _results(isa: Isa, stream: Stream) -> Iterator[Result]:
    """Yield results in the order of instructions."""
    runs: dict[int, int] = {}  # of a handle's rows; buffers share bytes, never handles
    for inst, record in enumerate(stream.instructions[0]):
        spec = spec_of(int(record[0]) & 0xFFFF)
        assert spec is not None, record[0]
        if spec.is_load:
            continue
        slots = _slots(record)
        source = next((slots[o.slot] + o.run for o in spec.operands if o.role == "in"), NO_HANDLE)
        for operand in results_of(spec):
            handle = slots[operand.slot] + operand.run
            tensor = isa.tensors[handle]
            runs[handle] = _runs_of(spec, record, runs.get(source, 1))
            yield _result(spec, inst, record, handle, tensor, runs[handle], isa.tp)


def _slots(record: Array) -> list[int]:
    words = np.ascontiguousarray(record, "<u4").view("<u2")
    return [int(h) for h in words[2 * WORD_HANDLES : 2 * WORD_UNITS]]


def _runs_of(spec: OpSpec, record: Array, of_input: int) -> int:
    if spec.op in _PER_EXPERT:
        return int(record[spec.word("top_k")])
    if spec.unit == "page":
        return int(record[WORD_UNITS])
    is_same = spec.placement == "follow" and spec.unit == "column"
    return of_input if is_same else 1


def _result(
    spec: OpSpec, inst: int, record: Array, handle: int, tensor: Tensor, n_runs: int, tp: int
) -> Result:
    name = tensor.name.removeprefix(f"{tensor.phase}/")
    words, base = tensor.local[-1], 0
    is_whole = tensor.logical == tensor.local
    place = "replicated" if is_whole else "sharded"
    if tensor.role == "peer":
        place = "sharded"
    if spec.placement == "partial":
        place = "partial"
    if spec.output.role == "inout":  # a row of the stack of blocks for each token
        index = int(record[spec.word("index")])
        name, base = f"{name}[{index}]", index * tensor.local[-2] * words
    run_cols = words // n_runs * (tp if place == "sharded" else 1)
    return Result(name, spec.name, inst, place, _rows(spec, record, tensor), n_runs, run_cols,
                  words, handle, base)  # fmt: skip


def _rows(spec: OpSpec, record: Array, tensor: Tensor) -> str:
    """Return which rows a slice writes: one of ROWS."""
    if spec.output.role == "state":
        assert spec.unit == "token", f"{spec.name} writes a state that no slice's units divide"
        return "cache"
    names = [param.name for param in spec.params]
    is_head = "head_only" in names and record[spec.word("head_only")]
    if is_head or spec.op in (Op.ARGMAX, Op.ARGMAX_FOLD):
        return "head"
    return {"token": "tokens", "page": "pages"}.get(spec.unit, "columns")


def _cut(
    spec: OpSpec, record: Array, parts: Sequence[Result], tp: int, unit0: int, unit1: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (which of the results, first column, end, run) of what units cover on one rank."""
    if spec.unit == "page":  # the runs themselves are divided: see cells_of_rank
        yield 0, 0, parts[0].words // parts[0].n_runs, ALL_RUNS
        return
    if spec.unit in ("token", "step"):
        yield from ((i, 0, part.words // part.n_runs, ALL_RUNS) for i, part in enumerate(parts))
        return
    if spec.unit == "member":
        yield from ((i, 0, parts[i].words, ALL_RUNS) for i in range(unit0, unit1))
        return
    each, first = max(1, int(record[WORD_UNIT_COLS])), 0
    if parts and parts[0].n_runs > 1 and int(record[WORD_UNITS]) * each == parts[0].words:
        yield from _by_run(parts[0], unit0 * each, unit1 * each)  # units go through all runs
        return
    for i, part in enumerate(parts):
        units = part.words // part.n_runs // each
        lo, hi = max(unit0 - first, 0), min(unit1 - first, units)
        if lo < hi:
            yield i, lo * each, hi * each, ALL_RUNS
        first += units


def _by_run(part: Result, col0: int, col1: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs that columns of a row on one rank lie in, each with its own columns."""
    local = part.words // part.n_runs
    for run in range(col0 // local, -(-col1 // local)):
        yield 0, max(col0 - run * local, 0), min(col1 - run * local, local), run


def cells_of_rank(isa: Isa, stream: Stream, found: Results, rank: int, kept: Array) -> Array:
    """Return what one rank's interpreter is given to hash, cell by cell.

    Shapes: kept (results,), where in a kept row a result's words begin, or NOT_KEPT -> (cells,) of
    CELL_DTYPE.
    """
    cells = np.zeros(found.n_cells, CELL_DTYPE)
    entries, first = stream.queues.entries, found.first.astype(np.int64)
    n_cells = first[1:] - first[:-1]
    units, ends = (np.repeat(entries[name], n_cells) for name in ("unit0", "unit1"))
    for index, cell in enumerate(cells):
        number = int(found.result[index])
        result = found.results[number]
        local, lo, hi = result.words // result.n_runs, int(found.lo[index]), int(found.hi[index])
        assert hi <= local, (result, lo, hi)
        shift = rank * local if result.place == "sharded" else 0
        cell["handle"], cell["rows"] = result.handle, ROWS.index(result.rows)
        cell["base"], cell["row_words"] = result.base, result.words
        cell["col0"], cell["n_cols"] = lo, hi - lo
        cell["n_runs"], cell["run_words"] = result.n_runs, local
        cell["key0"], cell["key_run"] = shift + lo, result.run_cols
        cell["kept0"] = kept[number] if kept[number] == NOT_KEPT else kept[number] + lo
        if found.run[index] != ALL_RUNS:
            run = int(found.run[index])
            cell["n_runs"], cell["col0"] = 1, run * local + lo
            cell["key0"] = run * result.run_cols + shift + lo
            if kept[number] != NOT_KEPT:
                cell["kept0"] = kept[number] + run * local + lo
        if result.rows == "pages":
            page = int(units[index])
            cell["n_runs"], cell["col0"] = int(ends[index]) - page, page * local
            cell["key0"] = shift + page * result.run_cols
            if kept[number] != NOT_KEPT:
                cell["kept0"] = kept[number] + page * local
    assert PAGE_TOKENS * int(isa.params["pages_per_slot"]) < 1 << 31, "a key has 32 bits for it"
    return cells


def named(results: Sequence[Result]) -> dict[str, int]:
    """Return results by name. A value is written once in a program."""
    found = {result.name: index for index, result in enumerate(results)}
    assert len(found) == len(results), "a value is written twice"
    return found
