"""OpenAI's client against a served sample: what it gets is what `run` gives, whoever else asks."""

import json
import socket
import struct
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import KEY, SLOTS, WAITING, ServerProcess, until

openai = pytest.importorskip("openai", reason="NOT RUN: openai is not installed")

HI = [{"role": "user", "content": "Hello there"}]
LONG = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}


def greedy(client: Any, prompt: object, n: int = 12, **more: Any) -> Any:
    body = {"ignore_eos": True, **more.pop("extra_body", {})}
    return client.completions.create(
        model="tiny", prompt=prompt, max_tokens=n, temperature=0, extra_body=body, **more
    )


def metric(server: ServerProcess, name: str) -> float:
    request = urllib.request.Request(
        f"{server.url.removesuffix('/v1')}/metrics", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


def post(server: ServerProcess, path: str, raw: bytes) -> tuple[int, Any]:
    """Send any bytes, as no client of OpenAI's would."""
    request = urllib.request.Request(
        f"{server.url}/{path}", raw, {"Authorization": f"Bearer {KEY}"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# -- answers -----------------------------------------------------------------------------------


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 1024
    with pytest.raises(openai.NotFoundError, match="model: got other, need tiny"):
        client.models.retrieve("other")


def test_a_completion_is_what_run_gives(
    client: Any, sample: Path, tmp_path: Path, k3tool: Callable[..., Any]
) -> None:
    """Token by token, from ids and from text; the program of the server holds more sequences."""
    ran = k3tool("run", sample, "--ids", "5,9,2", "--gen", 12, "--ignore-eos",
                 "--cache", tmp_path)  # fmt: skip
    answer = greedy(client, [5, 9, 2])
    choice = answer.choices[0]
    assert choice.token_ids == [int(word) for word in ran.out.split()]
    assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", 12)
    text = k3tool("run", sample, "--prompt", "Hello", "--gen", 12, "--ignore-eos", "--quiet",
                  "--cache", tmp_path)  # fmt: skip
    assert greedy(client, "Hello").choices[0].text == text.out.removesuffix("\n")


def test_a_stream_is_the_whole_in_parts(client: Any) -> None:
    whole = greedy(client, "Hello")
    parts = list(greedy(client, "Hello", stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts[:-1]) == whole.choices[0].text
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].usage == whole.usage
    assert len({part.id for part in parts}) == 1
    assert len(parts) == 13, "a part for each token, and one that counts"


def test_chat(client: Any) -> None:
    asked = {"model": "tiny", "messages": HI, "seed": 3, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content == "", "twenty tokens of noise do not leave the think channel"
    assert message.reasoning_content
    parts = list(client.chat.completions.create(**asked, stream=True))
    deltas = [part.choices[0].delta for part in parts]
    assert deltas[0].role == "assistant"
    thought = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
    assert thought == message.reasoning_content
    plain = client.chat.completions.create(**asked, reasoning_effort="none").choices[0].message
    assert plain.content
    assert not hasattr(plain, "reasoning_content")


def test_a_seed_draws_the_same(client: Any) -> None:
    def drawn(**more: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=8, **more)
        return [choice.text for choice in answer.choices]

    one = drawn(seed=1, n=2)
    assert one == drawn(seed=1, n=2)
    assert one[0] != one[1], "choices of one answer differ"
    assert one[0] == drawn(seed=1)[0]
    assert drawn(seed=2) != one[:1]
    assert drawn() != drawn(), "without a seed one is drawn"
    assert drawn(temperature=0) == drawn(temperature=0) == drawn(extra_body={"top_k": 1})


def test_each_of_many_gets_what_it_gets_alone(client: Any) -> None:
    """More than there are slots, of several lengths, at once."""
    prompts = [[7 + nth] * length for nth, length in enumerate((1, 40, 3, 200, 9))]
    alone = [greedy(client, prompt, 10 + nth).choices[0] for nth, prompt in enumerate(prompts)]
    assert len({choice.text for choice in alone}) > 1
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda nth: greedy(client, prompts[nth], 10 + nth).choices[0],
                                 range(len(prompts))))  # fmt: skip
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    rows = greedy(client, prompts[:3], 10).choices
    assert [row.token_ids for row in rows] == [c.token_ids[:10] for c in alone[:3]]


def test_stops(client: Any) -> None:
    whole = greedy(client, "Hello", 30).choices[0]
    phrase = whole.text[8:11]
    cut = greedy(client, "Hello", 30, stop=[phrase]).choices[0]
    assert whole.text.startswith(cut.text + phrase)
    assert (cut.finish_reason, cut.stop_reason) == ("stop", phrase)
    end = whole.token_ids[5]
    by_id = greedy(client, "Hello", 30, extra_body={"stop_token_ids": [end]}).choices[0]
    assert by_id.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", end)


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": [600]}, "id 1 of 1: got 600, need 0 to 511"),
        ({"prompt": [1] * 2000}, "prompt and tokens: got 2000"),
        ({"max_tokens": 1025}, "prompt and tokens: got 1 \\+ 1025"),
        ({"max_tokens": 1024}, "got 1 \\+ 1024 = 1025 positions, need at most 1024"),
        ({"prompt": [1] * 1024, "max_tokens": None}, "got 1024 \\+ 1 = 1025 positions"),
        (
            {"extra_body": {"stop_token_ids": [7, 99999]}},
            "stop_token_ids: got 99999, need 0 to 511",
        ),
        ({"temperature": -1}, "temperature: got -1"),
        ({"extra_body": {"best": 3}}, "best: got a field that is not known here"),
        ({"n": SLOTS + WAITING + 1}, f"n: got {SLOTS + WAITING + 1} answers at once"),
        ({"logprobs": 3}, "logprobs: got 3"),
    ],
)
def test_a_bad_request(client: Any, change: dict[str, Any], said: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": [1], "max_tokens": 2, **change}
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(**body)
    assert client.completions.create(model="tiny", prompt=[1], max_tokens=2).choices


def test_the_longest_answer_is_taken(client: Any) -> None:
    """The control of the refusals: all of the context, and the last id that there is."""
    body = {"stop_token_ids": [511], "ignore_eos": True}
    made = client.completions.create(
        model="tiny", prompt=[1] * 1020, max_tokens=4, temperature=0, extra_body=body
    )
    assert made.usage.total_tokens <= 1024
    assert made.choices[0].finish_reason in ("length", "stop")


def test_another_model_or_key(client: Any, server: ServerProcess) -> None:
    with pytest.raises(openai.NotFoundError, match="model: got gpt, need tiny"):
        client.completions.create(model="gpt", prompt="x")
    for key in ("wrong", f"{KEY}x"):
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key=key).models.list()
    with urllib.request.urlopen(f"{server.url.removesuffix('/v1')}/health") as answer:
        assert json.load(answer) == {"status": "ok", "model": "tiny"}


@pytest.mark.parametrize(
    ("path", "raw", "status"),
    [
        ("completions", b"{", 400), ("completions", b"[]", 400), ("chat/completions", b"", 400),
        ("completions", b'{"model": "tiny", "model": "tiny", "prompt": "x"}', 400),
        ("completions/", b"{}", 404), ("completions", b'{"model": 5, "prompt": "x"}', 400),
        ("completions", b"\xff\xfe", 400), ("embeddings", b"{}", 404), ("models", b"{}", 405),
        ("completions", b" " * ((32 << 20) + 1), 413),
        ("completions", b'{"model": "tiny", "prompt": "' + b"x" * 9_000_000 + b'"}', 400),
    ],
)  # fmt: skip
def test_bytes_that_no_client_sends(
    server: ServerProcess, path: str, raw: bytes, status: int
) -> None:
    got, answer = post(server, path, raw)
    assert got == status, answer
    assert answer["error"]["message"]


def test_too_many_are_turned_away(client: Any, server: ServerProcess) -> None:
    """Until a slot is free; who was let in gets all that was asked for."""
    asked = {"model": "tiny", "prompt": [3], "stream": True, **LONG}
    held = [client.completions.create(**asked) for _ in range(SLOTS + WAITING)]
    with pytest.raises(openai.RateLimitError, match="try again later") as refused:
        client.completions.create(**asked)
    assert refused.value.response.headers["retry-after"] == "1"
    assert sum(1 for _ in held[0]) == 400
    for stream in held:
        stream.close()
    until(lambda: metric(server, "k3tool_active_sequences") == 0)
    assert greedy(client, [3], 2).choices


def test_who_leaves_frees_a_slot(client: Any, server: ServerProcess) -> None:
    """Streaming, waiting for the whole, and while waiting for a slot."""
    asked = {"model": "tiny", "prompt": [3], **LONG}
    streams = [client.completions.create(**asked, stream=True) for _ in range(SLOTS)]
    until(lambda: metric(server, "k3tool_active_sequences") == SLOTS)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.1).completions.create(**asked)
    next(iter(streams[0]))
    for stream in streams:
        stream.close()
    until(lambda: metric(server, "k3tool_active_sequences") == 0)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.1).completions.create(**asked)
    until(lambda: metric(server, "k3tool_active_sequences") == 0)
    assert metric(server, "k3tool_waiting_sequences") == 0


def test_clients_that_leave_at_any_point(client: Any, server: ServerProcess) -> None:
    """In the head, in the body, before, while and after it answers; slots and counts come back."""
    body = json.dumps({"model": "tiny", "prompt": [3], "max_tokens": 400, "ignore_eos": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    sent = (head + body).encode()
    port = int(server.url.split(":")[2].split("/")[0])
    for nth, length in enumerate((1, 40, len(head), len(sent) - 1, *[len(sent)] * 8)):
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.sendall(sent[:length])
            if nth % 3 == 0:  # a reset, no orderly end
                linger = struct.pack("ii", 1, 0)
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    until(lambda: metric(server, "k3tool_active_sequences") == 0)
    assert metric(server, "k3tool_waiting_sequences") == 0
    assert greedy(client, [3], 2).choices


def test_the_page_s_example(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands in docs/serve.md, but for the address and the key."""
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    changed = example.replace("http://127.0.0.1:8000/v1", server.url).replace('"any"', f'"{KEY}"')
    assert changed.count(server.url) == changed.count(KEY) == 1
    exec(changed, {})
    assert len(capsys.readouterr().out) > 20
