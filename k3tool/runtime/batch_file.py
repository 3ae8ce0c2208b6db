"""The file of `run --batch`: requests, one JSON object a line, read strictly.

`ids` (a list of token ids) or `prompt` (text) is what to go on from; `id` names the request in what
is printed (default: its place in the file, from 0); `gen`, `stop_ids`, `stop`, `temperature`,
`top_p`, `top_k` and `seed` are its own where they differ from the command's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3tool.checkpoint.json_text import json_fault, json_kind, parse_json
from k3tool.errors import UsageError, quoted
from k3tool.runtime.sampling import GREEDY, Sampler

_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_FIELDS = ("id", "ids", "prompt", "gen", "stop_ids", "stop", *_SAMPLING)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a file. `text` is set, and `ids` empty, until a tokenizer has made ids of it.

    `where` names its line in messages.
    """

    name: str | int
    where: str
    ids: tuple[int, ...]
    gen: int
    text: str | None = None
    stop_ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    sampler: Sampler = GREEDY


def read_batch(raw: bytes, where: str, defaults: BatchLine) -> list[BatchLine]:
    """Return the requests of a file with one JSON object a line; empty lines are none.

    Raises: UsageError naming the line and the field.
    """
    lines: list[BatchLine] = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            place = f"{where}: line {number}"
            lines.append(_line(line, len(lines), place, defaults))
    if not lines:
        raise UsageError(where, got="no request", need="a JSON object a line")
    names: dict[str | int, str] = {}
    for one in lines:
        if one.name in names:
            need = f"a name of its own, {names[one.name]} has it"
            raise UsageError(f"{one.where}: id", got=quoted(one.name), need=need)
        names[one.name] = one.where
    return lines


def _line(raw: bytes, nth: int, where: str, defaults: BatchLine) -> BatchLine:
    try:
        found = parse_json(raw)
    except ValueError as error:
        raise UsageError(
            where, got=f"invalid JSON ({json_fault(error)})", need="a request as JSON"
        ) from None
    if not isinstance(found, dict):
        raise UsageError(where, got=json_kind(found), need="a JSON object")
    unknown = sorted(set(found) - set(_FIELDS))
    if unknown:
        need = f"{', '.join(_FIELDS[:-1])} or {_FIELDS[-1]}"
        raise UsageError(where, got=f"a field {quoted(unknown[0])}", need=need)
    if ("ids" in found) == ("prompt" in found):
        got = "both" if "ids" in found else "neither"
        raise UsageError(f"{where}: ids, prompt", got=got, need="one of them")
    fields = _Fields(found, where)
    return replace(
        defaults,
        name=fields.name(nth),
        where=where,
        ids=fields.ids("ids"),
        text=fields.text("prompt"),
        gen=fields.count("gen", defaults.gen),
        stop_ids=(*defaults.stop_ids, *fields.ids("stop_ids")),
        stops=(*defaults.stops, *fields.texts("stop")),
        sampler=fields.sampler(defaults.sampler),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """A line's fields, read by type. A boolean is no number here, though Python says so."""

    found: dict[str, Any]
    where: str

    def _refuse(self, name: str, need: str) -> UsageError:
        return UsageError(f"{self.where}: {name}", got=quoted(self.found[name]), need=need)

    def name(self, nth: int) -> str | int:
        found = self.found.get("id", nth)
        if isinstance(found, bool) or not isinstance(found, str | int):
            raise self._refuse("id", "a text or a number")
        return found

    def text(self, name: str) -> str | None:
        found = self.found.get(name)
        if name in self.found and not (isinstance(found, str) and found):
            raise self._refuse(name, "a text")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        found = self.found.get(name, [])
        each = [found] if isinstance(found, str) else found
        if not isinstance(each, list) or not all(isinstance(t, str) and t for t in each):
            raise self._refuse(name, "a text, or a list of texts")
        return tuple(each)

    def ids(self, name: str) -> tuple[int, ...]:
        found = self.found.get(name, [])
        if not isinstance(found, list) or not all(type(t) is int and t >= 0 for t in found):
            raise self._refuse(name, "a list of token ids such as [1, 2, 3]")
        if name in self.found and not found and name == "ids":
            raise self._refuse(name, "at least one token id")
        return tuple(found)

    def count(self, name: str, default: int) -> int:
        found = self.found.get(name, default)
        if type(found) is not int or found < 1:
            raise self._refuse(name, "a number, at least 1")
        return found

    def sampler(self, default: Sampler) -> Sampler:
        own = {name: self.found[name] for name in _SAMPLING if name in self.found}
        for name, value in own.items():
            is_whole = type(value) is int
            if not (is_whole or (type(value) is float and name in ("temperature", "top_p"))):
                raise self._refuse(name, "a number" if name in ("temperature", "top_p")
                                   else "a whole number")  # fmt: skip
        try:
            made = replace(default, **own)
        except UsageError as error:
            field = error.object.removeprefix("--").replace("-", "_")  # in a file it is no option
            where = f"{self.where}: {field}"
            raise UsageError(where, got=error.got, need=error.need) from None
        if own and made.temperature == 0 and "temperature" not in own:
            need = "both: without one nothing is drawn"
            raise UsageError(f"{self.where}: {next(iter(own))}", got="no temperature", need=need)
        return made


def check_lines(lines: Sequence[BatchLine], vocab: int, context: int) -> None:
    """Refuse requests that the model, or `context` positions, have no place for.

    Raises: UsageError naming the line.
    """
    for line in lines:
        for name, ids in (("ids", line.ids), ("stop_ids", line.stop_ids)):
            bad = [token for token in ids if token >= vocab]
            if bad:
                need = f"0 to {vocab - 1} (vocab_size)"
                raise UsageError(f"{line.where}: {name}", got=bad[0], need=need)
        if len(line.ids) + line.gen > context:
            raise UsageError(
                f"{line.where}: prompt and tokens",
                got=f"{len(line.ids)} + {line.gen} = {len(line.ids) + line.gen} positions",
                need=f"at most {context}",
            )  # fmt: skip
