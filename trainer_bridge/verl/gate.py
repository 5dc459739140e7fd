"""Admission to a server: open, parked until it opens again, or refusing; and who is inside."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator


class GateState(enum.Enum):
    """What happens to a request that arrives."""

    OPEN = "open"
    PARKED = "parked"
    """it waits for the gate to open"""
    REFUSING = "refusing"
    """it is answered as aborted, with no token"""


class Gate:
    """One server's admission. Belongs to one event loop; no await stands between the check and the entry."""

    def __init__(self) -> None:
        self._state = GateState.OPEN
        self._changed = asyncio.Condition()
        self.inside: set[str] = set()
        """request ids admitted and not yet answered"""

    @property
    def state(self) -> GateState:
        """What happens to arrivals now."""
        return self._state

    async def set(self, state: GateState) -> None:
        """Change what happens to arrivals; those that wait are told."""
        async with self._changed:
            self._state = state
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def enter(self, request_id: str) -> AsyncIterator[bool]:
        """Wait for admission, hold the place inside the block; False: refused, not inside."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._state is not GateState.PARKED)
            admitted = self._state is GateState.OPEN
            if admitted:
                self.inside.add(request_id)
        try:
            yield admitted
        finally:
            async with self._changed:
                self.inside.discard(request_id)
                self._changed.notify_all()

    async def wait_empty(self, timeout_s: float) -> bool:
        """Whether nobody is inside after at most ``timeout_s`` seconds."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: not self.inside), timeout_s)
            return not self.inside
