"""C4: one update's tensors as buckets, from wherever its head says, and the digest that its sender vouches for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import numpy as np

from rollout.config import WeightSettings
from rollout.errors import InvalidRequest, WeightUpdateError
from rollout.types import TensorChunk, UpdateEnd, UpdatePart, WeightUpdate
from rollout.weight_folder import folder_below, read_chunks, stored_tensors
from rollout.weight_transfer import taken

Bucket = list[TensorChunk]


class Intake:
    """The tensors of one update; one bucket is held at a time.

    Args:
        update: its head.
        parts: what follows the head on its stream.
        namespace: Ray namespace that a transfer's actor is looked for in.
    """

    def __init__(
        self, update: WeightUpdate, parts: AsyncIterator[UpdatePart], settings: WeightSettings, namespace: str
    ) -> None:
        self.update = update
        self._parts = parts
        self._settings = settings
        self._namespace = namespace
        self._end: UpdateEnd | None = None

    @property
    def digest(self) -> str:
        """The sender's root digest, hex; known once the buckets have ended.

        Raises:
            InvalidRequest: the stream ended without one.
        """
        digest = self._end.digest if self._end is not None else self.update.digest
        if not digest:
            raise InvalidRequest("the update ended without a digest; send it in begin or in end", field="end.digest")
        return digest

    async def references(self) -> AsyncGenerator[Any, None]:
        """References of a transfer's buckets, then the rest of the stream."""
        async with aclosing(taken(self.update.transfer, self._namespace)) as references:
            while (reference := await self._within(anext(references, None))) is not None:
                yield reference
        await self._no_chunks("transfer")

    async def buckets(self) -> AsyncGenerator[Bucket, None]:
        """Chunks in buckets of at most ``weights.bucket_bytes``, or of one message where that is larger; to the end.

        Raises:
            RolloutError: as the source raised it, or WeightUpdateError after ``weights.idle_s`` without a part.
        """
        if self.update.folder:
            async with aclosing(self._folder()) as buckets:
                async for bucket in buckets:
                    yield bucket
            return
        bucket, size = [], 0
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                # As an array its bytes go to other processes without being copied into a pickle.
                bucket.append(_as_array(chunk))
                size += len(chunk.data)
                if size >= self._settings.bucket_bytes:
                    yield bucket
                    bucket, size = [], 0
        if bucket:
            yield bucket

    async def _folder(self) -> AsyncGenerator[Bucket, None]:
        await self._no_chunks("folder")
        folder = folder_below(self._settings.root, self.update.folder)
        run = asyncio.get_running_loop().run_in_executor
        tensors = await self._within(run(None, stored_tensors, folder))
        buckets: Iterator[Bucket] = read_chunks(tensors, self._settings.bucket_bytes)
        while (bucket := await self._within(run(None, next, buckets, None))) is not None:
            yield bucket

    async def _no_chunks(self, source: str) -> None:
        """Read the stream to its end, where a digest may stand and nothing else."""
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                raise InvalidRequest(
                    f"begin.{source} says where the tensors are, and {chunk.name[:200]!r} came over the stream as well",
                    field=f"begin.{source}",
                )

    async def _chunks(self) -> AsyncGenerator[TensorChunk, None]:
        while (part := await self._within(anext(self._parts, None))) is not None:
            if self._end is not None:
                raise InvalidRequest("the update goes on after its end; send end last, once", field="end")
            if isinstance(part, UpdateEnd):
                if self.update.digest:
                    raise InvalidRequest("begin had a digest already; leave end out", field="end")
                self._end = part
            else:
                yield part

    async def _within(self, awaitable: Any) -> Any:
        try:
            async with asyncio.timeout(self._settings.idle_s):
                return await awaitable
        except TimeoutError:
            raise WeightUpdateError(
                f"nothing came for {self._settings.idle_s:g} s (weights.idle_s); the update is withdrawn"
            ) from None


def _as_array(chunk: TensorChunk) -> TensorChunk:
    data = np.frombuffer(chunk.data, np.uint8) if len(chunk.data) else np.empty(0, np.uint8)
    return TensorChunk(chunk.name, chunk.dtype, chunk.shape, chunk.offset, data)
