"""Token ids as plain text, of any engine: decimal numbers between spaces, line ends or commas.

Read strictly, in blocks: a sign, a letter, two commas without an id between them or a comma at the
end are refused, because a reader that skips what it does not know compares something else.
"""

import os
import re
from pathlib import Path

import numpy as np

from k3tool.checkpoint.regular_file import open_regular, unreadable
from k3tool.compare.spill import ROW_DTYPE, Columns, Spill
from k3tool.errors import ArtifactError, quoted
from k3tool.progress import Progress

NEED = "token ids such as 5 6 7, between spaces, line ends or commas"
MOST_ID = 2**32 - 1
MOST_DIGITS = 20  # of an id; int() itself fails at some thousands
_BLOCK_BYTES = 1 << 20
_SPACES = b" \t\r\n\v\f"
_ALLOWED = b"0123456789," + _SPACES
_COMMAS = re.compile(rb",[ \t\r\n\v\f]*,")
_LAST_WORD = re.compile(rb"[0-9]*\Z")
_BOM = b"\xef\xbb\xbf"


def read_ids(path: Path, progress: Progress = lambda done, total: None) -> Columns:
    """Return the rows of a plain list of ids, steps counted from 0; `progress` gets bytes.

    Raises: ArtifactError naming the file, the byte and what stands there.
    """
    spill, reader = Spill(), _Words(path)
    try:
        with open(open_regular(path, NEED), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while block := file.read(_BLOCK_BYTES):
                _add(spill, reader.words(block), path)
                progress(file.tell(), size)
        _add(spill, reader.end(), path)
    except OSError as error:
        raise unreadable(path, NEED, error) from None
    return spill.rows()


def _add(spill: Spill, words: list[bytes], path: Path) -> None:
    if not words:
        return
    longest = max(words, key=len)
    if len(longest) > MOST_DIGITS:
        raise _refusal(path, f"a number of {len(longest)} digits")
    ids = list(map(int, words))
    worst = max(ids)
    if worst > MOST_ID:
        nth = len(spill) + ids.index(worst)
        raise ArtifactError(f"{path}: id at step {nth}", got=worst, need=f"0 to {MOST_ID}")
    rows = np.zeros(len(ids), ROW_DTYPE)
    rows["id"], rows["position"], rows["margin"] = ids, -1, np.nan
    rows["step"] = len(spill) + np.arange(len(ids))
    spill.extend(rows)


class _Words:
    """Cuts blocks of text into words; one that a block's end cuts waits for the next block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        self._n_bytes = 0
        self._after_comma = False
        self._is_first = True  # no id yet: a comma may not come first

    def words(self, block: bytes) -> list[bytes]:
        """Return the words that end in a block."""
        bare = block.removeprefix(_BOM) if self._n_bytes == 0 else block
        text = self._rest + bare
        self._n_bytes += len(block)
        strange = text.translate(None, _ALLOWED)
        if strange:
            at = self._n_bytes - len(text) + text.index(strange[:1])
            raise _refusal(self._path, f"{_shown(strange[:1])} at byte {at}")
        match = _LAST_WORD.search(text)
        assert match is not None
        self._rest = match[0]
        if len(self._rest) > MOST_DIGITS:
            raise _refusal(self._path, f"a number of more than {MOST_DIGITS} digits")
        return self._cut(text[: match.start()])

    def end(self) -> list[bytes]:
        """Return the last word, where there is one."""
        words = self._cut(self._rest)
        if self._after_comma:
            raise _refusal(self._path, "a comma at the end")
        return words

    def _cut(self, text: bytes) -> list[bytes]:
        bare = text.strip(_SPACES)
        if not bare:
            return []
        no_id = self._after_comma or self._is_first
        if _COMMAS.search(bare) or (no_id and bare.startswith(b",")):
            raise _refusal(self._path, "a comma with no id before it")
        self._after_comma, self._is_first = bare.endswith(b","), False
        return bare.replace(b",", b" ").split()


def _refusal(path: Path, got: str) -> ArtifactError:
    return ArtifactError(str(path), got=got, need=NEED)


def _shown(byte: bytes) -> str:
    return quoted(byte.decode()) if byte.isascii() else f"byte 0x{byte.hex()}"
