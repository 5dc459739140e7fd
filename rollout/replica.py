"""How the pool reaches a worker: in this process, or as a Ray actor. Same methods, same records."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayTaskError

from rollout import tracing
from rollout.config import Settings
from rollout.errors import ReplicaUnavailable, RolloutError
from rollout.kernels.npu import environment
from rollout.kernels.registry import kernel_name
from rollout.openmp import spin_setting
from rollout.worker import Worker, WorkerInfo


class Replica(Protocol):
    """Calls a ``Worker`` method by name; raises errors of ``rollout.errors`` only."""

    name: str

    async def call(self, method: str, *args: Any) -> Any:
        """ReplicaUnavailable when the worker is gone."""
        ...

    async def share(self, value: Any) -> Any:
        """A form of ``value`` that may be passed to several replicas without being copied for each."""
        ...

    async def stop(self) -> None:
        """End the worker; what it still holds is lost."""
        ...

    async def kill(self) -> None:
        """End the worker at once, also one that does not answer; may be called again."""
        ...


class LocalReplica:
    """A worker in this process."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.name = name
        self._worker = worker

    async def call(self, method: str, *args: Any) -> Any:
        """Await the worker's own method."""
        return await getattr(self._worker, method)(*args)

    async def share(self, value: Any) -> Any:
        """The value itself: nothing is shipped."""
        return value

    async def stop(self) -> None:
        """Stop the engine's thread."""
        await self._worker.shutdown()

    async def kill(self) -> None:
        """A thread cannot be killed: it ends after its step, if that ends."""
        await self.stop()


class RayReplica:
    """A worker in a Ray actor. The actor is never restarted behind the pool's back: it would hold stale weights."""

    def __init__(self, actor: Any, name: str) -> None:
        self.name = name
        self._actor = actor

    async def call(self, method: str, *args: Any) -> Any:
        """Call the actor; its typed errors come back as they were raised, its death as ReplicaUnavailable."""
        try:
            return await getattr(self._actor, method).remote(*args)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RolloutError):
                raise cause from None
            raise
        except RayActorError as error:
            raise ReplicaUnavailable(f"worker {self.name} is gone: {type(error).__name__}") from error

    async def share(self, value: Any) -> Any:
        """A reference into Ray's object store."""
        return await asyncio.get_running_loop().run_in_executor(None, ray.put, value)

    async def stop(self) -> None:
        """Ask for a clean shutdown, wait 10 s at most, then kill the actor."""
        with contextlib.suppress(RolloutError, TimeoutError):
            await asyncio.wait_for(self.call("shutdown"), 10.0)
        await self.kill()

    async def kill(self) -> None:
        """Ray asks the process to end and, some seconds later, ends it, stopped or not."""
        ray.kill(self._actor)


class ActorWorker(Worker):
    """A worker whose refusal to start is told by name: an actor that raises in its constructor just dies."""

    def __init__(self, settings: Settings, path: str, name: str) -> None:
        self._refusal: RolloutError | None = None
        tracing.configure(f"zerodrift-{name}")
        try:
            super().__init__(settings, path, name)
        except RolloutError as error:
            self._refusal = error

    async def info(self) -> WorkerInfo:
        """Sizes, manifest and weights; or why there are none."""
        if self._refusal is not None:
            raise self._refusal
        return await super().info()

    async def shutdown(self) -> None:
        """End the engine, if there is one."""
        if self._refusal is None:
            await super().shutdown()


def actor_options(settings: Settings) -> Mapping[str, Any]:
    """Ray options of one worker: CPUs and resources as configured, no silent restarts, short OpenMP waits."""
    resources = dict(settings.worker.resources)
    # Read by the NPU's libraries when they start, so they belong to the process from its first moment.
    determinism = environment.required() if kernel_name(settings.kernels.name) == "npu" else {}
    return {
        "num_cpus": settings.worker.num_cpus,
        "resources": resources,
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {
            "env_vars": {
                "OMP_NUM_THREADS": str(settings.engine.threads),
                **spin_setting(),
                "TOKENIZERS_PARALLELISM": "false",
                **determinism,
            }
        },
    }


def start_ray_replica(settings: Settings, path: str, name: str) -> RayReplica:
    """Create the actor; it loads its model in the background, ``call("info")`` waits for that."""
    actor_class = ray.remote(ActorWorker)
    return RayReplica(actor_class.options(**actor_options(settings)).remote(settings, path, name), name)
