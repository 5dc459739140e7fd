"""Which replicas there are, which of them take samples, and calls to one or all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from rollout.errors import ReplicaUnavailable, RolloutError
from rollout.replica import Replica
from rollout.slot import LiveSample, Slot
from rollout.types import ReplicaLoad, WeightState
from rollout.watch import ProgressLimits, watch
from rollout.worker import WorkerInfo

log = logging.getLogger(__name__)
_LOAD_S = 5.0
"""A load is reported within so many seconds, or as unknown."""


class Roster:
    """The replicas of a service, each with its present slot."""

    def __init__(self, replicas: list[Replica], limits: ProgressLimits | None = None) -> None:
        self.replicas = replicas
        """the present ones; changed in place"""
        self._limits = limits or ProgressLimits()
        self._slots = {r.name: Slot(r) for r in replicas}
        self._tasks: set[asyncio.Task[None]] = set()
        self._none_serving: Callable[[bool], Awaitable[None]] | None = None
        self._on_leave: Callable[[str], None] | None = None
        self._expected: set[str] = set()
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Begin to attend to every replica, in tasks of the running loop."""
        for slot in self._slots.values():
            self._attend(slot)

    def _attend(self, slot: Slot) -> None:
        look = watch(slot, self._limits, self._fence)
        slot.tasks.append(asyncio.create_task(look, name=f"progress of {slot.name}"))

    async def stop(self) -> None:
        """Stop attending, stop the living replicas."""
        self._on_leave = self._none_serving = None
        tasks = [task for slot in self._slots.values() for task in slot.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stops = [slot.replica.stop() for slot in self._slots.values()]
        for outcome in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.warning("stopping a replica: %s", outcome)

    # ---- who is there -------------------------------------------------------------------------------------------

    def when_serving_changes(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Call ``tell(False)`` once no replica takes samples any more, ``tell(True)`` when one does again."""
        self._none_serving = tell

    def when_one_leaves(self, tell: Callable[[str], None]) -> None:
        """Call ``tell(name)`` when a replica has left rotation, before its samples look for another."""
        self._on_leave = tell

    def slot(self, name: str) -> Slot | None:
        """The present life of a replica."""
        return self._slots.get(name)

    def slots(self) -> list[Slot]:
        """Present lives of all replicas, those that left included."""
        return list(self._slots.values())

    def expect(self, name: str) -> None:
        """A replica is being started again: samples without a home wait for it."""
        self._expected.add(name)

    def give_up(self, name: str) -> None:
        """It will not come back."""
        self._expected.discard(name)
        self._changed.set()

    def admit(self, replica: Replica, stale: str = "") -> None:
        """Put a started replica in the place of the one that left; ``stale`` says why it takes no samples yet."""
        old = self._slots[replica.name]
        self.replicas[self.replicas.index(old.replica)] = replica
        slot = self._slots[replica.name] = Slot(replica)
        slot.stale = stale
        self._attend(slot)
        self._expected.discard(replica.name)
        self.serving_changed()

    def weights_committed(self) -> None:
        """Every living replica serves the same weights."""
        for slot in self._slots.values():
            slot.stale = ""
        self.serving_changed()

    def serving_changed(self) -> None:
        """Whoever waits for a replica, and the health service, look again."""
        self._changed.set()
        if self._none_serving is not None:
            self._start(self._tell(self._none_serving))

    async def _tell(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        await tell(any(slot.serving for slot in self._slots.values()))

    def _alive(self) -> list[Slot]:
        alive = [slot for slot in self._slots.values() if slot.alive]
        if not alive:
            raise ReplicaUnavailable(
                f"no replica is alive, {len(self._expected)} are being started; try again"
                if self._expected
                else "no replica is alive; restart the service"
            )
        return alive

    async def first_infos(self, timeout_s: float, asked: str) -> list[WorkerInfo]:
        """What the replicas are, once all have loaded; those that are gone already are fenced.

        Args:
            timeout_s: for all of them.
            asked: what each asks the cluster for, in words.

        Raises:
            ReplicaUnavailable: naming those that were not ready in time. RolloutError: why one refuses to start.
        """
        calls = {slot: asyncio.ensure_future(slot.call("info")) for slot in self._slots.values()}
        _, late = await asyncio.wait(calls.values(), timeout=timeout_s)
        for call in late:
            call.cancel()
        if late:
            names = ", ".join(slot.name for slot, call in calls.items() if call in late)
            raise ReplicaUnavailable(
                f"{len(late)} of {len(calls)} replicas were not ready after {timeout_s:g} s (worker.start_timeout_s): "
                f"{names}; each asks for {asked}: check that a node of the cluster has them free"
            )
        infos: list[WorkerInfo] = []
        for slot, call in calls.items():
            error = call.exception()
            if isinstance(error, ReplicaUnavailable) and len(calls) > 1:
                self._fence(slot, error)
            elif error is not None:
                raise error
            else:
                infos.append(call.result())
        self._alive()
        return infos

    # ---- calls --------------------------------------------------------------------------------------------------

    async def any(self, method: str, *args: Any) -> Any:
        """Call on the least loaded replica; one that turns out to be gone is fenced and the next is asked."""
        while True:
            slot = self._least_loaded()
            try:
                return await slot.call(method, *args)
            except ReplicaUnavailable as error:
                self._fence(slot, error)

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Call on every living replica; waits for all, then raises the first error."""
        slots = self._alive()
        outcomes = await asyncio.gather(*(s.call(method, *args) for s in slots), return_exceptions=True)
        results = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        for slot, outcome in zip(slots, outcomes, strict=True):
            if isinstance(outcome, ReplicaUnavailable):
                # One that died is out of rotation, and the others are all there are.
                self._fence(slot, outcome)
            if isinstance(outcome, BaseException) and not (isinstance(outcome, ReplicaUnavailable) and results):
                raise outcome
        return results

    async def all_outcomes(self, method: str, *args: Any) -> dict[str, Any]:
        """Call on every living replica: name -> result or exception."""
        slots = self._alive()
        results = await asyncio.gather(*(s.call(method, *args) for s in slots), return_exceptions=True)
        return {s.name: r for s, r in zip(slots, results, strict=True)}

    async def share(self, value: Any) -> Any:
        """A form of one large argument that is shipped once, whoever gets it."""
        return await self._alive()[0].replica.share(value)

    async def all_that_can(self, method: str) -> None:
        """Call on every living replica, errors logged: for clean-up that must reach everyone."""
        for slot in self._slots.values():
            if slot.alive:
                try:
                    await slot.call(method)
                except Exception as error:
                    log.warning("%s on %s: %s", method, slot.name, error)

    async def loads(self) -> list[ReplicaLoad]:
        """Load of every replica; those that take no samples are listed as unhealthy."""
        return list(await asyncio.gather(*(self._load(slot) for slot in self._slots.values())))

    async def _load(self, slot: Slot) -> ReplicaLoad:
        try:
            if slot.alive:
                load: ReplicaLoad = await asyncio.wait_for(slot.call("load"), _LOAD_S)
                return load if slot.serving else replace(load, healthy=False)
        except (RolloutError, TimeoutError) as error:
            log.warning("load of %s: %s", slot.name, str(error) or f"no answer in {_LOAD_S:g} s")
        return ReplicaLoad(slot.name, False, 0, 0, 0, 0, WeightState(-1, ""))

    def _least_loaded(self) -> Slot:
        serving = [slot for slot in self._alive() if slot.serving]
        if not serving:
            held = "; ".join(f"{slot.name}: {slot.hold}" for slot in self._slots.values() if slot.hold)
            raise ReplicaUnavailable(f"no replica is in rotation ({held})")
        return min(serving, key=lambda slot: len(slot.live))

    # ---- leaving ------------------------------------------------------------------------------------------------

    def fence(self, name: str, error: RolloutError) -> None:
        """Take a replica out of rotation."""
        self._fence(self._slots[name], error)

    def _fence(self, slot: Slot, error: RolloutError) -> None:
        if not slot.alive:
            return
        log.error("replica %s left rotation: %s", slot.name, error)
        orphans = slot.leave(error)
        if self._on_leave is not None:
            self._on_leave(slot.name)
        self._orphaned(orphans)
        if not any(s.serving for s in self._slots.values()):
            self.serving_changed()

    def _orphaned(self, orphans: dict[str, LiveSample]) -> None:
        """What a replica held when it left."""

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is kept until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
