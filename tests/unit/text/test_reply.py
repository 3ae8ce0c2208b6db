"""Stops across tokens, characters across tokens, channels across both."""

import random

import pytest

from k3tool.errors import UsageError
from k3tool.text.chat import Message, chat_ids
from k3tool.text.reply import Part, Reply
from k3tool.text.stop_text import StopText
from k3tool.text.tokenizer import Tokenizer, open_tokenizer
from tests.unit.text.vocabulary import grown, write_tokenizer

TOKENS = grown(700)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("reply")
    return open_tokenizer(folder, write_tokenizer(folder, TOKENS), folder)


# -- stops -------------------------------------------------------------------------------------


def expected(text: str, phrases: list[str]) -> tuple[str, str | None]:
    """Return the text before the phrase that ends first, said another way."""
    ends = [(text.find(p) + len(p), -len(p), p) for p in phrases if p in text]
    if not ends:
        return text, None
    end, _, phrase = min(ends)
    return text[: end - len(phrase)], phrase


@pytest.mark.parametrize(
    ("text", "phrases", "shown", "found"),
    [
        ("abcdef", ["cd"], "ab", "cd"),
        ("abcdef", ["x"], "abcdef", None),
        ("aab", ["ab"], "a", "ab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("abcd", ["bcd", "c"], "ab", "c"),
        ("abcd", ["abcd", "bcd"], "", "abcd"),
        ("xEN", ["END"], "xEN", None),
        ("END", ["END"], "", "END"),
        ("ab\n\nc", ["\n\n"], "ab", "\n\n"),
        ("你好。x", ["。"], "你好", "。"),
    ],
)
def test_stops(text: str, phrases: list[str], shown: str, found: str | None) -> None:
    assert expected(text, phrases) == (shown, found)
    for size in (1, 2, 3, 100):
        stop = StopText(phrases)
        parts = [stop.feed(text[at : at + size]) for at in range(0, len(text), size)]
        assert ("".join(parts) + stop.finish(), stop.found) == (shown, found)


def test_random_texts_and_phrases_of_few_letters() -> None:
    rng = random.Random(4)
    n_found = 0
    for _ in range(2000):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 12)))
        phrases = ["".join(rng.choice("abc") for _ in range(rng.randint(1, 4))) for _ in range(2)]
        stop = StopText(phrases)
        parts = [stop.feed(character) for character in text]
        assert ("".join(parts) + stop.finish(), stop.found) == expected(text, phrases)
        n_found += stop.found is not None
    assert 200 < n_found < 1800


def test_nothing_is_held_back_that_need_not_be() -> None:
    stop = StopText(["END"])
    assert [stop.feed(c) for c in "aEbENEND"] == ["a", "", "Eb", "", "", "EN", "", ""]
    assert stop.found == "END"
    assert stop.feed("more") == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(UsageError, match="an empty text"):
        StopText(["x", ""])


# -- replies -----------------------------------------------------------------------------------


def feed(reply: Reply, ids: list[int]) -> list[list[Part]]:
    return [reply.feed(token, number == len(ids)) for number, token in enumerate(ids, 1)]


def test_parts_are_the_text_and_no_character_is_split(tokenizer: Tokenizer) -> None:
    text = "naïve 🙂 हिन्दी end"
    ids = [token for value in text.encode() for token in tokenizer.encode_bytes(bytes([value]))]
    assert len(ids) > len(text)
    reply = Reply(tokenizer)
    parts = [part.text for parts in feed(reply, ids) for part in parts]
    assert "".join(parts) == reply.text == text
    assert all("\ufffd" not in part for part in parts)


def test_a_character_that_is_never_whole_shows_at_the_end(tokenizer: Tokenizer) -> None:
    reply = Reply(tokenizer)
    ids = tokenizer.encode_bytes(b"a\xf0\x9f\x99")
    assert [part.text for part in feed(reply, ids)[-1]] == ["\ufffd"]


def test_a_stop_across_tokens_ends_it(tokenizer: Tokenizer) -> None:
    ids = [token for c in "Hello STOP world" for token in tokenizer.encode(c)]
    reply = Reply(tokenizer, ["STOP"])
    n_fed = 0
    for token in ids:
        n_fed += 1
        reply.feed(token)
        if reply.stopped_by is not None:
            break
    assert (reply.text, reply.stopped_by) == ("Hello ", "STOP")
    assert n_fed == len("Hello STOP")


def test_what_was_held_back_is_shown_where_no_stop_came(tokenizer: Tokenizer) -> None:
    reply = Reply(tokenizer, ["STOP"])
    feed(reply, tokenizer.encode("Hello ST"))
    assert (reply.text, reply.stopped_by) == ("Hello ST", None)


def test_control_tokens_show_nothing(tokenizer: Tokenizer) -> None:
    reply = Reply(tokenizer)
    end = tokenizer.control_id("<|end_of_msg|>")
    assert feed(reply, [*tokenizer.encode("a"), end]) == [[Part("", "a")], []]


def test_stops_are_of_the_response_alone(tokenizer: Tokenizer) -> None:
    ids = chat_ids(tokenizer, [Message("assistant", "an answer. STOP", "a STOP")], "low")
    tags = [at for at, token in enumerate(ids) if token == tokenizer.control_id("<|open|>")]
    in_think = ids.index(tokenizer.control_id("<|sep|>"), tags[2]) + 1  # third: the first is effort
    answer = ids[in_think:]
    reply = Reply(tokenizer, ["STOP"], "think")
    for token in answer:
        reply.feed(token)
        if reply.stopped_by is not None:
            break
    assert reply.channels == {"think": "a STOP", "response": "an answer. "}
    assert reply.text == "an answer. "


# -- replies that go on ------------------------------------------------------------------------


def go_on(tokenizer: Tokenizer, text: bytes, at: int, stop: str, is_resumed: bool = True) -> str:
    """Return what two runs show of a text of single bytes that is divided behind `at`."""
    ids = [token for value in text for token in tokenizer.encode_bytes(bytes([value]))]
    first, second = Reply(tokenizer, [stop]), Reply(tokenizer, [stop])
    feed(first, ids[:at])
    if is_resumed:
        second.go_on(ids[:at])
    for number, token in enumerate(ids[at:], 1):
        second.feed(token, number == len(ids) - at)
        if second.stopped_by is not None:
            break
    return first.text + second.text + (f"[{second.stopped_by}]" if second.stopped_by else "")


def test_a_stop_that_began_before_a_run_ended_is_found_in_the_next(tokenizer: Tokenizer) -> None:
    text = b"Hello STOP world"
    shown = [go_on(tokenizer, text, at, "STOP") for at in range(1, 7)]
    assert shown == ["Hello [STOP]"] * 6
    assert [go_on(tokenizer, text, at, "STOP") for at in (7, 8, 9)] == [
        "Hello S[STOP]", "Hello ST[STOP]", "Hello STO[STOP]",
    ]  # fmt: skip
    assert "STOP world" in go_on(tokenizer, text, 8, "STOP", is_resumed=False)  # the control


def test_what_was_shown_at_an_end_is_not_shown_again(tokenizer: Tokenizer) -> None:
    text = "STuff, STOPped. STO"
    for at in range(1, len(text)):
        assert go_on(tokenizer, text.encode(), at, "STOPPED") == text


def test_behind_a_stop_a_run_goes_on(tokenizer: Tokenizer) -> None:
    reply = Reply(tokenizer, ["."])
    reply.go_on(tokenizer.encode("One. Two."))
    assert (reply.text, reply.stopped_by) == ("", None)
    feed(reply, tokenizer.encode(" Three. Four"))
    assert (reply.text, reply.stopped_by) == (" Three", ".")


def test_a_character_that_was_cut_is_whole_in_the_run_that_goes_on(tokenizer: Tokenizer) -> None:
    assert go_on(tokenizer, "a🙂b".encode(), 3, "x") == "a\ufffd🙂b"
    for data in (b"a\xf0\x9fb", b"a\xf0\x9f"):  # never whole: shown once, by the first run
        assert go_on(tokenizer, data, 2, "x") == data.decode(errors="replace")


def test_a_conversation_goes_on_in_its_channel(tokenizer: Tokenizer) -> None:
    ids = chat_ids(tokenizer, [Message("assistant", "an answer. STOP", "a STOP")], "low")
    ends = [at for at, token in enumerate(ids) if token == tokenizer.control_id("<|end_of_msg|>")]
    answer = ids[ends[0] + 1 : ends[1]]  # between the message of the effort and the next one
    for at in range(1, len(answer)):
        reply = Reply(tokenizer, ["STOP"], "")
        before = Reply(tokenizer, ["STOP"], "")
        reply.go_on(answer[:at])
        feed(before, answer[:at])
        if before.stopped_by is None:
            feed(reply, answer[at:])
            shown = before.text + reply.text  # and of the stop what the first run showed
            assert shown.startswith("an answer. ")
            assert shown.removeprefix("an answer. ") == before.text[len("an answer. ") :]
            assert reply.stopped_by == "STOP"
