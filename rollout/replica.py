"""How the pool reaches a worker: in this process, or as a Ray actor. Same methods, same records."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayTaskError

from rollout.actor_worker import ActorWorker
from rollout.config import Settings
from rollout.errors import ReplicaUnavailable, RolloutError
from rollout.kernels.npu import environment
from rollout.kernels.registry import kernel_name
from rollout.openmp import spin_setting
from rollout.worker import Worker


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
    """A worker in a Ray actor. The actor is never restarted behind the pool's back: it would hold stale weights.

    Args:
        actor: handle of an ``ActorWorker``.
        name: of the replica.
        owner: token of this gateway; a worker that another gateway has adopted refuses the calls of the first.
    """

    def __init__(self, actor: Any, name: str, owner: str = "") -> None:
        self.name = name
        self._actor = actor
        self._owner = owner

    async def call(self, method: str, *args: Any) -> Any:
        """Call the actor; its typed errors come back as they were raised, its death as ReplicaUnavailable."""
        try:
            return await self._actor.owned.remote(self._owner, method, *args)
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


def start_ray_replica(settings: Settings, path: str, name: str, owner: str = "") -> RayReplica:
    """Create the actor; it loads its model in the background, ``call("info")`` waits for that."""
    options = dict(actor_options(settings))
    if settings.worker.outlive_gateway_s:
        # A name of its own: that of one that was just killed may still be taken.
        options |= {"lifetime": "detached", "name": f"{name}.{secrets.token_hex(4)}"}
    actor_class = ray.remote(ActorWorker)
    return RayReplica(actor_class.options(**options).remote(settings, path, name, owner), name, owner)


class AbsentReplica:
    """A replica that a new gateway did not find: out of rotation from the start."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def call(self, method: str, *args: Any) -> Any:
        """ReplicaUnavailable, always."""
        raise ReplicaUnavailable(f"worker {self.name} did not outlive its gateway")

    async def share(self, value: Any) -> Any:
        """ReplicaUnavailable, always."""
        raise ReplicaUnavailable(f"worker {self.name} did not outlive its gateway")

    async def stop(self) -> None:
        """Nothing to end."""

    async def kill(self) -> None:
        """Nothing to end."""
