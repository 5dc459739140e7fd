"""Events that wait for their reader. A slow one costs nobody else anything, and only so much memory.

Engines never wait for readers: what they make is kept here. Beyond the limit of one stream, or of all together, the
call that holds most is ended; its pages become free, and the reader learns why.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from rollout.call_scope import CallScope, current_scope
from rollout.errors import RequestAborted, RolloutError
from rollout.server_settings import RequestLimits
from rollout.types import PromptChunk, TokenChunk

EVENT_BYTES = 512
"""What an event takes up besides its arrays, about."""


def event_bytes(event: object) -> int:
    """Memory of an event, about."""
    if not isinstance(event, TokenChunk | PromptChunk):
        return EVENT_BYTES
    arrays = [event.logprobs] if isinstance(event, PromptChunk) else [
        event.token_ids, event.policy_logprobs, event.behavior_logprobs
    ]  # fmt: skip
    size = EVENT_BYTES + sum(array.nbytes for array in arrays)
    if event.row_digests is not None:
        size += event.row_digests.nbytes
    if event.top is not None:
        size += event.top.token_ids.nbytes + event.top.logprobs.nbytes
    return size


class StreamBuffer:
    """Events of one request, in order: ``put_nowait`` and ``get`` of an ``asyncio.Queue``. One reader."""

    def __init__(self, owner: StreamBuffers) -> None:
        self._owner = owner
        self._scope: CallScope | None = current_scope()
        self._events: deque[Any] = deque()
        self._came = asyncio.Event()
        self._ended = False
        self.waiting_bytes = 0

    def put_nowait(self, event: object) -> None:
        """Append; nothing happens once the buffer was closed or overflowed."""
        if self._ended:
            return
        size = event_bytes(event)
        self._events.append((event, size))
        self._count(size)
        self._came.set()
        self._owner.check(self)

    async def get(self) -> Any:
        """The next event; waits for one."""
        while not self._events:
            self._came.clear()
            await self._came.wait()
        event, size = self._events.popleft()
        self._count(-size)
        return event

    def overflow(self, error: RolloutError) -> None:
        """Drop what waits, and end the call: the error takes the place of everything that would have come."""
        self.close()
        self._events.append((error, 0))
        self._came.set()
        # A reader that does not read is stuck in a write: it would never come to fetch the error.
        if self._scope is not None:
            self._scope.end(error)

    def close(self) -> None:
        """Forget what waits. May be called again."""
        self._ended = True
        self._events.clear()
        self._count(-self.waiting_bytes)
        self._owner.forget(self)

    def _count(self, size: int) -> None:
        self.waiting_bytes += size
        self._owner.waiting_bytes += size


class StreamBuffers:
    """All buffers of a service."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._open: set[StreamBuffer] = set()
        self.waiting_bytes = 0

    def open(self) -> StreamBuffer:
        """A buffer for the call that this task serves; close it with the call."""
        buffer = StreamBuffer(self)
        self._open.add(buffer)
        return buffer

    def forget(self, buffer: StreamBuffer) -> None:
        """It was closed."""
        self._open.discard(buffer)

    def check(self, grown: StreamBuffer) -> None:
        """End calls until the limits hold."""
        limits = self._limits
        if grown.waiting_bytes > limits.stream_buffer_bytes:
            grown.overflow(_too_slow(grown, limits.stream_buffer_bytes, "server.stream_buffer_bytes"))
        while self.waiting_bytes > limits.stream_buffers_bytes:
            most = max(self._open, key=lambda buffer: buffer.waiting_bytes)
            most.overflow(_too_slow(most, limits.stream_buffers_bytes, "server.stream_buffers_bytes, all streams"))


def _too_slow(buffer: StreamBuffer, limit: int, name: str) -> RequestAborted:
    return RequestAborted(
        f"the reader is {buffer.waiting_bytes} bytes behind, the limit is {limit} ({name}); read faster, or ask for "
        "fewer samples, tokens or alternatives in one call"
    )
