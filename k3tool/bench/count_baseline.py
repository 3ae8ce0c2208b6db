"""Compare counts with earlier ones: what `bench chain`, `simulate`, `cache` and `roofline` print.

Counts have no spread, so whatever differs is a change of the program or of what it was made from.
The machine says nothing about them. Wrong if the inputs had to be the same: two plans are compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from k3tool.bench.baseline import ratio_of, read_printed, require_same
from k3tool.bench.shapes import NUMBER, fault
from k3tool.tables import Column, Table, number_text

_LABELS = ("module", "op", "slots", "seed")  # what names an element of a list
_NO_COUNTS = frozenset({"bench", "settings", "machine", "against"})
_DIGITS = 9


class CountChange(NamedTuple):
    """One count that differs; None: the other has none of that name."""

    name: str
    before: float | None
    now: float | None

    @property
    def ratio(self) -> float | None:
        """Return now over before, None where there is none."""
        if self.now is None or self.before is None:
            return None
        return ratio_of(self.now, self.before)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return self._asdict() | {"ratio": self.ratio}


def read_counts(path: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return earlier counts; `now` says what is about to be counted: `bench`, `settings`, and the
    `machine` where it has a part in them.

    Raises: ArtifactError where the file is none, or of something else.
    """
    found = read_printed(path, now, "counts", lambda data: any(True for _ in counts_of(data)))
    for name, need_same in now.items():
        require_same(path, name, found.get(name), need_same)
    return found


def counts_of(data: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers of a JSON value by the path to each; elements of lists by what they are."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if name or key not in _NO_COUNTS:
                yield from counts_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(data, list):
        for at, value in enumerate(data):
            yield from counts_of(value, f"{name}[{_label(value, at)}]")
    elif fault(NUMBER, data) is None:
        assert isinstance(data, int | float)
        yield name, data


def _label(value: object, at: int) -> object:
    named = [value[key] for key in _LABELS if key in value] if isinstance(value, dict) else []
    return named[0] if named else at


def compare_counts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[CountChange]:
    """Return the counts that differ, in the order of now; those that are gone come last."""
    old, new = dict(counts_of(before)), dict(counts_of(now))
    names = [*new, *(name for name in old if name not in new)]
    changes = [CountChange(name, old.get(name), new.get(name)) for name in names]
    return [change for change in changes if change.before != change.now]


def count_lines(changes: Sequence[CountChange]) -> list[str]:
    """Return the comparison as a table, or that there is no difference."""
    if not changes:
        return ["against the baseline: all counts as before"]
    columns = [Column("against the baseline", "left"), Column("before"), Column("now"),
               Column("now / before")]  # fmt: skip
    rows = [
        (c.name, _text(c.before), _text(c.now), "-" if c.ratio is None else f"{c.ratio:.3f}")
        for c in changes
    ]
    return Table(columns, rows).text_lines()


def _text(value: float | None) -> str:
    return "-" if value is None else number_text(value, _DIGITS)
