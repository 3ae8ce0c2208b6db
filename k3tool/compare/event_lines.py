"""Records of tokens as lines of JSON: the events of `run --json`, and other engines' lines.

A line is an object with one id (`token_id`, `token` or `id`) or a list of them (`token_ids`,
`tokens` or `ids`), or it is a list of ids. It may have `request`, of several in one file, and
`rank`; beside one id `step` (from 0) and `margin`, or `best` and `second`, all documented in
docs/verify.md. A line with no name of ids is refused: skipped, it might have been a token.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.checkpoint.json_text import json_fault, json_kind, parse_json
from k3tool.checkpoint.regular_file import open_regular, unreadable
from k3tool.compare.id_lists import MOST_ID
from k3tool.compare.spill import ROW_DTYPE, Columns, Spill
from k3tool.errors import ArtifactError, listed, quoted
from k3tool.progress import Progress
from k3tool.tables import count_text
from k3tool.targets import MOST_RANKS

ONE_ID = ("token_id", "token", "id")
MANY_IDS = ("token_ids", "tokens", "ids")
Request = str | int | None
_EVENTS = ("start", "token", "finished", "end")
_NEED = "lines of JSON with token ids"
_NEED_IDS = f"one of {', '.join(ONE_ID)}, or of {', '.join(MANY_IDS)}"
MOST_LINE_BYTES = 1 << 26
_MOST_FAULTS = 3
_PROGRESS_LINES = 1024  # between two words to `progress`


@dataclass(slots=True)
class Answer:
    """What a file has of one request: rows by rank, and what a record must not have.

    `listed` are the ids that the event at its end lists, as their number and digest; `n_prompt` is
    the length of its prompt where that is said.
    """

    spills: dict[int, Spill] = field(default_factory=dict)
    ranks: dict[int, Columns] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    listed: tuple[int, bytes] | None = None
    n_prompt: int | None = None

    def fault(self, text: str) -> None:
        """Note a fault; some are enough."""
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(text)

    def spill(self, rank: int) -> Spill:
        """Return where a rank's rows go."""
        if rank not in self.spills:
            self.spills[rank] = Spill()
        return self.spills[rank]

    def check_listed(self) -> None:
        """Hold the ids that the event at the end lists against those of the events before it."""
        if self.listed is not None and self.listed != _summary(self.ranks[0]["id"]):
            n_ids, n_tokens = self.listed[0], len(self.ranks[0])
            self.fault(
                f"the event at its end lists {n_ids} ids, not those of the {n_tokens} events"
            )


class LineReader:
    """Reads one file of lines; see the module for what a line may be.

    After `read`: `answers` by request (None where lines name none), `n_ranks` (None where no line
    names a rank), `is_ours` for the events of run, and `start`, that event.
    """

    def __init__(self, path: Path, progress: Progress = lambda done, total: None) -> None:
        """Take a file, which `read` opens; `progress` gets bytes."""
        self.path = path
        self._progress = progress
        self.answers: dict[Request, Answer] = {}
        self.n_ranks: int | None = None
        self.is_ours = False
        self.start: Mapping[str, Any] | None = None
        self._end: Mapping[str, Any] | None = None
        self._keys: tuple[bool, ...] | None = None
        self._line = 0
        self._is_first = True

    def read(self) -> "LineReader":
        """Read all lines. Raises: ArtifactError naming file and line."""
        for value in self._lines():
            if self._is_first:
                self.is_ours = isinstance(value, dict) and "event" in value
                self._is_first = False
            if self.is_ours:
                self._event(value)
            else:
                self._foreign(value)
        if self.is_ours and not self.answers and not self._is_batch:
            self.answers[None] = Answer({0: Spill()})
        ranks = set[int]()
        for answer in self.answers.values():
            answer.ranks = {rank: spill.rows() for rank, spill in sorted(answer.spills.items())}
            ranks |= set(answer.ranks)
        if self.is_ours:
            self._finish()
        elif self._keys is not None and self._keys[1]:
            self.n_ranks = max(ranks) + 1
        return self

    @property
    def _is_batch(self) -> bool:
        return self.start is not None and "requests" in self.start

    def _lines(self) -> Iterator[Any]:
        """Yield each line's value; empty lines are none."""
        try:
            with open(open_regular(self.path, _NEED), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                while raw := file.readline(MOST_LINE_BYTES):
                    self._line += 1
                    if len(raw) == MOST_LINE_BYTES:
                        raise self._refusal(f"more than {MOST_LINE_BYTES} bytes", "a shorter line")
                    if raw.removeprefix(b"\xef\xbb\xbf" if self._line == 1 else b"").strip():
                        yield self._parsed(raw)
                    if self._line % _PROGRESS_LINES == 0:
                        self._progress(file.tell(), size)
        except OSError as error:
            raise unreadable(self.path, _NEED, error) from None

    def _parsed(self, raw: bytes) -> Any:
        try:
            return parse_json(raw)  # it takes a BOM, and refuses a key that stands twice
        except ValueError as error:
            raise self._refusal(
                f"invalid JSON ({json_fault(error)})", "a whole line of JSON"
            ) from None

    # -- lines of other engines ---------------------------------------------------------------

    def _foreign(self, value: Any) -> None:
        if isinstance(value, list):
            value = {"ids": value}
        if not isinstance(value, dict):
            raise self._refusal(json_kind(value), "a JSON object or a list of ids")
        if "event" in value:
            raise self._refusal("an event of run", "lines of one kind: the first had no event")
        name = self._id_key(value)
        keys = ("step" in value, "rank" in value, "request" in value, name in MANY_IDS)
        if self._keys is None:
            self._keys = keys
        elif keys != self._keys:
            need = "the same of step, rank, request and lists in every line"
            raise self._refusal(f"keys {listed(value)}", need)
        rank = self._count(value, "rank", MOST_RANKS - 1) if keys[1] else 0
        answer = self._answer(value)
        if name in MANY_IDS:
            if keys[0]:
                raise self._refusal("a step beside a list", "a list alone: its ids are in order")
            self._extend(answer.spill(rank), value[name], name)
        else:
            self._add(answer, rank, value, name)

    def _answer(self, value: Mapping[str, Any]) -> Answer:
        """Return the answer that a line is of."""
        request = value.get("request")
        if "request" in value and type(request) not in (str, int):
            raise self._refusal(f"request {quoted(request)}", "a text or an integer")
        if request not in self.answers:
            self.answers[request] = Answer()
        return self.answers[request]

    def _id_key(self, value: Mapping[str, Any]) -> str:
        found = [name for name in (*ONE_ID, *MANY_IDS) if name in value]
        if not found:
            raise self._refusal(f"keys {listed(value)}", _NEED_IDS)
        found = [name for name in found if not _is_text(value[name])] or found[:1]
        if any(value[name] != value[found[0]] for name in found):
            raise self._refusal(f"{listed(found)}, which differ", _NEED_IDS)
        return found[0]

    def _extend(self, spill: Spill, ids: Any, name: str) -> None:
        self._check_ids(ids, name)
        rows = np.zeros(len(ids), ROW_DTYPE)
        rows["id"], rows["position"], rows["margin"] = ids, -1, np.nan
        rows["step"] = len(spill) + np.arange(len(ids))
        spill.extend(rows)

    def _add(self, answer: Answer, rank: int, value: Mapping[str, Any], name: str) -> None:
        spill = answer.spill(rank)
        token = self._check_id(value[name], name)
        step = self._count(value, "step", MOST_ID) if "step" in value else len(spill)
        position = self._count(value, "position", MOST_ID) if self.is_ours else -1
        spill.append((step, position, token, self._margin(answer, value, step)))

    def _margin(self, answer: Answer, value: Mapping[str, Any], step: int) -> float:
        """Return what a line says of best - second, NaN where it says nothing."""
        if value.get("margin") is not None:
            margin = self._number(value, "margin")
        elif value.get("best") is not None and value.get("second") is not None:
            margin = self._number(value, "best") - self._number(value, "second")
        else:
            return math.nan
        if not math.isfinite(margin) or margin < 0:
            answer.fault(f"the margin of step {step} is {margin}")
        return margin

    # -- events of run ------------------------------------------------------------------------

    def _event(self, value: Any) -> None:
        kind = value.get("event") if isinstance(value, dict) else None
        if kind not in _EVENTS:
            need = f"an event that is {', '.join(_EVENTS)}, as in the first line"
            raise self._refusal(quoted(kind), need)
        if self._end is not None:
            raise self._refusal(f"{kind} behind end", "one run in a file")
        if kind == "start":
            if self.start is not None or self.answers:
                raise self._refusal("start behind other events", "one run in a file")
            self.start = value
            self._count(value, "tp", MOST_RANKS)
        elif kind == "end":
            self._end = value
        else:
            self._event_of(self._answer(value), value, kind)

    def _event_of(self, answer: Answer, value: Mapping[str, Any], kind: str) -> None:
        """Take a request's token, or its end."""
        if answer.listed is not None:
            raise self._refusal(f"{kind} of a request that is finished", "one end of each")
        if kind == "finished":
            if "request" not in value:
                raise self._refusal("finished without request", "a request that is finished")
            answer.listed = _summary(self._check_ids(value.get("ids"), "ids"))
            answer.n_prompt = self._count(value, "prompt_tokens", MOST_ID)
            answer.spill(0)  # it may have no token
            return
        for name in ("id", "step"):
            if name not in value:
                raise self._refusal(f"a token without {name}", f"a token with {name}")
        self._add(answer, 0, value, "id")
        need = None if self.start is None else self.start["tp"]
        if need is not None and value.get("ranks_agree", need) != need:
            got = quoted(value["ranks_agree"])
            answer.fault(f"step {value['step']}: {got} of {count_text(need, 'rank')} agree")

    def _finish(self) -> None:
        """Hold what a run says at its end against what was read."""
        is_whole = self._end is not None or self.start is None
        for request, answer in self.answers.items():
            if not is_whole:
                answer.fault("no end event: the run was cut short, or is not over")
            if request is None and self._end is not None:
                answer.listed = _summary(self._check_ids(self._end.get("tokens"), "tokens"))
            if request is not None and answer.listed is None and self.start is not None:
                answer.fault("no finished event: the request was cut short")
            answer.check_listed()
        if self._is_batch and self._end is not None:
            n_requests = self._count(self.start or {}, "requests", MOST_ID)
            if len(self.answers) != n_requests:
                got = f"{count_text(len(self.answers), 'request')} with tokens"
                raise self._refusal(got, f"{n_requests}, as start says")
            n_tokens = sum(len(answer.ranks[0]) for answer in self.answers.values())
            if n_tokens != self._count(self._end, "tokens", MOST_ID):
                got = f"{count_text(n_tokens, 'token')} of all requests"
                raise self._refusal(got, f"{self._end['tokens']}, as end says")

    # -- values -------------------------------------------------------------------------------

    def _check_ids(self, ids: Any, name: str) -> list[int]:
        if not isinstance(ids, list):
            raise self._refusal(f"{name}: {json_kind(ids)}", "a list of ids")
        for nth, each in enumerate(ids):
            self._check_id(each, f"{name}[{nth}]")
        return ids

    def _check_id(self, value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_ID:
            raise self._refusal(f"{name} {quoted(value)}", f"a token id, 0 to {MOST_ID}")
        return value

    def _count(self, value: Mapping[str, Any], name: str, most: int) -> int:
        number = value.get(name)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= most:
            raise self._refusal(f"{name} {quoted(number)}", f"{name}, an integer to {most}")
        return number

    def _number(self, value: Mapping[str, Any], name: str) -> float:
        number = value[name]
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise self._refusal(f"{name} {quoted(number)}", f"{name}, a number")
        return float(number)

    def _refusal(self, got: str, need: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: line {self._line}", got=got, need=need)


def _is_text(value: object) -> bool:
    """Return whether a value is words: beside an id, engines write a token's text or a name so."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(each, str) for each in texts)


def _summary(ids: Columns | list[int]) -> tuple[int, bytes]:
    """Return how many ids there are, and their digest."""
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(ids), 1 << 16):
        digest.update(np.array(ids[start : start + (1 << 16)], "<u4").tobytes())
    return len(ids), digest.digest()
