"""Tools in the message format: written as the model was trained on, read back as they were."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3tool.text.chat import Control, Message, chat_ids, pieces
from k3tool.text.reply import Reply
from k3tool.text.tokenizer import Tokenizer, open_tokenizer
from k3tool.text.tools import ARGUMENT, RAW, Call, CallReader, arguments_of, declaration
from tests.unit.text.vocabulary import grown, write_tokenizer

TOKENS = grown(700)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tools")
    return open_tokenizer(folder, write_tokenizer(folder, TOKENS), folder)


def shown(messages: list[Message], tools: str | None = None) -> str:
    return "".join(p.name if isinstance(p, Control) else p for p in pieces(messages, "off", tools))


def test_a_declaration_is_compact_and_its_keys_are_sorted() -> None:
    text = shown([], declaration([{"type": "function", "function": {"name": "é", "a": [1, 2]}}]))
    assert text.startswith(
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\nHere are the available '
        'tools, described in JSONSchema.\n\n```json\n[{"function":{"a":[1,2],"name":"é"},'
        '"type":"function"}]\n```<|close|>message<|sep|><|end_of_msg|>'
    )


def test_calls_and_answers_are_written() -> None:
    calls = (Call("f", '{"x": 1e2, "y": "a\\nb", "z": {"k" :[1,  2]}}'), Call("g", "{oops"))
    text = shown([Message("assistant", "ok", calls=calls),
                  Message("tool", "done", answers=("f", 1))])  # fmt: skip
    assert (
        "<|open|>response<|sep|>ok<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="x" type="number"<|sep|>1e2<|close|>argument<|sep|>'
        '<|open|>argument key="y" type="string"<|sep|>a\nb<|close|>argument<|sep|>'
        '<|open|>argument key="z" type="object"<|sep|>{"k" :[1,  2]}<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{oops<|close|>json<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="f" index="1"<|sep|>done<|close|>message<|sep|>'
    ) in text


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1} x', "3", '{"a": 1, "a": 2}', '{"a" 1}'])
def test_what_is_no_object_has_no_arguments(text: str) -> None:
    assert arguments_of(text) is None


def test_no_text_is_no_argument() -> None:
    assert arguments_of("") == arguments_of(" {} ") == []


def read(tokenizer: Tokenizer, ids: list[int], first: str = "response") -> list[tuple[str, str]]:
    """Return (name, arguments) of each call in an answer."""
    reply, reader = Reply(tokenizer, (), first), CallReader()
    calls: dict[int, list[str]] = {}
    for token in ids:
        texts = [part.text for part in reply.feed(token) if part.channel in (ARGUMENT, RAW)]
        for part in reader.feed(texts, reply.ended_tag):
            assert bool(part.id) == (part.number not in calls)
            calls.setdefault(part.number, [part.name, ""])[1] += part.arguments
    return [(name, arguments) for name, arguments in calls.values()]


def answer_ids(tokenizer: Tokenizer, *calls: Call) -> list[int]:
    """Return the ids of an answer with calls, from inside its response on."""
    whole = chat_ids(tokenizer, [Message("assistant", "ok", calls=calls)], "off")
    before = len(chat_ids(tokenizer, [], "off"))
    return whole[before : len(whole) - before]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4), st.text(min_size=1, max_size=8))
def test_what_was_written_is_read_back(
    tokenizer: Tokenizer, arguments: dict[str, object], name: str
) -> None:
    """And written again it is the same, so a conversation that goes on has the same prefix."""
    first, second = Call(name, json.dumps(arguments)), Call("g", "{oops")
    ids = answer_ids(tokenizer, first, second)
    found = read(tokenizer, ids)
    assert [pair[0] for pair in found] == [name, "g"]
    assert json.loads(found[0][1]) == arguments
    assert found[1][1] == "{oops"
    assert answer_ids(tokenizer, *(Call(*pair) for pair in found)) == ids


def test_tags_elsewhere_are_no_calls(tokenizer: Tokenizer) -> None:
    """In what it thinks, and where no list of calls is open; a cut call has what came of it."""
    ids = answer_ids(tokenizer, Call("f", '{"x": 1, "y": 2}'))
    assert read(tokenizer, ids) == [("f", '{"x": 1, "y": 2}')]
    assert read(tokenizer, ids, first="think") == []
    cut = next(n for n in range(len(ids), 0, -1) if len(read(tokenizer, ids[:n])[0][1]) < 8)
    assert read(tokenizer, ids[:cut]) == [("f", '{"x": 1')]
