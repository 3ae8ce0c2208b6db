"""Where two traces first differ: the step, the packet and its op, the layer, the rank, the slice.

Both are cut at the positions that steps of both end at, and what lies between is summed; so chunks
of other lengths compare as well. Two traces of one program are compared slice by slice, of others
by the names of graph values. A term of a sum over ranks (numerics rule 5) is another number at
another TP degree: it is left out there, and the sum itself is compared at the next collective.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from k3tool.errors import ArtifactError, quoted, shown
from k3tool.tables import count_text
from k3tool.trace.file import Program, TraceFile
from k3tool.trace.recorder import Step
from k3tool.trace.results import Array, Result, named
from k3tool.verdict import Check, failed, not_run, passed


class Difference(NamedTuple):
    """A result whose bits differ; positions first to last, a step's tokens in both traces.

    `lo` to `hi` are columns of a run over all ranks; `ranks` and `slices` are the first file's.
    """

    value: str
    op: str
    inst: int
    layer: int | None
    phase: str
    step: int
    first: int
    last: int
    lo: int
    hi: int
    ranks: tuple[int, ...]
    slices: tuple[int, ...]

    @property
    def text(self) -> str:
        """Return it in words."""
        where = f"position {self.first}" if self.first == self.last else (
            f"positions {self.first} to {self.last}")  # fmt: skip
        layer = "" if self.layer is None else f", layer {self.layer}"
        parts = [f"packet {self.inst} {self.op} {self.value}{layer}"]
        if self.ranks:
            parts.append(_listed("rank", self.ranks))
        if self.slices:
            parts.append(_listed("slice", self.slices))
        columns = f" (columns {self.lo} to {self.hi - 1})" if self.hi > self.lo else ""
        return f"step {self.step}, {where}, {self.phase}: {', '.join(parts)}{columns}"


def _listed(word: str, numbers: Sequence[int]) -> str:
    few = ", ".join(map(str, numbers[:4]))
    more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
    return f"{word}{'s' if len(numbers) > 1 else ''} {few}{more}"


@dataclass(slots=True)
class Comparison:
    """What a comparison found: its checks, the first difference, and how much was compared."""

    checks: list[Check] = field(default_factory=list)
    difference: Difference | None = None
    n_results: int = 0  # equal ones, each counted once a group of positions
    n_left_out: int = 0


# -- one side ------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Steps of one trace that cover the same positions as steps of another.

    `sums` are hashes by phase, (R, C), summed over the steps; `covered` of a phase the positions
    of its steps, and from which position each has computed its head.
    """

    number: int  # of the first step
    first: int
    end: int
    sums: dict[str, Array]
    covered: dict[str, list[tuple[int, int, int]]]

    @property
    def phase(self) -> str | None:
        """Return the one phase of all steps, None where there are several."""
        return next(iter(self.sums)) if len(self.sums) == 1 else None


def _groups(file: TraceFile, bounds: Array) -> Iterator[_Group]:
    """Yield a trace's steps between neighbouring bounds, whole groups only."""
    steps: list[Step] = []
    number = 0
    inside = list(pairwise(bounds.tolist()))
    for index, step in enumerate(file.steps()):
        while number < len(inside) and step.position >= inside[number][1]:
            number += 1
        fits = number < len(inside) and inside[number][0] <= step.position
        if fits:
            steps.append(step)
            if step.end == inside[number][1]:
                yield _summed(index + 1 - len(steps), steps)
                steps = []


def _summed(index: int, steps: Sequence[Step]) -> _Group:
    sums: dict[str, Array] = {}
    covered: dict[str, list[tuple[int, int, int]]] = {}
    for step in steps:
        known = sums.get(step.phase)
        sums[step.phase] = step.hashes if known is None else known + step.hashes
        head = step.position + min(step.head_from, step.n_tokens)
        covered.setdefault(step.phase, []).append((step.position, step.end, head))
    return _Group(index, steps[0].position, steps[-1].end, sums, covered)


def totals(program: Program, sums: Array) -> Array:
    """Return hashes of whole results on every rank, (R, results), from those of cells (R, C)."""
    out = np.zeros((len(program.results), len(sums)), np.uint64)
    np.add.at(out, program.result, np.ascontiguousarray(sums.T))
    return np.ascontiguousarray(out.T)


def _bounds(file: TraceFile) -> set[int]:
    rows = file.step_rows.astype(np.int64)
    return {*rows[:, 2].tolist(), *(rows[:, 2] + rows[:, 1]).tolist()}


# -- inside one trace ----------------------------------------------------------------------------


def check_ranks(file: TraceFile) -> Check | None:
    """Compare what all ranks hold whole; None where there is one rank."""
    if file.tp == 1:
        return None
    name, n_results = f"{file.name}: replicated results equal on all ranks", 0
    for index, step in enumerate(file.steps()):
        program = file.programs[step.phase]
        found = totals(program, step.hashes)
        whole = np.array([result.place == "replicated" for result in program.results])
        bad = (found != found[0]).any(axis=0) & whole
        if bad.any():
            number = int(np.argmax(bad))
            ranks = _minority(found[:, number])
            slices = _slices(program, step.hashes, number, ranks)
            difference = _difference(program.results[number], step.phase, index, step.position,
                                     step.end, ranks, slices)  # fmt: skip
            return failed(name, f"they differ at {difference.text}")
        n_results += int(whole.sum())
    if not n_results:
        return failed(name, "nothing to compare")
    return passed(name, f"{count_text(n_results, 'result')} on {file.tp} ranks")


def _minority(hashes: Array) -> tuple[int, ...]:
    """Return the ranks that differ from what most say; on a tie from what rank 0 says."""
    values = hashes.tolist()
    common = max(values, key=lambda value: (values.count(value), value == values[0]))
    return tuple(rank for rank, value in enumerate(values) if value != common)


def _slices(program: Program, sums: Array, number: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the slices of a replicated result that differ on a rank from the others'."""
    cells = np.flatnonzero(program.result == number)
    good = next(rank for rank in range(len(sums)) if rank not in ranks)
    bad = (sums[ranks[0], cells] != sums[good, cells]).nonzero()[0]
    return tuple(sorted({int(program.slice[cells[i]]) for i in bad}))


def _difference(
    result: Result, phase: str, step: int, first: int, end: int,
    ranks: tuple[int, ...] = (), slices: tuple[int, ...] = (), lo: int = 0, hi: int = 0,
) -> Difference:  # fmt: skip
    return Difference(result.name, result.op, result.inst, result.layer, phase, step, first,
                      end - 1, lo, hi, ranks, slices)  # fmt: skip


# -- two traces ----------------------------------------------------------------------------------

_ONE_QUESTION = {
    "checkpoint": "compare traces of one checkpoint",
    "numerics": "each mode of the arithmetic has bits of its own: trace runs of one --numerics",
    "eps": "compare traces of one model",
    "prompt": "compare traces of one prompt (run --ids)",
}


def require_comparable(left: TraceFile, right: TraceFile) -> None:
    """Refuse traces that answer other questions. Raises: ArtifactError naming what differs."""
    for what, hint in _ONE_QUESTION.items():
        (need, need_text), (got, got_text) = (_question(file)[what] for file in (left, right))
        if got != need:
            raise ArtifactError(f"{right.name}: {what}", got=got_text,
                                need=f"{need_text}, as {left.name}", hint=hint)  # fmt: skip


def _question(file: TraceFile) -> dict[str, tuple[object, str]]:
    identity = file.input("checkpoint").content_sha256
    numerics, eps = file.params["numerics"], file.params["eps"]
    return {
        "checkpoint": (identity, f"{identity[:16]}.."),
        "numerics": (numerics, shown(numerics)),
        "eps": (eps, shown(eps)),
        "prompt": (file.prompt, quoted(file.prompt)),
    }


def compare_traces(left: TraceFile, right: TraceFile) -> Comparison:
    """Compare two traces up to their first difference.

    Raises: ArtifactError where they are not of one checkpoint, prompt and arithmetic, or damaged.
    """
    require_comparable(left, right)
    found = Comparison([check for file in (left, right) if (check := check_ranks(file))])
    name = f"{left.name} and {right.name}: same bits"
    bounds = np.array(sorted(_bounds(left) & _bounds(right)), np.int64)
    is_one_program = left.input("isa").content_sha256 == right.input("isa").content_sha256
    end = None
    for a, b in zip(_groups(left, bounds), _groups(right, bounds), strict=False):
        assert (a.first, a.end) == (b.first, b.end), "groups of one cut"
        end = a.end
        found.difference = _first(left, right, a, b, is_one_program, found)
        if found.difference is not None:
            break
    left_out = ""
    if found.n_left_out:
        why = "that are no result of both programs, or terms of sums over other ranks, left out"
        left_out = f"; {found.n_left_out} {why}"
    equal = count_text(found.n_results, "result")
    if found.difference is not None:
        detail = f"first difference at {found.difference.text}; {equal} before it equal{left_out}"
        found.checks.append(failed(name, detail))
    elif end is None or not found.n_results:
        found.checks.append(failed(name, "nothing compared"))
    else:
        ranks = f"TP {left.tp} and {right.tp}"
        found.checks.append(passed(name, f"{equal} up to position {end - 1}, {ranks}{left_out}"))
        found.checks += _rest(left, right, end)
    return found


def _rest(left: TraceFile, right: TraceFile, end: int) -> Iterator[Check]:
    """Say what only one trace has."""
    for file, other in ((left, right), (right, left)):
        beyond = max(_bounds(file)) - end
        if beyond > 0:
            why = f"{other.name} has none" + ("" if other.is_whole else ": it was cut short")
            yield not_run(f"{file.name}: {count_text(beyond, 'position')} from {end} on", why)
    starts = {min(_bounds(left)), min(_bounds(right))}
    if len(starts) > 1:
        yield not_run(f"positions before {max(starts)}", "one trace begins there")


def _first(
    left: TraceFile, right: TraceFile, a: _Group, b: _Group, is_one_program: bool,
    found: Comparison,
) -> Difference | None:  # fmt: skip
    """Return the first difference of a group, or None after counting what is equal."""
    if is_one_program and a.covered == b.covered and a.phase is not None:
        return _first_cell(left, a, b, found)
    return _first_value(left, right, a, b, found)


def _first_cell(left: TraceFile, a: _Group, b: _Group, found: Comparison) -> Difference | None:
    """Compare slice by slice: both traces are of one program, cut alike."""
    assert a.phase is not None
    program = left.programs[a.phase]
    bad = a.sums[a.phase] != b.sums[a.phase]
    if not bad.any():
        found.n_results += len(program.results)
        return None
    number = int(program.result[bad.any(axis=0)].min())
    found.n_results += number
    result = program.results[number]
    cells = np.flatnonzero((program.result == number) & bad.any(axis=0))
    ranks = tuple(np.flatnonzero(bad[:, cells].any(axis=1)).tolist())
    slices = tuple(sorted({int(s) for s in program.slice[cells]}))
    shift = result.words // result.n_runs if result.place == "sharded" else 0
    lo = ranks[0] * shift + int(program.lo[cells].min())
    hi = ranks[-1] * shift + int(program.hi[cells].max())
    at = (a.phase, a.number, a.first, a.end)
    return _difference(result, *at, ranks if left.tp > 1 else (), slices, lo, hi)


# -- by the names of values ----------------------------------------------------------------------


class _Value(NamedTuple):
    """A value over a group's steps: its hash over all ranks, or each rank's if partial."""

    result: Result
    phase: str
    sums: tuple[int, ...]
    covered: tuple[tuple[int, int], ...]


def _values(file: TraceFile, group: _Group) -> dict[str, _Value]:
    out: dict[str, _Value] = {}
    for phase in group.sums:
        program = file.programs[phase]
        found = totals(program, group.sums[phase])
        for number, result in enumerate(program.results):
            value = _Value(result, phase, _over_ranks(result, found[:, number]),
                           _positions(group.covered[phase], result.rows == "head"))  # fmt: skip
            known = out.get(result.name)
            out[result.name] = value if known is None else _joined(known, value)
    return out


def _over_ranks(result: Result, hashes: Array) -> tuple[int, ...]:
    if result.place == "partial":
        return tuple(hashes.tolist())
    if result.place == "replicated":
        return (int(hashes[0]),)
    return (int(hashes.sum(dtype=np.uint64)),)


def _positions(steps: Sequence[tuple[int, int, int]], is_head: bool) -> tuple[tuple[int, int], ...]:
    """Return the positions that are covered, neighbours joined."""
    out: list[tuple[int, int]] = []
    for first, end, head in sorted(steps):
        lo = head if is_head else first
        if lo == end:
            continue
        if out and out[-1][1] == lo:
            out[-1] = (out[-1][0], end)
        else:
            out.append((lo, end))
    return tuple(out)


def _joined(a: _Value, b: _Value) -> _Value:
    """Return one value of two phases' steps; sums are modulo 2^64."""
    sums = tuple((x + y) % (1 << 64) for x, y in zip(a.sums, b.sums, strict=True))
    both = _positions([(lo, hi, lo) for lo, hi in a.covered + b.covered], False)
    return _Value(a.result, a.phase, sums, both)


def _is_comparable(a: _Value, b: _Value) -> bool:
    x, y = a.result, b.result
    if not a.covered or a.covered != b.covered:
        return False
    if "partial" in (x.place, y.place) and (x.place != y.place or len(a.sums) != len(b.sums)):
        return False
    # Of a softmax by pages there is room for as many as a context has; those not seen are not there
    return x.run_cols == y.run_cols and (x.n_runs == y.n_runs or x.rows == y.rows == "pages")


def _first_value(
    left: TraceFile, right: TraceFile, a: _Group, b: _Group, found: Comparison
) -> Difference | None:
    mine, others = _values(left, a), _values(right, b)
    for name, value in mine.items():
        other = others.get(name)
        if other is None or not _is_comparable(value, other):
            found.n_left_out += 1
        elif value.sums == other.sums:
            found.n_results += 1
        else:
            return _localised(left, right, a, b, value, other)
    return None


def _localised(
    left: TraceFile, right: TraceFile, a: _Group, b: _Group, value: _Value, other: _Value
) -> Difference:
    """Return a differing value with the columns that both cuts tell apart."""
    at = (value.phase, a.number, a.first, a.end)
    pieces = [_pieces(file, group, value.result.name) for file, group in ((left, a), (right, b))]
    mine, others = pieces
    if value.result.place == "partial":
        ranks = tuple(i for i, x in enumerate(value.sums) if x != other.sums[i])
        return _difference(value.result, *at, ranks if left.tp > 1 else ())
    if mine is None or others is None:
        return _difference(value.result, *at)
    cut = sorted(mine.ends() & others.ends())
    lo = 0
    for hi in cut:
        if mine.upto(hi) != others.upto(hi):
            ranks, slices = mine.who(lo, hi)
            return _difference(value.result, *at, ranks if left.tp > 1 else (), slices, lo, hi)
        lo = hi
    return _difference(value.result, *at)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A value's slices on all ranks, by columns of a run: (lo, hi, hash, rank, slice) rows."""

    rows: tuple[tuple[int, int, int, int, int], ...]

    def ends(self) -> set[int]:
        """Return where pieces end and none goes on."""
        ends = {row[1] for row in self.rows}
        return {end for end in ends if not any(row[0] < end < row[1] for row in self.rows)}

    def upto(self, hi: int) -> int:
        """Return the hash of all columns before one."""
        return sum(row[2] for row in self.rows if row[1] <= hi) % (1 << 64)

    def who(self, lo: int, hi: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks and slices that wrote columns."""
        rows = [row for row in self.rows if row[0] < hi and row[1] > lo]
        ranks, slices = (tuple(sorted({row[i] for row in rows})) for i in (3, 4))
        return ranks, slices


def _pieces(file: TraceFile, group: _Group, name: str) -> _Pieces | None:
    """Return a value's slices; None where steps of several programs wrote it."""
    if group.phase is None:
        return None
    program, sums = file.programs[group.phase], group.sums[group.phase]
    number = named(program.results)[name]
    result = program.results[number]
    sharded = result.place == "sharded"
    shift = result.words // result.n_runs if sharded else 0
    rows = []
    for rank in range(file.tp if sharded else 1):
        for cell in np.flatnonzero(program.result == number).tolist():
            lo, hi = (rank * shift + int(bound[cell]) for bound in (program.lo, program.hi))
            rows.append((lo, hi, int(sums[rank, cell]), rank, int(program.slice[cell])))
    return _Pieces(tuple(rows))
