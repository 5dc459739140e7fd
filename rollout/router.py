"""Which replica holds which sample, and where its events go."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rollout.chunks import cut_tokens
from rollout.errors import ParityError, ReplicaUnavailable, RolloutError, WeightsMoved
from rollout.events import Event, FailureEvent, ScoreEvent
from rollout.replica import Replica
from rollout.roster import Roster
from rollout.slot import EventQueue, LiveSample, ScoreCall, Slot
from rollout.types import ScoreOptions, ScoreSequence, TokenChunk, UpdatePolicy
from rollout.watch import ProgressLimits
from rollout.worker import WorkerInfo

log = logging.getLogger(__name__)
_POLL_S = 1.0
MAX_DEATHS = 3
"""Replicas that may leave rotation under one sample; it is not given to another, which it may end as well."""

MAX_POLICIES = 4096
"""Updates whose policies are remembered; a sample older than all of them does not go on under newer weights."""


class Router(Roster):
    """Least-loaded routing over replicas; the only owner of the live table."""

    def __init__(self, replicas: list[Replica], limits: ProgressLimits | None = None) -> None:
        super().__init__(replicas, limits)
        self._homeless: dict[str, LiveSample] = {}
        self._policies: dict[int, UpdatePolicy] = {}
        self._forgotten = -1

    def _attend(self, slot: Slot) -> None:
        super()._attend(slot)
        slot.tasks.append(asyncio.create_task(self._pump(slot), name=f"events of {slot.name}"))

    async def stop(self) -> None:
        """Fail what is live with ReplicaUnavailable, stop the living replicas."""
        for live in [live for slot in self._slots.values() for live in slot.live.values()] + [*self._homeless.values()]:
            self._fail(live, ReplicaUnavailable("the service is shutting down"))
        self._homeless.clear()
        for slot in self._slots.values():
            slot.live.clear()
        await super().stop()

    @property
    def num_live(self) -> int:
        """Samples and scored sequences without their last event yet."""
        return sum(len(slot.live) for slot in self._slots.values()) + len(self._homeless)

    def weights_will_change(self, version: int, policy: UpdatePolicy) -> None:
        """Before a commit: what its policy says of samples that cross it holds for replayed ones too."""
        self._policies[version] = policy
        if len(self._policies) > MAX_POLICIES:
            self._forgotten = min(self._policies)
            del self._policies[self._forgotten]

    # ---- samples ------------------------------------------------------------------------------------------------

    async def submit(self, samples: list[LiveSample]) -> None:
        """Queue samples together on the least loaded replica."""
        requests = [s.request for s in samples if s.request is not None]
        named = {r.sample_id: s for r, s in zip(requests, samples, strict=True)}
        await self._place(self._least_loaded(), named, "submit", requests)

    async def submit_begun(self, live: LiveSample) -> None:
        """Queue a sample whose client has its beginning, where its weights are still served; a failure is an event."""
        assert live.request is not None
        self._homeless[live.request.sample_id] = live
        await self._replay(live.request.sample_id, live)

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

    async def _place(self, slot: Slot, samples: dict[str, LiveSample], method: str, *args: Any) -> None:
        """Register, then call: events may come back before the acknowledgement does.

        A replica that is gone is fenced, and the samples still registered there are replayed; one answer either way.
        """
        for sample_id, sample in samples.items():
            slot.live[sample_id] = sample
        try:
            await slot.call(method, *args)
        except ReplicaUnavailable as error:
            self._fence(slot, error)
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
        counts, again = 0, list[str]()
        for slot in self.slots():
            here = [i for i in sample_ids if i in slot.live]
            if not here:
                continue
            try:
                counts += await slot.call("abort", here, message)
            except ReplicaUnavailable as error:
                self._fence(slot, error)
                again += here
        return counts + (await self.abort(again, message) if again else 0)

    async def drop(self, sample_ids: list[str], message: str) -> None:
        """Forget samples whose client is gone, and free their pages. Nothing to do for finished ones."""
        for sample_id in sample_ids:
            self._homeless.pop(sample_id, None)
        for slot in self._slots.values():
            here = [i for i in sample_ids if slot.live.pop(i, None) is not None]
            if here and slot.alive:
                await asyncio.shield(self._start(self._free(slot, here, message)))

    async def _free(self, slot: Slot, sample_ids: list[str], message: str) -> None:
        try:
            await slot.call("abort", sample_ids, message)
        except RolloutError as error:
            log.warning("abort on %s: %s", slot.name, error)

    # ---- events -------------------------------------------------------------------------------------------------

    async def _pump(self, slot: Slot) -> None:
        while slot.alive:
            try:
                events: list[Event] = await slot.call("next_events", _POLL_S)
            except RolloutError as error:
                self._fence(slot, error)
                return
            except Exception:
                log.exception("events of %s", slot.name)
                self._fence(slot, ReplicaUnavailable(f"worker {slot.name} answers nonsense"))
                return
            for event in events:
                self._deliver(slot, event)

    def _deliver(self, slot: Slot, event: Event) -> None:
        live = slot.live.get(event.sample_id)
        if live is None:
            return
        if isinstance(event, FailureEvent):
            if isinstance(event.error, ReplicaUnavailable):
                self._fence(slot, event.error)
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

    def _deliver_chunk(self, slot: Slot, sample_id: str, live: LiveSample, chunk: TokenChunk) -> bool:
        """Pass on what is new of a chunk; False when the sample had to be failed."""
        skip = live.delivered - chunk.offset
        if self._spoiled(slot, sample_id, live, skip > 0, chunk.weight_version):
            return False
        if skip < 0:
            error = ParityError(f"worker {slot.name} skipped tokens {live.delivered} to {chunk.offset} of a sample")
            self._refuse(slot, sample_id, live, error)
            return False
        if skip >= len(chunk.token_ids):
            return True
        live.deliver(cut_tokens(chunk, skip) if skip else chunk)
        return True

    def _spoiled(self, slot: Slot, sample_id: str, live: LiveSample, again: bool, version: int) -> bool:
        """Fail a replayed sample that weights have overtaken: what comes ``again`` need not be what the client has, and
        what is new may follow only where the update's policy lets samples cross it."""
        fine = live.versions <= {version} if again else not live.moved or self._may_go_on(live, version)
        if fine:
            return False
        self._refuse(slot, sample_id, live, _changed_weights(live, version))
        return True

    def _may_go_on(self, live: LiveSample, version: int) -> bool:
        """Whether a sample whose worker died may go on under ``version``, as it would have done undisturbed."""
        newest = max(live.versions, default=version)
        crossed = [v for v in self._policies if newest < v <= version]
        known = version == newest or (version in self._policies and newest >= self._forgotten)
        return version >= newest and known and all(self._policies[v] is UpdatePolicy.RECOMPUTE for v in crossed)

    def _refuse(self, slot: Slot, sample_id: str, live: LiveSample, error: RolloutError) -> None:
        del slot.live[sample_id]
        self._fail(live, error)
        self._start(self._free(slot, [sample_id], "its replay was refused"))

    @staticmethod
    def _fail(live: LiveSample, error: RolloutError) -> None:
        live.queue.put_nowait(error)
        live.placed.set()

    # ---- deaths -------------------------------------------------------------------------------------------------

    def _orphaned(self, orphans: dict[str, LiveSample]) -> None:
        """They go on elsewhere, from their last delivered token."""
        for sample_id, live in orphans.items():
            live.placed.clear()
            live.deaths += 1
            live.moved = True
            self._homeless[sample_id] = live
            self._start(self._replay(sample_id, live))

    async def _replay(self, sample_id: str, live: LiveSample) -> None:
        try:
            if live.deaths > MAX_DEATHS:
                raise ReplicaUnavailable(f"{live.deaths} replicas in a row left rotation while they held this sample")
            slot, info = await self._someone()
            version = info.weights.version
            if live.versions and not self._may_go_on(live, version):
                raise _changed_weights(live, version)
            if self._homeless.get(sample_id) is not live:
                return  # dropped meanwhile
            if not slot.serving:
                await self._replay(sample_id, live)
                return
            del self._homeless[sample_id]
            if live.request is not None:
                await self._place(slot, {sample_id: live}, "submit", [live.rest()])
            elif live.score is not None:
                s = live.score
                await self._place(slot, {sample_id: live}, "submit_scores", [sample_id], [s.sequence], s.options)
        except RolloutError as final:
            self._homeless.pop(sample_id, None)
            self._fail(live, final)

    async def _someone(self) -> tuple[Slot, WorkerInfo]:
        """The least loaded replica that answers, and what it serves; waits for one that is being started."""
        while True:
            self._changed.clear()
            try:
                slot = self._least_loaded()
            except ReplicaUnavailable:
                if not self._expected:
                    raise
                await self._changed.wait()
                continue
            try:
                return slot, await slot.call("info")
            except ReplicaUnavailable as error:
                self._fence(slot, error)


def _changed_weights(live: LiveSample, version: int) -> WeightsMoved:
    return WeightsMoved(
        f"the replica left after {live.delivered} tokens sampled under versions {sorted(live.versions)}, replicas now "
        f"serve {version}: the same tokens cannot be drawn again; submit the request anew"
    )
