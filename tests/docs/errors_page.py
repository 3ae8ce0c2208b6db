"""docs/errors.md, written from what the rows answered; the suite fails where the page is stale."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.docs.error_rows import GROUPS, SETUP, STALE, Row

_WIDTH = 240  # of a cell: lists of rules and norms go on
PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"


class Answer(NamedTuple):
    """What a row gave: exit code, the line without its first words, the hint or nothing."""

    code: int
    line: str
    hint: str


_TITLES = {
    1: ("Failed", "A file or stream could not be read or written."),
    2: ("Usage", "Bad options. Nothing was read of any weight, nothing written."),
    3: ("Inputs", "Missing, damaged, mismatched or stale. Every kind of damage to a checkpoint is "
        "in [damage.md](damage.md)."),
    4: ("Not to be trusted", "It finished, or was stopped, and the result is wrong or unproved: "
        "a comparison that found a difference, a value that is no number, a rank that died, hung "
        "past `--deadline` or disagreed."),
    5: ("This machine", "A device, driver, compiler or memory is absent or unfit. `k3tool doctor` "
        "says what is here and what to type next."),
}  # fmt: skip

_HEAD = """\
# Refusals

This page is written by its test (`pytest tests/docs --update-golden`), which runs every command on
it; the test fails where the page is stale.

A refusal is one line on stderr, `k3tool COMMAND: WHAT: got X, need Y`, and where one action would
help, a second one: `hint: ...`. Nothing is printed on stdout, nothing half-written stays behind,
and the exit code says which kind it is. Nobody should need a traceback; to report a bug there is
one:

```console
$ k3tool run ckpt --ids 1,,2 --traceback    # exit 2
```

shows the refusal, then where in the code it arose. An error without `k3tool COMMAND:` in front is a
bug of ours. Ctrl-C ends with 130, SIGTERM with 143, a closed terminal (SIGHUP) with 129, all after
ranks are stopped and unfinished files are gone; further signals do not hurry that. A signal that
whoever started the command had ignored (nohup, `trap ''`, a script's `&`) stays ignored. A reader
that goes away (`| head`) is no error and changes no verdict: a check that fails ends with its code
all the same. Words that stderr cannot take are dropped. `--json` changes no refusal.

The commands were run in a folder made so (`LM_HEAD` is where lm_head's first value lies; `{stale}`
was written by another version of the op table):

```sh
{setup}```

"""


def render(answers: Mapping[Row, Answer]) -> str:
    """Return the page."""
    parts = [_HEAD.format(setup=SETUP, stale=STALE)]
    for code in (2, 3, 4, 5, 1):
        title, words = _TITLES[code]
        parts.append(f"## {code}: {title}\n\n{words}\n\n")
        parts.append("| what is wrong | command | what it says | next step |\n|---|---|---|---|\n")
        parts += [_line(row, answers[row]) for row in GROUPS[code]]
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


def _line(row: Row, answer: Answer) -> str:
    following = answer.hint or "give what it needs"
    cells = (row.wrong, f"`{row.command}`", answer.line, following)
    return f"| {' | '.join(_cell(cell) for cell in cells)} |\n"


def _cell(text: str) -> str:
    text = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def answer_of(code: int, err: str) -> Answer:
    """Return an answer from an exit code and stderr, without what differs between machines."""
    lines = err.strip().splitlines()
    hint = lines.pop().strip().removeprefix("hint: ") if lines[-1].startswith("  hint: ") else ""
    line = re.sub(r"^k3tool( [a-z-]+)*: ", "", lines[-1])
    return Answer(code, _plain(line), _plain(hint))


def _plain(text: str) -> str:
    """Return text without digests, sizes of this machine and the folder it ran in."""
    text = re.sub(r"/\S*/(?=[\w.-]+)", "…/", text)
    text = re.sub(r"\b[0-9a-f]{12,64}\b", "…", text)
    text = re.sub(r"\b\d{7,}\b", "N", text)
    return re.sub(r"\b[\d.]+ [KMGT]?B (?=under|free|left)", "N ", text)


def check(text: str, update: bool) -> None:
    """Compare the page with the file, or write it."""
    if update:
        PAGE.write_text(text)
    assert PAGE.is_file(), f"no {PAGE.name}: pytest --update-golden writes it"
    assert PAGE.read_text() == text, f"{PAGE.name} is stale: pytest --update-golden, then review"
