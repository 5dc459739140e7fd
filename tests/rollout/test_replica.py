"""A worker is reached the same way in this process and through Ray: same records, same errors, one kind of death."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import InvalidRequest, ReplicaUnavailable, RolloutError, UnsupportedFeature, WeightUpdateError
from rollout.replica import LocalReplica, RayReplica, Replica, actor_options, start_ray_replica
from rollout.types import TokenChunk
from tests.fakes.replica_actor import ReplicaActor
from tests.services import tiny_settings


def replica_of(kind: str) -> Replica:
    if kind == "local":
        stand_in: Any = ReplicaActor()
        return LocalReplica(stand_in, "w")
    import ray

    return RayReplica(ray.remote(ReplicaActor).options(num_cpus=0).remote(), "w")


KINDS = ["local", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.fixture(params=KINDS)
def replica(request: pytest.FixtureRequest) -> Replica:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return replica_of(request.param)


async def test_records_errors_and_shared_values_pass(replica: Replica) -> None:
    chunk = await replica.call("chunk")
    assert isinstance(chunk, TokenChunk)
    assert chunk.policy_logprobs.tobytes() == ReplicaActor.make_chunk().policy_logprobs.tobytes()
    with pytest.raises(InvalidRequest) as caught:
        await replica.call("refuse", "n = 0 is outside [1, 8]", "n")
    assert type(caught.value) is InvalidRequest
    assert (caught.value.message, caught.value.field) == ("n = 0 is outside [1, 8]", "n")
    with pytest.raises(WeightUpdateError):
        await replica.call("refuse_update")
    assert await replica.call("length", await replica.share([b"x" * 1000] * 3)) == 3
    assert await asyncio.gather(*(replica.call("length", [0] * i) for i in range(5))) == list(range(5))
    with pytest.raises(Exception, match="not one of ours") as foreign:
        await replica.call("explode")
    assert not isinstance(foreign.value, RolloutError), "control: only ours are ours"
    await replica.stop()


@pytest.mark.ray
async def test_a_dead_actor_is_unavailable(ray_cluster: Any) -> None:
    import ray

    replica = replica_of("ray")
    assert isinstance(replica, RayReplica)
    assert await replica.call("length", [1]) == 1, "control: it lived"
    waiting = asyncio.ensure_future(replica.call("wait"))
    await replica.call("length", [])
    ray.kill(replica._actor)
    with pytest.raises(ReplicaUnavailable, match="w is gone"):
        await asyncio.wait_for(waiting, 20)
    with pytest.raises(ReplicaUnavailable, match="w is gone"):
        await asyncio.wait_for(replica.call("length", [1]), 20)
    await asyncio.wait_for(replica.stop(), 20)


@pytest.mark.ray
async def test_why_an_actor_refuses_to_start(ray_cluster: Any, tiny_qwen3_path: Path, tmp_path: Path) -> None:
    """The user reads what the model lacks, not that an actor died."""
    path = Path(shutil.copytree(tiny_qwen3_path, tmp_path / "windowed"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": 8, "use_sliding_window": True}))
    replica = start_ray_replica(tiny_settings(path), str(path), "w")
    with pytest.raises(UnsupportedFeature, match="sliding_window"):
        await asyncio.wait_for(replica.call("info"), 60)
    await asyncio.wait_for(replica.stop(), 20)


def test_actor_options(tiny_qwen3_path: Path) -> None:
    settings = tiny_settings(tiny_qwen3_path)
    worker = settings.worker.model_copy(update={"num_cpus": 2.0, "resources": {"NPU": 1.0}})
    options = actor_options(settings.model_copy(update={"worker": worker}))
    assert (options["num_cpus"], options["resources"]) == (2.0, {"NPU": 1.0})
    assert (options["max_restarts"], options["max_task_retries"]) == (0, 0), "a restarted actor holds stale weights"
    assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"
