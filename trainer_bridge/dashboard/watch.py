"""Look for new steps and tell open pages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator

from trainer_bridge.store.reader import RunStore

log = logging.getLogger(__name__)
HEARTBEAT_S = 15.0
"""Silence after which a comment goes out, so that proxies keep the connection and a dead one is noticed."""


class Watcher:
    """One scan for all listeners, at a steady pace; each listener hears the names of the runs that changed."""

    def __init__(self, store: RunStore, *, interval_s: float = 1.0) -> None:
        self._store, self._interval_s = store, interval_s
        self._listeners: set[asyncio.Queue[set[str] | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._sequence = 0
        self._closed = False

    async def start(self) -> None:
        """Begin to scan; the first scan is left to the task, so that the page can be served at once."""
        self._task = asyncio.create_task(self._run(), name="watch runs")

    async def stop(self) -> None:
        """End the scan and every open stream."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.close()

    def close(self) -> None:
        """End every open stream, and those that come later."""
        self._closed = True
        for listener in self._listeners:
            listener.put_nowait(None)

    async def _run(self) -> None:
        while True:
            try:
                changed = await asyncio.to_thread(self._store.refresh)
            except OSError as error:
                log.warning("the runs folder cannot be read: %s", error)
                changed = set()
            if changed:
                self._sequence += 1
                for listener in self._listeners:
                    listener.put_nowait(changed)
            await asyncio.sleep(self._interval_s)

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events: ``hello`` with the current sequence number, then ``changed`` with names of runs."""
        listener: asyncio.Queue[set[str] | None] = asyncio.Queue()
        self._listeners.add(listener)
        try:
            yield self._event("hello", [])
            while not self._closed:
                try:
                    changed = await asyncio.wait_for(listener.get(), HEARTBEAT_S)
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                if changed is None:
                    return
                yield self._event("changed", sorted(changed))
        finally:
            self._listeners.discard(listener)

    def _event(self, name: str, runs: list[str]) -> str:
        data = json.dumps({"sequence": self._sequence, "runs": runs})
        return f"id: {self._sequence}\nevent: {name}\ndata: {data}\n\n"
