"""Events that wait for their reader. A slow one costs nobody else anything, and only so much memory.

Engines never wait for readers: what they make is kept here. A reader is behind by what came more than ``GRACE_S`` ago
and still waits: tokens come in bursts, of all samples of a call together, and a burst may be of any size. A call whose
reader is behind by more than the limit of one stream is ended; beyond the limit of all together, the call that holds
most. Its pages become free, and the reader learns why.
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
GRACE_S = 1.0
"""Seconds that a burst has to be read; more than the longest wait of a token for company (``GATHER_S``)."""


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
        self._put = self._taken = 0
        self._marks: deque[tuple[float, int]] = deque()
        self._mark_began = 0.0
        self._due = 0
        self._look: asyncio.TimerHandle | None = None
        self.waiting_bytes = 0

    def put_nowait(self, event: object) -> None:
        """Append; nothing happens once the buffer was closed or overflowed."""
        if self._ended:
            return
        size = event_bytes(event)
        self._events.append((event, size))
        self._put += size
        self._count(size)
        self._mark()
        self._came.set()
        self._owner.check(self)

    async def get(self) -> Any:
        """The next event; waits for one."""
        while not self._events:
            self._came.clear()
            await self._came.wait()
        event, size = self._events.popleft()
        self._taken += size
        self._count(-size)
        return event

    @property
    def behind_bytes(self) -> int:
        """What came longer ago than the grace, and still waits."""
        before = asyncio.get_running_loop().time() - self._owner.grace_s
        while self._marks and self._marks[0][0] <= before:
            self._due = self._marks.popleft()[1]
        return max(0, self._due - self._taken)

    def _mark(self) -> None:
        """Note how much has come by now. What comes within a sixteenth of the grace shares a mark."""
        now = asyncio.get_running_loop().time()
        if self._marks and now - self._mark_began < self._owner.grace_s / 16:
            # As if all of it were as young as the last of it: nothing counts before its time.
            self._marks.pop()
        else:
            self._mark_began = now
        self._marks.append((now, self._put))

    def look_later(self) -> None:
        """Check again when what waits now is due, should nothing more come."""
        if self._look is None and not self._ended:
            self._look = asyncio.get_running_loop().call_later(self._owner.grace_s, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._owner.check(self)

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
        if self._look is not None:
            self._look.cancel()
        self._events.clear()
        self._marks.clear()
        self._count(-self.waiting_bytes)
        self._owner.forget(self)

    def _count(self, size: int) -> None:
        self.waiting_bytes += size
        self._owner.waiting_bytes += size


class StreamBuffers:
    """All buffers of a service.

    Args:
        limits: of one stream, and of all together.
        grace_s: seconds that a reader has for what comes, before it counts against the limit of one stream.
    """

    def __init__(self, limits: RequestLimits, grace_s: float = GRACE_S) -> None:
        self._limits = limits
        self.grace_s = grace_s
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
        one, together = self._limits.stream_buffer_bytes, self._limits.stream_buffers_bytes
        if (behind := grown.behind_bytes) > one:
            grown.overflow(_too_slow(f"{behind} bytes behind, the limit is {one} (server.stream_buffer_bytes)"))
        elif grown.waiting_bytes > one:
            grown.look_later()
        while self.waiting_bytes > together:
            most = max(self._open, key=lambda buffer: buffer.waiting_bytes)
            held = f"{most.waiting_bytes} of {self.waiting_bytes} bytes that wait for readers, more than any other"
            most.overflow(_too_slow(f"holding up {held}; the limit is {together} (server.stream_buffers_bytes)"))


def _too_slow(how: str) -> RequestAborted:
    return RequestAborted(
        f"the reader is {how}; read faster, or ask for fewer samples, tokens or alternatives in one call"
    )
