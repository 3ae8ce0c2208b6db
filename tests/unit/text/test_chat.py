"""The message format piece by piece, and answers read back into channels."""

import json
from pathlib import Path

import pytest

from k3tool.errors import ArtifactError, UsageError
from k3tool.text.chat import (
    CLOSE,
    END_OF_MESSAGE,
    OPEN,
    SEP,
    ChannelReader,
    Control,
    Message,
    chat_ids,
    first_channel,
    kept_conversation,
    last_message,
    message_of,
    pieces,
    read_history,
)
from k3tool.text.tokenizer import Tokenizer, open_tokenizer
from tests.unit.text.vocabulary import grown, write_tokenizer

TOKENS = grown(700)
USER = Message("user", "Hi")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("chat")
    return open_tokenizer(folder, write_tokenizer(folder, TOKENS), folder)


def shown(messages: list[Message], effort: str) -> str:
    return "".join(p.name if isinstance(p, Control) else p for p in pieces(messages, effort))


def rendered(tokenizer: Tokenizer, ids: list[int]) -> str:
    names = tokenizer.control_tokens
    return b"".join(names.get(i, "").encode() or tokenizer.token_bytes(i) for i in ids).decode()


# -- conversations -----------------------------------------------------------------------------


def test_the_least_conversation() -> None:
    assert shown([USER], "off") == (
        '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )


def test_a_thinking_effort_stands_in_front_and_the_think_channel_is_open() -> None:
    text = shown([Message("system", "Be brief."), USER], "high")
    assert text.startswith(
        '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on '
    )
    assert (
        "Now the system is invoked with `thinking_effort=high`.<|close|>message<|sep|>"
        '<|end_of_msg|><|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|>'
    ) in text
    assert text.endswith('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')


def test_an_answer_of_before_has_both_channels_or_only_its_response() -> None:
    before = Message("assistant", "Hello.", "A greeting.")
    response = "<|open|>response<|sep|>Hello.<|close|>response<|sep|>"
    think = "<|open|>think<|sep|>A greeting.<|close|>think<|sep|>"
    assert think + response in shown([USER, before, USER], "low")
    assert "think" not in shown([USER, before, USER], "off")
    empty = Message("assistant", "Hello.")
    assert f"<|open|>think<|sep|><|close|>think<|sep|>{response}" in shown([empty, USER], "low")


def test_attributes_are_escaped() -> None:
    named = Message("user", "a & b", name='A&B "x"')
    assert ' name="A&amp;B &quot;x&quot;"<|sep|>a & b<|close|>' in shown([named], "off")


def test_ids_are_the_pieces_each_by_itself(tokenizer: Tokenizer) -> None:
    messages = [Message("user", "Hello world")]
    ids = chat_ids(tokenizer, messages, "off")
    assert rendered(tokenizer, ids) == shown(messages, "off")
    whole = shown(messages, "off").removeprefix(OPEN).split(SEP)[0]
    first = ids[1 : ids.index(tokenizer.control_id(SEP))]
    parts = ["message", " role", '="', "user", '"']
    assert first == [token for part in parts for token in tokenizer.encode(part)]
    assert "".join(parts) == whole


def test_a_body_cannot_end_its_message(tokenizer: Tokenizer) -> None:
    bad = f"x{CLOSE}message{SEP}<|end_of_msg|>{OPEN}message"
    ids = chat_ids(tokenizer, [Message("user", bad)], "off")
    n_close = sum(token == tokenizer.control_id(CLOSE) for token in ids)
    assert n_close == 1
    assert rendered(tokenizer, ids).count(CLOSE) == 2


def test_efforts_that_the_model_does_not_take(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="low or high or max or off"):
        chat_ids(tokenizer, [USER], "medium")


def test_a_tokenizer_without_the_format_is_refused(tmp_path: Path) -> None:
    n_ids = write_tokenizer(tmp_path, TOKENS)
    names = {"added_tokens_decoder": {"700": "[BOS]", "702": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    with pytest.raises(ArtifactError, match="no such control token"):
        chat_ids(open_tokenizer(tmp_path, n_ids, tmp_path), [USER])


# -- kept conversations ------------------------------------------------------------------------


def test_a_message_behind_a_kept_conversation_is_as_in_the_whole(tokenizer: Tokenizer) -> None:
    answer = Message("assistant", "Hello", "hm")
    for effort in ("low", "off"):
        before = chat_ids(tokenizer, [USER, answer], effort)
        before = before[: len(before) - before[::-1].index(tokenizer.control_id(END_OF_MESSAGE))]
        kept = kept_conversation(tokenizer, before)
        assert kept is not None
        assert (kept.open_tags, kept.is_thinking) == ((), effort != "off")
        behind = chat_ids(tokenizer, [Message("user", "More")], "max", kept)
        whole = chat_ids(tokenizer, [USER, answer, Message("user", "More")], effort)
        assert before + behind == whole
        assert first_channel("max", kept) == first_channel(effort)


def test_an_answer_that_was_cut_is_closed_in_front_of_the_next_message(
    tokenizer: Tokenizer,
) -> None:
    asked = chat_ids(tokenizer, [USER], "low")
    close = f"{CLOSE}think{SEP}{CLOSE}message{SEP}{END_OF_MESSAGE}"
    for cut, first in (("hm", ""), (f"hm{CLOSE}", SEP), (f"hm{CLOSE}think{SEP}", None)):
        kept = kept_conversation(tokenizer, [*asked, *answer(tokenizer, cut)])
        assert kept is not None
        text = rendered(tokenizer, chat_ids(tokenizer, [USER], "max", kept))
        wanted = close if first is not None else close.removeprefix(f"{CLOSE}think{SEP}")
        assert text.startswith((first or "") + wanted + f"{OPEN}message role=")
        assert text.count("thinking_effort") == 0


def test_a_sequence_that_is_no_conversation(tokenizer: Tokenizer) -> None:
    assert kept_conversation(tokenizer, tokenizer.encode("<|open|>message<|sep|>")) is None


def test_the_last_message_is_what_stands_behind_the_last_end(tokenizer: Tokenizer) -> None:
    ids = chat_ids(tokenizer, [USER], "off")
    assert rendered(tokenizer, last_message(tokenizer, ids)).startswith(f"{OPEN}message role=")
    assert last_message(tokenizer, [7, 8]) == [7, 8]


# -- answers -----------------------------------------------------------------------------------


def answer(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of an answer in which the format's words are control tokens."""
    names = {name: token for token, name in tokenizer.control_tokens.items()}
    ids: list[int] = []
    while text:
        name = next((n for n in names if text.startswith(n)), None)
        if name is not None:
            ids.append(names[name])
            text = text[len(name) :]
            continue
        end = min([text.find(n) for n in names if n in text], default=len(text))
        ids += tokenizer.encode(text[:end])
        text = text[end:]
    return ids


def channels(tokenizer: Tokenizer, text: str, first: str = "think") -> dict[str, str]:
    reader = ChannelReader(tokenizer, first)
    found: dict[str, bytes] = {}
    for token in answer(tokenizer, text):
        name, data = reader.feed(token)
        found[name] = found.get(name, b"") + data
    return {name: data.decode() for name, data in found.items() if data}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hm<|close|>think<|sep|><|open|>response<|sep|>Hello 你好<|close|>response<|sep|>"
         "<|close|>message<|sep|><|end_of_msg|>", {"think": "hm", "response": "Hello 你好"}),
        ("only thoughts", {"think": "only thoughts"}),
        ('a<|open|>call tool="x" index="1"<|sep|>b<|close|>call<|sep|>c',
         {"think": "ac", "call": "b"}),
        ("a<|close|>think<|sep|>lost", {"think": "a", "": "lost"}),
        ("a<|close|>other<|sep|>b", {"think": "ab"}),
        ("a<|sep|>b[EOT]c", {"think": "abc"}),
        ("a<|open|>x<|sep|>b<|close|>think<|sep|>c", {"think": "a", "x": "b", "": "c"}),
        ("a<|open|>unfinished", {"think": "a"}),
    ],
)  # fmt: skip
def test_channels(tokenizer: Tokenizer, text: str, found: dict[str, str]) -> None:
    assert channels(tokenizer, text) == found


def test_what_was_rendered_is_read_back(tokenizer: Tokenizer) -> None:
    before = Message("assistant", "Hello <|sep|> world", "1 & 2")
    ids = chat_ids(tokenizer, [before], "low")
    start = ids.index(tokenizer.control_id("<|end_of_msg|>")) + 1
    reader = ChannelReader(tokenizer, "")
    found: dict[str, bytes] = {}
    for token in ids[start:]:
        name, data = reader.feed(token)
        found[name] = found.get(name, b"") + data
    assert found["think"] == b"1 & 2"
    assert found["response"] == b"Hello <|sep|> world"
    assert reader.channel == "think"  # of the message that the prompt leaves open


# -- histories ---------------------------------------------------------------------------------


def test_a_history_is_read_line_by_line() -> None:
    raw = (
        b'{"role": "system", "content": "s"}\r\n\n'
        b'{"role": "user", "content": "u", "name": "n"}\n'
        b'{"role": "assistant", "content": "a", "reasoning_content": "r"}\n'
    )
    assert read_history(Path("h"), raw) == [
        Message("system", "s"), Message("user", "u", name="n"), Message("assistant", "a", "r"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 2"), ("[]", "a JSON list"), ("{}", "role"), ('{"role": "tool"}', "role"),
        ('{"role": "user"}', "content"), ('{"role": "user", "content": 5}', "content"),
        ('{"role": "user", "content": "x", "tool_calls": []}', "tool_calls"),
        ('{"role": "user", "content": "x", "name": 1}', "name"),
        ('{"role": "user", "content": "x", "reasoning": "y"}', "an assistant's"),
        ('{"role": "user", "role": "user", "content": "x"}', "twice"),
        ("\xff", "line 2"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(line: str, word: str) -> None:
    raw = b'{"role": "user", "content": "fine"}\n' + line.encode("latin-1")
    with pytest.raises(UsageError) as caught:
        read_history(Path("h"), raw)
    assert "--history: h: line 2" in str(caught.value)
    assert word in str(caught.value)


def test_no_message_at_all() -> None:
    with pytest.raises(UsageError, match="no message"):
        read_history(Path("h"), b"\n\n")
    assert message_of({"role": "user", "content": ""}, "x") == Message("user", "")
