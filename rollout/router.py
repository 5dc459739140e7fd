"""Which replica holds which sample, and where its events go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.chunks import cut_tokens
from rollout.errors import ReplicaUnavailable, RolloutError
from rollout.events import Event, FailureEvent, ScoreEvent
from rollout.replica import Replica
from rollout.types import ReplicaLoad, SampleRequest, ScoreOptions, ScoreSequence, TokenChunk, WeightState
from rollout.worker import WorkerInfo

log = logging.getLogger(__name__)
_POLL_S = 1.0


class EventQueue(Protocol):
    """Where the router leaves events: a ``StreamBuffer``, or an ``asyncio.Queue``."""

    def put_nowait(self, event: Any, /) -> None:
        """Never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """One sequence to score, as a replica takes it."""

    sequence: ScoreSequence
    options: ScoreOptions


@dataclass(slots=True, eq=False)
class LiveSample:
    """A sample or scored sequence between submission and its last event."""

    request: SampleRequest | None
    queue: EventQueue
    """Receives PromptChunk, TokenChunk, SampleSummary, ScoreEvent or one RolloutError."""
    delivered: int = 0
    """tokens already passed on; a replay after a death skips them"""
    prompt_delivered: bool = False
    """whether the prompt's log-probs were passed on"""
    versions: set[int] = field(default_factory=set)
    """weight versions of what was delivered"""
    score: ScoreCall | None = None
    """what to score, when ``request`` is None"""
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    """set while a replica has it, or once it has failed; clear while a replay looks for a replica"""


@dataclass(slots=True, eq=False)
class _Slot:
    replica: Replica
    alive: bool = True
    live: dict[str, LiveSample] = field(default_factory=dict)
    pump: asyncio.Task[None] | None = None


class Router:
    """Least-loaded routing over replicas; the only owner of the live table."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self._slots = {r.name: _Slot(r) for r in replicas}
        self._homeless: dict[str, LiveSample] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._none_alive: Callable[[bool], Awaitable[None]] | None = None

    def start(self) -> None:
        """Begin to fetch every replica's events, in tasks of the running loop."""
        for slot in self._slots.values():
            slot.pump = asyncio.create_task(self._pump(slot), name=f"events of {slot.replica.name}")

    async def stop(self) -> None:
        """Stop fetching, fail what is live with ReplicaUnavailable, stop the living replicas."""
        pumps = [slot.pump for slot in self._slots.values() if slot.pump is not None]
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for live in [live for slot in self._slots.values() for live in slot.live.values()] + [*self._homeless.values()]:
            self._fail(live, ReplicaUnavailable("the service is shutting down"))
        self._homeless.clear()
        for slot in self._slots.values():
            slot.live.clear()
        stops = [slot.replica.stop() for slot in self._slots.values()]
        for outcome in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.warning("stopping a replica: %s", outcome)

    def when_none_alive(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Call ``tell(False)`` once the last replica has left rotation."""
        self._none_alive = tell

    @property
    def num_live(self) -> int:
        """Samples and scored sequences without their last event yet."""
        return sum(len(slot.live) for slot in self._slots.values()) + len(self._homeless)

    def _alive(self) -> list[_Slot]:
        alive = [slot for slot in self._slots.values() if slot.alive]
        if not alive:
            raise ReplicaUnavailable("no replica is alive; restart the service")
        return alive

    # ---- calls --------------------------------------------------------------------------------------------------

    async def any(self, method: str, *args: Any) -> Any:
        """Call on the least loaded replica; one that turns out to be gone is fenced and the next is asked."""
        while True:
            slot = self._least_loaded()
            try:
                return await slot.replica.call(method, *args)
            except ReplicaUnavailable as error:
                self.fence(slot.replica.name, error)

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Call on every living replica; waits for all, then raises the first error."""
        outcomes = await self.all_outcomes(method, *args)
        results = [outcome for outcome in outcomes.values() if not isinstance(outcome, BaseException)]
        for name, outcome in outcomes.items():
            if isinstance(outcome, ReplicaUnavailable):
                # One that died is out of rotation, and the others are all there are.
                self.fence(name, outcome)
            if isinstance(outcome, BaseException) and not (isinstance(outcome, ReplicaUnavailable) and results):
                raise outcome
        return results

    async def all_outcomes(self, method: str, *args: Any) -> dict[str, Any]:
        """Call on every living replica: name -> result or exception."""
        slots = self._alive()
        results = await asyncio.gather(*(s.replica.call(method, *args) for s in slots), return_exceptions=True)
        return {s.replica.name: r for s, r in zip(slots, results, strict=True)}

    async def all_shared(self, method: str, value: Any) -> None:
        """Call with one large argument, shipped once."""
        await self.all(method, await self._alive()[0].replica.share(value))

    async def all_that_can(self, method: str) -> None:
        """Call on every living replica, errors logged: for clean-up that must reach everyone."""
        for slot in self._slots.values():
            if slot.alive:
                try:
                    await slot.replica.call(method)
                except Exception as error:
                    log.warning("%s on %s: %s", method, slot.replica.name, error)

    async def loads(self) -> list[ReplicaLoad]:
        """Load of every replica; dead ones are listed as unhealthy."""
        loads: list[ReplicaLoad] = []
        for name, slot in self._slots.items():
            try:
                if slot.alive:
                    loads.append(await slot.replica.call("load"))
                    continue
            except RolloutError as error:
                log.warning("load of %s: %s", name, error)
            loads.append(ReplicaLoad(name, False, 0, 0, 0, 0, WeightState(-1, "")))
        return loads

    # ---- samples ------------------------------------------------------------------------------------------------

    def _least_loaded(self) -> _Slot:
        return min(self._alive(), key=lambda slot: len(slot.live))

    async def submit(self, samples: list[LiveSample]) -> None:
        """Queue samples together on the least loaded replica."""
        requests = [s.request for s in samples if s.request is not None]
        named = {r.sample_id: s for r, s in zip(requests, samples, strict=True)}
        await self._place(self._least_loaded(), named, "submit", requests)

    async def submit_scores(
        self,
        ids: list[str],
        sequences: list[ScoreSequence],
        options: ScoreOptions,
        queue: EventQueue,
    ) -> None:
        """Queue sequences to score together on the least loaded replica; ``queue`` receives their events."""
        calls = [ScoreCall(sequence, options) for sequence in sequences]
        named = {i: LiveSample(None, queue, score=call) for i, call in zip(ids, calls, strict=True)}
        await self._place(self._least_loaded(), named, "submit_scores", ids, sequences, options)

    async def _place(self, slot: _Slot, samples: dict[str, LiveSample], method: str, *args: Any) -> None:
        """Register, then call: events may come back before the acknowledgement does.

        A replica that is gone is fenced, and the samples still registered there are replayed; one answer either way.
        """
        for sample_id, sample in samples.items():
            slot.live[sample_id] = sample
        try:
            await slot.replica.call(method, *args)
        except ReplicaUnavailable as error:
            self.fence(slot.replica.name, error)
        except RolloutError:
            for sample_id in samples:
                slot.live.pop(sample_id, None)
            raise
        for sample_id, sample in samples.items():
            if sample_id not in self._homeless:
                sample.placed.set()

    async def abort(self, sample_ids: list[str], message: str) -> int:
        """Abort where live; their ends arrive as summaries. One that is between two replicas is waited for."""
        for live in [self._homeless[i] for i in sample_ids if i in self._homeless]:
            await live.placed.wait()
        counts = 0
        for slot in self._slots.values():
            here = [i for i in sample_ids if i in slot.live]
            if here and slot.alive:
                counts += await slot.replica.call("abort", here, message)
        return counts

    async def drop(self, sample_ids: list[str], message: str) -> None:
        """Forget samples whose client is gone, and free their pages. Nothing to do for finished ones."""
        for sample_id in sample_ids:
            self._homeless.pop(sample_id, None)
        for slot in self._slots.values():
            here = [i for i in sample_ids if slot.live.pop(i, None) is not None]
            if here and slot.alive:
                await asyncio.shield(self._start(self._free(slot, here, message)))

    async def _free(self, slot: _Slot, sample_ids: list[str], message: str) -> None:
        try:
            await slot.replica.call("abort", sample_ids, message)
        except RolloutError as error:
            log.warning("abort on %s: %s", slot.replica.name, error)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is kept until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- events -------------------------------------------------------------------------------------------------

    async def _pump(self, slot: _Slot) -> None:
        while slot.alive:
            try:
                events: list[Event] = await slot.replica.call("next_events", _POLL_S)
            except RolloutError as error:
                self.fence(slot.replica.name, error)
                return
            except Exception:
                log.exception("events of %s", slot.replica.name)
                self.fence(slot.replica.name, ReplicaUnavailable(f"worker {slot.replica.name} answers nonsense"))
                return
            for event in events:
                self._deliver(slot, event)

    def _deliver(self, slot: _Slot, event: Event) -> None:
        live = slot.live.get(event.sample_id)
        if live is None:
            return
        if isinstance(event, FailureEvent):
            if isinstance(event.error, ReplicaUnavailable):
                self.fence(slot.replica.name, event.error)
                return
            del slot.live[event.sample_id]
            self._fail(live, event.error)
        elif isinstance(event, ScoreEvent):
            del slot.live[event.sample_id]
            live.queue.put_nowait(event)
        else:
            if event.prompt is not None:
                if self._spoiled(slot, event.sample_id, live, live.prompt_delivered, event.prompt.weight_version):
                    return
                if not live.prompt_delivered:
                    live.prompt_delivered = True
                    live.versions.add(event.prompt.weight_version)
                    live.queue.put_nowait(event.prompt)
            if event.chunk is not None and not self._deliver_chunk(slot, event.sample_id, live, event.chunk):
                return
            if event.summary is not None:
                del slot.live[event.sample_id]
                live.queue.put_nowait(event.summary)

    def _deliver_chunk(self, slot: _Slot, sample_id: str, live: LiveSample, chunk: TokenChunk) -> bool:
        """Pass on what is new of a chunk; False when the sample had to be failed."""
        skip = live.delivered - chunk.offset
        if self._spoiled(slot, sample_id, live, skip > 0, chunk.weight_version):
            return False
        if skip >= len(chunk.token_ids):
            return True
        if skip > 0:
            chunk = cut_tokens(chunk, skip)
        live.delivered = chunk.offset + len(chunk.token_ids)
        live.versions.add(chunk.weight_version)
        live.queue.put_nowait(chunk)
        return True

    def _spoiled(self, slot: _Slot, sample_id: str, live: LiveSample, again: bool, version: int) -> bool:
        """Fail a sample whose replay runs under other weights: what comes ``again`` need not be what the client has."""
        if not again or live.versions == {version}:
            return False
        del slot.live[sample_id]
        self._fail(live, _changed_weights(live, version))
        self._start(self._free(slot, [sample_id], "its replay ran into a weight update"))
        return True

    @staticmethod
    def _fail(live: LiveSample, error: RolloutError) -> None:
        live.queue.put_nowait(error)
        live.placed.set()

    # ---- deaths -------------------------------------------------------------------------------------------------

    def fence(self, name: str, error: RolloutError) -> None:
        """Take a replica out of rotation; replay its samples elsewhere where that gives the same bits."""
        slot = self._slots[name]
        if not slot.alive:
            return
        slot.alive = False
        log.error("replica %s left rotation: %s", name, error)
        orphans, slot.live = slot.live, {}
        for sample_id, live in orphans.items():
            live.placed.clear()
            self._homeless[sample_id] = live
            self._start(self._replay(sample_id, live, error))
        if self._none_alive is not None and not any(s.alive for s in self._slots.values()):
            self._start(_tell(self._none_alive))

    async def _replay(self, sample_id: str, live: LiveSample, error: RolloutError) -> None:
        try:
            slot, info = await self._someone()
            if live.versions and live.versions != {info.weights.version}:
                raise _changed_weights(live, info.weights.version)
            if self._homeless.get(sample_id) is not live:
                return  # dropped meanwhile
            if not slot.alive:
                await self._replay(sample_id, live, error)
                return
            del self._homeless[sample_id]
            if live.request is not None:
                await self._place(slot, {sample_id: live}, "submit", [live.request])
            elif live.score is not None:
                s = live.score
                await self._place(slot, {sample_id: live}, "submit_scores", [sample_id], [s.sequence], s.options)
        except RolloutError as final:
            self._homeless.pop(sample_id, None)
            self._fail(live, final)

    async def _someone(self) -> tuple[_Slot, WorkerInfo]:
        """The least loaded replica that answers, and what it serves."""
        while True:
            slot = self._least_loaded()
            try:
                return slot, await slot.replica.call("info")
            except ReplicaUnavailable as error:
                self.fence(slot.replica.name, error)


def _changed_weights(live: LiveSample, version: int) -> ReplicaUnavailable:
    return ReplicaUnavailable(
        f"the replica died after {live.delivered} tokens sampled under versions {sorted(live.versions)}, replicas now "
        f"serve {version}: the same tokens cannot be drawn again; submit the request anew"
    )


async def _tell(tell: Callable[[bool], Awaitable[None]]) -> None:
    await tell(False)
