"""docs/damage.md, written from what the suite found; the suite fails where the page is stale."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.faults.damage.case import Case
from tests.faults.damage.harness import HINT, Verdict
from tests.faults.damage.record import Record

PAGE = Path(__file__).resolve().parents[3] / "docs" / "damage.md"
_WIDTH = 260

_HEAD = """\
# What k3tool says about damaged checkpoints

This page is written by the damage suite (`pytest tests/faults/damage --update-golden`) from what
the commands answered; the suite fails where the page is stale. Each case is a copy of a small
checkpoint with one thing done to it, given to `inspect`, `shard --tp 2` and `run`.

* **Refused**: all three answer with the same message (file, tensor, found, needed) and the same
  next step, exit code 3, without a traceback and with nothing left behind. `inspect` reports all it
  finds, the others the first of it.
* **Legal**: all three answer 0, and tokens and logits are those of the healthy checkpoint, from the
  checkpoint itself and from its shards.
* **Values** are looked at where they are read: by `inspect --values`, by `shard` as it copies
  (scales), by `run` before the first use, and at TP 2 as it splits. They end with 4 where the files
  are whole, `run` at every degree; `shard` ends with 3, as it does for all that it refuses.

Damage that changes nothing, that nobody sees, or that is refused in other words fails the suite;
tests of the suite show that.
"""


def render(
    groups: Mapping[str, Sequence[Case]],
    verdicts: Mapping[str, Verdict],
    values: Mapping[str, Verdict],
    resources: Record,
) -> str:
    """Return the page."""
    parts = [_HEAD, _summary(groups, verdicts)]
    for title, cases in groups.items():
        rows = [(case.kind, case.instance, *_cells(verdicts[case.id])) for case in cases]
        parts += [f"## {title}\n", _table(("kind", "instance", *_ASKED, "what they say"), rows)]
    header = ("kind", "instance", "inspect --values", "shard", "run, TP 1 and 2", "what they say")
    parts += ["## Values\n", _table(header, [_row(*item) for item in values.items()])]
    rows = [_row(*item) for item in resources.verdicts.items()]
    parts += ["## Permission\n", _table(("kind", "instance", *_ASKED, "what they say"), rows)]
    answers = [(*asked, *answer) for asked, answer in resources.answers.items()]
    header = ("what is lacking", "command", "exit code", "answer")
    parts += ["## Resources\n", _table(header, answers)]
    return "\n".join(parts)


_ASKED = ("inspect", "shard", "run")


def _summary(groups: Mapping[str, Sequence[Case]], verdicts: Mapping[str, Verdict]) -> str:
    rows = []
    for title, cases in groups.items():
        for kind in dict.fromkeys(case.kind for case in cases):
            of_kind = [case for case in cases if case.kind == kind]
            codes = (
                _codes(getattr(verdicts[case.id], command) for case in of_kind)
                for command in _ASKED
            )
            n_legal = sum(case.is_legal for case in of_kind)
            rows.append((title, kind, len(of_kind), n_legal, *codes))
    header = ("group", "kind", "instances", "of them legal", *_ASKED)
    return f"## Kinds\n\nExit codes, with how many instances gave each.\n\n{_table(header, rows)}"


def _codes(codes: Iterable[int]) -> str:
    counts = sorted(Counter(codes).items())
    if len(counts) == 1:
        return str(counts[0][0])
    return ", ".join(f"{code} ({count})" for code, count in counts)


def _row(name: str, verdict: Verdict) -> tuple[object, ...]:
    return (*name.split(": ", 1), *_cells(verdict))


def _cells(verdict: Verdict) -> tuple[object, ...]:
    words = verdict.words.split(HINT)[0]
    # What a JSON parser says of itself depends on its version.
    words = re.sub(r"(invalid (?:JSON|header)) \((?!.* twice).*\)", r"\1", words)
    return verdict.inspect, verdict.shard, verdict.run, words or "the healthy one's tokens"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [_line(header), _line(["---"] * len(header))]
    lines += [_line([_cell(value) for value in row]) for row in rows]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    text = str(value).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    text = "".join(char if char.isprintable() else f"\\\\x{ord(char):02x}" for char in text)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def check(text: str, update: bool) -> None:
    """Compare the page with the file, or write it."""
    if update:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)
    assert PAGE.is_file(), f"no {PAGE.name}: pytest --update-golden writes it"
    assert PAGE.read_text() == text, f"{PAGE.name} is stale: pytest --update-golden, then review"
