"""The worker's part of a trace: one span a sample, from its queueing to its last event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout.events import Event, is_end
from rollout.tracing import Attributes, start
from rollout.types import SampleEvent, SampleRequest


class SampleSpans:
    """Spans of the samples that live here and belong to a trace."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._live: dict[str, Any] = {}

    def begin(self, requests: Iterable[SampleRequest]) -> None:
        """Open a span for each sample that came with a trace."""
        for request in requests:
            if request.trace:
                self._live[request.sample_id] = start("zerodrift/sample", request.trace, self._attributes(request))

    def forget(self, requests: Iterable[SampleRequest]) -> None:
        """Close the spans of samples that were refused."""
        for request in requests:
            if (span := self._live.pop(request.sample_id, None)) is not None:
                span.set_attribute("zerodrift.finish", "refused")
                span.end()

    def _attributes(self, request: SampleRequest) -> Attributes:
        return {"zerodrift.worker": self._worker, "zerodrift.sample_index": request.sample_index}

    def see(self, events: Iterable[Event]) -> None:
        """Close the spans of samples that ended."""
        if not self._live:
            return
        for event in events:
            if is_end(event) and (span := self._live.pop(event.sample_id, None)) is not None:
                if isinstance(event, SampleEvent) and event.summary is not None:
                    span.set_attribute("zerodrift.tokens", event.summary.num_tokens)
                    span.set_attribute("zerodrift.finish", event.summary.finish.reason.value)
                else:
                    span.set_attribute("zerodrift.finish", "failed")
                span.end()
