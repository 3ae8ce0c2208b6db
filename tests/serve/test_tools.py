"""Tools with OpenAI's client, on an engine that says what a trained model would say."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from k3tool.runtime.engine import Choice, StepResult, StepToken
from k3tool.serve.app import App
from k3tool.serve.service import Served, Service
from k3tool.text.chat import END_OF_MESSAGE, Message, chat_ids
from k3tool.text.tokenizer import Tokenizer, open_tokenizer
from k3tool.text.tools import Call
from tests.runtime.test_scheduler import CheckingEngine

openai = pytest.importorskip("openai", reason="NOT RUN: openai is not installed")
httpx = pytest.importorskip("httpx", reason="NOT RUN: httpx is not installed")

ASKED: dict[str, Any] = {
    "model": "m", "reasoning_effort": "none",
    "messages": [{"role": "user", "content": "How warm?"}],
    "tools": [{
        "type": "function",
        "function": {"name": "warmth", "parameters": {"type": "object", "properties": {}}},
    }],
}  # fmt: skip
ARGUMENTS = {"place": 'the "sea" & sky', "days": [1, 2], "deep": True}
CALLS = (Call("warmth", json.dumps(ARGUMENTS)), Call("warmth", "{}"))


class Speaking(CheckingEngine):
    """Every sequence is answered by the same ids."""

    context = 2000

    def __init__(self, vocab: int, says: Sequence[int]) -> None:
        super().__init__(2, 64)
        self.vocab, self.says = vocab, says
        self.n_said = [0, 0]

    def step(
        self, tokens: Sequence[StepToken], n_wanted: int, wants_logits: bool = False
    ) -> StepResult:
        result = super().step(tokens, n_wanted, False)
        choices = []
        for token in tokens:
            if token.position == 0:
                self.n_said[token.slot] = 0
        for token in tokens[len(tokens) - n_wanted :]:
            choices.append(Choice(self.says[self.n_said[token.slot]], 2.0, 1.0))
            self.n_said[token.slot] += 1
        return StepResult(tuple(choices), None, result.rows, 1)


@pytest.fixture
def tokenizer(sample: Path, cache: Path) -> Tokenizer:
    return open_tokenizer(sample, 512, cache)


def says(tokenizer: Tokenizer, answer: Message) -> list[int]:
    """Return the ids of an answer, from inside its response on."""
    before = len(chat_ids(tokenizer, [], "off"))
    whole = chat_ids(tokenizer, [answer], "off")
    return whole[before : len(whole) - before]


def asked(tokenizer: Tokenizer, answer: Message, **change: Any) -> Any:
    """Return what the client gets: an answer, or all parts of a stream."""
    engine = Speaking(512, says(tokenizer, answer))
    ends = frozenset([tokenizer.control_id(END_OF_MESSAGE)])
    service = Service(Served("m", 0, "f", ends, 8), engine, tokenizer)
    transport = httpx.ASGITransport(App(service).asgi())

    async def ask() -> Any:
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(
                base_url="http://here/v1", api_key="x", http_client=http, max_retries=0
            ) as client,
        ):
            got = await client.chat.completions.create(**{"temperature": 0, **ASKED, **change})
            return [part async for part in got] if change.get("stream") else got

    with service:
        return asyncio.run(ask())


def test_calls_are_answered_whole(tokenizer: Tokenizer) -> None:
    choice = asked(tokenizer, Message("assistant", "", calls=CALLS)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    found = choice.message.tool_calls
    assert [call.function.name for call in found] == ["warmth", "warmth"]
    assert [json.loads(call.function.arguments) for call in found] == [ARGUMENTS, {}]
    assert len({call.id for call in found}) == 2


def test_calls_are_streamed(tokenizer: Tokenizer) -> None:
    """An argument at a time; text before them is text."""
    parts = asked(tokenizer, Message("assistant", "Wait.", calls=CALLS), stream=True)
    choices = [part.choices[0] for part in parts]
    assert "".join(choice.delta.content or "" for choice in choices) == "Wait."
    assert choices[-1].finish_reason == "tool_calls"
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in deltas if call.id] == [
        (0, "warmth"), (1, "warmth"),
    ]  # fmt: skip
    texts = ["".join(c.function.arguments for c in deltas if c.index == n) for n in (0, 1)]
    assert [json.loads(text) for text in texts] == [ARGUMENTS, {}]
    assert sum(1 for call in deltas if call.index == 0) == 2 + len(ARGUMENTS)


def test_without_tools_or_calls_an_answer_is_text(tokenizer: Tokenizer) -> None:
    plain = asked(tokenizer, Message("assistant", "Warm.")).choices[0]
    assert (plain.message.content, plain.finish_reason) == ("Warm.", "stop")
    assert plain.message.tool_calls is None
    undeclared = asked(tokenizer, Message("assistant", "Hm.", calls=CALLS), tools=[]).choices[0]
    assert (undeclared.message.content, undeclared.finish_reason) == ("Hm.", "stop")
    assert undeclared.message.tool_calls is None


def test_an_answer_that_is_cut_says_so(tokenizer: Tokenizer) -> None:
    cut = asked(tokenizer, Message("assistant", "", calls=CALLS), max_tokens=40).choices[0]
    assert cut.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut.message.tool_calls[0].function.arguments)


def test_what_was_called_comes_back_in_the_prompt(tokenizer: Tokenizer) -> None:
    """A client sends the message it got: the model reads what it said, to the token."""
    first = asked(tokenizer, Message("assistant", "", calls=CALLS)).choices[0].message
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": "20"} for call in first.tool_calls
    ]
    messages = [*ASKED["messages"], first.model_dump(exclude_none=True), *reversed(answers)]
    final = asked(tokenizer, Message("assistant", "20 degrees."), messages=messages)
    assert final.choices[0].message.content == "20 degrees."
    said = [Message("user", "How warm?"), Message("assistant", "", calls=CALLS)]
    back = [Message("tool", "20", answers=("warmth", n)) for n in (1, 2)]
    tools = (
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
        '[{"function":{"name":"warmth","parameters":{"properties":{},"type":"object"}},'
        '"type":"function"}]\n```'
    )
    whole = chat_ids(tokenizer, [*said, *back], "off", tools=tools)
    assert final.usage.prompt_tokens == len(whole)
