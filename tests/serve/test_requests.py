"""Bodies are read strictly: what is not served is refused by name, never dropped."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3tool.errors import UsageError
from k3tool.serve.requests import MOST_BRACKETS, Ask, read_body, read_chat, read_completion
from k3tool.text.chat import NO_THINKING, Message
from k3tool.text.tools import Call

HELLO = [{"role": "user", "content": "hello"}]


CALLED: dict[str, Any] = {
    "role": "assistant", "content": None,
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1e2}'}}
    ],
}  # fmt: skip
ANSWER = {"role": "tool", "tool_call_id": "a", "content": "done"}
TOOL: dict[str, Any] = {
    "type": "function", "function": {"name": "f", "parameters": {"type": "object"}},
}  # fmt: skip


def completion(**body: Any) -> Any:
    return read_completion({"model": "m", "prompt": "hello", **body})


def chat(**body: Any) -> Any:
    return read_chat({"model": "m", "messages": HELLO, **body})


def test_defaults_are_those_of_the_api() -> None:
    assert completion().ask == Ask(model="m")
    assert (Ask("m").temperature, Ask("m").top_p, Ask("m").n) == (1.0, 1.0, 1)


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompts(prompt: object, read: object) -> None:
    assert completion(prompt=prompt).prompts == read


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], [[]], [1, -1], [1, True], [2**32], ["a", 1], [1.0], {}, 3]
)
def test_prompts_that_are_none(prompt: object) -> None:
    with pytest.raises(UsageError, match=r"^prompt"):
        completion(prompt=prompt)


def test_every_field_is_taken() -> None:
    asked = chat(
        max_completion_tokens=7, temperature=0, top_p=0.5, top_k=3, seed=11, stop="x",
        stop_token_ids=[5], ignore_eos=True, n=2, stream=True,
        stream_options={"include_usage": True}, reasoning_effort="low", user="somebody",
        presence_penalty=0, frequency_penalty=0.0, tools=[], response_format={"type": "text"},
        logprobs=False, metadata={"a": "b"}, max_tokens=None,
    )  # fmt: skip
    assert asked.ask == Ask("m", 7, 0.0, 0.5, 3, 11, ("x",), (5,), True, 2, True, True)
    assert asked.effort == "low"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 101), ("temperature", True), ("temperature", float("nan")),
        ("temperature", "1"), ("top_p", 0), ("top_p", 1.5), ("top_k", -1), ("top_k", 1.5), ("n", 0),
        ("n", 1000), ("max_tokens", 0), ("max_tokens", 2**32), ("seed", -1), ("seed", 2**64),
        ("stop", [""]), ("stop", ["x"] * 17), ("stop", 3), ("stop_token_ids", ["x"]),
        ("stream", 1), ("stream_options", {"include_usage": True}), ("stream_options", {"x": 1}),
        ("presence_penalty", 0.5), ("logprobs", True), ("logprobs", 5), ("logit_bias", {"1": 2}),
        ("tools", [{}]), ("tools", {"x": 1}), ("tools", [TOOL, TOOL]), ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("echo", True), ("best_of", 2), ("modalities", ["audio"]), ("max_token", 3),
        ("reasoning_effort", "medium"), ("reasoning_effort", ["low"]),
        ("model", 3), ("ignore_eos", "no"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_served_is_named(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"^{field}"):
        chat(**{field: value})


@pytest.mark.parametrize("value", [{}, "", 0, False, {"x": 1}])
def test_tools_are_a_list_even_where_there_are_none(value: object) -> None:
    with pytest.raises(UsageError, match=r"^tools: .*need a list of tools"):
        chat(tools=value)
    assert chat(tools=[]).tools is chat(tools=None).tools is None


def test_two_names_of_one_field() -> None:
    with pytest.raises(UsageError, match="one of the two"):
        chat(max_tokens=3, max_completion_tokens=3)


def test_no_model() -> None:
    with pytest.raises(UsageError, match=r"^model: got none"):
        read_completion({"prompt": "a"})


def test_messages_become_roles_and_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "x"},
            {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": None},
            {"role": "user", "content": ""},
        ]
    )
    assert asked.messages == (
        Message("system", "be brief"),
        Message("user", "ab", name="x"),
        Message("assistant", "c", reasoning="hm"),
        Message("user", ""),
    )
    assert asked.effort == "max"
    assert chat(reasoning_effort="none").effort == NO_THINKING


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        (None, "messages"), ([], "messages"), ("hello", "messages"), ([3], r"messages\[0\]"),
        ([{"role": "function", "content": "x"}], r"messages\[0\].role"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\].tool_call_id"),
        ([{"role": "tool", "tool_call_id": "a", "content": "x"}],
         r"messages\[0\].tool_call_id: got .a."),
        ([*HELLO, CALLED], r"messages\[2\]: got no answer to the call .a."),
        ([*HELLO, CALLED, *HELLO], r"messages\[2\]: got no answer to the call .a."),
        ([*HELLO, CALLED, ANSWER, ANSWER], r"messages\[3\].tool_call_id: got .a."),
        ([*HELLO, CALLED | {"tool_calls": CALLED["tool_calls"] * 2}],
         r"messages\[1\].tool_calls\[1\].id"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([*HELLO, {"role": "user", "content": [{"type": "image_url"}]}],
         r"messages\[1\].content\[0\]"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], r"messages\[0\].tool_calls"),
        ([{"role": "user", "content": "x", "reasoning_content": "y"}],
         r"messages\[0\].reasoning_content"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\].role"),
    ],
)  # fmt: skip
def test_messages_that_are_none(messages: object, place: str) -> None:
    with pytest.raises(UsageError, match=rf"^{place}"):
        chat(messages=messages)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b'{"a": 1, "a": 2}', b"\xff", b"[" * 999])
def test_bodies_that_are_no_object(raw: bytes) -> None:
    with pytest.raises(UsageError, match=r"^body"):
        read_body(raw)


WORDS = st.text('ab\né"{', max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["model", "prompt", "messages", "n", "stop", "seed", "stream", "stream_options", "tools",
     "temperature", "reasoning_effort", "logit_bias", "response_format"]
)  # fmt: skip


@given(st.dictionaries(FIELDS, JSON, max_size=5), st.booleans())
def test_any_json_is_read_or_refused(body: dict[str, Any], is_chat: bool) -> None:
    """Nothing else comes out of a reader than an Ask or a UsageError in one line."""
    said = ""
    try:
        found = (read_chat if is_chat else read_completion)({**body, "model": "m"})
        said = found.ask.model
    except UsageError as error:
        said = error.text()
    assert said
    assert "\n" not in said


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(), max_size=5))
def test_a_body_comes_out_as_it_was_sent(body: dict[str, Any]) -> None:
    assert read_body(json.dumps(body).encode()) == body


def test_a_body_of_brackets_is_not_built() -> None:
    """Millions of lists would hold up every thread; as many as a long text may have are read."""
    with pytest.raises(UsageError, match="body: got 1048577 brackets, need at most 1048576"):
        read_body(b"[" * (MOST_BRACKETS + 1))
    with pytest.raises(UsageError, match="invalid JSON"):
        read_body(b"[" * MOST_BRACKETS)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_every_field_of_the_official_client_is_known(kind: str) -> None:
    """Taken, or refused as not served; "not known" is for misspelt names."""
    openai = pytest.importorskip("openai", reason="NOT RUN: openai is not installed")
    types = openai.types.chat if kind == "chat" else openai.types
    fields = types.completion_create_params.CompletionCreateParamsBase.__annotations__
    read = read_chat if kind == "chat" else read_completion
    base = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    body: dict[str, Any] = base if kind == "chat" else {"model": "m", "prompt": "x"}
    assert len(fields) > 15
    for field in set(fields) - set(body):
        said = ""
        try:
            read({**body, field: {"no": "value"}})
        except UsageError as error:
            said = error.text()
        assert "not known" not in said
    with pytest.raises(UsageError, match="verbosit: got a field that is not known"):
        read({**body, "verbosit": "low"})


def test_a_field_that_is_never_served() -> None:
    assert read_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], "audio": None})
    with pytest.raises(UsageError, match=r"web_search_options: got .*, need null: nothing else"):
        read_chat({"model": "m", "messages": [], "web_search_options": {}})


def test_tools_are_read() -> None:
    asked = chat(tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)
    assert asked.tools.endswith(
        '```json\n[{"function":{"name":"f","parameters":{"type":"object"}},"type":"function"}]\n```'
    )
    assert chat(tools=[], tool_choice="none").tools is None


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"strict": True}, r"tools\[0\].function.strict: got true"),
        ({"name": ""}, r"tools\[0\].function.name"),
        ({"parameters": []}, r"tools\[0\].function.parameters"),
        ({"returns": {}}, r"tools\[0\].function.returns"),
    ],
)
def test_a_tool_that_is_not_served_is_named(change: dict[str, Any], place: str) -> None:
    with pytest.raises(UsageError, match=rf"^{place}"):
        chat(tools=[{"type": "function", "function": TOOL["function"] | change}])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "none"), ("tool_choice", "required"), ("parallel_tool_calls", False),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ],
)  # fmt: skip
def test_what_nothing_holds_the_model_to_is_refused(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"^{field}: got .*nothing would hold the model"):
        chat(tools=[TOOL], **{field: value})


def test_answers_of_tools_stand_in_the_order_of_the_calls() -> None:
    second = {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}}
    both = CALLED | {"tool_calls": [*CALLED["tool_calls"], second]}
    late = ANSWER | {"tool_call_id": "b", "content": "other"}
    read = read_chat({"model": "m", "messages": [*HELLO, both, late, ANSWER, *HELLO]}).messages
    assert [message.answers for message in read] == [None, None, ("f", 1), ("g", 2), None]
    assert [message.content for message in read[2:4]] == ["done", "other"]
    assert read[1].calls == (Call("f", '{"x": 1e2}', "a"), Call("g", "", "b"))
