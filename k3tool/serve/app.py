"""The ASGI application: routes, limits, errors; what is generated comes from a Service.

It holds no engine and no tokenizer, so a test drives it with a service of its own.
"""

import asyncio
import hmac
import sys
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from k3tool.errors import K3Error, UsageError, quoted
from k3tool.serve.answers import Choice, Head, Json, Usage, error_json, event, model_json
from k3tool.serve.requests import (
    Ask,
    ChatAsk,
    CompletionAsk,
    read_body,
    read_chat,
    read_completion,
)
from k3tool.serve.service import (
    BrokenError,
    Generation,
    OverloadedError,
    Service,
    StoppedError,
    Update,
)
from k3tool.text.chat import first_channel

MOST_BODY_BYTES = 32 << 20
RETRY_SECONDS = 1  # what a client that is turned away is told to wait
_CLIENT_GONE = 499  # never sent: the client has closed; counted under this number as proxies do
Handler = Callable[[Request], Awaitable[Response]]


class UnknownModelError(UsageError):
    """Another model than the served one was asked for."""


class App:
    """The routes over one service; `key` is what clients must show where it is given."""

    def __init__(self, service: Service, key: str | None = None) -> None:
        """Keep the service; it is started and stopped by who made it."""
        self._service, self._key = service, key

    def asgi(self) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/health", self._counted(self._health, is_open=True), methods=["GET"]),
            Route("/metrics", self._counted(self._metrics), methods=["GET"]),
            Route("/v1/models", self._counted(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._counted(self._model), methods=["GET"]),
            Route("/v1/completions", self._counted(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._counted(self._chat), methods=["POST"]),
        ]
        made = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
        # A redirect would go to whatever host the request names, without its body.
        made.router.redirect_slashes = False
        return made

    # -- around every route --------------------------------------------------------------------

    def _counted(self, handler: Handler, *, is_open: bool = False) -> Handler:
        """Return a handler whose errors are JSON, that asks for the key, and is counted."""

        async def handle(request: Request) -> Response:
            response = await self._answered(handler, request, is_open)
            path = request.scope["route"].path
            self._service.metrics.add(
                "k3tool_requests_total", path=path, status=str(response.status_code)
            )
            return response

        return handle

    async def _answered(self, handler: Handler, request: Request, is_open: bool) -> Response:
        try:
            if not (is_open or self._may_enter(request)):
                return _error(401, "a wrong or no key", "authentication_error", "invalid_api_key")
            return await handler(request)
        except UsageError as error:
            field = error.object.partition("[")[0].partition(".")[0]
            param = field if field.isidentifier() and field != "body" else None
            status, code = 400, None
            if isinstance(error, UnknownModelError):
                status, code = 404, "model_not_found"
            return JSONResponse(
                error_json(error.text(), "invalid_request_error", param, code), status_code=status
            )
        except OverloadedError as error:
            headers = {"Retry-After": str(RETRY_SECONDS)}
            return _error(429, str(error), "overloaded_error", "overloaded", headers)
        except (StoppedError, K3Error) as error:
            return _error(503, str(error), "server_error", "engine_stopped")
        except HTTPException as error:
            return await _http_error(request, error)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:  # ours, and this request's alone; it is counted like the others
            return JSONResponse(_bug_json(error), status_code=500)

    def _may_enter(self, request: Request) -> bool:
        if self._key is None:
            return True
        kind, _, shown = request.headers.get("authorization", "").partition(" ")
        # Not ==, whose time tells how much of the key was right.
        return kind.lower() == "bearer" and hmac.compare_digest(shown.encode(), self._key.encode())

    # -- what is known without generating ------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        fault = self._service.fault
        if fault is not None:
            return JSONResponse({"status": "stopped", "error": fault}, status_code=503)
        return JSONResponse({"status": "ok", "model": self._service.served.name})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            self._service.metrics.text(), media_type="text/plain; version=0.0.4"
        )

    def _entry(self) -> Json:
        served = self._service.served
        return model_json(served.name, served.created, self._service.engine.context)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def _model(self, request: Request) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self._entry())

    def _require_model(self, name: str) -> None:
        if name != self._service.served.name:
            raise UnknownModelError(
                "model", got=name or quoted(name), need=self._service.served.name
            )

    # -- generating ----------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat)

    def _asked(
        self, read: Callable[[Json], CompletionAsk | ChatAsk], raw: bytes
    ) -> tuple[CompletionAsk | ChatAsk, list[Sequence[int]]]:
        """Return what a body asks for, and its prompts' ids. Raises: as Service.start, as read."""
        asked = read(read_body(raw))
        self._require_model(asked.ask.model)
        n_prompts = len(asked.prompts) if isinstance(asked, CompletionAsk) else 1
        self._service.require_room(n_prompts * asked.ask.n)  # before a text is encoded for nothing
        return asked, self._service.prompts(asked)

    async def _answer(
        self, request: Request, read: Callable[[Json], CompletionAsk | ChatAsk]
    ) -> Response:
        """Start every generation that a body asks for, all or none, and answer."""
        service, served = self._service, self._service.served
        # Off the loop: a long text takes a while, and others' tokens wait for the loop.
        asked, prompts = await asyncio.to_thread(self._asked, read, await _body(request))
        channel = first_channel(asked.effort) if isinstance(asked, ChatAsk) else None
        may_call = isinstance(asked, ChatAsk) and asked.tools is not None
        started = service.start(prompts, asked.ask, channel, may_call=may_call)
        kind = "cmpl" if channel is None else "chatcmpl"
        head = Head(
            f"{kind}-{uuid.uuid4().hex}", int(time.time()), served.name, served.fingerprint,
            is_chat=channel is not None,
        )  # fmt: skip
        n_prompt = sum(map(len, prompts))
        if asked.ask.stream:
            parts = _stream(request, head, started, asked.ask, n_prompt)
            return _Events(parts, started)
        return await _whole(request, head, started, n_prompt)


class _Events(StreamingResponse):
    """Server-sent events. Generations end with it, even where the first event was never sent."""

    def __init__(self, parts: AsyncIterator[bytes], started: Sequence[Generation]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(parts, media_type="text/event-stream", headers=headers)
        self._started = started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generation in self._started:
                generation.cancel()


async def _whole(
    request: Request, head: Head, started: Sequence[Generation], n_prompt: int
) -> Response:
    choices = [Choice() for _ in started]
    async with aclosing(_updates(request, started)) as updates:
        async for index, new in updates:
            choices[index].add(new)
    usage = Usage(n_prompt, sum(one.n_tokens for one in started))
    return JSONResponse(head.whole(choices, usage))


async def _stream(
    request: Request, head: Head, started: Sequence[Generation], ask: Ask, n_prompt: int
) -> AsyncIterator[bytes]:
    """Yield server-sent events; what goes wrong is an event too, since 200 has been sent."""
    fresh = set(range(len(started)))
    try:
        async with aclosing(_updates(request, started)) as updates:
            async for index, new in updates:
                yield event(head.part(index, new, is_first=index in fresh))
                fresh.discard(index)
    except (StoppedError, K3Error) as error:
        yield event(error_json(str(error), "server_error", None, "engine_stopped"))
        return
    except ClientDisconnect:
        return
    except Exception as error:
        yield event(_bug_json(error))
        return
    if ask.include_usage:
        yield event(head.last(Usage(n_prompt, sum(one.n_tokens for one in started))))
    yield event("[DONE]")


async def _updates(
    request: Request, started: Sequence[Generation]
) -> AsyncGenerator[tuple[int, Choice], None]:
    """Yield what is new in each generation, as it comes; whatever ends this, all of them end.

    Raises: ClientDisconnect when the client goes: nobody computes for it any more.
    """
    queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
    for index, generation in enumerate(started):
        generation.listen(partial(_put, queue, index))
    gone = asyncio.ensure_future(_until_gone(request))
    left = len(started)
    try:
        while left:
            coming = asyncio.ensure_future(queue.get())
            await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                raise ClientDisconnect
            index, new = coming.result()
            if isinstance(new, Exception):
                raise new
            left -= new.finish is not None
            yield index, new
    finally:
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        for generation in started:
            generation.cancel()


def _put(queue: asyncio.Queue[tuple[int, Update]], index: int, update: Update) -> None:
    queue.put_nowait((index, update))


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """Return a body of bounded size. Raises: HTTPException where it is larger."""
    parts, n_bytes = [], 0
    async for part in request.stream():
        n_bytes += len(part)
        if n_bytes > MOST_BODY_BYTES:
            raise HTTPException(413, f"body: got more than {MOST_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _error(
    status: int, message: str, kind: str, code: str, headers: dict[str, str] | None = None
) -> Response:
    return JSONResponse(error_json(message, kind, None, code), status_code=status, headers=headers)


def _bug_json(error: Exception) -> Json:
    """Say on stderr what should not have happened; return what the client is told of it."""
    cause = error.__cause__ if isinstance(error, BrokenError) and error.__cause__ else error
    with suppress(OSError):  # nobody may read it
        print("k3tool serve: a fault of ours ended a request (500):", file=sys.stderr)
        traceback.print_exception(cause)
    return error_json("a fault of the server", "server_error", None, "internal_error")


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer what no route has, in JSON as everything else."""
    assert isinstance(error, HTTPException)
    return JSONResponse(
        error_json(str(error.detail), "invalid_request_error", None, None),
        status_code=error.status_code, headers=error.headers,
    )  # fmt: skip
