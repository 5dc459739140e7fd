"""Which replica holds which sample, and where its events go."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.engine import Event, FailureEvent, ScoreEvent
from rollout.errors import ReplicaUnavailable, RolloutError
from rollout.replica import Replica
from rollout.types import ReplicaLoad, SampleRequest, ScoreSequence, TokenChunk, WeightState

log = logging.getLogger(__name__)
_POLL_S = 1.0


@dataclass(slots=True, eq=False)
class LiveSample:
    """A sample or scored sequence between submission and its last event."""

    request: SampleRequest | None
    queue: asyncio.Queue[Any]
    """Receives TokenChunk, SampleSummary, ScoreEvent or one RolloutError."""
    delivered: int = 0
    """tokens already passed on; a replay after a death skips them"""
    versions: set[int] = field(default_factory=set)
    """weight versions of the delivered tokens"""
    replica: str = ""


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
        self._replays: set[asyncio.Task[None]] = set()

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
        for slot in self._slots.values():
            self._fail_all(slot, ReplicaUnavailable("the service is shutting down"))
        await asyncio.gather(*(slot.replica.stop() for slot in self._slots.values() if slot.alive))

    @property
    def num_live(self) -> int:
        """Samples and scored sequences not yet ended, on all replicas."""
        return sum(len(slot.live) for slot in self._slots.values())

    def _alive(self) -> list[_Slot]:
        alive = [slot for slot in self._slots.values() if slot.alive]
        if not alive:
            raise ReplicaUnavailable("no replica is alive; restart the service")
        return alive

    # ---- calls --------------------------------------------------------------------------------------------------

    async def any(self, method: str, *args: Any) -> Any:
        """Call on the least loaded replica."""
        return await self._least_loaded().replica.call(method, *args)

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Call on every living replica; waits for all, then raises the first error."""
        outcomes = await self.all_outcomes(method, *args)
        for outcome in outcomes.values():
            if isinstance(outcome, BaseException):
                raise outcome
        return list(outcomes.values())

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
                except RolloutError as error:
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
        slot = self._least_loaded()
        requests = [s.request for s in samples if s.request is not None]
        self._register(slot, {r.sample_id: s for r, s in zip(requests, samples, strict=True)})
        await self._submit_or_forget(slot, [r.sample_id for r in requests], "submit", requests)

    async def submit_scores(
        self,
        ids: list[str],
        sequences: list[ScoreSequence],
        temperature: float,
        row_digests: bool,
        queue: asyncio.Queue[Any],
    ) -> None:
        """Queue sequences to score together on the least loaded replica; ``queue`` receives their events."""
        slot = self._least_loaded()
        self._register(slot, {i: LiveSample(None, queue) for i in ids})
        await self._submit_or_forget(slot, ids, "submit_scores", ids, sequences, temperature, row_digests)

    def _register(self, slot: _Slot, samples: dict[str, LiveSample]) -> None:
        # Before the call: events may come back before the acknowledgement does.
        for sample_id, sample in samples.items():
            sample.replica = slot.replica.name
            slot.live[sample_id] = sample

    async def _submit_or_forget(self, slot: _Slot, ids: list[str], method: str, *args: Any) -> None:
        try:
            await slot.replica.call(method, *args)
        except RolloutError:
            for sample_id in ids:
                slot.live.pop(sample_id, None)
            raise

    async def abort(self, sample_ids: list[str], message: str) -> int:
        """Abort where live; their ends arrive as summaries."""
        counts = 0
        for slot in self._slots.values():
            here = [i for i in sample_ids if i in slot.live]
            if here and slot.alive:
                counts += await slot.replica.call("abort", here, message)
        return counts

    async def drop(self, sample_ids: list[str], message: str) -> None:
        """Forget samples whose client is gone, and free their pages. Nothing to do for finished ones."""
        for slot in self._slots.values():
            here = [i for i in sample_ids if slot.live.pop(i, None) is not None]
            if here and slot.alive:
                try:
                    await asyncio.shield(slot.replica.call("abort", here, message))
                except RolloutError as error:
                    log.warning("abort on %s: %s", slot.replica.name, error)

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
            del slot.live[event.sample_id]
            live.queue.put_nowait(event.error)
        elif isinstance(event, ScoreEvent):
            del slot.live[event.sample_id]
            live.queue.put_nowait(event)
        else:
            if event.chunk is not None:
                self._deliver_chunk(live, event.chunk)
            if event.summary is not None:
                del slot.live[event.sample_id]
                live.queue.put_nowait(event.summary)

    @staticmethod
    def _deliver_chunk(live: LiveSample, chunk: TokenChunk) -> None:
        skip = live.delivered - chunk.offset
        if skip >= len(chunk.token_ids):
            return
        if skip > 0:
            chunk = dataclasses.replace(
                chunk,
                offset=live.delivered,
                token_ids=chunk.token_ids[skip:],
                policy_logprobs=chunk.policy_logprobs[skip:],
                behavior_logprobs=chunk.behavior_logprobs[skip:],
                row_digests=None if chunk.row_digests is None else np.ascontiguousarray(chunk.row_digests[skip:]),
            )
        live.delivered = chunk.offset + len(chunk.token_ids)
        live.versions.add(chunk.weight_version)
        live.queue.put_nowait(chunk)

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
            task = asyncio.get_running_loop().create_task(self._replay(sample_id, live, error))
            self._replays.add(task)
            task.add_done_callback(self._replays.discard)

    async def _replay(self, sample_id: str, live: LiveSample, error: RolloutError) -> None:
        try:
            if live.request is None:
                raise error
            slot = self._least_loaded()
            info = await slot.replica.call("info")
            if live.versions and live.versions != {info.weights.version}:
                raise ReplicaUnavailable(
                    f"{error.message}; {live.delivered} tokens were sampled under versions {sorted(live.versions)}, "
                    f"replicas now serve {info.weights.version}: the same tokens cannot be drawn again"
                )
            self._register(slot, {sample_id: live})
            await self._submit_or_forget(slot, [sample_id], "submit", [live.request])
        except RolloutError as final:
            live.queue.put_nowait(final)

    def _fail_all(self, slot: _Slot, error: RolloutError) -> None:
        orphans, slot.live = slot.live, {}
        for live in orphans.values():
            live.queue.put_nowait(error)
