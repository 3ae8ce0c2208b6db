"""A mistake in what one request calls: it ends with 500, and nobody else is told of it."""

import asyncio
import json
from typing import Any

import pytest

from k3tool.runtime.sampling import Sampler
from k3tool.serve.app import App
from k3tool.serve.service import Served, Service
from tests.runtime.test_scheduler import CheckingEngine, alone

httpx = pytest.importorskip("httpx", reason="NOT RUN: httpx is not installed")

BROKEN_SEED = 13


def served(engine: Any, waiting: int = 64) -> Service:
    """Return a service of an engine, without a tokenizer."""
    return Service(Served("m", 0, "f", frozenset(), waiting), engine, None)


def body(first: int, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": [first], "max_tokens": 6, "temperature": 0} | more


async def ask(service: Service, *bodies: dict[str, Any]) -> list[Any]:
    """Return the responses to bodies that are sent at once."""
    transport = httpx.ASGITransport(App(service).asgi(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies))


def test_one_request_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole and streamed; the operator reads why, the others are answered, and later ones too."""
    chosen = Sampler.choose

    def choose(self: Sampler, logits: Any, step: int) -> int:
        if self.seed == BROKEN_SEED and step == 2:
            raise ZeroDivisionError("a mistake")
        return chosen(self, logits, step)

    monkeypatch.setattr(Sampler, "choose", choose)
    draws = {"temperature": 1.0, "seed": BROKEN_SEED}
    with served(CheckingEngine(3)) as service:
        whole, stream, good = asyncio.run(
            ask(service, body(1, **draws), body(1, **draws, stream=True), body(2))
        )
        later = asyncio.run(ask(service, body(5)))[0]
        assert service.fault is None
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "internal_error"
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line]
    codes = [event.get("error", {}).get("code") for event in events]
    assert codes == [None, None, "internal_error"]
    assert "[DONE]" not in stream.text
    assert good.json()["choices"][0]["token_ids"] == alone([2], 6)
    assert later.json()["choices"][0]["token_ids"] == alone([5], 6)
    said = capsys.readouterr().err
    assert said.count("k3tool serve: a fault of ours ended a request (500)") == 2
    assert said.count("ZeroDivisionError: a mistake") == 2
    metrics = service.metrics
    assert metrics.value("k3tool_generations_total", reason="broken") == 2
    assert metrics.value("k3tool_generations_total", reason="length") == 2
    assert service.metrics.text().count("k3tool_active_sequences 0") == 1


def test_an_engine_that_breaks_ends_all(capsys: pytest.CaptureFixture[str]) -> None:
    """The control: no token of it may be trusted, so nothing goes on."""

    class Faulty(CheckingEngine):
        def step(self, *given: Any, **named: Any) -> Any:
            if len(self.taken) == 3:
                raise ZeroDivisionError("a mistake")
            return super().step(*given, **named)

    with served(Faulty(3)) as service:
        answers = asyncio.run(ask(service, body(1), body(2)))
        assert service.fault == "a mistake"
    assert [answer.status_code for answer in answers] == [503, 503]
