"""The socket and the HTTP server: bound before anything is read, closed when the engine is."""

import asyncio
import errno
import inspect
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from k3tool.errors import TargetError, UsageError, install_extra

_OF_HOST = "an address of this host"
_HOSTS = "leave out --host to listen to this machine alone; 0.0.0.0 listens to all"
_BACKLOG = 128
_LAST_WORDS_SECONDS = 2  # for answers that end to say so
_TICK_SECONDS = 0.05
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Before weights are read, which takes minutes, and is no place to learn of a port in use.
    Raises: UsageError for an address that cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise UsageError("--host", got=f"{host}: {text}", need=_OF_HOST, hint=_HOSTS) from None
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        words = (error.strerror or str(error)).lower()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError("--host", got=f"{host}: {words}", need=_OF_HOST, hint=_HOSTS) from None
        got, hint = f"{host}:{port}: {words}", "--port 0 takes a free one"
        raise UsageError("--port", got=got, need="a free one", hint=hint) from None
    return found


def url_of(listening: socket.socket) -> str:
    """Return the address to give to a client."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def require_server() -> None:
    """Raise TargetError where the packages of the server are not installed."""
    try:
        import starlette
        import uvicorn
    except ImportError as error:
        raise TargetError(
            "serve", got=f"no package {error.name}", need="starlette and uvicorn",
            hint=install_extra("serve"),
        ) from None  # fmt: skip
    del starlette, uvicorn


class Server:
    """uvicorn on one socket, until a signal or `stop`.

    `on_ready` is called on the loop when requests are answered and signals are heard, `on_end` when
    what still runs is to end: `grace_seconds` after a signal or `stop`, or at a second Ctrl-C.
    """

    def __init__(
        self, app: Callable[..., object], *, grace_seconds: int, logs: bool,
        on_ready: Callable[[], None] = lambda: None, on_end: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Take an ASGI application."""
        import uvicorn

        class Told(uvicorn.Server):
            """uvicorn's server that says where it is."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                on_ready()

            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                """Take what ends a command, but nothing that whoever started us had ignored; the
                first that came is raised again. uvicorn's own takes no SIGHUP, and all others.
                """
                taken = [each for each in _ENDS if signal.getsignal(each) is not signal.SIG_IGN]
                before = [(each, signal.signal(each, self.handle_exit)) for each in taken]
                try:
                    yield
                finally:
                    for each, handler in before:
                        signal.signal(each, handler)
                for first in self._captured_signals[:1]:
                    signal.raise_signal(first)

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                ending = asyncio.create_task(self._end())
                await super().shutdown(sockets)
                ending.cancel()

            async def _end(self) -> None:
                end = time.monotonic() + grace_seconds
                while time.monotonic() < end and not self.force_exit:
                    await asyncio.sleep(_TICK_SECONDS)
                on_end()

        # A log of every request is for whoever asked; faults are ours to say. uvicorn's own time
        # cuts whoever does not take the last words.
        self._server = Told(
            uvicorn.Config(
                app, log_level="info" if logs else "critical", access_log=logs, lifespan="off",
                timeout_graceful_shutdown=grace_seconds + _LAST_WORDS_SECONDS, ws="none",
            )
        )  # fmt: skip

    def run(self, listening: socket.socket) -> None:
        """Serve. A signal that ended it is raised again, so the caller sees what it always sees."""
        with suppress(SystemExit), asyncio.Runner() as runner:
            runner.get_loop()  # now: it takes a while, in which a signal ends what has not begun
            serving = self._server.serve(sockets=[listening])
            try:
                runner.run(serving)
            finally:
                # Python warns of one that a signal kept from beginning; one that has begun is its
                # task's to end.
                if inspect.getcoroutinestate(serving) == inspect.CORO_CREATED:
                    serving.close()

    def stop(self) -> None:
        """End it soon; for any thread."""
        self._server.should_exit = True
