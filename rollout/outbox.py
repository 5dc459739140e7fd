"""Events waiting to be fetched from a worker: per sample, in order, with neighbouring chunks merged on delivery."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import numpy as np

from rollout.engine import Event
from rollout.types import SampleEvent, TokenChunk


def merge_chunks(chunks: list[TokenChunk]) -> list[TokenChunk]:
    """Join consecutive chunks of one sample that share a weight version."""
    merged: list[list[TokenChunk]] = []
    for chunk in chunks:
        if merged and merged[-1][0].weight_version == chunk.weight_version:
            merged[-1].append(chunk)
        else:
            merged.append([chunk])
    return [_join(group) for group in merged]


def _join(group: list[TokenChunk]) -> TokenChunk:
    if len(group) == 1:
        return group[0]
    first = group[0]
    digests = [c.row_digests for c in group if c.row_digests is not None]
    return TokenChunk(
        sample_index=first.sample_index,
        offset=first.offset,
        token_ids=np.concatenate([c.token_ids for c in group]),
        policy_logprobs=np.concatenate([c.policy_logprobs for c in group]),
        behavior_logprobs=np.concatenate([c.behavior_logprobs for c in group]),
        weight_version=first.weight_version,
        row_digests=np.concatenate(digests) if digests else None,
    )


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
