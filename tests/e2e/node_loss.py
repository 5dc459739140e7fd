"""A cluster of three Ray nodes that loses one: run as a process of its own, since it hosts the cluster.

    python -m tests.e2e.node_loss MODEL_FOLDER

Prints one JSON object. Two replicas, one node each beside the head; the node of one is taken away while samples run;
then a node is added and the replica comes back on it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}

import ray
from ray.cluster_utils import Cluster

from rollout.errors import ConfigError, RolloutError
from rollout.serving import Service, running_service
from rollout.types import GenerateRequest
from tests.services import bits, engine_bits, sampling, tiny_settings
from trainer_bridge.aio_client import AsyncRolloutClient

SLOT = {"zerodrift_slot": 1}


async def scenario(cluster: Any, nodes: list[Any], path: Path) -> dict[str, object]:
    settings = tiny_settings(path, replicas=2)
    asked = {"num_cpus": 0.5, "resources": {"zerodrift_slot": 1.0}, "answer_timeout_s": 10.0, "start_timeout_s": 60.0}
    settings = settings.model_copy(update={"worker": settings.worker.model_copy(update=asked)})
    three = settings.model_copy(update={"worker": settings.worker.model_copy(update={"count": 3})})
    refused = ""
    try:
        async with running_service(three):
            pass
    except ConfigError as error:
        refused = str(error)
    requests = [
        GenerateRequest(f"r{i}", (3 + i, 4, 5), sampling(seed=i, max_tokens=300), row_digests=True) for i in range(8)
    ]
    expected = engine_bits(settings, requests)
    async with running_service(settings) as service, AsyncRolloutClient(service.address, timeout_s=120) as client:
        tasks = [asyncio.ensure_future(client.generate_many([r])) for r in requests]
        while service.pool.num_live < len(requests):
            await asyncio.sleep(0.01)
        live = service.pool.num_live
        await asyncio.to_thread(cluster.remove_node, nodes[1], allow_graceful=False)
        results = [r for (r,) in await asyncio.wait_for(asyncio.gather(*tasks), 120)]
        out = await until(service, lambda s: sum(x.serving for x in s) == 1)
        # Ray wants the main thread for it; the loop stands still meanwhile, and blames nobody for that.
        cluster.add_node(num_cpus=1, resources=SLOT)
        back = await until(service, lambda s: all(x.serving for x in s))
        again = await client.generate_many(requests)
    return {
        "refused": refused,
        "live_when_lost": live,
        "equal": [bits(r) for r in results] == expected,
        "control_differs": [bits(r) for r in results] != expected[::-1],
        "reason": [s.reason for s in out if not s.serving],
        "restarts": sorted(s.restarts for s in back),
        "equal_again": [bits(r) for r in again] == expected,
        "replicas": sorted({s.replica for r in again for s in r.samples}),
    }


async def until(service: Service, holds: Any) -> Any:
    async with asyncio.timeout(150):
        while not holds(standings := service.supervisor.standings()):
            await asyncio.sleep(0.1)
    return standings


def main(path: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1, resources=SLOT) for _ in range(2)]
        ray.init(address=cluster.address, namespace="node-loss", log_to_driver=False, logging_level="error")
        try:
            found = asyncio.run(scenario(cluster, nodes, path))
        except RolloutError as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)
    finally:
        # First the driver: one whose head is gone is ended by Ray.
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
