"""trace.h5: the hash of every result of a run, step by step; docs/verify.md has the format.

A hash is the sum over words of mix(word ^ mix(position << 32 | column)), with columns numbered over
all ranks, so sums over slices, ranks and steps are hashes of what they cover together: they compare
whatever the cut. Schema 2 of kind `trace`; written and read a block of steps at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from k3tool.artifact import Artifact, Dataset, InputRef, open_artifact, write_large_artifact
from k3tool.errors import ArtifactError
from k3tool.fields import column, params_of, texts
from k3tool.isa.table import ALL_PHASES
from k3tool.targets import MOST_RANKS
from k3tool.trace.kept import Kept
from k3tool.trace.recorder import Recorder, Step
from k3tool.trace.results import NOT_KEPT, PLACES, ROWS, Array, Result, Results

TRACE_SCHEMA = 2
_BLOCK_WORDS = 1 << 21  # hashes of a rank that are in memory at once: 16 MiB
_NUMBERS = ("inst", "n_runs", "run_cols", "words")
_STEP_FIELDS = ("phase", "n_tokens", "position", "head_from")


class Given(NamedTuple):
    """A run's ids one behind the other: what a state held, the prompt behind it, what was chosen.

    The steps read all but the last one chosen, from the first position of the prompt on.
    """

    history: tuple[int, ...]
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]

    @property
    def asked(self) -> tuple[int, ...]:
        """Return what was there before the run chose a token."""
        return self.history + self.prompt


# -- writing -----------------------------------------------------------------------------------


def write_trace(
    path: Path,
    recorder: Recorder,
    given: Given,
    *,
    params: Mapping[str, object],
    inputs: Iterable[InputRef],
    target: str | None,
) -> str | None:
    """Write what ranks have recorded of a run that was `given` ids and chose others.

    Returns the content digest, None where no step is whole.

    Raises: K3Error when the file cannot be written.
    """
    blocks = _Blocks(recorder)
    if not blocks.rows:
        return None
    datasets: dict[str, Callable[[], Dataset]] = {}

    def put(name: str, data: Any, axes: tuple[str, ...], unit: str = "") -> None:
        datasets[name] = partial(Dataset, data, axes, unit)

    for key in Given._fields:
        put(key, np.array(getattr(given, key), "<u4"), ("position",), "token id")
    rows = np.array(blocks.rows, "<u4")
    for index, name in enumerate((*_STEP_FIELDS, "block")):
        put(f"steps/{name}", np.ascontiguousarray(rows[:, index]), ("step",), name)
    for phase, found in recorder.results.items():
        _put_results(put, phase, found)
    for rank in range(recorder.isa.tp):
        for block in range(blocks.count):
            name = f"rank-{rank:02d}/hashes-{block:06d}"
            datasets[name] = partial(blocks.dataset, rank, block)
    _put_values(datasets, put, recorder, blocks.rows)
    return write_large_artifact(
        path, "trace", TRACE_SCHEMA, datasets, inputs=inputs, params=params, target=target
    )


class _Blocks:
    """Which steps a block has: (phase, tokens, position, head_from, block) rows, and their hashes.

    Blocks are asked for rank by rank, so the recorded steps are gone through once a rank.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._steps: Iterator[Step] = iter(())
        self._at: tuple[int, int] = (-1, 0)
        self.rows: list[tuple[int, int, int, int, int]] = []
        words = block = 0
        for step in recorder.steps():
            size = step.hashes.shape[1]
            if words and words + size > _BLOCK_WORDS:
                words, block = 0, block + 1
            words += size
            self.rows.append((ALL_PHASES.index(step.phase), step.n_tokens, step.position,
                              step.head_from, block))  # fmt: skip
        self.count = block + 1

    def dataset(self, rank: int, block: int) -> Dataset:
        """Return a rank's hashes of a block, steps one after the other."""
        if self._at != (rank, block):
            assert block == 0, "blocks come in their order"
            self._steps = self._recorder.steps()
        n_steps = sum(row[-1] == block for row in self.rows)
        parts = [next(self._steps).hashes[rank] for _ in range(n_steps)]
        self._at = (rank, block + 1)
        return Dataset(np.concatenate(parts), ("hash",), "K3 hash")


def _put_results(put: Callable[..., None], phase: str, found: Results) -> None:
    for name in ("name", "op", "place", "rows"):
        texts_ = [str(getattr(result, name)) for result in found.results]
        put(f"{phase}/results/{name}", texts_, ("result",))
    for name in _NUMBERS:
        data = np.array([getattr(result, name) for result in found.results], "<u4")
        put(f"{phase}/results/{name}", data, ("result",), name)
    for name in ("result", "slice", "lo", "hi"):
        data = np.ascontiguousarray(getattr(found, name), "<u4")
        put(f"{phase}/cells/{name}", data, ("cell",), name)


def _put_values(
    datasets: dict[str, Callable[[], Dataset]], put: Callable[..., None], recorder: Recorder,
    rows: list[tuple[int, int, int, int, int]],
) -> None:  # fmt: skip
    """Put kept values by name: all ranks' columns; a partial result has an axis of ranks."""
    kept = recorder.kept
    if kept is None:
        return
    names: list[str] = []
    covered = []
    for phase, found in recorder.results.items():
        for index, result in enumerate(found.results):
            known = f"{phase}/{result.name}" in names or f"/{result.name}" in names
            if recorder.kept_rows[phase][index] == NOT_KEPT or known:
                continue
            here = _covered(kept, recorder, rows, result)
            if not here.any():
                continue
            datasets[f"values/{len(names):06d}"] = partial(_values, recorder, phase, index)
            names.append(f"/{result.name}" if _is_alike(recorder, result) else
                         f"{phase}/{result.name}")  # fmt: skip
            covered.append(here)
    put("values/names", names, ("value",))
    shape = (len(names), kept.last - kept.first + 1)
    put("values/covered", np.array(covered, "u1").reshape(shape), ("value", "position"), "flag")


def _is_alike(recorder: Recorder, result: Result) -> bool:
    """Return whether all phases that write a value of this name keep it in one form."""
    forms = {
        (other.place, other.n_runs, other.words)
        for found in recorder.results.values()
        for other in found.results
        if other.name == result.name
    }
    return len(forms) == 1


def _covered(
    kept: Kept, recorder: Recorder, rows: list[tuple[int, int, int, int, int]], result: Result
) -> Array:
    """Return of which kept positions a value was written, in any phase that keeps it alike."""
    alike = _is_alike(recorder, result)
    writers = {
        phase: other.rows
        for phase, found in recorder.results.items()
        for other in found.results
        if other.name == result.name and (alike or other == result)
    }
    here = np.zeros(kept.last - kept.first + 1, bool)
    for phase, n_tokens, position, head_from, _ in rows:
        name = ALL_PHASES[phase]
        if name not in writers:
            continue
        first = position + (head_from if writers[name] == "head" else 0)
        lo, hi = first - kept.first, position + n_tokens - kept.first
        here[max(lo, 0) : max(hi, 0)] = True
    return here


def _values(recorder: Recorder, phase: str, index: int) -> Dataset:
    """Return a kept result's bits: (positions, all columns), with ranks between if partial."""
    joined = recorder.kept_whole(phase, index)
    if joined is not None:
        return Dataset(joined, ("position", "column"), "f32 bits")
    ranks = recorder.kept_values(phase, index)
    return Dataset(np.stack(ranks, axis=1), ("position", "rank", "column"), "f32 bits")


# -- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Program:
    """A phase's results and cells as a trace has them."""

    results: tuple[Result, ...]
    result: Array
    slice: Array
    lo: Array
    hi: Array


def _stored_results(file: Artifact, at: str) -> tuple[Result, ...]:
    names = texts(file, f"{at}/name")
    n = len(names)
    op, place, rows = (texts(file, f"{at}/{key}", n) for key in ("op", "place", "rows"))
    inst, n_runs, run_cols, words = (
        column(file, f"{at}/{key}", "<u4", n_rows=n).tolist() for key in _NUMBERS
    )
    results = tuple(
        Result(names[i], op[i], inst[i], place[i], rows[i], n_runs[i], run_cols[i], words[i], 0)
        for i in range(n)
    )  # handles are the run's
    for result in results:
        known = result.place in PLACES and result.rows in ROWS
        if not known or min(result.n_runs, result.run_cols, result.words) < 1:
            raise ArtifactError(f"{file.path}: {at}", got=result.name, need="a place and columns")
    return results


class TraceFile:
    """An open trace; a context manager. `programs` are its phases' results."""

    def __init__(self, path: str | Path) -> None:
        """Open and check a trace. Raises: ArtifactError naming the file and what is damaged."""
        self._file = open_artifact(path, "trace", TRACE_SCHEMA)
        self.name = str(path)
        try:
            fields = params_of(self._file)
            self.tp = fields.count("tp", least=1, most=MOST_RANKS)
            for name in ("numerics", "eps"):
                fields.present(name)
            self.params = self._file.params
            self.programs = {phase: self._program(phase) for phase in self._phases()}
            self.step_rows = self._steps()
            self.given = self._ids()
            self._value_names = self._kept_names()
        except BaseException:
            self._file.close()
            raise

    def _ids(self) -> Given:
        """Return the run's ids. Raises: ArtifactError where steps are not behind the history."""
        found = (column(self._file, key, "<u4").tolist() for key in Given._fields)
        given = Given(*map(tuple, found))
        first = int(self.step_rows[:, 2].min())
        if first != len(given.history):
            need = f"{first} ids, what the first step is behind"
            raise ArtifactError(f"{self.name}: history", got=len(given.history), need=need)
        return given

    @property
    def is_whole(self) -> bool:
        """Return whether the run was recorded to its end."""
        return self.params.get("is_whole") is True

    def input(self, role: str) -> InputRef:
        """Return the input of a role. Raises: ArtifactError naming the file when it has none."""
        for ref in self._file.inputs:
            if ref.role == role:
                return ref
        raise ArtifactError(f"{self.name}: inputs", got=f"no {role}", need=f"a {role}")

    def _phases(self) -> list[str]:
        names = self._file.names()
        return [phase for phase in ALL_PHASES if f"{phase}/cells/result" in names]

    def _program(self, phase: str) -> Program:
        file = self._file
        results = _stored_results(file, f"{phase}/results")
        n = len(results)
        first = column(file, f"{phase}/cells/result", "<u4")
        cells = [
            column(file, f"{phase}/cells/{k}", "<u4", n_rows=len(first))
            for k in ("slice", "lo", "hi")
        ]
        if len(first) and int(first.max()) >= n:
            raise ArtifactError(f"{self.name}: {phase}/cells/result", got=int(first.max()),
                                need=f"below {n}")  # fmt: skip
        return Program(results, first, *cells)

    def _steps(self) -> Array:
        n = len(column(self._file, "steps/phase", "<u4"))
        names = (*_STEP_FIELDS, "block")
        rows = np.stack([column(self._file, f"steps/{k}", "<u4", n_rows=n) for k in names], axis=1)
        phases = [ALL_PHASES.index(phase) for phase in self.programs]
        if not np.isin(rows[:, 0], phases).all():
            raise ArtifactError(f"{self.name}: steps/phase", got="a phase without a program",
                                need="programs of all steps")  # fmt: skip
        if not (np.diff(rows[:, 4].astype(np.int64)) >= 0).all():
            raise ArtifactError(f"{self.name}: steps/block", got="no order", need="ascending")
        return rows

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.step_rows)

    def steps(self) -> Iterator[Step]:
        """Yield all steps; memory holds a block of them. Raises: ArtifactError where one is cut."""
        for block in np.unique(self.step_rows[:, 4]).tolist():
            rows = self.step_rows[self.step_rows[:, 4] == block]
            sizes = [len(self.programs[ALL_PHASES[phase]].result) for phase in rows[:, 0].tolist()]
            names = [f"rank-{rank:02d}/hashes-{block:06d}" for rank in range(self.tp)]
            data = [column(self._file, name, "<u8", n_rows=sum(sizes)) for name in names]
            at = 0
            for row, size in zip(rows.tolist(), sizes, strict=True):
                hashes = np.stack([rank[at : at + size] for rank in data])
                at += size
                yield Step(ALL_PHASES[row[0]], row[1], row[2], row[3], hashes)

    # -- values ----------------------------------------------

    @property
    def kept(self) -> Kept | None:
        """Return of what the trace has values, None where it has none."""
        found = self.params.get("kept")
        if not isinstance(found, dict) or not {"first", "last", "layers"} <= set(found):
            return None
        layers = None if found["layers"] is None else frozenset(found["layers"])
        return Kept(int(found["first"]), int(found["last"]), layers)

    def value_names(self, phase: str) -> dict[str, int]:
        """Return which values a phase has kept: their number by name."""
        return self._value_names.get(phase, {})

    def _kept_names(self) -> dict[str, dict[str, int]]:
        if "values/names" not in self._file.names():
            return {}
        pairs = [name.split("/", 1) for name in texts(self._file, "values/names")]
        return {
            phase: {pair[-1]: i for i, pair in enumerate(pairs) if pair[0] in ("", phase)}
            for phase in self.programs
        }

    def values(self, number: int) -> tuple[Array, Array]:
        """Return a kept value's bits, (positions, columns) or (positions, ranks, columns), and
        which positions it was written at.
        """
        covered = self._file.read("values/covered")[number].astype(bool)
        return self._file.read(f"values/{number:06d}"), covered

    # -- the end ----------------------------------------------

    @property
    def artifact(self) -> Artifact:
        """Return the open artifact."""
        return self._file

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()
