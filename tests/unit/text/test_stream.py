"""No character is shown in parts; bytes that are none show as U+FFFD when that is certain."""

import random

import pytest

from k3tool.text.stream import StreamDecoder

TEXT = "naïve 你好 🙂 e\u0301 👩‍👩‍👧 \U0010ffff"


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_gives_the_same_characters(seed: int) -> None:
    rng, data = random.Random(seed), TEXT.encode()
    decoder, out = StreamDecoder(), []
    while data:
        size = rng.randint(1, 5)
        out.append(decoder.feed(data[:size]))
        data = data[size:]
    assert all("\ufffd" not in part for part in out)
    assert "".join(out) + decoder.finish() == TEXT


def test_bytes_one_by_one() -> None:
    decoder = StreamDecoder()
    assert [decoder.feed(bytes([value])) for value in "🙂a".encode()] == ["", "", "", "🙂", "a"]
    assert decoder.finish() == ""


def test_a_broken_character_is_shown_when_it_is_certain() -> None:
    decoder = StreamDecoder()
    assert decoder.feed(b"\xf0\x9f") == ""  # may still become one
    assert decoder.feed(b"\x99") == ""
    assert decoder.feed(b"a") == "\ufffda"  # not any more
    assert decoder.feed(b"\xff") == "\ufffd"  # never
    assert decoder.feed(b"\xe4\xbd") == ""
    assert decoder.finish() == "\ufffd"


def test_random_bytes_give_what_the_whole_gives() -> None:
    rng = random.Random(1)
    for _ in range(300):
        data = bytes(rng.choice(b"a\x80\xbf\xc3\xe4\xbd\xa0\xf0\x9f\xff") for _ in range(20))
        decoder = StreamDecoder()
        out = "".join(decoder.feed(bytes([value])) for value in data) + decoder.finish()
        assert out == data.decode("utf-8", "replace")
