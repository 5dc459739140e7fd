"""What a worker looks like from outside: asynchronous methods that return records, refuse, fail or never answer."""

from __future__ import annotations

import asyncio

import numpy as np

from rollout.errors import InvalidRequest, WeightUpdateError
from rollout.types import TokenChunk


class ReplicaActor:
    """Its methods are called by name."""

    async def owned(self, owner: str, method: str, *args: object) -> object:
        """As ``ActorWorker``, for any owner."""
        return await getattr(self, method)(*args)

    @staticmethod
    def make_chunk() -> TokenChunk:
        """A chunk whose log-probs are no round numbers."""
        logprobs = -np.sqrt(np.arange(1, 4, dtype=np.float32))
        return TokenChunk(
            0, 0, np.arange(3, dtype=np.int32), logprobs, logprobs.copy(), 1, np.arange(3, dtype=np.uint64)
        )

    async def chunk(self) -> TokenChunk:
        """A record with arrays."""
        return self.make_chunk()

    async def length(self, values: list[object]) -> int:
        """Of a list."""
        return len(values)

    async def refuse(self, message: str, field: str) -> None:
        """With a typed error."""
        raise InvalidRequest(message, field=field)

    async def refuse_update(self) -> None:
        """With another."""
        raise WeightUpdateError("no")

    async def explode(self) -> None:
        """With an error of no kind we know."""
        raise ValueError("not one of ours")

    async def wait(self) -> None:
        """Never return."""
        await asyncio.Event().wait()

    async def shutdown(self) -> None:
        """Nothing to stop."""
