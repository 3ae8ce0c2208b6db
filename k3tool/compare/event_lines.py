"""Records of tokens as lines of JSON: the events of `run --json`, and other engines' lines.

A line is an object with one id (`token_id`, `token` or `id`) or a list of them (`token_ids`,
`tokens` or `ids`), or it is a list of ids. Beside one id a line may have `step` (from 0), `rank`,
and `margin` or `best` and `second`, all documented in docs/verify.md. A line with none of the
names of ids is refused: skipped, it might have been a token.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
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
_EVENTS = ("start", "token", "end")
_NEED = "lines of JSON with token ids"
_NEED_IDS = f"one of {', '.join(ONE_ID)}, or of {', '.join(MANY_IDS)}"
MOST_LINE_BYTES = 1 << 26
_MOST_FAULTS = 3
_PROGRESS_LINES = 1024  # between two words to `progress`


class LineReader:
    """Reads one file of lines into streams by rank; see the module for what a line may be.

    After `read`: `ranks` and `n_ranks` (None where no line names a rank), `is_ours` for the events
    of run, `start` that event, `faults` what was read that a record must not have.
    """

    def __init__(self, path: Path, progress: Progress = lambda done, total: None) -> None:
        """Take a file, which `read` opens; `progress` gets bytes."""
        self.path = path
        self._progress = progress
        self.ranks: dict[int, Columns] = {}
        self.n_ranks: int | None = None
        self.is_ours = False
        self.start: Mapping[str, Any] | None = None
        self.faults: list[str] = []
        self._end: Mapping[str, Any] | None = None
        self._keys: tuple[bool, ...] | None = None
        self._streams: dict[int, Spill] = {}
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
        self.ranks = {rank: spill.rows() for rank, spill in sorted(self._streams.items())}
        if self.is_ours:
            self._finish()
        elif self._keys is not None and self._keys[1]:
            self.n_ranks = max(self.ranks) + 1
        return self

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
            raise self._refusal(json_fault(error), "a whole line of JSON") from None

    # -- lines of other engines ---------------------------------------------------------------

    def _foreign(self, value: Any) -> None:
        if isinstance(value, list):
            value = {"ids": value}
        if not isinstance(value, dict):
            raise self._refusal(json_kind(value), "a JSON object or a list of ids")
        if "event" in value:
            raise self._refusal("an event of run", "lines of one kind: the first had no event")
        name = self._id_key(value)
        keys = ("step" in value, "rank" in value, name in MANY_IDS)
        if self._keys is None:
            self._keys = keys
        elif keys != self._keys:
            need = "the same of step, rank and lists in every line"
            raise self._refusal(f"keys {listed(value)}", need)
        rank = self._count(value, "rank", MOST_RANKS - 1) if keys[1] else 0
        if name in MANY_IDS:
            if keys[0]:
                raise self._refusal("a step beside a list", "a list alone: its ids are in order")
            self._extend(rank, value[name], name)
        else:
            self._add(rank, value, name)

    def _id_key(self, value: Mapping[str, Any]) -> str:
        found = [name for name in (*ONE_ID, *MANY_IDS) if name in value]
        if not found:
            raise self._refusal(f"keys {listed(value)}", _NEED_IDS)
        if any(value[name] != value[found[0]] for name in found):
            raise self._refusal(f"{listed(found)}, which differ", _NEED_IDS)
        return found[0]

    def _extend(self, rank: int, ids: Any, name: str) -> None:
        if not isinstance(ids, list):
            raise self._refusal(f"{name}: {json_kind(ids)}", "a list of ids")
        for nth, each in enumerate(ids):
            self._check_id(each, f"{name}[{nth}]")
        spill = self._streams.setdefault(rank, Spill())
        rows = np.zeros(len(ids), ROW_DTYPE)
        rows["id"], rows["position"], rows["margin"] = ids, -1, np.nan
        rows["step"] = len(spill) + np.arange(len(ids))
        spill.extend(rows)

    def _add(self, rank: int, value: Mapping[str, Any], name: str) -> None:
        spill = self._streams.setdefault(rank, Spill())
        token = self._check_id(value[name], name)
        step = self._count(value, "step", MOST_ID) if "step" in value else len(spill)
        position = self._count(value, "position", MOST_ID) if self.is_ours else -1
        spill.append((step, position, token, self._margin(value, step)))

    def _margin(self, value: Mapping[str, Any], step: int) -> float:
        """Return what a line says of best - second, NaN where it says nothing."""
        if value.get("margin") is not None:
            margin = self._number(value, "margin")
        elif value.get("best") is not None and value.get("second") is not None:
            margin = self._number(value, "best") - self._number(value, "second")
        else:
            return math.nan
        if not math.isfinite(margin) or margin < 0:
            self._fault(f"the margin of step {step} is {margin}")
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
            if self.start is not None or self._streams:
                raise self._refusal("start behind other events", "one run in a file")
            self.start = value
            self._count(value, "tp", MOST_RANKS)
        elif kind == "token":
            for name in ("id", "step"):
                if name not in value:
                    raise self._refusal(f"a token without {name}", f"a token with {name}")
            self._add(0, value, "id")
            self._check_agreement(value)
        else:
            self._end = value

    def _check_agreement(self, value: Mapping[str, Any]) -> None:
        need = None if self.start is None else self.start["tp"]
        if need is not None and value.get("ranks_agree", need) != need:
            got = quoted(value["ranks_agree"])
            self._fault(f"step {value['step']}: {got} of {count_text(need, 'rank')} agree")

    def _finish(self) -> None:
        self.ranks = self.ranks or {0: Spill().rows()}
        if self._end is None:
            if self.start is not None:
                self._fault("no end event: the run was cut short, or is not over")
            return
        ids = self._end.get("tokens")
        if not isinstance(ids, list):
            raise self._refusal(f"end without tokens ({listed(self._end)})", "a list of ids")
        for nth, each in enumerate(ids):
            self._check_id(each, f"tokens[{nth}]")
        if _digest(np.array(ids, "<u4")) != _digest(self.ranks[0]["id"]):
            n_tokens = len(self.ranks[0])
            self._fault(f"the end event lists {len(ids)} ids, other than the {n_tokens} events'")

    # -- values -------------------------------------------------------------------------------

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

    def _fault(self, text: str) -> None:
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(text)

    def _refusal(self, got: str, need: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: line {self._line}", got=got, need=need)


def _digest(ids: Columns) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(ids), 1 << 16):
        digest.update(np.ascontiguousarray(ids[start : start + (1 << 16)]).tobytes())
    return digest.digest()
