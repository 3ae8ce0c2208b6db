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
    """Ask as a server would, which hears of the mistake too."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    service: Any = Broken()
    with pytest.raises(ZeroDivisionError):
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
    assert "ZeroDivisionError: a mistake" in capsys.readouterr().err
