"""One seeded schedule: some requests, some faults at given numbers of delivered tokens, a verdict."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rollout.errors import NotFound, ParityError, RolloutError, WeightsMoved, WeightUpdateError
from rollout.types import GenerateRequest, TokenChunk, UpdatePolicy
from tests.e2e.chaos.disk import record_on_full_disk
from tests.e2e.chaos.reference import Reference
from tests.e2e.chaos.tally import Tally
from tests.e2e.chaos.verdict import judge
from tests.e2e.chaos.world import DEADLINE_S, REPLICAS, World, send
from tests.services import sampling
from trainer_bridge.resilient import generate_resumed
from trainer_bridge.wire import GenerateResult

KINDS: tuple[tuple[str, ...], ...] = (
    ("kill",),
    ("drop",),
    ("recompute",),
    ("slow", "drop"),
    ("disk", "wait"),
    ("stop",),
    ("abort", "drop"),
    ("kill", "recompute"),
    ("slow", "recompute"),
    ("gateway",),
)
"""Faults of a schedule, by seed: kill or stop a worker, slow one down, drop all streams, update under a policy, kill
the gateway, fill the records' disk."""
_FATAL = {"kill", "stop"}
_KINDS: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}]
_POOL = 16


def request_of(number: int) -> GenerateRequest:
    """One of a few, so that calm runs are computed once; 100 to 340 tokens a sample."""
    prompt = tuple(2 + (number + j * 7) % 60 for j in range(1 + number * 3 % 40))
    return GenerateRequest(
        f"chaos-{number}", prompt,
        sampling(seed=1000 + number, max_tokens=100 + 16 * number, **_KINDS[number % len(_KINDS)]),
        n=1 + number % 2, row_digests=True,
    )  # fmt: skip


@dataclass
class Rig:
    """What all schedules share."""

    world: World
    reference: Reference
    weights: list[list[tuple[str, torch.Tensor]]]
    folder: Path
    """for records"""


class Schedule:
    """One run."""

    def __init__(self, rig: Rig, seed: int, tally: Tally) -> None:
        self._rig, self._seed, self._tally = rig, seed, tally
        self._random = random.Random(seed)
        self._requests = [request_of(n) for n in self._random.sample(range(_POOL), 6)]
        self._delivered = 0
        self._moved = asyncio.Condition()
        self._unfinished = len(self._requests)
        total = sum(r.n * (r.sampling.max_tokens or 0) for r in self._requests)
        kinds = KINDS[seed % len(KINDS)]
        # At what delivered token each fault comes: early enough that work is left.
        places = sorted(self._random.randint(1, total // 3) for _ in kinds)
        self._faults = list(zip(places, kinds, strict=True))

    async def run(self) -> None:
        """Requests and faults side by side, then the verdict; AssertionError where something hangs."""
        began = time.monotonic()
        if _FATAL & set(KINDS[self._seed % len(KINDS)]):
            healthy = lambda info: sum(r.healthy for r in info.replicas) == REPLICAS  # noqa: E731
            await self._rig.world.until(healthy, "both replicas, for a fault that takes one")
        asks = [asyncio.ensure_future(self._ask(request)) for request in self._requests]
        faults = [asyncio.ensure_future(self._strike(place, kind)) for place, kind in self._faults]
        try:
            async with asyncio.timeout(DEADLINE_S):
                results = await asyncio.gather(*asks)
                await asyncio.gather(*faults)
        finally:
            for task in [*asks, *faults]:
                task.cancel()
            await asyncio.gather(*asks, *faults, return_exceptions=True)
        for request, result in zip(self._requests, results, strict=True):
            if result is not None:
                judge(request, result, self._rig.reference, self._tally)
        await self._check_pages()
        if "disk" in KINDS[self._seed % len(KINDS)]:
            answers = [r for r in results if r is not None]
            self._tally.dropped_records += record_on_full_disk(self._rig.folder / f"records-{self._seed}", answers)
        self._tally.schedules += 1
        self._tally.seconds += time.monotonic() - began

    async def _ask(self, request: GenerateRequest) -> GenerateResult | None:
        """The answer; a sample that updates took the weights from is asked anew, as the error says."""
        world = self._rig.world
        try:
            for attempt in range(5):
                named = replace(request, request_id=f"{request.request_id}/{self._seed}/{attempt}")
                try:
                    result = await generate_resumed(world.client, named, within_s=DEADLINE_S / 2, on_event=self._see)
                except WeightsMoved:
                    self._tally.resubmitted += 1
                    continue
                return result
        except ParityError as error:
            # A stream that repeats, skips or relabels tokens.
            self._tally.duplicated += 1
            print(f"  schedule {self._seed}: {error}", flush=True)
            return None
        except RolloutError as error:
            print(f"  schedule {self._seed}: {request.request_id}: {type(error).__name__}: {error}", flush=True)
        finally:
            self._unfinished -= 1
            async with self._moved:
                self._moved.notify_all()
        self._tally.lost += request.n
        return None

    def _see(self, event: object) -> None:
        if isinstance(event, TokenChunk):
            self._delivered += len(event.token_ids)
            asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    # ---- faults -------------------------------------------------------------------------------------------------

    async def _strike(self, place: int, kind: str) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._delivered >= place or not self._unfinished)
        self._tally.faults[kind] += 1
        self._tally.struck[kind] += self._unfinished > 0
        strikes: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill, "stop": self._stop, "slow": self._slow, "drop": self._drop, "gateway": self._gateway,
        }  # fmt: skip
        if kind in strikes:
            await strikes[kind]()
        elif kind != "disk":
            await self._update(UpdatePolicy(kind))

    async def _victim(self) -> tuple[str, int]:
        pids = await self._rig.world.pids()
        name = self._random.choice(sorted(pids))
        return name, pids[name]

    async def _kill(self) -> None:
        _, pid = await self._victim()
        self._tally.replaced += send(pid, signal.SIGKILL)

    async def _stop(self) -> None:
        """Stop for good as far as the service can tell; the zombie wakes up once it was taken out of rotation."""
        name, pid = await self._victim()
        self._tally.replaced += send(pid, signal.SIGSTOP)
        await self._rig.world.until(
            lambda info: not next(r.healthy for r in info.replicas if r.name == name), f"{name} to leave rotation"
        )
        send(pid, signal.SIGCONT)

    async def _slow(self) -> None:
        """A fifth of its speed for a while, and never still for as long as the deadline."""
        _, pid = await self._victim()
        try:
            for _ in range(12):
                send(pid, signal.SIGSTOP)
                await asyncio.sleep(0.08)
                send(pid, signal.SIGCONT)
                await asyncio.sleep(0.02)
        finally:
            send(pid, signal.SIGCONT)

    async def _drop(self) -> None:
        self._rig.world.proxy.cut()

    async def _gateway(self) -> None:
        await self._rig.world.kill_gateway()
        await self._rig.world.start_gateway()

    async def _update(self, policy: UpdatePolicy) -> None:
        world = self._rig.world
        for _ in range(5):
            version = (await world.control.info()).weights.version + 1
            try:
                await world.control.update_weights(self._rig.weights[version % 2], version=version, policy=policy)
                return
            except (WeightUpdateError, NotFound, RolloutError) as error:
                # A replica died in the middle of it: all or none, and the trainer sends it again.
                print(f"  schedule {self._seed}: update to {version}: {type(error).__name__}: {error}", flush=True)
        raise AssertionError("five updates in a row were refused")

    # ---- afterwards ---------------------------------------------------------------------------------------------

    async def _check_pages(self) -> None:
        """Every replica in rotation is idle soon, and then holds no page."""
        info = await self._rig.world.until(
            lambda info: (
                all(r.running + r.waiting == 0 for r in info.replicas if r.healthy)
                and any(r.healthy for r in info.replicas)
            ),
            "idle replicas",
        )
        self._tally.leaked += sum(r.total_pages - r.free_pages for r in info.replicas if r.healthy)
