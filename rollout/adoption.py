"""A gateway that starts finds the workers of the one before it, and takes them over with the weights they hold."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.exceptions import RayError

from rollout.actor_worker import fingerprint
from rollout.config import Settings
from rollout.errors import ConfigError, RolloutError
from rollout.replica import RayReplica
from rollout.worker import WorkerInfo

log = logging.getLogger(__name__)
SILENCE_S = 4.0
"""A gateway calls its workers about every second; silent for so long, it is gone."""
_POLL_S = 0.5


async def adopt_workers(settings: Settings, path: str, names: list[str], owner: str) -> dict[str, RayReplica]:
    """Replica name -> worker left by an earlier gateway. All that are returned hold the same, newest weights; workers
    that hang, hold older weights or run with other settings are ended.

    Raises:
        ConfigError: the workers' gateway still calls them.
    """
    found = [(full, full.rpartition(".")[0]) for full in ray.util.list_named_actors()]
    tries = [_adopt(settings, path, full, owner) for full, name in found if name in names]
    outcomes = await asyncio.gather(*tries)
    taken = [(actor, info) for actor, info in outcomes if info is not None]
    newest = max((info.weights.version for _, info in taken), default=-1)
    adopted: dict[str, RayReplica] = {}
    for actor, info in taken:
        if info.weights.version == newest and info.name not in adopted:
            adopted[info.name] = RayReplica(actor, info.name, owner)
            log.warning("worker %s is taken over with weight version %d", info.name, newest)
        else:
            ray.kill(actor)
    return adopted


async def _adopt(settings: Settings, path: str, full: str, owner: str) -> tuple[Any, WorkerInfo | None]:
    actor: Any = None
    try:
        actor = ray.get_actor(full)
        async with asyncio.timeout(settings.worker.answer_timeout_s):
            await _until_silent(actor, full, settings.ray.namespace)
            return actor, await actor.adopt.remote(owner, fingerprint(settings, path))
    except ConfigError as error:
        # Ray derives classes of its own from ours, so this is also what the worker raised.
        if error.field == "ray.namespace":
            raise
        log.warning("worker %s cannot be taken over: %s", full, error)
    except (RolloutError, RayError, ValueError, TimeoutError) as error:
        log.warning("worker %s cannot be taken over: %s", full, str(error) or "it does not answer")
    if actor is not None:
        ray.kill(actor)
    return actor, None


async def _until_silent(actor: Any, full: str, namespace: str) -> None:
    """A gateway that has just died called a moment ago."""
    for _ in range(round(2 * SILENCE_S / _POLL_S)):
        if await actor.silence_s.remote() >= SILENCE_S:
            return
        await asyncio.sleep(_POLL_S)
    raise ConfigError(
        f"worker {full} belongs to a gateway that is alive; stop it, or set another ray.namespace",
        field="ray.namespace",
    )
