"""A worker as a Ray actor: it tells why it does not start, whose calls it takes, and may outlive its gateway."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from typing import Any

from rollout import tracing
from rollout.config import Settings
from rollout.errors import ConfigError, ReplicaUnavailable, RolloutError
from rollout.garbage import settle_heap
from rollout.worker import Worker, WorkerInfo


def fingerprint(settings: Settings, path: str) -> str:
    """Of everything that makes a worker what it is; a gateway with another one cannot take it over."""
    parts = [s.model_dump_json() for s in (settings.model, settings.kernels, settings.engine)]
    return hashlib.blake2b("\0".join([path, *parts]).encode(), digest_size=16).hexdigest()


class ActorWorker(Worker):
    """A worker whose refusal to start is told by name: an actor that raises in its constructor just dies.

    Args:
        settings: of the service.
        path: folder of the model.
        name: of the replica.
        owner: token of the gateway whose calls it takes.
    """

    def __init__(self, settings: Settings, path: str, name: str, owner: str = "") -> None:
        self._refusal: RolloutError | None = None
        self._owner = owner
        self._name, self._fingerprint = name, fingerprint(settings, path)
        self._heard_at = time.monotonic()
        tracing.configure(f"zerodrift-{name}")
        try:
            super().__init__(settings, path, name)
        except RolloutError as error:
            self._refusal = error
        settle_heap()
        if settings.worker.outlive_gateway_s:
            self._heard_at = time.monotonic()
            limit = settings.worker.outlive_gateway_s
            threading.Thread(target=self._end_alone, args=(limit,), name="zerodrift-orphan", daemon=True).start()

    async def owned(self, owner: str, method: str, *args: Any) -> Any:
        """Call a method for a gateway. ReplicaUnavailable when it is no longer the one that this worker belongs to."""
        if owner != self._owner:
            raise ReplicaUnavailable(f"worker {self._name} was taken over by another gateway")
        self._heard_at = time.monotonic()
        return await getattr(self, method)(*args)

    async def silence_s(self) -> float:
        """Seconds since its gateway called."""
        return time.monotonic() - self._heard_at

    async def adopt(self, owner: str, wanted: str) -> WorkerInfo:
        """Belong to another gateway: what runs is dropped, the weights stay.

        Raises:
            ConfigError: the gateway's settings ask for another worker.
        """
        if wanted != self._fingerprint:
            raise ConfigError(f"worker {self._name} runs with other settings of model, kernels or engine")
        self._owner = owner
        self._heard_at = time.monotonic()
        await self.abandon()
        return await self.info()

    async def info(self) -> WorkerInfo:
        """Sizes, manifest and weights; or why there are none."""
        if self._refusal is not None:
            raise self._refusal
        return await super().info()

    async def shutdown(self) -> None:
        """End the engine, if there is one."""
        if self._refusal is None:
            await super().shutdown()

    def _end_alone(self, limit_s: float) -> None:
        """End the process once no gateway has called for so long: it holds a device."""
        while (rest := self._heard_at + limit_s - time.monotonic()) > 0:
            time.sleep(rest)
        os._exit(0)
