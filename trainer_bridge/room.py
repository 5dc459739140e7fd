"""Many calls to one service: no more under way than it has room for, so that none of them is refused for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rollout.errors import CapacityExceeded
from trainer_bridge.together import together

T = TypeVar("T")
SAMPLES_UNDER_WAY = 256
"""More fill no batch and only wait in the service, where they count against the limits of all clients."""
PATIENCE_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class Room:
    """Calls under way, towards one service.

    Args:
        most: calls at a time.
        patience_s: seconds that a refused call waits for other clients' samples to end, when none of ours is under way.
    """

    def __init__(self, most: int, *, patience_s: float = PATIENCE_S) -> None:
        self._slots = asyncio.Semaphore(most)
        self._patience_s = patience_s
        self._under_way = 0
        self._ended = asyncio.Condition()

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """The call's result. Refused for want of room, it is made again once another of ours has ended.

        Raises:
            CapacityExceeded: refused for ``patience_s`` seconds with none of ours under way. Else what the call raises.
        """
        async with self._slots:
            pause, waited = _FIRST_PAUSE_S, 0.0
            while True:
                try:
                    return await self._attempt(call)
                except CapacityExceeded:
                    if waited >= self._patience_s:
                        raise
                async with self._ended:
                    if self._under_way:
                        await self._ended.wait()
                        pause, waited = _FIRST_PAUSE_S, 0.0
                        continue
                await asyncio.sleep(pause)
                pause, waited = min(2 * pause, _LONGEST_PAUSE_S), waited + pause

    async def _attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        self._under_way += 1
        try:
            return await call()
        finally:
            self._under_way -= 1
            async with self._ended:
                self._ended.notify_all()


async def gather_in_room(
    calls: Sequence[Callable[[], Awaitable[T]]], *, samples_each: int = 1, patience_s: float = PATIENCE_S
) -> list[T]:
    """Results in the order of the calls; the first failure cancels the rest.

    Args:
        samples_each: samples that one call asks for.

    Raises:
        What a call raises; see ``Room.run``.
    """
    room = Room(max(1, SAMPLES_UNDER_WAY // samples_each), patience_s=patience_s)
    return await together(room.run(call) for call in calls)
