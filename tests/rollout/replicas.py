"""Replicas that do exactly what a test scripts, and the events that they say."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import numpy as np

from rollout.errors import ReplicaUnavailable, RolloutError
from rollout.events import Event, ScoreEvent
from rollout.router import Router
from rollout.slot import LiveSample
from rollout.types import (
    FinishDetail,
    FinishReason,
    ReplicaLoad,
    SampleEvent,
    SampleRequest,
    SampleSummary,
    TokenChunk,
    VersionSpan,
    WeightState,
)
from rollout.watch import ProgressLimits
from rollout.worker import WorkerInfo
from tests.services import sampling, soon


def gone() -> ReplicaUnavailable:
    return ReplicaUnavailable("worker is gone")


class ScriptedReplica:
    """Records calls; answers from ``answers`` (a value, an error to raise, an event to wait for); dies on demand."""

    def __init__(self, name: str, version: int = 1) -> None:
        self.name = name
        self.version = version
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        self.made: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.events: asyncio.Queue[list[Event] | Exception] = asyncio.Queue()

    async def call(self, method: str, *args: Any) -> Any:
        if method == "next_events":
            batch = await self.events.get()
            if isinstance(batch, Exception):
                raise batch
            return batch
        self.calls.append((method, *args))
        self.made[method].set()
        answer = self.answers.get(method)
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            answer = self.answers[method] if self.answers[method] is not answer else None
        if isinstance(answer, Exception):
            raise answer
        if method == "info":
            return WorkerInfo(self.name, 64, 512, (1,), {}, WeightState(self.version, "aa"))
        if method == "busy_s":
            return answer or 0.0
        if method == "load":
            return ReplicaLoad(self.name, True, 0, 0, 8, 8, WeightState(self.version, "aa"))
        return len(args[0]) if method == "abort" else answer

    async def share(self, value: Any) -> Any:
        return value

    async def stop(self) -> None:
        self.calls.append(("stop",))

    async def kill(self) -> None:
        self.calls.append(("kill",))

    def submitted(self) -> list[str]:
        return [r.sample_id for method, *args in self.calls if method == "submit" for r in args[0]]

    def aborted(self) -> list[str]:
        return [i for method, *args in self.calls if method == "abort" for i in args[0]]

    def emit(self, *events: Event) -> None:
        self.events.put_nowait(list(events))

    def die(self) -> None:
        self.events.put_nowait(gone())


class Rig:
    """Two replicas, a started router."""

    def __init__(self, limits: ProgressLimits | None = None) -> None:
        self.a, self.b = ScriptedReplica("a"), ScriptedReplica("b")
        self.router = Router([self.a, self.b], limits)

    def sample(self, name: str) -> LiveSample:
        return LiveSample(SampleRequest(name, (3,), sampling()), asyncio.Queue())

    async def submit(self, *names: str) -> list[LiveSample]:
        samples = [self.sample(name) for name in names]
        await self.router.submit(samples)
        return samples


def chunk(name: str, offset: int, count: int, *, version: int = 1, salt: int = 0, digests: bool = False) -> SampleEvent:
    """Tokens that depend on their index and ``salt`` alone, as C2 wants it."""
    index = np.arange(offset, offset + count)
    logprobs = (-1.0 / (index + 1 + salt)).astype(np.float32)
    hashed = (index + salt).astype(np.uint64) if digests else None
    return SampleEvent(
        name, TokenChunk(0, offset, (index + 2 + salt).astype(np.int32), logprobs, logprobs.copy(), version, hashed)
    )


def end(name: str, count: int, *spans: VersionSpan) -> SampleEvent:
    spans = spans or (VersionSpan(1, 0, count),)
    return SampleEvent(name, summary=SampleSummary(0, count, FinishDetail(FinishReason.LENGTH), spans))


async def delivered(sample: LiveSample) -> list[Any]:
    """Everything up to the end or the error of a sample."""
    items: list[Any] = []
    while not items or not isinstance(items[-1], SampleSummary | ScoreEvent | RolloutError):
        items.append(await soon(sample.queue.get()))
    return items


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)
