"""Serve the dashboard: alone, or beside a run in the same process."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class PageTls:
    """Files of the dashboard's https; both PEM."""

    certificate: Path
    key: Path


def page_tls(host: str, certificate: Path | None, key: Path | None, *, allow_insecure: bool) -> PageTls | None:
    """The https to serve with; None for plain http, which beyond loopback must be asked for.

    Raises:
        ConfigError: half a pair, files that do not fit, or plain http beyond loopback without a word.
    """
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-certificate and --tls-key belong together; give both, or neither", field="tls_key")
    if certificate is not None and key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"--tls-certificate {certificate} with --tls-key {key}: {error}") from error
        return PageTls(certificate, key)
    if not allow_insecure and not is_loopback(host):
        raise ConfigError(
            f"--host {host} is reachable from outside, and without TLS anyone on the way reads the token and all that "
            "is shown; give --tls-certificate and --tls-key, use 127.0.0.1 behind a proxy, or say --allow-insecure",
            field="host",
        )
    return None


def page_address(listener: socket.socket, token: str | None, tls: PageTls | None = None) -> str:
    """What to open. The token travels in the fragment, which browsers do not send to any server."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if tls is None else 'https'}://{shown}:{port}/" + (f"#token={token}" if token else "")


class Server(uvicorn.Server):
    """Ends the event streams before it waits for connections: they would never end by themselves."""

    def __init__(self, app: Starlette, tls: PageTls | None = None) -> None:
        files: dict[str, Any] = {} if tls is None else {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, **files))
        self._watcher: Watcher = app.state.watcher

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop serving."""
        self._watcher.close()
        await super().shutdown(sockets)


def make_server(
    root: Path, *, token: str | None, explainer: Explainer | None = None, tls: PageTls | None = None
) -> Server:
    """A server of the runs under ``root``."""
    app = build_app(root, token=token, explainer=explainer)
    return Server(app, tls)


def serve(
    root: Path,
    listener: socket.socket,
    *,
    token: str | None,
    explainer: Explainer | None = None,
    tls: PageTls | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM."""
    make_server(root, token=token, explainer=explainer, tls=tls).run(sockets=[listener])


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
