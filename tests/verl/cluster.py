"""verl's own components on the CPU: server manager, agent loops, FSDP workers, checkpoint manager."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from examples.verl_grpo_cpu.run import compose
from trainer_bridge.verl.checkpoint import server_names

STANDALONE = (
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=3",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
    "+actor_rollout_ref.rollout.engine_kwargs.zerodrift.row_digests=True",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=zerodrift",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=trainer_bridge.verl.checkpoint",
)
"""Three replicas apart from the trainer, weights over gRPC."""
HERE = Path(__file__).parent
LOOPS = (
    f"actor_rollout_ref.rollout.agent.agent_loop_config_path={HERE / 'loops.yaml'}",
    f"actor_rollout_ref.rollout.multi_turn.function_tool_path={HERE / 'tool.py'}",
    "actor_rollout_ref.rollout.multi_turn.format=zerodrift_test",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
)
"""A loop of our own, and what verl's tool loop needs."""
FLOAT32 = (
    "actor_rollout_ref.rollout.dtype=float32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32",
)


@dataclass(slots=True)
class Cluster:
    """What a verl trainer holds."""

    config: Any
    servers: Any
    """LLMServerManager"""
    loops: Any
    """AgentLoopManager"""
    actors: Any
    """RayWorkerGroup of ActorRolloutRefWorker"""
    checkpoints: Any
    """CheckpointEngineManager"""

    def generate(
        self, prompts: Sequence[str], n: int = 1, loops: Any = None, agent: str = "single_turn_agent"
    ) -> DataProto:
        """verl's agent loops over our service."""
        batch = batch_of(prompts, n)
        batch.non_tensor_batch["agent_name"] = np.array([agent] * len(batch), dtype=object)
        return (loops or self.loops).generate_sequences(batch)

    def fresh_loops(self) -> Any:
        """What a second run of the trainer would have: a router, clients and agent loops of its own."""
        from verl.experimental.agent_loop import AgentLoopManager

        asyncio.run(self.servers._init_global_load_balancer())
        return AgentLoopManager.create(config=self.config, llm_client=self.servers.get_client())

    def score(self, data: DataProto) -> DataProto:
        """verl's FSDP forward of every row, as its trainer calls it; adds ``old_log_probs``."""
        rows = _trainer_rows(data, self.config)
        tu.assign_non_tensor(rows, calculate_entropy=True, compute_loss=False)
        output = self.actors.compute_log_prob(rows)
        log_probs = no_padding_2_padding(tu.get(output, "log_probs"), rows).float()
        data.batch["old_log_probs"] = log_probs
        data.batch["row_digests"] = no_padding_2_padding(tu.get(output, "row_digests"), rows)
        return data

    def learn(self, data: DataProto, seed: int = 0) -> dict[str, Any]:
        """One optimizer step of verl's actor, with advantages of its own making."""
        import torch

        data.batch["advantages"] = torch.randn(
            data.batch["responses"].shape, generator=torch.Generator().manual_seed(seed)
        )
        data.batch["returns"] = data.batch["advantages"]
        rows = _trainer_rows(data, self.config)
        size = len(data)
        tu.assign_non_tensor(
            rows,
            calculate_entropy=False,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=size,
            mini_batch_size=size,
            epochs=1,
            seed=0,
            dataloader_kwargs={"shuffle": False},
            compute_loss=True,
        )
        return dict(tu.get(self.actors.update_actor(rows), "metrics"))


def _trainer_rows(data: DataProto, config: Any) -> Any:
    data.meta_info["temperature"] = config.actor_rollout_ref.rollout.temperature
    data.meta_info["multi_turn"] = False
    return left_right_2_no_padding(data.to_tensordict())


def batch_of(prompts: Sequence[str], n: int) -> DataProto:
    """A verl batch: every prompt n times, interleaved, as ``fit`` repeats it."""
    rows = [prompt for prompt in prompts for _ in range(n)]
    messages = np.empty(len(rows), dtype=object)
    messages[:] = [[{"role": "user", "content": row}] for row in rows]
    return DataProto(non_tensor_batch={"raw_prompt": messages, "index": np.arange(len(rows))})


def start(folder: Path, extra: Sequence[str] = (), ranks: int = 2) -> Cluster:
    """Servers, loops, FSDP workers and the checkpoint manager, all verl's."""
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.experimental.agent_loop import AgentLoopManager
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.rollout.llm_server import LLMServerManager

    config = compose(folder, [*STANDALONE, *LOOPS, *extra])
    servers = LLMServerManager.create(config=config)
    loops = AgentLoopManager.create(config=config, llm_client=servers.get_client())
    actors = RayWorkerGroup(
        resource_pool=RayResourcePool([ranks], use_gpu=True, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(
            ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role="actor"
        ),
        device_name="cpu",
    )
    actors.init_model()
    checkpoints = CheckpointEngineManager(
        config=omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine),
        actor_wg=actors,
        replicas=servers.get_replicas(),
    )
    return Cluster(config, servers, loops, actors, checkpoints)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for another process's state."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def stop(cluster: Cluster) -> None:
    """End every actor that was started."""
    for handle in [
        *cluster.servers.server_handles,
        *cluster.loops.agent_loop_workers,
        *cluster.actors.workers,
        *(worker for replica in cluster.servers.get_replicas() for worker in replica.workers),
        cluster.servers.global_load_balancer,
    ]:
        ray.kill(handle)
    # A name is free only once its actor is gone, and the next cluster uses the same names.
    until(lambda: not server_names())
