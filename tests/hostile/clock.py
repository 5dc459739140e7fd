"""What a service's own process knows of its speed: how long a call waits for its refusal, how long its loop is held."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from rollout.interceptors import Context, GuardInterceptor

CALL_S = 9.0
"""Deadline of every call that is timed. gRPC sends it in steps of 10 ms, and counts from the arrival of the headers."""
LOOK_EVERY_S = 0.01


@dataclass
class Times:
    """Seconds, in order of events."""

    refusals: list[float] = field(default_factory=list)
    """from the arrival of a call's headers in gRPC's core to the status handed to it, where the deadline is CALL_S"""
    handled: list[float] = field(default_factory=list)
    """the part of it from the first line of Python on, of all calls"""
    late: list[float] = field(default_factory=list)
    """by which a timer of the event loop came too late"""
    collections: list[float] = field(default_factory=list)
    """that garbage collections of the oldest generation took"""


class Clock(GuardInterceptor):
    """Outermost of all interceptors. It keeps nothing before it is first asked: it would look like a leak."""

    def __init__(self) -> None:
        self.times: Times | None = None
        self._began = 0.0

    def take(self) -> Times:
        """What was measured since the last call; the first one begins it."""
        times, self.times = self.times, Times()
        return times or Times()

    @asynccontextmanager
    async def guard(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        """Note the age of a call that is aborted."""
        start = time.monotonic()
        try:
            yield
        except grpc.aio.AbortError:
            if self.times is None:
                raise
            self.times.handled.append(time.monotonic() - start)
            # The deadline was made of the arrival and CALL_S, before anything of Python ran.
            left = context.time_remaining()
            if left is not None and left <= CALL_S + 0.02:
                self.times.refusals.append(max(0.0, CALL_S - left))
            raise

    async def watch(self) -> None:
        """Look at the loop, for ever."""
        gc.callbacks.append(self._collected)
        try:
            while True:
                due = time.monotonic() + LOOK_EVERY_S
                await asyncio.sleep(LOOK_EVERY_S)
                if self.times is not None:
                    self.times.late.append(time.monotonic() - due)
        finally:
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] < 2 or self.times is None:
            return
        if phase == "start":
            self._began = time.monotonic()
        else:
            self.times.collections.append(time.monotonic() - self._began)
