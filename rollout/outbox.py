"""Events waiting to be fetched from a worker: per sample, in order, with neighbouring chunks merged on delivery."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from rollout.chunks import merge_chunks
from rollout.events import Event
from rollout.types import SampleEvent, TokenChunk


class Outbox:
    """Thread-safe; the engine thread puts, one reader takes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._events: list[Event] = []
        self._closed = False

    def put(self, events: Iterable[Event]) -> None:
        """Append in order and wake the reader; never blocks on it."""
        with self._condition:
            self._events.extend(events)
            self._condition.notify_all()

    def close(self) -> None:
        """Wake the reader for good."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def take(self, timeout_s: float, gather_s: float = 0.0) -> list[Event]:
        """Everything put so far, merged; waits up to ``timeout_s`` for a first event, then ``gather_s`` for more."""
        with self._condition:
            self._condition.wait_for(lambda: self._events or self._closed, timeout_s)
            closed = self._closed
        if gather_s and not closed:
            time.sleep(gather_s)
        with self._condition:
            events, self._events = self._events, []
        return _merge(events)


def _merge(events: list[Event]) -> list[Event]:
    result: list[Event] = []
    chunks: dict[str, list[TokenChunk]] = {}

    def flush(sample_id: str) -> None:
        result.extend(SampleEvent(sample_id, chunk=c) for c in merge_chunks(chunks.pop(sample_id, [])))

    for event in events:
        if isinstance(event, SampleEvent):
            if event.prompt is not None:
                result.append(SampleEvent(event.sample_id, prompt=event.prompt))
            if event.chunk is not None:
                chunks.setdefault(event.sample_id, []).append(event.chunk)
            if event.summary is not None:
                flush(event.sample_id)
                result.append(SampleEvent(event.sample_id, summary=event.summary))
        else:
            flush(event.sample_id)
            result.append(event)
    for sample_id in list(chunks):
        flush(sample_id)
    return result
