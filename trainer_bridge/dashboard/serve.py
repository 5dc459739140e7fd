"""Serve the dashboard: alone, or beside a run in the same process."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from rollout.config import is_loopback
from rollout.errors import ConfigError
from trainer_bridge.dashboard.app import build_app
from trainer_bridge.dashboard.explain import Explainer
from trainer_bridge.dashboard.watch import Watcher

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one. Errors: ConfigError when it cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # From here on callers wait instead of being refused, until the server takes them.
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{host}:{port} cannot be bound ({error.strerror}); choose another --port, or 0") from error
    return listener


def access_token(host: str, token: str | None) -> str | None:
    """The token to demand: the one given; a fresh one beyond loopback; None on loopback."""
    if token or is_loopback(host):
        return token or None
    return secrets.token_urlsafe(24)


def page_address(listener: socket.socket, token: str | None) -> str:
    """What to open. The token travels in the fragment, which browsers do not send to any server."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"#token={token}" if token else "")


class Server(uvicorn.Server):
    """Ends the event streams before it waits for connections: they would never end by themselves."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        self._watcher: Watcher = app.state.watcher

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop serving."""
        self._watcher.close()
        await super().shutdown(sockets)


def make_server(root: Path, *, token: str | None, explainer: Explainer | None = None) -> Server:
    """A server of the runs under ``root``."""
    app = build_app(root, token=token, explainer=explainer)
    return Server(app)


def serve(root: Path, listener: socket.socket, *, token: str | None, explainer: Explainer | None = None) -> None:
    """Serve until SIGINT or SIGTERM."""
    make_server(root, token=token, explainer=explainer).run(sockets=[listener])


@contextlib.contextmanager
def serving_beside(
    root: Path, listener: socket.socket, *, token: str | None, explainer: Explainer | None = None
) -> Iterator[None]:
    """Serve on a thread while the body runs; the body may call ``wait`` style code of its own."""
    server = make_server(root, token=token, explainer=explainer)
    # Only the main thread may install signal handlers; this one is not it.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="dashboard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(10)
