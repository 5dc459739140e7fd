"""When refused callers are to come back: one after another, not in the herd that they were refused in."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

EARLIEST_S = 1.0
LATEST_S = 10.0
BACK_PER_S = 200
"""Callers told to come back in one second: to refuse so many again is a small part of a core."""


class RetryPace:
    """Hands out places in time, ``1 / BACK_PER_S`` apart.

    Args:
        clock: seconds.
        draw: a number in [a, b], for what lies beyond the latest place.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._clock, self._draw = clock, draw
        self._last = float("-inf")

    def next_delay_s(self) -> float:
        """Seconds in [EARLIEST_S, LATEST_S] until the next free place; a random one of them where all are taken."""
        now = self._clock()
        place = max(self._last + 1 / BACK_PER_S, now + EARLIEST_S)
        if place > now + LATEST_S:
            return self._draw(EARLIEST_S, LATEST_S)
        self._last = place
        return place - now
