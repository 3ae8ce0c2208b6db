"""Read `tiktoken.model`: a line for each token, its bytes in base64, a space, its rank.

A token's rank is its id, and its priority in byte-pair encoding. Source: k3_spec E.
"""

import base64
import binascii
from pathlib import Path

from k3tool.errors import ArtifactError, quoted

RANK_FILE = "tiktoken.model"
_NEXT_STEP = "fetch the file again"
_MOST_DIGITS = 9


def parse_ranks(raw: bytes, path: Path) -> list[bytes]:
    """Return each token's bytes, by rank.

    Raises: ArtifactError with the line's number for what is no token and rank, for a rank or a
    token that stands twice and for ranks with a gap; also where a byte has no token of its own,
    because text with that byte could not be said.
    """
    tokens: dict[int, bytes] = {}
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        token, rank = _parse_line(line, path, number)
        if rank in tokens:
            raise _wrong(path, number, f"rank {rank} a second time", "each rank once")
        if token in ranks:
            got = f"the token of rank {ranks[token]} a second time"
            raise _wrong(path, number, got, "each token once")
        tokens[rank] = token
        ranks[token] = rank
    absent = next((rank for rank in range(len(tokens)) if rank not in tokens), None)
    if absent is not None:
        raise ArtifactError(f"{path}: rank {absent}", got="no line", need="one", hint=_NEXT_STEP)
    found = [tokens[rank] for rank in range(len(tokens))]
    require_bytes(found, path)
    return found


def require_bytes(tokens: list[bytes], path: Path) -> None:
    """Refuse a vocabulary that cannot say every byte. Raises: ArtifactError naming the first."""
    have = {token for token in tokens if len(token) == 1}
    for value in range(256):
        if bytes([value]) not in have:
            raise ArtifactError(
                f"{path}: byte 0x{value:02x}", got="no token", need="a token for every byte",
                hint=_NEXT_STEP,
            )  # fmt: skip


def write_ranks(tokens: list[bytes]) -> bytes:
    """Return the file of a vocabulary, tokens by rank."""
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    return b"".join(lines)


def _parse_line(line: bytes, path: Path, number: int) -> tuple[bytes, int]:
    words = line.split()
    if len(words) != 2:
        got = quoted(line.decode("ascii", "replace"))
        raise _wrong(path, number, got, "a token in base64 and its rank")
    try:
        token = base64.b64decode(words[0], validate=True)
    except binascii.Error:
        token = b""
    if not token:
        raise _wrong(path, number, quoted(words[0].decode("ascii", "replace")), "a token in base64")
    if not (words[1].isdigit() and len(words[1]) <= _MOST_DIGITS):
        raise _wrong(path, number, quoted(words[1].decode("ascii", "replace")), "a rank")
    return token, int(words[1])


def _wrong(path: Path, number: int, got: str, need: str) -> ArtifactError:
    return ArtifactError(f"{path}: line {number}", got=got, need=need, hint=_NEXT_STEP)
