"""Faults that need a cluster of their own: a node that is lost, gateways that follow each other."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.config import Settings
from rollout.errors import ConfigError, ReplicaUnavailable
from rollout.replica import RayReplica
from rollout.serving import running_service
from rollout.types import UpdatePolicy
from tests.services import PROMPT, bits, sampling, tensors_of, tiny_settings, version_path
from trainer_bridge.aio_client import AsyncRolloutClient

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]


async def test_a_lost_node(tiny_qwen3_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.e2e.node_loss", str(tiny_qwen3_path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        out, errors = await asyncio.wait_for(process.communicate(), 280)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()[-3000:]
    # Ray says things of its own on the way out.
    (line,) = [line for line in out.decode().splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert "error" not in found, found
    assert "3 replicas of 1 zerodrift_slot need 3" in found["refused"]
    assert found["live_when_lost"] == 8 and found["equal"] and found["control_differs"]
    assert len(found["reason"]) == 1 and "replica-" in found["reason"][0]
    assert found["restarts"] == [0, 1] and found["equal_again"] and found["replicas"] == ["replica-0", "replica-1"]


def outliving(path: Path, namespace: str, **worker: Any) -> Settings:
    settings = tiny_settings(path)
    fields = {"num_cpus": 0.5, "outlive_gateway_s": 30.0, "answer_timeout_s": 20.0} | worker
    return settings.model_copy(update={"worker": settings.worker.model_copy(update=fields)})


async def test_gateways_follow_each_other(ray_cluster: Any, tiny_qwen3_path: Path) -> None:
    """The second finds the worker with the weights of an update; the first, still there, is no longer listened to."""
    import ray

    first_settings = outliving(tiny_qwen3_path, "x")
    other = version_path(tiny_qwen3_path, 1)
    async with running_service(first_settings) as first, AsyncRolloutClient(first.address) as client:
        with pytest.raises(ConfigError, match="belongs to a gateway that is alive"):
            async with running_service(first_settings):
                pass
        state = await client.update_weights(tensors_of(other), version=1, policy=UpdatePolicy.WAIT)
        calm = bits(await client.generate(PROMPT, sampling()))
        # The first gateway stands still, as one does that is about to be restarted.
        for slot in first.pool.router.slots():
            for task in slot.tasks:
                task.cancel()
        first.backend._inner.stats = _nothing  # type: ignore[attr-defined]
        first.backend._inner.info = _nothing  # type: ignore[attr-defined]
        async with running_service(first_settings) as second, AsyncRolloutClient(second.address) as newer:
            assert (await newer.info()).weights == state
            assert bits(await newer.generate(PROMPT, sampling())) == calm
            (replica,) = first.pool.router.replicas
            assert isinstance(replica, RayReplica)
            with pytest.raises(ReplicaUnavailable, match="taken over"):
                await replica.call("info")
        assert not ray.util.list_named_actors(), "a gateway that is stopped ends its workers"


@pytest.mark.slow
async def test_the_only_worker_is_killed_after_an_update(ray_cluster: Any, tiny_qwen3_path: Path) -> None:
    """Nobody else holds the weights: it gets what the trainer sent, and serves the same bits again."""
    settings = tiny_settings(tiny_qwen3_path)
    async with running_service(settings) as service, AsyncRolloutClient(service.address) as client:
        before = bits(await client.generate(PROMPT, sampling()))
        state = await client.update_weights(tensors_of(version_path(tiny_qwen3_path, 1)), version=1)
        calm = bits(await client.generate(PROMPT, sampling()))
        assert calm != before, "control: the update shows"
        (replica,) = service.pool.router.replicas
        await replica.kill()
        async with asyncio.timeout(60):
            while service.pool.router.replicas == [replica] or not (await client.info()).replicas[0].healthy:
                await asyncio.sleep(0.1)
        assert bits(await client.generate(PROMPT, sampling())) == calm
        info = await client.info()
        assert [r.weights for r in info.replicas] == [state] == [info.weights]


async def _nothing() -> Any:
    raise ReplicaUnavailable("the gateway stands still")


async def test_a_worker_without_a_gateway_ends(ray_cluster: Any, tiny_qwen3_path: Path) -> None:
    import ray

    from rollout.replica import start_ray_replica

    settings = outliving(tiny_qwen3_path, "x", outlive_gateway_s=4.0)
    replica = start_ray_replica(settings, str(tiny_qwen3_path), "lonely", "me")
    await asyncio.wait_for(replica.call("info"), 60)
    assert [name.partition(".")[0] for name in ray.util.list_named_actors()] == ["lonely"], "control"
    async with asyncio.timeout(60):
        while ray.util.list_named_actors():
            await asyncio.sleep(0.2)
