"""Text to token ids and ids to bytes, by the files beside a checkpoint's weights.

Text never becomes a control token: the encoder's vocabulary has none. Whoever wants one says so by
its id (`control_id`), as the chat format does. Decoding gives bytes, because a token may be part of
a character (k3tool.text.stream makes characters of them); a control token has none.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from k3tool.checkpoint.side_files import TOKENIZER_CONFIG, read_side_file, token_names
from k3tool.errors import ArtifactError, UsageError, quoted
from k3tool.text.byte_pairs import library_json
from k3tool.text.definition import TOKENIZER_JSON, read_definition
from k3tool.text.kept import kept
from k3tool.text.rank_file import RANK_FILE, parse_ranks

# The release cuts a text before it looks for its pieces. Source: k3_spec E.
MOST_CHARACTERS = 400_000
MOST_RUN = 25_000  # of white space, or of anything else
_RUN = re.compile(r"\s+|\S+")  # of str: \s is what str.isspace says
_NO_CHARACTER = re.compile(
    "([\udc80-\udcff]+)"
)  # bytes that are no UTF-8, as surrogateescape has them
_HINT = "give token ids (--ids), or put the model's own {} beside its weights"


class Encoder(Protocol):
    """What the `tokenizers` library gives: `encode(text, add_special_tokens=...).ids`."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Encode a text."""


class Room(NamedTuple):
    """How many tokens a text may be; `name` is what is refused where it is more, `limit` says who
    sets it. To encode a text takes a second for each MB or two: a longer one is refused first.
    `n_before` of them are taken by what stands before the text.
    """

    n_tokens: int
    name: str
    limit: str
    hint: str | None = None
    n_before: int = 0

    @property
    def left(self) -> int:
        """Return the tokens that are not taken."""
        return self.n_tokens - self.n_before

    def refused(self, n_characters: int) -> UsageError:
        """Return the refusal of a text that is longer."""
        got = f"{n_characters} characters, more than {self.n_tokens} tokens"
        return UsageError(self.name, got=got, need=f"at most {self.limit}", hint=self.hint)


class Tokenizer:
    """The vocabulary of one model. The library that encodes is loaded when a text is."""

    def __init__(
        self, tokens: Mapping[int, bytes], control: Mapping[int, str], load: Callable[[], Encoder],
        source: Path, *, keeps_all: bool = True,
    ) -> None:  # fmt: skip
        """Take bytes by id, control tokens' names by id, and what makes the encoder.

        `keeps_all` is whether every byte of a text is in its tokens: a definition from elsewhere
        may drop some.
        """
        self._tokens, self._control, self._load, self._source = tokens, control, load, source
        self._keeps_all = keeps_all
        self._ids = {name: token for token, name in control.items()}
        self._byte_ids = {token: number for number, token in tokens.items() if len(token) == 1}
        self._encoder: Encoder | None = None

    @property
    def control_tokens(self) -> Mapping[int, str]:
        """Return the names of all control tokens, by id."""
        return self._control

    def control_id(self, name: str) -> int:
        """Return a control token's id. Raises: ArtifactError where the model has none so named."""
        found = self._ids.get(name)
        if found is None:
            raise ArtifactError(
                f"{self._source}: {name}", got="no such control token", need="one",
                hint="a model without it has another chat format: give --prompt, not --chat",
            )  # fmt: skip
        return found

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes; a control token has none."""
        return self._tokens.get(token, b"")

    def decode(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of tokens, one behind the other, without control tokens."""
        return b"".join(map(self.token_bytes, ids))

    @cached_property
    def longest(self) -> int:
        """Return the bytes of the longest token."""
        return max(map(len, self._tokens.values()))

    def require_fit(self, n_characters: int, room: Room) -> None:
        """Refuse a text that is too long however it is encoded. Raises: UsageError."""
        if self._keeps_all and n_characters > room.left * self.longest:
            raise room.refused(n_characters)

    def encode(self, text: str, room: Room | None = None) -> list[int]:
        """Return the ids of a text. Half of a surrogate pair stands for a byte, as in argv.

        Raises: UsageError for a text that is more tokens than `room`, as soon as that is known.
        """
        if room is not None:
            self.require_fit(len(text), room)
        ids: list[int] = []
        for piece in _pieces(text):
            ids += self._encode_piece(piece)
            if room is not None and len(ids) > room.left:
                raise room.refused(len(text))
        return ids

    def encode_bytes(self, data: bytes, room: Room | None = None) -> list[int]:
        """Return the ids of bytes as they are; those that are no UTF-8 are a token each.

        Raises: as `encode`.
        """
        return self.encode(data.decode("utf-8", "surrogateescape"), room)

    def release(self) -> None:
        """Give back what only encoding needs: of the release's vocabulary some 150 MB.

        The next text loads it again.
        """
        self._encoder = None

    def _encode_piece(self, text: str) -> Iterator[int]:
        for nth, part in enumerate(_NO_CHARACTER.split(text)):
            if nth % 2 == 1:
                raw = part.encode("utf-8", "surrogateescape")
                yield from (self._byte_ids[bytes([value])] for value in raw)
            elif part:
                if self._encoder is None:
                    self._encoder = self._load()
                yield from self._encoder.encode(part, add_special_tokens=False).ids


def _pieces(text: str) -> Iterator[str]:
    """Yield a text as the release cuts it: a merge or a pattern's piece never crosses a cut."""
    for start in range(0, len(text), MOST_CHARACTERS):
        part = text[start : start + MOST_CHARACTERS]
        begin = 0
        if len(part) > MOST_RUN:
            for run in _RUN.finditer(part):
                for cut in range(run.start() + MOST_RUN, run.end(), MOST_RUN):
                    yield part[begin:cut]
                    begin = cut
        yield part[begin:]


# -- files -----------------------------------------------------------------------------------------


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer, whole or not."""
    return any(os.path.lexists(folder / name) for name in (RANK_FILE, TOKENIZER_JSON))


def open_tokenizer(folder: Path, n_ids: int, cache: Path) -> Tokenizer:
    """Open the tokenizer in a checkpoint's or shards' folder; `n_ids` is the model's vocab_size.

    `tiktoken.model` and `tokenizer_config.json` where both are there, as in the release, else
    `tokenizer.json`. What the library builds its encoder from is kept in `cache`.
    Raises: ArtifactError naming file and line or field.
    """
    if os.path.lexists(folder / RANK_FILE):
        return _from_ranks(folder, n_ids, cache)
    raw = read_side_file(folder, TOKENIZER_JSON)
    if raw is None:
        need = f"{RANK_FILE} and {TOKENIZER_CONFIG}, or {TOKENIZER_JSON}"
        raise ArtifactError(
            str(folder), got="no tokenizer", need=need, hint=_HINT.format("tokenizer")
        )
    path = folder / TOKENIZER_JSON
    definition = read_definition(raw, path)
    last = max(definition.tokens)
    if last >= n_ids:
        raise ArtifactError(
            str(path), got=f"a token of text with id {last}", need=f"ids below {n_ids} "
            "(vocab_size)", hint=_HINT.format(TOKENIZER_JSON),
        )  # fmt: skip
    control = _control(path, definition.added, n_ids, [*definition.tokens])
    return Tokenizer(definition.tokens, control, definition.load, path, keeps_all=False)


def _from_ranks(folder: Path, n_ids: int, cache: Path) -> Tokenizer:
    path = folder / RANK_FILE
    raw = read_side_file(folder, RANK_FILE)
    assert raw is not None
    named = token_names(folder)
    if named is None:
        raise ArtifactError(
            str(folder / TOKENIZER_CONFIG), got="absent", need=f"the names beside {RANK_FILE}",
            hint=_HINT.format(TOKENIZER_CONFIG),
        )  # fmt: skip
    tokens = parse_ranks(raw, path)
    if len(tokens) > n_ids:
        raise ArtifactError(
            str(path), got=f"{len(tokens)} tokens", need=f"at most {n_ids} (vocab_size)",
            hint=_HINT.format(RANK_FILE),
        )  # fmt: skip
    _require_all(tokens, path, named)
    control = _control(folder / TOKENIZER_CONFIG, named, n_ids, range(len(tokens)))

    def load() -> Encoder:
        from tokenizers import Tokenizer as Library

        encoder: Encoder = Library.from_str(kept(cache, raw, lambda: library_json(tokens)))
        return encoder

    return Tokenizer(dict(enumerate(tokens)), control, load, path)


def _require_all(tokens: list[bytes], path: Path, names: Mapping[int, str]) -> None:
    """Refuse ranks that end before the control tokens begin: the file was cut between two lines.

    In the release the first control token is named. Raises: ArtifactError.
    """
    first = min(names, default=None)
    if first is None:
        raise ArtifactError(
            f"{path.parent / TOKENIZER_CONFIG}: added_tokens_decoder", got="no control token",
            need="their ids and names", hint=_HINT.format(TOKENIZER_CONFIG),
        )  # fmt: skip
    if len(tokens) < first:
        raise ArtifactError(
            str(path), got=f"{len(tokens)} tokens", hint=_HINT.format(RANK_FILE),
            need=f"{first}, up to the first control token, {quoted(names[first])}",
        )  # fmt: skip


def _control(
    path: Path, named: Mapping[int, str], n_ids: int, used: Iterable[int]
) -> dict[int, str]:
    """Return the names of all ids that are no text: the files' own, and the release's for the rest.

    Source: k3_spec E (unnamed control ids). Raises: ArtifactError for a name of an id of text, of
    one past the model's, or of two ids.
    """
    text = set(used)
    for token, name in named.items():
        if token in text or token >= n_ids:
            what = "an id of text" if token in text else f"no id below {n_ids} (vocab_size)"
            raise ArtifactError(
                f"{path}: {quoted(name)}", got=f"id {token}, {what}", need="a control token's id",
                hint=_HINT.format(path.name),
            )  # fmt: skip
    rest = {token: f"<|reserved_token_{token}|>" for token in range(n_ids) if token not in text}
    return rest | dict(named)
