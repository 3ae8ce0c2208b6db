"""The tokenizer of a sample checkpoint: every byte, and syllables, in the release's files.

It is made by rule, not learned, so it is the same on every machine and its words mean nothing.
"""

import json
from collections.abc import Iterator
from itertools import islice, product

from k3tool.text.rank_file import write_ranks

_VOWELS = [letter.encode() for letter in "aeiou"]
_CONSONANTS = [letter.encode() for letter in "bcdfghjklmnprstvwz"]
# By distance from the first control id, as in the release; the last two are counted from the end.
_CONTROL = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
_LAST = ("[UNK]", "[PAD]")


def sample_ranks(n_tokens: int) -> bytes:
    """Return tiktoken.model of so many tokens, the 256 bytes first."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += islice(_syllables(), n_tokens - len(tokens))
    assert len(tokens) == n_tokens, "not so many syllables"
    return write_ranks(tokens)


def _syllables() -> Iterator[bytes]:
    """Yield tokens of two earlier ones each: so byte-pair encoding comes by all of them."""
    open_ones = [first + last for first, last in product(_CONSONANTS, _VOWELS)]
    yield from open_ones
    yield from (b" " + syllable for syllable in open_ones)
    yield from (first + last for first, last in product(_VOWELS, _CONSONANTS))
    closed = [first + last for first, last in product(open_ones, _CONSONANTS)]
    yield from closed
    yield from (b" " + syllable for syllable in closed)
    for space in (b"", b" "):
        yield from (space + first + last for first, last in product(open_ones, repeat=2))
    yield from (first + last for first, last in product(closed, open_ones))


def sample_config(first_id: int, n_ids: int) -> str:
    """Return tokenizer_config.json of a model with `n_ids` ids, control tokens from `first_id`."""
    names = {first_id + nth: name for nth, name in enumerate(_CONTROL)}
    names |= {n_ids - len(_LAST) + nth: name for nth, name in enumerate(_LAST)}
    assert len(names) == len(_CONTROL) + len(_LAST), "too few ids for the control tokens"
    listed = {
        str(token): {"content": name, "special": name not in _CONTROL[3:]}
        for token, name in names.items()
    }
    config = {
        "added_tokens_decoder": listed, "bos_token": _CONTROL[0], "eos_token": _CONTROL[1],
        "unk_token": _LAST[0], "pad_token": _LAST[1],
    }  # fmt: skip
    return json.dumps(config, indent=1) + "\n"
