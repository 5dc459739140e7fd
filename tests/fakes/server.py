"""A real server on a free loopback port, for the length of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout.backend import Backend
from rollout.config import ServerSettings
from rollout.door import NoRoom
from rollout.server import DEFAULT_MAX_CONCURRENT_RPCS, DEFAULT_MAX_MESSAGE_BYTES, RunningServer, start_server


@asynccontextmanager
async def serving(
    backend: Backend,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    max_concurrent_rpcs: int = DEFAULT_MAX_CONCURRENT_RPCS,
    settings: ServerSettings | None = None,
    no_room: NoRoom | None = None,
) -> AsyncIterator[RunningServer]:
    """Start, report SERVING, and stop without grace."""
    server = await start_server(
        backend,
        host="127.0.0.1",
        port=0,
        max_message_bytes=max_message_bytes,
        max_concurrent_rpcs=max_concurrent_rpcs,
        reflection=True,
        settings=settings,
        no_room=no_room,
    )
    await server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop(None)


def address(server: RunningServer) -> str:
    """Where clients connect."""
    return f"127.0.0.1:{server.port}"
