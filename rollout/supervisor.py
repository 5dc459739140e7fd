"""Replicas that left are started again, brought to the weights being served, and only then take samples.

Also what an operator asks for: drain one, start one again, start all again one after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from ray.exceptions import RayError

from rollout.errors import (
    CertificateError,
    ConfigError,
    NotFound,
    ParityError,
    ReplicaUnavailable,
    UnsupportedFeature,
)
from rollout.kept_weights import copy_weights
from rollout.pool import Pool
from rollout.replica import Replica
from rollout.router import Router
from rollout.slot import Slot
from rollout.types import WeightState
from rollout.worker import WorkerInfo

log = logging.getLogger(__name__)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How hard a start is tried."""

    start_s: float
    """seconds to load, and again to get the present weights"""
    attempts: int
    """failed starts in a row after which a replica stays out; 0: it is never started again"""
    bucket_bytes: int
    """of weights, most that goes to a newcomer at a time"""


@dataclass(frozen=True, slots=True)
class ReplicaStanding:
    """Where a replica stands."""

    name: str
    serving: bool
    held: int
    """samples and scored sequences there"""
    restarts: int
    """times it was started again"""
    reason: str
    """why it takes no samples, "" when it does"""


class Supervisor:
    """Watches over a pool's replicas.

    Args:
        pool: started.
        make: starts a worker under a name; it may still be loading when this returns.
        limits: how hard a start is tried.
    """

    def __init__(self, pool: Pool, make: Callable[[str], Awaitable[Replica]], limits: RestartLimits) -> None:
        self._pool, self._make, self._limits = pool, make, limits
        self._router: Router = pool.router
        self._restarts: dict[str, int] = {}
        self._failures: dict[str, str] = {}
        self._revivals: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Take care of every replica that has left, or leaves from now on."""
        self._router.when_one_leaves(self._left)
        for slot in self._router.slots():
            if not slot.alive:
                self._left(slot.name)

    async def stop(self) -> None:
        """Start nothing any more."""
        self._router.when_one_leaves(lambda name: None)
        revivals = list(self._revivals.values())
        for task in revivals:
            task.cancel()
        await asyncio.gather(*revivals, return_exceptions=True)

    # ---- starting again -----------------------------------------------------------------------------------------

    def _left(self, name: str) -> None:
        if self._limits.attempts == 0 or name in self._revivals:
            return
        self._router.expect(name)
        task = asyncio.get_running_loop().create_task(self._revive(name), name=f"restart of {name}")
        self._revivals[name] = task
        task.add_done_callback(lambda _: self._revivals.pop(name, None))

    async def _revive(self, name: str) -> None:
        old = self._router.slot(name)
        try:
            if old is not None:
                # A worker that only stood still may go on later: it holds a device, and nobody listens to it any more.
                await old.replica.kill()
            for attempt in range(self._limits.attempts):
                if attempt:
                    await asyncio.sleep(min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S))
                if await self._try_start(name):
                    return
        finally:
            self._router.give_up(name)
        log.error("replica %s stays out of rotation: %s", name, self._failures[name])

    async def _try_start(self, name: str) -> bool:
        """Whether there is an end of trying: it serves, or never will. False: another attempt may help."""
        newcomer: Replica | None = None
        try:
            newcomer = await self._make(name)
            await self._welcome(newcomer)
        except BaseException as error:
            if newcomer is not None:
                await newcomer.kill()
            if not isinstance(error, Exception):
                raise
            late = isinstance(error, TimeoutError)
            what = f"not ready after {self._limits.start_s:g} s (worker.start_timeout_s)" if late else str(error)
            self._failures[name] = what
            final = isinstance(error, CertificateError | ParityError | ConfigError | UnsupportedFeature)
            log.error("replica %s did not start%s: %s", name, " and never will" if final else "", what)
            return final
        self._failures.pop(name, None)
        self._restarts[name] = self._restarts.get(name, 0) + 1
        return True

    async def _welcome(self, newcomer: Replica) -> None:
        """From loaded to admitted. Updates wait meanwhile, so that it cannot miss one."""
        async with asyncio.timeout(self._limits.start_s):
            info: WorkerInfo = await newcomer.call("info")
        # No deadline on the wait for an update that lets long samples finish: it has its own ends.
        async with self._pool.steady() as standing, asyncio.timeout(self._limits.start_s):
            if info.manifest != standing.manifest:
                raise ParityError(f"replica {newcomer.name} was started again with another manifest than the others'")
            stale = "" if info.weights == standing.weights else await self._renew(newcomer, info, standing.weights)
            paused = False
            while paused != self._pool.paused:
                paused = self._pool.paused
                await newcomer.call("pause" if paused else "resume")
            self._router.admit(newcomer, stale)
        if not stale:
            log.warning("replica %s is back with weight version %d", newcomer.name, standing.weights.version)

    async def _renew(self, newcomer: Replica, info: WorkerInfo, target: WeightState) -> str:
        """Bring it to the weights being served; returns why it must not serve, "" when it may."""
        donor = await self._donor(target)
        if donor is not None:
            await copy_weights(donor, newcomer, target, self._limits.bucket_bytes)
            return ""
        if info.weights.version >= target.version:
            raise ParityError(
                f"replica {newcomer.name} loaded weights {info.weights.digest}, version {info.weights.version} "
                f"had {target.digest}: the checkpoint has changed on disk"
            )
        why = "no replica holds them any more"
        kept = self._pool.kept_weights
        if kept is not None and kept.state == target:
            try:
                await kept.give(newcomer)
            except RayError as error:
                why = f"{why}, and what was sent is gone ({type(error).__name__})"
                await newcomer.call("release")
            else:
                return ""
        stale = (
            f"the weights served are of version {target.version}, this one has {info.weights.version}, and {why}: "
            "send the weights again, as a newer version"
        )
        log.error("replica %s takes no samples: %s", newcomer.name, stale)
        return stale

    async def _donor(self, weights: WeightState) -> Slot | None:
        for slot in self._router.slots():
            try:
                if slot.alive and (await slot.call("info")).weights == weights:
                    return slot
            except ReplicaUnavailable:
                continue
        return None

    # ---- what an operator asks for ------------------------------------------------------------------------------

    def standings(self) -> list[ReplicaStanding]:
        """Of every replica."""
        return [
            ReplicaStanding(
                slot.name,
                slot.serving,
                len(slot.live),
                self._restarts.get(slot.name, 0),
                slot.hold or "; ".join(filter(None, (slot.reason, self._failures.get(slot.name, "")))),
            )
            for slot in self._router.slots()
        ]

    async def drain(self, name: str, within_s: float) -> ReplicaStanding:
        """No new samples for a replica; returns once it holds none, or after ``within_s`` seconds. It stays out until
        ``restart`` or ``undrain``, and takes part in weight updates.

        Raises:
            NotFound: no such replica.
        """
        slot = self._slot(name)
        slot.drained = True
        self._router.serving_changed()
        deadline = asyncio.get_running_loop().time() + within_s
        while slot.alive and slot.live and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_S)
        return self._standing(name)

    def undrain(self, name: str) -> ReplicaStanding:
        """Back into rotation. NotFound: no such replica."""
        self._slot(name).drained = False
        self._router.serving_changed()
        return self._standing(name)

    async def restart(self, name: str, within_s: float) -> ReplicaStanding:
        """Drain, start again, bring to the present weights. What has not ended after ``within_s`` seconds goes on
        elsewhere from its last delivered token.

        Raises:
            NotFound: no such replica. ReplicaUnavailable: it is the last one in rotation of several, or did not start.
            UnsupportedFeature: workers of this service are never started again.
        """
        slot = self._slot(name)
        if self._limits.attempts == 0:
            raise UnsupportedFeature("worker.max_restarts = 0: replicas of this service are not started again")
        slots = self._router.slots()
        if len(slots) > 1 and not any(s.serving for s in slots if s is not slot):
            raise ReplicaUnavailable(f"{name} is the last replica in rotation; wait until another one is back")
        if slot.alive:
            await self.drain(name, within_s)
            self._router.fence(name, ReplicaUnavailable("it is started again on request"))
        else:
            self._left(name)
        revival = self._revivals.get(name)
        if revival is not None:
            await asyncio.shield(revival)
        standing = self._standing(name)
        if not standing.serving:
            raise ReplicaUnavailable(f"{name} was not started again: {standing.reason}")
        return standing

    async def rolling_restart(self, within_s: float) -> AsyncGenerator[ReplicaStanding, None]:
        """Every replica in turn; stops at the first that does not come back, and raises as ``restart`` does."""
        for slot in self._router.slots():
            yield await self.restart(slot.name, within_s)

    def _slot(self, name: str) -> Slot:
        slot = self._router.slot(name)
        if slot is None:
            known = ", ".join(s.name for s in self._router.slots())
            raise NotFound(f"no replica {name!r}; there are {known}", field="replica")
        return slot

    def _standing(self, name: str) -> ReplicaStanding:
        return next(s for s in self.standings() if s.name == name)
