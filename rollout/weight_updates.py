"""C4 over all replicas: every bucket to all of them, the commit on all of them or on none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from rollout.errors import ReplicaUnavailable
from rollout.kept_weights import SentBucket
from rollout.router import Router
from rollout.types import ReplicaDigests, WeightState, WeightUpdate
from rollout.weight_intake import Intake

log = logging.getLogger(__name__)
T = TypeVar("T")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end even when the caller is cancelled; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        raise cancelled
    return task.result()


async def stage_all(router: Router, intake: Intake, sent: list[SentBucket] | None = None) -> str:
    """Pass every bucket to all replicas while the next one comes in; returns the sender's root digest, hex.

    Args:
        sent: where every bucket is noted as it went out; None: nowhere.

    Raises:
        RolloutError: the sender's side, or a replica, refused.
    """
    staging: asyncio.Task[Any] | None = None
    through_ray = bool(intake.update.transfer)
    buckets: AsyncGenerator[Any, None] = intake.references() if through_ray else intake.buckets()
    try:
        async with aclosing(buckets):
            async for bucket in buckets:
                if staging is not None:
                    await staging
                staging = asyncio.create_task(_pass_on(router, bucket, through_ray, sent))
                # The task's from here on: one bucket beside the stages' own.
                del bucket
        if staging is not None:
            await staging
        return intake.digest
    finally:
        if staging is not None:
            # Awaited here, since nobody else would ever look at how it ended.
            await to_the_end(_settled(staging))


async def _pass_on(router: Router, bucket: Any, through_ray: bool, sent: list[SentBucket] | None) -> None:
    method, argument = ("stage_bucket", [bucket]) if through_ray else ("stage_chunks", await router.share(bucket))
    if sent is not None:
        sent.append(SentBucket(method, argument))
    await router.all(method, argument)


async def _settled(task: asyncio.Task[Any]) -> None:
    await asyncio.gather(task, return_exceptions=True)


async def commit_all(router: Router, update: WeightUpdate) -> WeightState:
    """Switch on every replica, once each has proven the set and stands still.

    A replica that fails now may hold new and old tensors: it leaves rotation, and its engine never steps again.

    Raises:
        ReplicaUnavailable: no replica could commit.
    """
    outcomes = await router.all_outcomes("commit")
    states = {outcome for outcome in outcomes.values() if isinstance(outcome, WeightState)}
    for name, outcome in outcomes.items():
        if len(states) > 1 or not isinstance(outcome, WeightState):
            # An exception's own text may be of any library, and what a fence says reaches clients.
            log.error("worker %s failed to commit: %s", name, outcome)
            router.fence(name, ReplicaUnavailable(f"worker {name} failed to commit"))
    if len(states) != 1:
        raise ReplicaUnavailable(
            f"version {update.version} could be committed on no replica, and none serves any more; restart the service"
        )
    (state,) = states
    committed(update, state)
    return state


def committed(update: WeightUpdate, state: WeightState) -> None:
    """Every committed update passes here once, after the last replica has switched: the place of the audit line."""
    source = "a folder" if update.folder else "Ray" if update.transfer else "the stream"
    log.info(
        "weights version %d, digest %s, %d tensors from %s, policy %s",
        state.version, state.digest, update.num_tensors, source, update.policy.value,
    )  # fmt: skip


async def digests_of_all(router: Router) -> tuple[ReplicaDigests, ...]:
    """What each living replica holds, hashed anew; one that dies meanwhile is left out."""
    return tuple(await router.all("tensor_digests"))
