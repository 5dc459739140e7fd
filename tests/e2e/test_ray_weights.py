"""Weights through Ray's object store: a trainer in the service's cluster, its death, the death of its hand-out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray

from rollout.errors import WeightUpdateError
from rollout.serving import running_service
from rollout.types import GenerateRequest, WeightState
from tests.fakes.ray_trainer import Trainer
from tests.rollout.updates import digest_over
from tests.services import PROMPT, bits, sampling, tensors_of, tiny_settings, version_path
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.client import RolloutClient
from trainer_bridge.ray_weights import RayWeights

pytestmark = [pytest.mark.ray, pytest.mark.slow]


async def test_a_trainer_in_the_cluster(ray_cluster: Any, tiny_qwen3_path: Path) -> None:
    """One service for all of it, since actors take seconds to start."""
    new = version_path(tiny_qwen3_path, 1)
    settings = tiny_settings(tiny_qwen3_path, replicas=2)
    async with running_service(settings) as service, AsyncRolloutClient(service.address, timeout_s=60) as client:
        before = await said(client)
        trainers = [
            ray.remote(Trainer).options(num_cpus=0, max_concurrency=2).remote(service.address, settings.ray.namespace)
            for _ in range(2)
        ]
        state = await trainers[0].push.remote(new, 1)
        assert state == WeightState(1, digest_over(dict(tensors_of(new)))) == (await client.info()).weights
        after = await said(client)
        assert after != before

        trainers[1].push_half.remote(tiny_qwen3_path, 2)
        assert await trainers[1].stuck.remote()
        ray.kill(trainers[1])
        # The service notices by itself; the next sender only has to wait its turn.
        assert (await trainers[0].push.remote(tiny_qwen3_path, 2)).version == 2
        assert await said(client) == before

        with pytest.raises(WeightUpdateError):
            await asyncio.to_thread(push_from_an_actor_that_dies, service.address, settings.ray.namespace, new)
        assert await said(client) == before
        await asyncio.to_thread(bad_names, service.address, new)
        assert (await client.update_weights(tensors_of(new), version=3)).version == 3
        assert await said(client) == after
        info = await client.info(tensor_digests=True)
        assert [d.name for d in info.replica_digests] == ["replica-0", "replica-1"]
        assert info.replica_digests[0].tensors == info.replica_digests[1].tensors
        for trainer in trainers[:1]:
            ray.kill(trainer)


async def said(client: AsyncRolloutClient) -> Any:
    results = await client.generate_many([GenerateRequest(f"r{i}", PROMPT, sampling(max_tokens=8)) for i in range(4)])
    assert len({s.replica for r in results for s in r.samples}) == 2, "control: both answered"
    (only,) = {repr(bits(r)) for r in results}
    return only


def push_from_an_actor_that_dies(address: str, namespace: str, path: Path) -> None:
    with RolloutClient(address, timeout_s=60) as client:
        weights = RayWeights(client, namespace=namespace)
        offer, left = weights._offer, [5]

        def dying(*args: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                ray.kill(weights._actor)
            offer(*args)

        weights._offer = dying  # type: ignore[method-assign]
        weights.push(tensors_of(path), version=3, bucket_bytes=4096)


def bad_names(address: str, path: Path) -> None:
    """A name on the wire leads to transfers only, never to another actor of the cluster."""
    from rollout import codec
    from rollout.types import UpdatePolicy
    from trainer_bridge.wire import plan_update

    with RolloutClient(address, timeout_s=60) as client:
        for name in ("SERVE_CONTROLLER", "zerodrift-transfer-" + "0" * 32, "zerodrift-transfer-" + "0" * 32 + "/1"):
            update = plan_update(tensors_of(path), version=3, digest="ab", policy=UpdatePolicy.WAIT, transfer=name)
            with pytest.raises(WeightUpdateError, match="no transfer"):
                client.send_update(iter([codec.update_to_proto(update).SerializeToString()]))
