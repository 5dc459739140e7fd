"""verl's checkpoint engine "zerodrift": the trainer streams weights straight to the services over gRPC.

For rollouts apart from the trainer (``rollout.checkpoint_engine.backend=zerodrift`` with ``custom_backend_module``
set to this module). No device transport and no process group: rank 0 speaks to every living server, the rollout
workers look on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import ray
import torch
from pydantic import TypeAdapter
from ray.exceptions import RayActorError
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from rollout.errors import ReplicaUnavailable
from rollout.types import UpdatePolicy
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.handshake import Mode
from trainer_bridge.verl.adapter import DIRECT
from trainer_bridge.verl.align_state import aligned_process, trainer_manifest
from trainer_bridge.verl.options import NAME
from trainer_bridge.verl.sync import check_manifests, push_weights
from trainer_bridge.wire.channel import ClientSecurity

log = logging.getLogger(__name__)


@CheckpointEngineRegistry.register(NAME)
class GrpcCheckpointEngine(CheckpointEngine):
    """See the module.

    Args:
        is_master: set by verl on the trainer's ranks, True on rank 0; None on rollout workers.
        handshake, update_policy, timeout_s, security: as in ``VerlOptions``; from
            ``checkpoint_engine.engine_kwargs.zerodrift``.
    """

    wire_format = DIRECT

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        handshake: Mode = "strict",
        update_policy: str = "wait",
        timeout_s: float = 3600.0,
        security: Mapping[str, Any] | None = None,
    ) -> None:
        self._sends = bool(is_master)
        self._handshake: Mode = handshake
        self._policy = UpdatePolicy(update_policy)
        self._timeout_s = timeout_s
        self._security = TypeAdapter(ClientSecurity | None).validate_python(security and dict(security))
        self._checked = False

    def prepare(self) -> dict[str, Any]:
        """Nothing to allocate."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """No links between workers."""
        return {"rank": list(range(actor_wg_world_size))}, {"rank": list(range(rollout_world_size))}

    def init_process_group(self, **_: Any) -> None:
        """No group."""

    def finalize(self) -> None:
        """Nothing to free."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Send one whole set to every service; all of them serve it when this returns.

        Raises:
            ReplicaUnavailable: no server lives. ParityError: the handshake. WeightUpdateError: a service refused.
        """
        listed: list[tuple[str, torch.Tensor]] = []
        # Every rank walks the generator: gathering a sharded tensor is a collective. Only the sender keeps what comes,
        # and on the host, so that no device holds more than one gathered tensor.
        async for name, tensor in ensure_async_iterator(weights):
            if self._sends:
                listed.append((name, tensor.detach().cpu()))
        aligned_process().serving(global_steps, self._policy)
        if not self._sends:
            return {}
        served = [await self._serve(name, listed, global_steps) for name in server_names()]
        if not any(served):
            raise ReplicaUnavailable("no zerodrift server lives to take the weights")
        return {"zerodrift/services_updated": float(sum(served))}

    async def _serve(self, name: str, listed: list[tuple[str, torch.Tensor]], global_steps: int | None) -> bool:
        try:
            server: Any = ray.get_actor(name)
            address: str = await server.get_server_address.remote()
        except (ValueError, RayActorError) as error:
            log.error("%s is dead and gets no weights: %s", name, error)
            return False
        try:
            # verl also syncs within a step, without naming it.
            step: int = await server.get_global_steps.remote() if global_steps is None else int(global_steps)
            async with AsyncRolloutClient(address, timeout_s=self._timeout_s, security=self._security) as client:
                info = await client.info()
                if not self._checked:
                    check_manifests(info, trainer_manifest(), self._handshake)
                state = await push_weights(client, listed, step=step, policy=self._policy, info=info)
        except (ReplicaUnavailable, RayActorError) as error:
            log.error("%s cannot take weights: %s", name, error)
            with contextlib.suppress(RayActorError):
                await server.fence.remote(f"its service missed the weights of step {global_steps}: {error}")
            return False
        self._checked = True
        await server.set_global_steps.remote(step, state.version)
        return True

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Nothing comes this way."""
        none: tuple[tuple[str, torch.Tensor], ...] = ()
        for item in none:
            yield item


def server_names() -> list[str]:
    """Ray names of the living server actors of this job's namespace."""
    return sorted(name for name in ray.util.list_named_actors() if name.startswith(f"{NAME}_server_"))
