"""Events waiting to be fetched from a worker: per sample, in order, with neighbouring chunks merged on delivery."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from time import monotonic

from rollout.chunks import merge_chunks
from rollout.events import Event, is_end
from rollout.types import SampleEvent, TokenChunk


class Outbox:
    """Thread-safe; the engine thread puts, one reader takes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._events: list[Event] = []
        self._ended: set[str] = set()
        self._oldest = 0.0
        self._closed = False

    def put(self, events: Iterable[Event]) -> None:
        """Append in order; never blocks on the reader, and wakes it only where it has something to do."""
        events = list(events)
        if not events:
            return
        ended = {event.sample_id for event in events if is_end(event)}
        with self._condition:
            if not self._events:
                self._oldest = monotonic()
            if ended or not self._events:
                self._condition.notify_all()
            self._events.extend(events)
            self._ended |= ended

    def close(self) -> None:
        """Wake the reader for good."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def take(self, timeout_s: float, gather_s: float = 0.0) -> list[Event]:
        """Everything put so far, merged; waits up to ``timeout_s`` for a first event, then ``gather_s`` for more.

        A sample that ends does not wait for company: its events come at once, the others' go on gathering.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._events or self._closed, timeout_s)
            rest_s = self._oldest + gather_s - monotonic() if self._events else 0.0
            if rest_s > 0 and not self._condition.wait_for(lambda: self._ended or self._closed, rest_s):
                rest_s = 0.0
            ended, self._ended = self._ended, set()
            if rest_s > 0 and not self._closed:
                events = [event for event in self._events if event.sample_id in ended]
                self._events = [event for event in self._events if event.sample_id not in ended]
            else:
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
