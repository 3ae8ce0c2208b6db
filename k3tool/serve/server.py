"""The socket and the HTTP server: bound before anything is read, closed when the engine is."""

import socket
from collections.abc import Callable
from contextlib import suppress

from k3tool.errors import TargetError, UsageError

_BACKLOG = 128
_INSTALL = "pip install 'k3tool[serve]'"


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
        raise UsageError("--host", got=f"{host}: {text}", need="an address of this host") from None
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        got = f"{host}:{port}: {(error.strerror or str(error)).lower()}"
        raise UsageError("--port", got=got, need="a free one; 0 takes any") from None
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
        got = f"no package {error.name}"
        raise TargetError("serve", got=got, need="starlette and uvicorn", hint=_INSTALL) from None
    del starlette, uvicorn


class Server:
    """uvicorn on one socket, until a signal or `stop`."""

    def __init__(self, app: Callable[..., object], *, grace_seconds: int, logs: bool) -> None:
        """Take an ASGI application. At the end answers that run have `grace_seconds` left."""
        import uvicorn

        # A log of every request is for whoever asked; faults are ours to say.
        self._server = uvicorn.Server(
            uvicorn.Config(
                app, log_level="info" if logs else "critical", access_log=logs, lifespan="off",
                timeout_graceful_shutdown=grace_seconds, ws="none",
            )
        )  # fmt: skip

    def run(self, listening: socket.socket) -> None:
        """Serve. A signal that ended it is raised again, so the caller sees what it always sees."""
        with suppress(SystemExit):
            self._server.run(sockets=[listening])

    def stop(self) -> None:
        """End it soon; for any thread."""
        self._server.should_exit = True
