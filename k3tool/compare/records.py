"""A record of tokens, whichever file it came from: streams by rank, and what is known of the run.

A record says which columns it has; two are compared in what both have. It knows no file format
(`read_records` chooses the reader by the file's first bytes), and it compares nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.checkpoint.regular_file import open_regular
from k3tool.compare.event_lines import Answer, LineReader, Request
from k3tool.compare.id_lists import read_ids
from k3tool.compare.spill import Columns
from k3tool.errors import ArtifactError, hinted, quoted, shown
from k3tool.progress import progress_of
from k3tool.runtime.tokens import TokenFile, read_tokens

NEED = "a record of tokens: tokens.h5, lines of JSON or token ids"
# Marks that formats put first, with what the file is to be made into.
_NO_RECORD = (
    (b"\x89HDF\r\n", "HDF5 that this tool did not write"),
    (b"PK\x03\x04", "a zip or npz archive"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
    (b"\x1f\x8b", "a gzip file"),
)
_BOM = b"\xef\xbb\xbf"
_FIRST_BYTES = 4096
# Columns in the order of messages. `margin` is best - second, kept where those two are not.
_ORDER = ("step", "position", "id", "best", "second", "margin", "logits_digest", "digest")
_BITS = ("best", "second", "margin", "logits_digest", "digest")


@dataclass(frozen=True, slots=True)
class Record:
    """One answer's streams. `ranks[r]` (N,) has at least `step` and `id`, in the file's order.

    `request` names it among several of `file`, None where the file has one answer without a name.
    `fields` are the columns that were recorded. `n_ranks` is how many ranks ran, None where the
    file knows no ranks. `facts` are what the file says of the run (checkpoint, numerics, prompt,
    prompt_tokens, tp, sampling), each with its text. `faults` were met while reading: the record
    must not be trusted.
    """

    file: str
    request: Request
    kind: str
    ranks: Mapping[int, Columns]
    fields: tuple[str, ...]
    n_ranks: int | None
    facts: Mapping[str, tuple[object, str]]
    program: str | None = None
    faults: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return what it is called in messages."""
        return self.file if self.request is None else f"{self.file} request {shown(self.request)}"

    @property
    def has_bits(self) -> bool:
        """Return whether its numbers can be held to the bit: the run is known to be ours."""
        return {"checkpoint", "numerics"} <= set(self.facts)

    @property
    def is_sampled(self) -> bool:
        """Return whether its tokens are known to be drawn: margins then explain nothing."""
        return self.facts.get("sampling", (None, ""))[0] is not None

    def stream(self) -> Columns:
        """Return the lowest rank's rows with the digest of all ranks' logits where that is there.

        A copy only where something is added up.
        """
        first = min(self.ranks)
        rows = self.ranks[first]
        if "logits_digest" not in self.fields or len(self.ranks) == 1:
            return rows
        rows = rows.copy()
        for rank, other in self.ranks.items():
            if rank != first and len(other) == len(rows):  # unequal lengths fail by themselves
                rows["logits_digest"] += other["logits_digest"]
        return rows


@hinted("docs/verify.md says what of such a file is read")
def read_records(path: Path) -> list[Record]:
    """Read a file's records of tokens, one a request; its first bytes say of which kind it is.

    Raises: ArtifactError naming the file and what is no record, or where it is damaged.
    """
    start = _first_bytes(path)
    if start.startswith(b"k3tool "):
        return [of_tokens(read_tokens(path))]
    for mark, what in _NO_RECORD:
        if start.startswith(mark):
            raise ArtifactError(str(path), got=what, need=NEED)
    text = start.removeprefix(_BOM).lstrip()
    with progress_of(f"reading {path}") as progress:
        if text[:1] in (b"{", b"["):
            return _of_lines(LineReader(path, progress).read())
        ids = read_ids(path, progress)
    return [Record(str(path), None, "ids", {0: ids}, ("step", "id"), None, {})]


def _first_bytes(path: Path) -> bytes:
    """Return enough of a file to know its kind: spaces may come first."""
    with open(open_regular(path, NEED, is_fetched=False), "rb") as file:
        start = file.read(_FIRST_BYTES)
        while start and not start.removeprefix(_BOM).strip():
            more = file.read(_FIRST_BYTES)
            if not more:
                break
            start = more
    return start


def of_tokens(file: TokenFile) -> Record:
    """Return the record of a tokens.h5."""
    identity, numerics = file.input("checkpoint").content_sha256, file.params["numerics"]
    facts = {
        "checkpoint": (identity, f"{identity[:16]}.."),
        "numerics": (numerics, shown(numerics)),
        "prompt": (file.prompt, quoted(file.prompt)),
        "prompt_tokens": (len(file.prompt), str(len(file.prompt))),
        "tp": (file.tp, str(file.tp)),
        "sampling": _sampling(file.params.get("sampling")),
    }
    # Streams emitted in memory have no digest of their own: two of them are no one program.
    program = file.input("isa").content_sha256 or None
    return Record(file.name, None, "tokens.h5", file.ranks, _ORDER, file.tp, facts, program)


def _sampling(value: object) -> tuple[object, str]:
    """Return how tokens were chosen, and in words."""
    return value, "none (the best is taken)" if value is None else shown(value)


def _of_lines(lines: LineReader) -> list[Record]:
    return [_of_answer(lines, request, answer) for request, answer in lines.answers.items()]


def _of_answer(lines: LineReader, request: Request, answer: Answer) -> Record:
    start: Mapping[str, Any] = lines.start or {}
    facts: dict[str, tuple[object, str]] = {}
    if isinstance(start.get("checkpoint"), str):
        facts["checkpoint"] = (start["checkpoint"], f"{start['checkpoint'][:16]}..")
    if "numerics" in start:
        facts["numerics"] = (start["numerics"], shown(start["numerics"]))
    if "tp" in start:
        facts["tp"] = (start["tp"], str(start["tp"]))
    n_prompt = answer.n_prompt
    if request is None:  # of several requests each has a prompt, and may have a sampler, of its own
        n_prompt = start["prompt_tokens"] if isinstance(start.get("prompt_tokens"), int) else None
        if "sampling" in start:
            facts["sampling"] = _sampling(start["sampling"])
    if n_prompt is not None:
        facts["prompt_tokens"] = (n_prompt, str(n_prompt))
    fields = {"step", "id"}
    if lines.is_ours:
        fields |= (
            {"position", "margin"} if {"checkpoint", "numerics"} <= set(facts) else {"position"}
        )
    return Record(
        str(lines.path), request, "k3tool events" if lines.is_ours else "JSONL", answer.ranks,
        tuple(name for name in _ORDER if name in fields), lines.n_ranks, facts,
        faults=tuple(answer.faults),
    )  # fmt: skip


def common_fields(left: Record, right: Record) -> tuple[str, ...]:
    """Return what two records can be compared in: numbers to the bit only of our own runs.

    `digest` is of one program's replicated results.
    """
    both = [name for name in _ORDER if name in left.fields and name in right.fields]
    if not (left.has_bits and right.has_bits):
        both = [name for name in both if name not in _BITS]
    if left.program is None or left.program != right.program:
        both = [name for name in both if name != "digest"]
    return tuple(both)


def values(rows: Columns, field: str) -> Columns:
    """Return a column in the form that is compared: floats as their bits, counts as integers.

    As bits a NaN equals itself and -0 is not +0.
    """
    column = margins(rows) if field == "margin" else rows[field]
    if column.dtype.kind == "f":
        return np.ascontiguousarray(column).view(f"<u{column.dtype.itemsize}")
    return column.astype(np.int64) if field == "position" else column


def margins(rows: Columns) -> Columns:
    """Return best - second of each row, NaN where it is unknown."""
    names = rows.dtype.names or ()
    if "margin" in names:
        return rows["margin"]
    if "best" not in names:
        return np.full(len(rows), np.nan)
    return rows["best"].astype(np.float64) - rows["second"].astype(np.float64)
