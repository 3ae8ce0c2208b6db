"""The application over a service of its own: what is no client's fault."""

import asyncio
import json
from typing import Any

import pytest

from k3tool.serve.app import App
from k3tool.serve.metrics import Metrics


class Broken:
    """A service in whose code is a mistake."""

    metrics = Metrics()
    fault = None

    @property
    def served(self) -> Any:
        """Return nothing."""
        raise ZeroDivisionError("a mistake")


def get(path: str) -> tuple[int, Any]:
    """Ask as a server would."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    service: Any = Broken()
    asyncio.run(App(service).asgi()(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_mistake_in_the_code_is_said_and_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON as any answer, with no word of the inside; the operator gets all of it."""
    status, answer = get("/v1/models")
    assert status == 500
    assert answer["error"] == {
        "message": "a fault of the server", "type": "server_error", "param": None,
        "code": "internal_error",
    }  # fmt: skip
    said = capsys.readouterr().err
    assert said.startswith("k3tool serve: a fault of ours ended a request (500):\n")
    assert said.endswith("ZeroDivisionError: a mistake\n")
    counted = Broken.metrics.value("k3tool_requests_total", path="/v1/models", status="500")
    assert counted == 1
