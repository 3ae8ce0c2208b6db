"""Compare a run's logits with a reference's, position by position, within stated tolerances.

Of each position that both have: the largest |difference| and its id, the rms of the differences,
KL(reference || run) in nats, and both choices with their margins. All in binary64. A value that is
not finite fails, on either side; a position that one side lacks is NOT RUN; nothing compared fails.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3tool.compare.differences import MAX_LOGIT_ERROR
from k3tool.compare.logits_files import Array, Logits, Section
from k3tool.errors import ArtifactError
from k3tool.progress import progress_of
from k3tool.tables import count_text, ranges_text
from k3tool.verdict import Check, failed, not_run, passed

POSITION_DTYPE = np.dtype(
    [
        ("step", "i1"),  # 1 for a row that a token was chosen from, 0 for one of given ids
        ("position", "<i8"),  # -1 where the prompt's length is not known
        ("row", "<i8"),  # in its section of the run
        ("max_abs", "<f8"),
        ("at", "<i8"),
        ("rms", "<f8"),
        ("kl", "<f8"),
        ("run_id", "<i8"),
        ("reference_id", "<i8"),
        ("run_margin", "<f8"),
        ("reference_margin", "<f8"),
    ]
)


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How far a run's logits may be from the reference's.

    `max_abs` of one logit; `rms` of one position, in standard deviations of the reference's logits;
    `kl` in nats; `flips` positions with another choice. The defaults are the gate that every
    implementation passes against the released code in float64. By Hoeffding's lemma differences of
    at most d keep KL within d^2 / 2, so that bound follows from the first.
    """

    max_abs: float = MAX_LOGIT_ERROR
    rms: float = 1e-5
    kl: float = MAX_LOGIT_ERROR**2 / 2
    flips: int = 0


_DEFAULT = Tolerances()


@dataclass(frozen=True, slots=True)
class LogitsComparison:
    """The checks, and one POSITION_DTYPE row for each pair of rows that was compared."""

    checks: tuple[Check, ...]
    positions: Array
    deviation: float


@dataclass(frozen=True, slots=True)
class _Pair:
    """Rows of the run and of the reference that are of the same positions."""

    run: Section
    reference: Section
    run_rows: npt.NDArray[np.int64]
    reference_rows: npt.NDArray[np.int64]

    @property
    def are_both_steps(self) -> bool:
        """Return whether each side was fed its own choices."""
        return self.run.name == self.reference.name == "steps"


def compare_logits(
    run: Logits, reference: Logits, tolerances: Tolerances = _DEFAULT
) -> LogitsComparison:
    """Compare two files of logits.

    Raises: ArtifactError for another vocabulary, or prompts of other lengths.
    """
    _require_same_shape(run, reference)
    absent: list[Check] = []
    pairs = _pairs(run, reference, absent)
    parts, sums, faults = [], _Deviation(), list[str]()
    n_bytes = sum(len(pair.run_rows) for pair in pairs) * run.vocab_size * 8
    done = 0
    with progress_of("comparing logits") as progress:

        def count(more: int) -> None:
            nonlocal done
            done += more
            progress(done, n_bytes)

        for pair in pairs:
            rows = _compare_pair(pair, sums, faults, count)
            parts.append(_up_to_other_inputs(pair, rows, absent))
    positions = np.concatenate([np.zeros(0, POSITION_DTYPE), *parts])
    if len(positions) == 0:
        check = failed("positions compared", "none: nothing to compare")
        return LogitsComparison((check, *absent), positions, 0.0)
    checks = [_finite(faults, len(positions))]
    checks += _within(positions, sums.deviation, tolerances)
    checks.append(_choices(positions, tolerances))
    return LogitsComparison((*checks, *absent), positions, sums.deviation)


def place(row: Array, *, with_id: bool = False) -> str:
    """Return where a row is, in words."""
    where = f"position {row['position']}" if row["position"] >= 0 else f"row {row['row']}"
    step = f", step {row['row']}" if row["step"] else ""
    at = f", id {row['at']}" if with_id else ""
    return f"{where}{step}{at}"


# -- which rows belong together --------------------------------------------------------------------


def _require_same_shape(run: Logits, reference: Logits) -> None:
    if run.vocab_size != reference.vocab_size:
        raise ArtifactError(
            f"{reference.name}: vocabulary", got=reference.vocab_size,
            need=f"{run.vocab_size}, as {run.name}",
            hint="compare logits of one checkpoint, without padding of the vocabulary",
        )  # fmt: skip
    mine, its = run.sections.get("prefill"), reference.sections.get("prefill")
    if mine is not None and its is not None and len(mine) != len(its):
        raise ArtifactError(
            f"{reference.name}: prefill", got=count_text(len(its), "position"),
            need=f"{len(mine)}, as {run.name}", hint="compare runs of one prompt",
        )  # fmt: skip


def _pairs(run: Logits, reference: Logits, absent: list[Check]) -> list[_Pair]:
    """Pair rows: section by section where both have it, by position where their names differ."""
    pairs = []
    for name, section in run.sections.items():
        same = reference.sections.get(name)
        others = [each for key, each in reference.sections.items() if key not in run.sections]
        pairs += [_pair(section, each) for each in (others if same is None else [same])]
    for mine, lacks, is_run in ((run, reference.name, True), (reference, run.name, False)):
        for section in mine.sections.values():
            have: set[int] = set()
            for pair in pairs:
                if (pair.run if is_run else pair.reference) is section:
                    have |= set((pair.run_rows if is_run else pair.reference_rows).tolist())
            _note_absent(section, have, lacks, absent)
    return [pair for pair in pairs if len(pair.run_rows)]


def _pair(run: Section, other: Section) -> _Pair:
    """Pair two sections by position, or by row where they are of one kind and count alike."""
    if run.name == other.name and run.name != "logits":
        mine = its = np.arange(min(len(run), len(other)))
    elif run.positions is None or other.positions is None:
        mine = its = np.arange(0)
    else:
        _, mine, its = np.intersect1d(
            run.positions, other.positions, assume_unique=True, return_indices=True
        )
    return _Pair(run, other, mine, its)


def _note_absent(section: Section, have: set[int], lacks: str, absent: list[Check]) -> None:
    missing = [row for row in range(len(section)) if row not in have]
    if not missing:
        return
    where = f"rows {ranges_text(missing)}"
    if section.positions is not None:
        where = f"positions {ranges_text(sorted(int(section.positions[row]) for row in missing))}"
    absent.append(not_run(f"{section.name}, {where}", f"not in {lacks}"))


# -- numbers ---------------------------------------------------------------------------------------


class _Deviation:
    """The standard deviation of all numbers that were added, by mean and squares of blocks."""

    def __init__(self) -> None:
        self._n, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, values: Array) -> None:
        if values.size == 0:
            return
        mean, n = float(values.mean()), values.size
        squares = float(((values - mean) ** 2).sum())
        gap, total = mean - self._mean, self._n + n
        self._squares += squares + gap * gap * self._n * n / total
        self._mean += gap * n / total
        self._n = total

    @property
    def deviation(self) -> float:
        return math.sqrt(self._squares / self._n) if self._n else 0.0


def _compare_pair(
    pair: _Pair, sums: _Deviation, faults: list[str], progress: Callable[[int], None]
) -> Array:
    out = np.zeros(len(pair.run_rows), POSITION_DTYPE)
    out["step"], out["row"] = pair.run.name == "steps", pair.run_rows
    out["position"] = -1 if pair.run.positions is None else pair.run.positions[pair.run_rows]
    for nth, (mine, its) in enumerate(zip(pair.run_rows, pair.reference_rows, strict=True)):
        a, b = pair.run.block(mine, mine + 1)[0], pair.reference.block(its, its + 1)[0]
        is_good = True
        for name, values in (("run", a), ("reference", b)):
            finite = np.isfinite(values)
            if not finite.all():
                is_good, wrong = False, int(np.argmin(finite))
                faults.append(f"{name} has {values[wrong]} at ({place(out[nth])}, id {wrong})")
        with np.errstate(over="ignore", invalid="ignore"):  # finite, and their squares may not be
            if is_good:
                sums.add(b)
            _measure(out[nth : nth + 1], a, b)
        progress(a.nbytes)
    return out


def _measure(row: Array, run: Array, reference: Array) -> None:
    """Fill in one row's numbers; where a logit is not finite they are infinitely far."""
    for name, values in (("run", run), ("reference", reference)):
        first = int(np.argmax(values))  # of equals, and of NaN, the lowest id
        second = max(part.max() for part in (values[:first], values[first + 1 :]) if len(part))
        row[f"{name}_id"], row[f"{name}_margin"] = first, values[first] - second
    difference = np.abs(run - reference)
    difference[~np.isfinite(difference)] = np.inf
    row["at"] = int(np.argmax(difference))
    row["max_abs"] = difference.max()
    row["rms"] = math.sqrt(float(np.mean(difference**2)))
    row["kl"] = divergence(run, reference) if math.isfinite(row["max_abs"][0]) else math.inf


def divergence(run: Array, reference: Array) -> float:
    """Return KL(reference || run) of two finite rows of logits, in nats.

    With d = run - reference and p = softmax(reference) it is log(sum p e^d) - sum p d: taken so,
    around d's mean, a difference in the last bits is not lost as in a difference of two logarithms.
    """
    shifted = reference - reference.max()
    p = np.exp(shifted)
    p /= p.sum()
    d = run - reference
    d = d - float((p * d).sum())  # not p @ d: of one row it only wakes the library's threads
    if float(d.max()) < 1.0:
        return max(0.0, math.log1p(float((p * np.expm1(d)).sum())))
    top = float((shifted + d).max())
    return (
        top
        + math.log(float(np.exp(shifted + d - top).sum()))
        - math.log(float(np.exp(shifted).sum()))
    )


def _up_to_other_inputs(pair: _Pair, rows: Array, absent: list[Check]) -> Array:
    """Leave out steps behind a first other choice: from there each side was fed other ids."""
    flips = np.flatnonzero(rows["run_id"] != rows["reference_id"])
    if not pair.are_both_steps or len(flips) == 0 or flips[0] + 1 == len(rows):
        return rows
    first = int(flips[0])
    behind = rows[first + 1 :]["row"].tolist()
    reason = f"behind the other choice at {place(rows[first])}: other ids were fed"
    absent.append(not_run(f"steps {ranges_text(behind)}", reason))
    return rows[: first + 1]


# -- checks ----------------------------------------------------------------------------------------


def _finite(faults: Sequence[str], n_rows: int) -> Check:
    name = "every logit finite"
    if faults:
        more = f" (and {len(faults) - 1} more rows)" if len(faults) > 1 else ""
        return failed(name, faults[0] + more)
    return passed(name, f"{count_text(n_rows, 'row')} of both")


def _within(positions: Array, deviation: float, tolerances: Tolerances) -> list[Check]:
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = deviation if math.isfinite(deviation) else 0.0  # of logits beyond all sense
        relative = np.where(positions["rms"] == 0, 0.0, positions["rms"] / scale)
    return [
        _worst("largest |difference|", positions, positions["max_abs"], tolerances.max_abs, True),
        _worst("rms / deviation", positions, relative, tolerances.rms, False),
        _worst("KL(reference || run)", positions, positions["kl"], tolerances.kl, False),
    ]


def _worst(name: str, positions: Array, numbers: Array, tolerance: float, with_id: bool) -> Check:
    at = int(np.argmax(numbers))
    worst = float(numbers[at])
    where = place(positions[at], with_id=with_id)
    ratio = worst / tolerance
    text = f"worst={ratio:.2f}x tol at ({where}): {worst:.3g}, tol {tolerance:.3g}"
    return passed(name, text) if worst <= tolerance else failed(name, text)


def _choices(positions: Array, tolerances: Tolerances) -> Check:
    name = "same choices"
    flips = np.flatnonzero(positions["run_id"] != positions["reference_id"])
    n_rows = len(positions)
    text = f"{n_rows - len(flips)} of {n_rows}"
    if len(flips):
        row = positions[flips[0]]
        margins = (float(row["run_margin"]), float(row["reference_margin"]))
        # Within the tolerance of one logit a gap moves by twice that, and here it changed sign.
        is_near = max(margins) <= 2 * tolerances.max_abs
        text += (
            f"; first flip at {place(row)}: run has id {row['run_id']} (margin {margins[0]:.3g}), "
            f"reference {row['reference_id']} (margin {margins[1]:.3g}): "
            f"{'near tie' if is_near else 'real'}"
        )
    return passed(name, text) if len(flips) <= tolerances.flips else failed(name, text)
