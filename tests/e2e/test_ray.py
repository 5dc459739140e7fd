"""The same service with its workers in Ray actors: same bits, updates, and a death in the middle."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray

from rollout.errors import InvalidRequest, ReplicaUnavailable, WeightUpdateError
from rollout.serving import Service, running_service
from rollout.types import Completion, GenerateRequest, ScoreSequence, TokenChunk, UpdatePolicy
from tests.services import (
    PROMPT,
    assert_idle,
    bits,
    bits_of_chunks,
    engine_bits,
    mixed_requests,
    sampling,
    tensors_of,
    tiny_settings,
    training_bits,
    version_path,
)
from trainer_bridge.aio_client import AsyncRolloutClient

pytestmark = pytest.mark.ray


async def test_actors_do_as_engines_do(ray_cluster: Any, tiny_qwen3_path: Path) -> None:
    """One service for all of it, since actors take seconds to start."""
    settings = tiny_settings(tiny_qwen3_path, replicas=2)
    # Deaths are to stay; what restarts do is in test_recovery and chaos.
    settings = settings.model_copy(update={"worker": settings.worker.model_copy(update={"max_restarts": 0})})
    async with running_service(settings) as service, AsyncRolloutClient(service.address, timeout_s=60) as client:
        await same_bits_and_typed_errors(client, tiny_qwen3_path)
        new = version_path(tiny_qwen3_path, 1)
        await an_update(client, tiny_qwen3_path, new)
        await a_death_loses_nothing(service, client, new)
        await the_last_death_is_said(service, client)


async def same_bits_and_typed_errors(client: AsyncRolloutClient, path: Path) -> None:
    requests = mixed_requests(7)
    results = await client.generate_many(requests)
    assert [bits(r) for r in results] == engine_bits(tiny_settings(path), requests)
    assert len({s.replica for r in results for s in r.samples}) == 2, "control: both took part"
    with pytest.raises(InvalidRequest) as caught:
        await client.generate(PROMPT, sampling(stop=("x",)))
    # Ray derives classes of its own from ours; the client must not take them for ours.
    assert (type(caught.value), caught.value.field) == (InvalidRequest, "sampling.stop")


async def an_update(client: AsyncRolloutClient, old: Path, new: Path) -> None:
    requests, tensors = mixed_requests(3), tensors_of(new)
    before, after = (engine_bits(tiny_settings(path), requests) for path in (old, new))
    with pytest.raises(WeightUpdateError, match="missing"):
        await client.update_weights(tensors[:-1], version=1)
    assert [bits(r) for r in await client.generate_many(requests)] == before
    events = client.stream(PROMPT, sampling(max_tokens=400))
    assert isinstance(await anext(events), TokenChunk)
    await client.pause()
    state = await client.update_weights(tensors, version=1, policy=UpdatePolicy.ABORT, bucket_bytes=4096)
    await client.resume()
    assert [r.weights for r in (await client.info()).replicas] == [state] * 2
    rest = [event async for event in events]
    assert isinstance(rest[-1], Completion) and rest[-1].samples[0].finish.message == "weight update"
    assert [bits(r) for r in await client.generate_many(requests)] == after != before
    ids = (*PROMPT, *range(2, 60))
    (scored,) = (await client.score([ScoreSequence(ids)])).scores
    assert scored.logprobs.tobytes() == training_bits(new, [(ids[:1], ids[1:])])[0][0]
    await assert_idle(client)


async def a_death_loses_nothing(service: Service, client: AsyncRolloutClient, path: Path) -> None:
    """Twenty samples, one of two actors killed while they run: each is whole, once, with the bits of a calm run."""
    requests = [
        GenerateRequest(f"r{i}", (*PROMPT, 3 + i), sampling(seed=i, max_tokens=60), row_digests=True) for i in range(20)
    ]
    expected = engine_bits(tiny_settings(path), requests)
    # Alone, so on the first replica; its first tokens are delivered when that dies.
    events = client.stream(PROMPT, sampling(seed=50, max_tokens=400))
    seen = [await anext(events)]
    await client.pause()
    tasks = [asyncio.ensure_future(client.generate_many([request])) for request in requests[:10]]
    while service.pool.num_live < 11:
        await asyncio.sleep(0)
    ray.kill(actors(service)[0])
    await client.resume()
    tasks += [asyncio.ensure_future(client.generate_many([request])) for request in requests[10:]]
    results = [r for (r,) in await asyncio.wait_for(asyncio.gather(*tasks), 60)]
    assert [bits(r) for r in results] == expected
    seen += [event async for event in events]
    calm = await client.generate(PROMPT, sampling(seed=50, max_tokens=400))
    assert bits_of_chunks(e for e in seen if isinstance(e, TokenChunk)) == bits(calm)
    assert calm.samples[0].replica == "replica-1"
    dead, living = (await client.info()).replicas
    assert (dead.healthy, living.healthy) == (False, True)
    assert (living.running, living.free_pages) == (0, living.total_pages)


async def the_last_death_is_said(service: Service, client: AsyncRolloutClient) -> None:
    await client.pause()
    running = asyncio.ensure_future(client.generate(PROMPT, sampling()))
    while not service.pool.num_live:
        await asyncio.sleep(0)
    ray.kill(actors(service)[1])
    with pytest.raises(ReplicaUnavailable):
        await asyncio.wait_for(running, 30)
    with pytest.raises(ReplicaUnavailable, match="no replica is alive"):
        await client.generate(PROMPT, sampling())
    assert [r.healthy for r in (await client.info()).replicas] == [False, False]
    assert service.pool.num_live == 0


def actors(service: Service) -> list[Any]:
    replicas: list[Any] = service.pool._router.replicas
    return [replica._actor for replica in replicas]
