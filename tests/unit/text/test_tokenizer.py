"""Control tokens at their places, bytes as they are, damaged files, and what the cache keeps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.errors import ArtifactError, UsageError
from k3tool.text import tokenizer as module
from k3tool.text.byte_pairs import library_json
from k3tool.text.rank_file import parse_ranks, write_ranks
from k3tool.text.tokenizer import Encoder, Room, Tokenizer, open_tokenizer
from tests.unit.text.vocabulary import N_CONTROL, control_names, grown, write_tokenizer

N_BASE = 700
TOKENS = grown(N_BASE)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return open_tokenizer(tmp_path, write_tokenizer(tmp_path, TOKENS), tmp_path)


# -- control tokens ----------------------------------------------------------------------------


def test_all_control_ids_are_at_their_places(tokenizer: Tokenizer) -> None:
    names = tokenizer.control_tokens
    assert list(names) == list(range(N_BASE, N_BASE + N_CONTROL))
    named = control_names(N_BASE)
    for token, name in names.items():
        assert name == named.get(token, f"<|reserved_token_{token}|>")
        assert tokenizer.control_id(name) == token
        assert tokenizer.token_bytes(token) == b""


def test_no_text_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    for name in tokenizer.control_tokens.values():
        for text in (name, f"a{name}b", f" {name}\n", name * 2):
            ids = tokenizer.encode(text)
            assert max(ids) < N_BASE
            assert tokenizer.decode(ids) == text.encode()


def test_a_library_that_knows_the_names_would_take_them_for_control_tokens(
    tokenizer: Tokenizer,
) -> None:
    """The control of the test above: what it forbids is what the library does by itself."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

    library = Library.from_str(library_json(TOKENS))
    library.add_special_tokens([AddedToken("<|open|>", special=True, normalized=False)])
    assert library.encode("a<|open|>b", add_special_tokens=False).ids != tokenizer.encode(
        "a<|open|>b"
    )


def test_an_absent_control_token_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ArtifactError, match="no such control token"):
        tokenizer.control_id("<|im_end|>")


# -- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"a\xc3", b"\xc3a", b"\xe4\xbd", b"ok \xf0\x9f\x99 \x80\x81", bytes(range(256))],
)
def test_bytes_that_are_no_text_come_back_as_they_were(tokenizer: Tokenizer, data: bytes) -> None:
    assert tokenizer.decode(tokenizer.encode_bytes(data)) == data
    assert tokenizer.encode_bytes("naïve 你".encode()) == tokenizer.encode("naïve 你")


def test_what_only_encoding_needs_is_given_back_and_loaded_again(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world")
    tokenizer.release()
    assert tokenizer.decode(ids) == b"Hello world"
    assert tokenizer.encode("Hello world") == ids


# -- damaged files -----------------------------------------------------------------------------


def _lines() -> list[bytes]:
    return write_ranks(TOKENS).splitlines(keepends=True)


@pytest.mark.parametrize(
    ("line", "text", "words"),
    [
        (3, b"YQ== 2 3\n", ("line 3", "a token in base64 and its rank")),
        (3, b"YQ==\n", ("line 3",)),
        (300, b"Y!== 299\n", ("line 300", "a token in base64")),
        (300, b" 299\n", ("line 300",)),
        (300, b"YWFhYWFhYWFhYWFhYWFhYQ== -1\n", ("line 300", "a rank")),
        (300, b"YWFhYWFhYWFhYWFhYWFhYQ== 2x\n", ("line 300", "a rank")),
        (300, b"YWFhYWFhYWFhYWFhYWFhYQ== 10\n", ("line 300", "rank 10 a second time")),
        (300, b"YQ== 299\n", ("line 300", "a second time")),
        (300, b"\xff\xfe 299\n", ("line 300",)),
        (300, b"YWFhYWFhYWFhYWFhYWFhYQ== 800\n", ("rank 299", "no line")),
        (300, b"", ("rank 299", "no line")),
    ],
)
def test_a_damaged_line_is_named(line: int, text: bytes, words: tuple[str, ...]) -> None:
    lines = _lines()
    lines[line - 1] = text
    with pytest.raises(ArtifactError) as caught:
        parse_ranks(b"".join(lines), Path("tiktoken.model"))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_undamaged_file_is_read() -> None:
    raw = write_ranks(TOKENS)
    assert parse_ranks(raw, Path("x")) == TOKENS
    assert parse_ranks(raw.replace(b"\n", b"\r\n") + b"\n", Path("x")) == TOKENS


def test_a_vocabulary_without_a_byte_is_refused() -> None:
    tokens = [token for token in TOKENS if token != b"\xf0"]
    with pytest.raises(ArtifactError, match="byte 0xf0: got no token"):
        parse_ranks(write_ranks(tokens), Path("x"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"added_tokens_decoder": {str(N_BASE - 1): {"content": "x"}}}, "an id of text"),
        ({"added_tokens_decoder": {"700": "a", str(N_BASE + 256): "x"}}, "no id below 956"),
        ({"added_tokens_decoder": {"x": {"content": "x"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"-1": {"content": "x"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"701": {"content": ""}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"701": 5}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"701": "a", "702": "a"}}, "each once"),
        ({"added_tokens_decoder": ["a"]}, "added_tokens_decoder"),
        ([], "a JSON object"),
    ],
)
def test_a_config_with_wrong_names_is_refused(tmp_path: Path, config: object, words: str) -> None:
    n_ids = write_tokenizer(tmp_path, TOKENS)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError) as caught:
        open_tokenizer(tmp_path, n_ids, tmp_path)
    assert words in str(caught.value)
    assert "tokenizer_config.json" in str(caught.value)


def test_ranks_that_were_cut_between_two_lines_are_refused(tmp_path: Path) -> None:
    n_ids = write_tokenizer(tmp_path, TOKENS)
    assert open_tokenizer(tmp_path, n_ids, tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(b"".join(_lines()[:-1]))
    with pytest.raises(ArtifactError, match=rf"got {N_BASE - 1} tokens, need {N_BASE}, up to the"):
        open_tokenizer(tmp_path, n_ids, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="got no control token"):
        open_tokenizer(tmp_path, n_ids, tmp_path)


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no tokenizer"):
        open_tokenizer(tmp_path, 512, tmp_path)
    n_ids = write_tokenizer(tmp_path, TOKENS)
    with pytest.raises(ArtifactError, match=f"{N_BASE} tokens, need at most 600"):
        open_tokenizer(tmp_path, 600, tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ArtifactError, match=r"tokenizer_config.json: got absent"):
        open_tokenizer(tmp_path, n_ids, tmp_path)


# -- tokenizer.json ----------------------------------------------------------------------------


def _definition() -> dict[str, object]:
    made = json.loads(library_json(TOKENS))
    names = control_names(N_BASE)
    made["added_tokens"] = [
        {"id": token, "content": name, "special": False, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for token, name in names.items()
    ]  # fmt: skip
    # As a rule control tokens stand in the vocabulary too; one of text may be spelled alike.
    made["model"]["vocab"] = {name: token for token, name in names.items()} | made["model"]["vocab"]
    return made


def test_a_tokenizer_json_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "json"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(_definition()))
    other = open_tokenizer(folder, N_BASE + N_CONTROL, folder)
    assert other.control_tokens == tokenizer.control_tokens
    for text in ("Hello world", "a<|open|>b <|sep|>", "你好 🙂", "[BOS]"):
        assert other.encode(text) == tokenizer.encode(text)
        assert other.decode(other.encode(text)) == text.encode()


def _no_model(made: dict[str, object]) -> None:
    made["model"] = 5


def _unigram(made: dict[str, object]) -> None:
    made["model"]["type"] = "Unigram"


def _no_byte(made: dict[str, object]) -> None:
    del made["model"]["vocab"]["a"]


def _words(made: dict[str, object]) -> None:
    made["model"]["vocab"]["▁the"] = 699


def _twice(made: dict[str, object]) -> None:
    made["added_tokens"].append({"id": N_BASE, "content": "again"})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_no_model, "model"), (_unigram, "BPE"), (_no_byte, "byte 0x61"), (_words, "vocab"),
        (_twice, "added_tokens"),
    ],
)  # fmt: skip
def test_a_tokenizer_json_of_another_kind_is_refused(
    tmp_path: Path, change: Callable[[dict[str, object]], None], word: str
) -> None:
    made = _definition()
    change(made)
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(ArtifactError) as caught:
        open_tokenizer(tmp_path, N_BASE + N_CONTROL, tmp_path)
    assert word in str(caught.value)


# -- the cache ---------------------------------------------------------------------------------


def test_the_definition_is_made_once_and_again_when_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(tokens: list[bytes]) -> str:
        made.append(len(tokens))
        return library_json(tokens)

    monkeypatch.setattr(module, "library_json", counted)
    cache = tmp_path / "cache"
    cache.mkdir()
    n_ids = write_tokenizer(tmp_path, TOKENS)

    def ids() -> list[int]:
        return open_tokenizer(tmp_path, n_ids, cache).encode("Hello world")

    expected = ids()
    assert (ids(), made) == (expected, [N_BASE])
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    for damaged in (whole[:-5], whole[:100] + b"x" + whole[101:], b""):
        entry.write_bytes(damaged)
        assert ids() == expected
        assert entry.read_bytes() == whole
    assert len(made) == 4
    fewer = TOKENS[:-1]
    write_tokenizer(tmp_path, fewer, n_ids - len(fewer))
    assert ids() is not None
    assert made[-1] == len(fewer)  # other ranks, another entry
    assert len(list(cache.iterdir())) == 2


# -- texts that are too long -------------------------------------------------------------------


class Counting:
    """An encoder that says how much it was given."""

    def __init__(self, inner: Encoder) -> None:
        self._inner, self.n_characters = inner, 0

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        self.n_characters += len(text)
        return self._inner.encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def counting(tokenizer: Tokenizer) -> Counting:
    tokenizer.encode("x")
    assert tokenizer._encoder is not None
    tokenizer._encoder = found = Counting(tokenizer._encoder)
    return found


def room(n_tokens: int) -> Room:
    return Room(n_tokens, "--prompt", f"{n_tokens} tokens")


def test_a_text_that_fits_in_no_way_is_not_encoded(
    tokenizer: Tokenizer, counting: Counting
) -> None:
    assert tokenizer.longest == max(map(len, TOKENS))
    with pytest.raises(UsageError, match=r"got \d+ characters, more than 10 tokens, need at most"):
        tokenizer.encode("a" * (10 * tokenizer.longest + 1), room(10))
    assert counting.n_characters == 0
    widest = max(TOKENS, key=len).decode("utf-8", "surrogateescape")
    assert len(tokenizer.encode(widest, room(1))) == 1  # the control: the bound is not too low


def test_a_text_is_encoded_no_further_than_its_room(
    tokenizer: Tokenizer, counting: Counting
) -> None:
    text = "a b" * 300_000
    n_tokens = len(tokenizer.encode(text))
    whole, counting.n_characters = counting.n_characters, 0
    assert tokenizer.encode(text, room(n_tokens)) == tokenizer.encode(text)  # the control
    counting.n_characters = 0
    with pytest.raises(UsageError):
        tokenizer.encode(text, room(n_tokens // 4))
    assert 0 < counting.n_characters <= whole // 2


def test_bytes_count_too(tokenizer: Tokenizer) -> None:
    data = bytes([0xFF]) * 50
    assert len(tokenizer.encode_bytes(data, room(50))) == 50
    with pytest.raises(UsageError):
        tokenizer.encode_bytes(data, room(49))


def test_a_definition_that_may_drop_text_has_no_such_bound(tmp_path: Path) -> None:
    """What is dropped needs no token: only counting says what fits."""
    n_ids = write_tokenizer(tmp_path, TOKENS)
    parsed = json.loads(library_json(TOKENS))
    parsed["normalizer"] = {"type": "Replace", "pattern": {"String": "z"}, "content": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    (tmp_path / "tiktoken.model").unlink()
    made = open_tokenizer(tmp_path, n_ids, tmp_path)
    assert len(made.encode("z" * 100_000 + "a", room(2))) == 1
    with pytest.raises(UsageError):
        made.encode("a b c d e f", room(2))
