"""Byte-pair encoding by rank, said in the words of the `tokenizers` library.

The release merges, in each piece of the pattern, the pair whose bytes have the lowest rank, the
leftmost of equals. The library knows merges of two tokens, each with a priority of its own, so it
is given every split of every token into two tokens. One split a token is the tempting wrong
version: a token is then missed where its parts came together another way. A piece that is a token
as it stands is that token, whether merges lead there or not.

Source: k3_spec E (pattern, form); gated by tests/unit/text/test_exact.py against tiktoken.
"""

import json
from typing import Any

# Alternatives in the release's order. `&&` is an intersection to Oniguruma, the library's engine.
_NOT_HAN = r"&&[^\p{Han}]"
_UPPER = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}]"
_LOWER = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_ANY_LEAD = r"[^\r\n\p{L}\p{N}]?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_ANY_LEAD}{_UPPER}*{_LOWER}+{_SHORT}",
        f"{_ANY_LEAD}{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def _byte_letters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level vocabularies."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(plain)]
    letters = {value: chr(value) for value in plain}
    letters |= {value: chr(256 + nth) for nth, value in enumerate(others)}
    return [letters[value] for value in range(256)]


LETTERS = _byte_letters()
LETTER_BYTES = {letter: value for value, letter in enumerate(LETTERS)}
_TABLE = dict(enumerate(LETTERS))


def letters_of(token: bytes) -> str:
    """Return a token as the library's vocabularies spell it."""
    return token.decode("latin-1").translate(_TABLE)


def bytes_of(letters: str) -> bytes | None:
    """Return the bytes of a token in the library's spelling; None where it is no such token."""
    values = [LETTER_BYTES.get(letter) for letter in letters]
    return None if None in values or not values else bytes(v for v in values if v is not None)


def merges_of(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return every split of every token into two tokens, in order of priority."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges: list[tuple[bytes, bytes]] = []
    for token in tokens:
        splits = [
            (token[:at], token[at:])
            for at in range(1, len(token))
            if token[:at] in ranks and token[at:] in ranks
        ]
        merges += sorted(splits, key=_leftmost_first)
    return merges


def _leftmost_first(split: tuple[bytes, bytes]) -> tuple[bool, int]:
    """Order splits of one token so that of two that overlap the left one is merged.

    X Y Z with XY = YZ overlap in Y; |X| is then a period of the token, and the split after X has to
    come before the one after Y.
    """
    left, right = split
    token = left + right
    return not token.startswith(right), len(left)


def library_json(tokens: list[bytes]) -> str:
    """Return the definition that the library builds its encoder from.

    It has no control tokens at all: what is not in its vocabulary no text can become.
    """
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": True,
        "vocab": {letters_of(token): rank for rank, token in enumerate(tokens)},
        "merges": [[letters_of(left), letters_of(right)] for left, right in merges_of(tokens)],
    }  # fmt: skip
    split = {
        "type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    bytewise = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False,
    }  # fmt: skip
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
            "normalizer": None, "post_processor": None, "decoder": None, "model": model,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytewise]},
        },
        ensure_ascii=False,
    )  # fmt: skip
