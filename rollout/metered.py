"""A backend that counts what goes through another one. It passes every record on as it came."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

from rollout.backend import Backend
from rollout.errors import RolloutError
from rollout.metrics import Meter
from rollout.types import (
    EngineStats,
    GenerateRequest,
    SampleSummary,
    ScoreRequest,
    ScoreResult,
    ServerInfo,
    TokenChunk,
    UpdatePart,
    WeightState,
    WeightUpdate,
)

POLL_S = 2.0
"""Seconds between two looks at the replicas' loads."""


class Polled(Backend, Protocol):
    """A backend whose engines can be asked for their counts."""

    async def stats(self) -> dict[str, EngineStats]:
        """Replica -> counts since its start; replicas that do not answer are left out."""
        ...


class MeteredBackend:
    """Counts calls, tokens and times of ``inner``; ``watch`` reports its replicas."""

    def __init__(self, inner: Polled, meter: Meter, *, queue_limit: int) -> None:
        self._inner, self._meter, self._queue_limit = inner, meter, queue_limit
        self._in_flight = 0
        self._before: dict[str, EngineStats] = {}

    # ---- what the service calls ---------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Any, None]:
        """See ``Backend``; the events are the inner backend's own."""
        start = time.monotonic()
        last: dict[int, float] = {}
        self._enter(1)
        try:
            async with aclosing(self._inner.generate(request)) as events:
                async for event in events:
                    self._see(event, start, last, len(request.prompt_ids))
                    yield event
            self._meter.observe("zerodrift_e2e_request_latency_seconds", time.monotonic() - start)
        finally:
            self._enter(-1)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """See ``Backend``."""
        result = await self._inner.score(request)
        self._meter.add("zerodrift_scored_tokens", float(sum(len(s.logprobs) for s in result.scores)))
        return result

    async def update_weights(self, update: WeightUpdate, chunks: AsyncIterator[UpdatePart]) -> WeightState:
        """See ``Backend``."""
        start = time.monotonic()
        outcome = "failed"
        try:
            state = await self._inner.update_weights(update, chunks)
            outcome = "committed"
            return state
        finally:
            self._meter.observe("zerodrift_weight_update_seconds", time.monotonic() - start, outcome=outcome)

    async def abort(self, request_id: str) -> int:
        """See ``Backend``."""
        return await self._inner.abort(request_id)

    async def pause(self) -> WeightState:
        """See ``Backend``."""
        return await self._inner.pause()

    async def resume(self) -> WeightState:
        """See ``Backend``."""
        return await self._inner.resume()

    async def info(self, *, tensor_digests: bool = False) -> ServerInfo:
        """See ``Backend``."""
        return await self._inner.info(tensor_digests=tensor_digests)

    def encode(self, text: str) -> tuple[int, ...]:
        """See ``Backend``."""
        return self._inner.encode(text)

    # ---- counting -----------------------------------------------------------------------------------------------

    def _enter(self, step: int) -> None:
        self._in_flight += step
        self._meter.put("zerodrift_requests_in_flight", float(self._in_flight))

    def _see(self, event: Any, start: float, last: dict[int, float], prompt_tokens: int) -> None:
        now = time.monotonic()
        if isinstance(event, TokenChunk) and len(event.token_ids):
            count = len(event.token_ids)
            self._meter.add("zerodrift_generation_tokens", float(count))
            if event.sample_index not in last:
                self._meter.observe("zerodrift_time_to_first_token_seconds", now - start)
            else:
                # Tokens of a chunk share the time since the chunk before.
                each = (now - last[event.sample_index]) / count
                for _ in range(count):
                    self._meter.observe("zerodrift_inter_token_latency_seconds", each)
            last[event.sample_index] = now
        elif isinstance(event, SampleSummary):
            self._meter.add("zerodrift_samples", finish=event.finish.reason.value)
            self._meter.add("zerodrift_prompt_tokens", float(prompt_tokens))
            self._meter.add("zerodrift_prefix_cache_hit_tokens", float(event.num_cached_tokens))

    async def look(self) -> None:
        """Report every replica once."""
        info = await self._inner.info()
        for load in info.replicas:
            name = load.name
            self._meter.put("zerodrift_replica_up", float(load.healthy), replica=name)
            if not load.healthy:
                continue
            self._meter.put("zerodrift_weight_version", float(load.weights.version), replica=name)
            self._meter.put("zerodrift_requests_running", float(load.running), replica=name)
            self._meter.put("zerodrift_requests_waiting", float(load.waiting), replica=name)
            self._meter.put("zerodrift_queue_limit", float(self._queue_limit), replica=name)
            used = 1.0 - load.free_pages / load.total_pages if load.total_pages else 0.0
            self._meter.put("zerodrift_kv_cache_usage_ratio", used, replica=name)
        for name, stats in (await self._inner.stats()).items():
            before = self._before.get(name, EngineStats(0, 0, 0))
            self._meter.add("zerodrift_engine_steps", float(stats.steps - before.steps), replica=name)
            self._meter.add("zerodrift_engine_rows", float(stats.rows - before.rows), replica=name)
            self._meter.add("zerodrift_preemptions", float(stats.preemptions - before.preemptions), replica=name)
            self._before[name] = stats

    async def watch(self, interval_s: float = POLL_S) -> None:
        """Report every replica again and again; runs until it is cancelled."""
        while True:
            with contextlib.suppress(RolloutError):
                await self.look()
            await asyncio.sleep(interval_s)
