"""verl's ``BaseRollout`` in the trainer's (or a checkpoint worker's) process: hands weights to the service."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from rollout.errors import UnsupportedFeature
from rollout.types import ServerInfo, UpdatePolicy
from trainer_bridge.verl.align_state import aligned_process, trainer_manifest
from trainer_bridge.verl.options import NAME, read_options
from trainer_bridge.verl.replica import server_name
from trainer_bridge.verl.sync import check_manifests, push_weights

log = logging.getLogger(__name__)
Weights = Iterator[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]
DIRECT = "zerodrift_direct"
"""Wire format of our checkpoint engine: the trainer has already spoken to the service."""


class ServerAdapter(BaseRollout):
    """One per trainer rank. The first rank of the first replica on a service sends; the others take part and wait."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.options = read_options(self.config.engine_kwargs)
        size = int(self.config.tensor_model_parallel_size * self.config.data_parallel_size)
        rank = int(os.environ.get("RANK", "0"))
        self.replica_rank = replica_rank if replica_rank != -1 else rank // size
        self._colocated = replica_rank == -1
        """in the trainer's process, not in a checkpoint worker"""
        self.is_leader_rank = not self._colocated or rank % size == 0
        services = len(self.options.addresses)
        self._sends = self.is_leader_rank and (services == 0 or self.replica_rank < services)
        self._server: Any = None
        self._checked = False

    def _handle(self) -> Any:
        if self._server is None:
            # Looked up late: servers start after the trainer.
            self._server = ray.get_actor(server_name(self.replica_rank, self.options))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Wake weights or KV cache; requests are admitted once the KV cache is."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._handle().wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Let no request in until ``resume``."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._handle().sleep.remote()

    async def update_weights(
        self, weights: Weights, wire_format: str = "named_tensors", global_steps: int | None = None, **extra: Any
    ) -> None:
        """Send one weight set; it is served, whole and proven by digest, when this returns.

        Raises:
            UnsupportedFeature: delta formats, or a LoRA adapter that is not merged.
            ParityError: the handshake found a difference, in strict mode. WeightUpdateError: the service refused.
        """
        if wire_format == DIRECT:
            async for _ in ensure_async_iterator(weights):
                pass
            return
        if wire_format != "named_tensors":
            raise UnsupportedFeature(f"wire format {wire_format!r}: zerodrift takes whole named tensors")
        if extra.get("peft_config") is not None:
            raise UnsupportedFeature(
                "a LoRA adapter by itself is not served; set actor_rollout_ref.model.lora.merge=true"
            )
        # Every rank must walk the generator: gathering a sharded tensor is a collective.
        listed = [(name, tensor) async for name, tensor in ensure_async_iterator(weights)]
        if self._colocated:
            aligned_process().serving(global_steps, UpdatePolicy(self.options.update_policy))
        if not self._sends:
            return
        try:
            address = await self._handle().get_server_address.remote()
        except RayActorError as error:
            log.error("replica %d is dead and gets no weights: %s", self.replica_rank, error)
            return
        # verl also syncs within a step, without naming it.
        step = await self._handle().get_global_steps.remote() if global_steps is None else int(global_steps)
        await self._send(address, listed, step)

    def _check(self, info: ServerInfo) -> None:
        if self._colocated:
            check_manifests(info, trainer_manifest(), self.options.handshake)
        elif self.options.handshake != "off":
            log.warning(
                "no handshake: this process only passes weights on and knows nothing of the trainer; with "
                "checkpoint_engine.backend=%s the trainer itself speaks to the service and compares manifests",
                NAME,
            )

    async def _send(self, address: str, listed: list[tuple[str, torch.Tensor]], step: int) -> None:
        async with self.options.client(address) as client:
            info = await client.info()
            if not self._checked:
                self._check(info)
                self._checked = True
            policy = UpdatePolicy(self.options.update_policy)
            state = await push_weights(client, listed, step=step, policy=policy, info=info)
        await self._handle().set_global_steps.remote(step, state.version)
        log.info("%s replica %d serves step %d as version %d", NAME, self.replica_rank, step, state.version)
