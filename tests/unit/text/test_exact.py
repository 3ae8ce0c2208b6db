"""The tokenizer against tiktoken: the same ids for texts of all scripts, and controls that fail."""

import json
from pathlib import Path

import pytest
import tiktoken
from tokenizers import Tokenizer as Library

from k3tool.text.byte_pairs import PATTERN, library_json
from k3tool.text.tokenizer import MOST_RUN, Tokenizer, open_tokenizer
from tests.unit.text.vocabulary import grown, texts, write_tokenizer

N_TEXTS = 20_000
CORNERS = (
    "", " ", "\n", "\r\n", "\r\n\r\n  x", "a\u0301", "\u0301", "e\u0301\u0302x",
    "你", "你a好", "汉字ABC漢字", "\U0002000b\U0002000b",
    "1234567", "12 345", "x1234y", "\uff11\uff12\uff13\uff14", "a  b", "a   ", "   a", "\t\ta",
    "it's IT'S it'Ll '\u017f", "👩\u200d👩\u200d👧", "🙂🙂", "\u200d", "\ufeff", "\x00", "\x7f",
    "foo(bar)\n\n", "...\r\n\n", "<|open|>message<|sep|>", "[EOS]", "<|reserved_token_4100|>",
    "ÀÉ Éa aÉ", "ǅǅa", "ʰʱ", "\u3000 x",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    return grown(4000)


@pytest.fixture(scope="module")
def encoding(tokens: list[bytes]) -> tiktoken.Encoding:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


@pytest.fixture(scope="module")
def tokenizer(tokens: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return open_tokenizer(folder, write_tokenizer(folder, tokens), folder)


def test_random_texts_of_mixed_scripts(encoding: tiktoken.Encoding, tokenizer: Tokenizer) -> None:
    longer = 0
    for text in texts(N_TEXTS):
        ids = tokenizer.encode(text)
        assert ids == encoding.encode_ordinary(text), text
        assert tokenizer.decode(ids) == text.encode()
        longer += len(ids) < len(text.encode())
    assert longer > N_TEXTS * 0.8, "nearly nothing was merged: the comparison says little"


@pytest.mark.parametrize("text", CORNERS)
def test_corners(encoding: tiktoken.Encoding, tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == encoding.encode_ordinary(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode()


def _mismatches(encoding: tiktoken.Encoding, definition: dict[str, object]) -> int:
    library = Library.from_str(json.dumps(definition))
    return sum(
        library.encode(text, add_special_tokens=False).ids != encoding.encode_ordinary(text)
        for text in texts(2000)
    )


def test_the_comparison_sees_wrong_tokenizers(
    encoding: tiktoken.Encoding, tokens: list[bytes]
) -> None:
    right = json.loads(library_json(tokens))
    assert _mismatches(encoding, right) == 0
    one_split: dict[str, list[str]] = {}
    for left, right_part in right["model"]["merges"]:
        one_split.setdefault(left + right_part, [left, right_part])
    fewer = {**right, "model": {**right["model"], "merges": list(one_split.values())}}
    assert _mismatches(encoding, fewer) > 0
    from_words = {**right, "model": {**right["model"], "ignore_merges": False}}
    split, bytewise = right["pre_tokenizer"]["pretokenizers"]
    other = split["pattern"]["Regex"].replace("{1,3}", "{1,2}")
    digits = {**split, "pattern": {"Regex": other}}
    by_two = {**right, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, bytewise]}}
    assert _mismatches(encoding, by_two) > 0
    # Every token here comes about by merges; of one that does not only a whole piece can be it.
    assert _mismatches(encoding, from_words) == 0


def test_a_token_that_no_merges_lead_to_is_found_as_a_whole_piece(tmp_path: Path) -> None:
    tokens = [bytes([value]) for value in range(256)] + [b"zqxjk"]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    tokenizer = open_tokenizer(tmp_path, write_tokenizer(tmp_path, tokens), tmp_path)
    for text in ("zqxjk", "zqxjks", " zqxjk"):
        assert tokenizer.encode(text) == encoding.encode_ordinary(text)
    assert tokenizer.encode("zqxjk") == [256]


@pytest.mark.parametrize("alphabet", ["ab", "aab", "abc"])
def test_overlapping_merges(alphabet: str, tmp_path: Path) -> None:
    """Few letters, so that parts of tokens overlap: X Y Z with XY = YZ."""
    import random

    rng = random.Random(alphabet)
    tokens = [bytes([value]) for value in range(256)]
    pool = [letter.encode() for letter in alphabet]
    while len(tokens) < 290:
        new = rng.choice(pool) + rng.choice(pool)
        if new not in tokens and len(new) < 12:
            tokens.append(new)
            pool.append(new)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    tokenizer = open_tokenizer(tmp_path, write_tokenizer(tmp_path, tokens), tmp_path)
    for _ in range(1000):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 60)))
        assert tokenizer.encode(text) == encoding.encode_ordinary(text), text


def test_long_runs_are_cut_as_the_release_cuts_them(
    encoding: tiktoken.Encoding, tokenizer: Tokenizer
) -> None:
    """A run of more than 25,000 characters is cut there, white space like anything else."""
    run, tail = "e" * (MOST_RUN + 10), " " * (2 * MOST_RUN + 3)
    cuts = [run[:MOST_RUN], run[MOST_RUN:] + tail[:MOST_RUN], tail[MOST_RUN:-3], tail[-3:] + "x"]
    expected = [token for part in cuts for token in encoding.encode_ordinary(part)]
    assert tokenizer.encode(run + tail + "x") == expected
