"""verl's ``RolloutReplica`` for zerodrift: starts or reaches a service and keeps control calls off dead servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf, open_dict
from ray.exceptions import RayActorError
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from rollout.errors import ConfigError, ReplicaUnavailable, UnsupportedFeature
from trainer_bridge.verl.options import NAME, VerlOptions, read_options
from trainer_bridge.verl.server import ZerodriftServer

log = logging.getLogger(__name__)
ROUTER_FILE = Path(__file__).with_name("router.yaml")


def server_name(rank: int, options: VerlOptions) -> str:
    """Ray name of the server actor that replica ``rank`` uses; replicas that share an address share the actor."""
    return f"{NAME}_server_{rank % len(options.addresses) if options.addresses else rank}"


class ZerodriftReplica(RolloutReplica):
    """One rollout replica: a server actor that hosts a service, or that speaks to one at a given address."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            raise UnsupportedFeature("zerodrift serves the policy only, not reward or teacher models")
        self.options = read_options(self.config.engine_kwargs)
        if self.options.router and not self.config.router_config_path and OmegaConf.is_config(config):
            # The server manager reads this after it has made its replicas; verl offers no other hook for a default.
            log.info("rollout.router_config_path was empty: routing through %s", ROUTER_FILE)
            with open_dict(config):
                config.router_config_path = str(ROUTER_FILE)

    async def init_standalone(self) -> None:
        """Workers that only receive weights; on the CPU when the transport needs no device."""
        backend = self.config.checkpoint_engine.backend
        if get_device_name() != "cpu" and backend not in ("naive", NAME):
            await super().init_standalone()
            return
        self.rollout_mode = RolloutMode.STANDALONE
        if backend != "naive":
            pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
            self.resource_pool = pool
            group = RayWorkerGroup(
                resource_pool=pool,
                ray_cls_with_init=self.get_ray_class_with_init_args(),
                bin_pack=False,
                name_prefix=f"{NAME}_standalone_{self.replica_rank}{self.name_suffix}",
                use_gpu=False,
                device_name="cpu",
            )
            self.workers = group.workers
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start the server actor and wait until it serves.

        Raises:
            ReplicaUnavailable: it did not serve in time; verl itself would wait for ever.
        """
        options = self.options
        address = options.addresses[self.replica_rank % len(options.addresses)] if options.addresses else None
        actor = ray.remote(ZerodriftServer).options(
            name=server_name(self.replica_rank, options),
            get_if_exists=True,
            num_cpus=options.num_cpus,
            resources=options.resources or None,
            max_concurrency=self.max_concurrency,
        )
        sleeps = self.rollout_mode is RolloutMode.HYBRID and bool(self.config.free_cache_engine)
        server: Any = actor.remote(options.model_dump(), address, self._model(), sleeps)
        launched = server.launch.remote()
        try:
            where = await asyncio.wait_for(asyncio.wrap_future(launched.future()), options.start_timeout_s)
        except TimeoutError:
            raise ReplicaUnavailable(
                f"replica {self.replica_rank} did not serve within {options.start_timeout_s} s "
                f"(engine_kwargs.{NAME}.start_timeout_s); it asks Ray for {options.num_cpus} CPUs and "
                f"{options.resources or 'nothing else'}: check that the cluster has them free"
            ) from None
        self.servers = [server]
        self._server_handle = server
        # The balancer's key: unique, although replicas may share a service.
        self._server_address = where if not options.addresses else f"{where}#{self.replica_rank}"

    def _model(self) -> dict[str, Any]:
        config = self.config
        path = self.model_config.get("local_path") or self.model_config.get("path")
        if self.config.tensor_model_parallel_size * self.config.pipeline_model_parallel_size != 1:
            raise ConfigError(
                "rollout.tensor_model_parallel_size and pipeline_model_parallel_size must be 1 for zerodrift: a "
                "replica is one service; how it is parallel is the service's own setting"
            )
        return {
            "path": str(path),
            "dtype": str(config.dtype).removeprefix("torch."),
            "seed": int(config.seed),
            "prompt_length": int(config.prompt_length),
            "response_length": int(config.response_length),
            "context_length": int(config.max_model_len or config.prompt_length + config.response_length),
            "hosted_context_length": None if config.max_model_len is None else int(config.max_model_len),
            "max_running": min(int(config.max_num_seqs), 256),
        }

    # ---- control: as the base class, but a dead server is skipped, or one death would end every weight sync --------

    async def _all(self, call: Callable[[Any], Awaitable[Any]]) -> None:
        alive = []
        for server in self.servers:
            try:
                await call(server)
                alive.append(server)
            except RayActorError as error:
                log.error("replica %d: its server is dead and takes no further part: %s", self.replica_rank, error)
        self.servers = alive

    async def wake_up(self) -> None:
        """See ``ZerodriftServer``."""
        await self._all(lambda server: server.wake_up.remote())

    async def sleep(self) -> None:
        """See ``ZerodriftServer``."""
        await self._all(lambda server: server.sleep.remote())

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """See ``ZerodriftServer``."""
        await self._all(lambda server: server.abort_all_requests.remote(reject_request=reject_request))

    async def resume_generation(self) -> None:
        """See ``ZerodriftServer``."""
        await self._all(lambda server: server.resume_generation.remote())

    async def clear_kv_cache(self) -> None:
        """See ``ZerodriftServer``."""
        await self._all(lambda server: server.clear_kv_cache.remote())

    async def release_kv_cache(self) -> None:
        """See ``ZerodriftServer``."""
        await self._all(lambda server: server.release_kv_cache.remote())

    async def resume_kv_cache(self) -> None:
        """See ``ZerodriftServer``."""
        await self._all(lambda server: server.resume_kv_cache.remote())

    async def start_profile(self, **kwargs: Any) -> None:
        """See ``ZerodriftServer``."""
        await self._all(lambda server: server.start_profile.remote(**kwargs))

    async def stop_profile(self) -> None:
        """See ``ZerodriftServer``."""
        await self._all(lambda server: server.stop_profile.remote())
