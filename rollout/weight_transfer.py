"""C4: weights through Ray's object store. The sender's actor hands out references; bytes go from node to node by Ray.

Only references pass through the actor and the server: a bucket is written once into the sender's object store and read
by every replica from its own node's. What a reference leads to was pickled inside the cluster, by a process that could
run code on it anyway; nothing of the kind is ever taken from gRPC.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rollout.errors import RolloutError, UnsupportedFeature, WeightUpdateError

WINDOW = 2
"""Buckets that wait to be taken; a sender that is faster waits."""
_NAME = re.compile(r"(zerodrift-transfer-[0-9a-f]{32})/[0-9]{1,9}")
"""Actor and number of the transfer."""
_TAKE_S = 5.0
"""One question to the sender's actor; asked again, so that its death is noticed."""


class TransferActor:
    """A sender's Ray actor, without a CPU: ``take`` is for the server, the other methods for the sender."""

    def __init__(self) -> None:
        self._buckets: deque[list[Any]] = deque()
        self._changed = asyncio.Condition()
        self._transfer = ""
        self._finished = False

    async def begin(self, transfer: str) -> None:
        """Forget what an earlier transfer left."""
        async with self._changed:
            self._buckets.clear()
            self._transfer, self._finished = transfer, False
            self._changed.notify_all()

    async def offer(self, transfer: str, bucket: list[Any], wait_s: float) -> bool:
        """Queue one bucket, as a list that holds its reference; False when there was no room in time."""
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: len(self._buckets) < WINDOW or self._transfer != transfer)
            except TimeoutError:
                return False
            if self._transfer != transfer:
                raise WeightUpdateError("this transfer is over")
            self._buckets.append(bucket)
            self._changed.notify_all()
            return True

    async def finish(self, transfer: str) -> None:
        """Nothing more will be offered."""
        async with self._changed:
            self._finished = self._finished or self._transfer == transfer
            self._changed.notify_all()

    async def take(self, transfer: str, wait_s: float) -> list[Any] | None:
        """The next bucket; [] when none came in time, None after the last."""
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(
                        lambda: bool(self._buckets) or self._finished or self._transfer != transfer
                    )
            except TimeoutError:
                return []
            if self._transfer != transfer:
                # A question that outlived its update must not take a bucket from the next one.
                raise WeightUpdateError("this transfer is over")
            if not self._buckets:
                return None
            bucket = self._buckets.popleft()
            self._changed.notify_all()
            return bucket


async def taken(name: str, namespace: str) -> AsyncGenerator[Any, None]:
    """References of a transfer's buckets, in order.

    Raises:
        UnsupportedFeature: this server is in no Ray cluster. WeightUpdateError: no such transfer, or its sender died.
    """
    if not ray.is_initialized():
        raise UnsupportedFeature(
            "this service runs without Ray, so it has no object store to read from; send buckets or a folder",
            field="begin.transfer",
        )
    actor = await asyncio.get_running_loop().run_in_executor(None, _find, name, namespace)
    try:
        while (bucket := await actor.take.remote(name, _TAKE_S)) is not None:
            for reference in bucket:
                yield reference
    except RayTaskError as error:
        raise WeightUpdateError(
            f"transfer {name} failed: {type(error.cause).__name__}", field="begin.transfer"
        ) from error
    except RayActorError as error:
        raise WeightUpdateError(f"the sender of transfer {name} is gone", field="begin.transfer") from error


def _find(name: str, namespace: str) -> Any:
    # Other actors of the cluster are none of a sender's business.
    found = _NAME.fullmatch(name)
    if found is None:
        raise WeightUpdateError(f"begin.transfer = {name[:80]!r} is no transfer's name", field="begin.transfer")
    try:
        return ray.get_actor(found[1], namespace=namespace)
    except ValueError:
        raise WeightUpdateError(
            f"no transfer {name} in the server's cluster and namespace {namespace!r}", field="begin.transfer"
        ) from None


def bucket_of(reference: Any) -> Any:
    """What a reference leads to, on a replica; arrays are views of the node's object store.

    Raises:
        WeightUpdateError: its owner died, or the bucket was lost.
    """
    try:
        return ray.get(reference)
    except RolloutError:
        raise
    except RayError as error:
        raise WeightUpdateError(f"a bucket was lost on its way: {type(error).__name__}") from error
