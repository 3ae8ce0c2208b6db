"""Where two traces first differ: the step, the packet and its op, the layer, the rank, the slice.

Both are cut at the positions that steps of both end at, and what lies between is summed; so chunks
of other lengths compare as well (`groups`). Two traces of one program are compared slice by slice,
of others by the names of graph values (`by_name`).
"""

from collections.abc import Iterator

import numpy as np

from k3tool.errors import ArtifactError, quoted, shown
from k3tool.tables import count_text
from k3tool.trace.by_name import first_value
from k3tool.trace.difference import Comparison, Difference, difference_at
from k3tool.trace.file import Program, TraceFile
from k3tool.trace.groups import Group, groups, step_bounds, totals
from k3tool.trace.results import Array
from k3tool.verdict import Check, failed, not_run, passed

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
            difference = difference_at(program.results[number], step.phase, index, step.position,
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


# -- two traces ----------------------------------------------------------------------------------

_ONE_QUESTION = {
    "checkpoint": "compare traces of one checkpoint",
    "numerics": "each mode of the arithmetic has bits of its own: trace runs of one --numerics",
    "eps": "compare traces of one model",
}


def require_comparable(left: TraceFile, right: TraceFile) -> None:
    """Refuse traces that answer other questions. Raises: ArtifactError naming what differs."""
    for what, hint in _ONE_QUESTION.items():
        (need, need_text), (got, got_text) = (_question(file)[what] for file in (left, right))
        if got != need:
            raise ArtifactError(f"{right.name}: {what}", got=got_text,
                                need=f"{need_text}, as {left.name}", hint=hint)  # fmt: skip
    _require_one_text(left, right)


def _question(file: TraceFile) -> dict[str, tuple[object, str]]:
    identity = file.input("checkpoint").content_sha256
    numerics, eps = file.params["numerics"], file.params["eps"]
    return {
        "checkpoint": (identity, f"{identity[:16]}.."),
        "numerics": (numerics, shown(numerics)),
        "eps": (eps, shown(eps)),
    }


def _require_one_text(left: TraceFile, right: TraceFile) -> None:
    """Refuse traces of other prompts.

    One that goes on from a state begins later: what it was given has to be what the other had read
    or chosen by then. Ids that both chose are no question, but an answer.
    """
    hint = "compare traces of one prompt (run --ids, or --load-state of that run)"
    if len(left.given.history) == len(right.given.history):
        if left.given.asked != right.given.asked:
            raise ArtifactError(
                f"{right.name}: prompt", got=quoted(right.given.asked),
                need=f"{quoted(left.given.asked)}, as {left.name}", hint=hint,
            )  # fmt: skip
        return
    early, late = sorted((left, right), key=lambda file: len(file.given.history))
    had, need = late.given.asked, (*early.given.asked, *early.given.chosen)
    for at, (a, b) in enumerate(zip(had, need, strict=False)):
        if a != b:
            raise ArtifactError(
                f"{late.name}: token at position {at}", got=a, need=f"{b}, as {early.name}",
                hint=hint,
            )  # fmt: skip


def compare_traces(left: TraceFile, right: TraceFile) -> Comparison:
    """Compare two traces up to their first difference.

    Raises: ArtifactError where they are not of one checkpoint, prompt and arithmetic, or damaged.
    """
    require_comparable(left, right)
    found = Comparison([check for file in (left, right) if (check := check_ranks(file))])
    name = f"{left.name} and {right.name}: same bits"
    bounds = np.array(sorted(step_bounds(left) & step_bounds(right)), np.int64)
    digest = left.input("isa").content_sha256  # none of streams that were emitted in memory
    is_one_program = digest != "" and digest == right.input("isa").content_sha256
    first = end = None
    for a, b in zip(groups(left, bounds), groups(right, bounds), strict=False):
        assert (a.first, a.end) == (b.first, b.end), "groups of one cut"
        first, end = a.first if first is None else first, a.end
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
    elif first is None or end is None or not found.n_results:
        spans = " and ".join(f"{file.name} has {_span(*_ends(file))}" for file in (left, right))
        found.checks.append(failed(name, f"nothing compared: {spans}"))
    else:
        ranks = f"TP {left.tp} and {right.tp}"
        detail = f"{equal} at {_span(first, end)}, {ranks}{left_out}"
        found.checks.append(passed(name, detail))
        found.checks += _rest(left, right, first, end)
    return found


def _ends(file: TraceFile) -> tuple[int, int]:
    bounds = step_bounds(file)
    return min(bounds), max(bounds)


def _span(first: int, end: int) -> str:
    return f"position {first}" if end - first == 1 else f"positions {first} to {end - 1}"


def _rest(left: TraceFile, right: TraceFile, first: int, end: int) -> Iterator[Check]:
    """Say what only one trace has."""
    for file, other in ((left, right), (right, left)):
        begins, ends = _ends(file)
        if begins < first:
            start = _ends(other)[0]
            why = f"{other.name} " + (f"begins at {start}" if start >= first else "has none there")
            yield not_run(f"{file.name}: {_span(begins, first)}", why)
        if ends > end:
            why = f"{other.name} has none" + ("" if other.is_whole else ": it was cut short")
            yield not_run(f"{file.name}: {_span(end, ends)}", why)


def _first(
    left: TraceFile, right: TraceFile, a: Group, b: Group, is_one_program: bool,
    found: Comparison,
) -> Difference | None:  # fmt: skip
    """Return the first difference of a group, or None after counting what is equal."""
    if is_one_program and a.covered == b.covered and a.phase is not None:
        return _first_cell(left, a, b, found)
    return first_value(left, right, a, b, found)


def _first_cell(left: TraceFile, a: Group, b: Group, found: Comparison) -> Difference | None:
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
    return difference_at(result, *at, ranks if left.tp > 1 else (), slices, lo, hi)
