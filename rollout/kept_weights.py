"""C4: how a replica that starts anew gets the weights being served, from another replica or from what was sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rollout.errors import ParityError
from rollout.replica import Replica
from rollout.slot import Slot
from rollout.types import ReplicaDigests, TensorChunk, UpdatePolicy, WeightState, WeightUpdate
from rollout.weight_export import ExportPlace


@dataclass(frozen=True, slots=True)
class SentBucket:
    """One bucket as every replica got it."""

    method: str
    argument: Any
    """chunks, or what leads to them in Ray's object store, which lives as long as this does"""


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """The last committed update, whole."""

    update: WeightUpdate
    """its head, digest included"""
    state: WeightState
    """what replicas held after it"""
    buckets: tuple[SentBucket, ...]

    async def give(self, newcomer: Replica) -> None:
        """Update a replica from what was sent. Caller holds off updates.

        Raises:
            ParityError: it holds something else afterwards. RolloutError: it refused, or is gone.
            RayError: the sender's process, which owned the buckets, has ended.
        """
        await newcomer.call("stage", self.update)
        for bucket in self.buckets:
            await newcomer.call(bucket.method, bucket.argument)
        await _switch(newcomer, self.state, "what was sent")


def kept(update: WeightUpdate, digest: str, state: WeightState, buckets: list[SentBucket]) -> KeptWeights:
    """After the commit of ``update``, whose sender vouched for ``digest``."""
    return KeptWeights(replace(update, digest=digest, policy=UpdatePolicy.ABORT), state, tuple(buckets))


async def copy_weights(donor: Slot, newcomer: Replica, target: WeightState, bucket_bytes: int) -> None:
    """Bucket by bucket from a replica that serves ``target``, digest checked at the end. Caller holds off updates.

    Args:
        bucket_bytes: most at a time.

    Raises:
        WeightUpdateError: the copy is not what the donor serves. ReplicaUnavailable: one of the two is gone.
    """
    held: ReplicaDigests = await donor.call("tensor_digests")
    # Whoever served them took their values, NaN or not.
    update = WeightUpdate(target.version, target.digest, len(held.tensors), UpdatePolicy.ABORT, allow_nonfinite=True)
    await newcomer.call("stage", update)
    place: ExportPlace | None = ExportPlace()
    while place is not None:
        chunks: list[TensorChunk]
        chunks, place = await donor.call("export", place, bucket_bytes)
        await newcomer.call("stage_chunks", chunks)
    await _switch(newcomer, target, donor.name)


async def _switch(newcomer: Replica, target: WeightState, source: str) -> None:
    await newcomer.call("verify_stage")
    await newcomer.call("quiesce", UpdatePolicy.ABORT)
    state: WeightState = await newcomer.call("commit")
    await newcomer.call("release")
    if state != target:
        raise ParityError(f"{newcomer.name} holds {state.digest} after the copy, {source} is {target.digest}")
