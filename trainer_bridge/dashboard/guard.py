"""Who may read: everyone on this machine, or whoever holds the token. A web page elsewhere never may."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.secret import Secret

_HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'; "
        "base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Guard:
    """Checks the bearer token of ``/api`` calls, or, without a token, that the page was asked for by a local name.

    The second check stops a foreign site whose name is made to point here (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else Secret.of(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on with the headers every answer carries, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Headers(scope=scope), scope["path"])
        if refusal is not None:
            await JSONResponse({"error": refusal}, status_code=403 if self._token is None else 401)(
                scope, receive, send
            )
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers, path: str) -> str | None:
        if self._token is not None:
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if path.startswith("/api/") and not self._token.matches(given):
                return "this dashboard needs its token: open the address that `zerodrift dashboard` printed"
            return None
        host = headers.get("host", "").rsplit(":", 1)[0].strip("[]")
        if host not in ("localhost", "127.0.0.1", "::1"):
            return f"without a token this dashboard answers to localhost only, not to {host!r}"
        return None
