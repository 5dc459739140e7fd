"""K10: SIGTERM twice, and SIGTERM in the middle of an update: everyone gets an answer, and no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import RolloutError
from rollout.types import UpdatePolicy
from tests.services import PROMPT, sampling, tensors_of, version_path
from trainer_bridge.aio_client import AsyncRolloutClient

pytestmark = pytest.mark.ray


@asynccontextmanager
async def served(cluster: Any, path: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The real command and its address."""
    overrides = [
        f"model.path={path}", "model.dtype=float32", "server.port=0", "server.drain_s=0.5",
        "ray.address=" + cluster.address_info["gcs_address"], "ray.namespace=shutdown", "engine.kv_cache_tokens=65536",
        "engine.page_size=16", "worker.num_cpus=0.5", "log.level=error",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rollout", "serve", *overrides]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=os.environ)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 90)).decode()
        yield process, line.split(" on ")[1].split()[0]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def workers() -> list[int]:
    """Processes that host an actor of ours."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (folder / "cmdline").read_text().startswith("ray::ActorWorker"):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


async def ended(task: asyncio.Future[Any]) -> str:
    """How a call ended."""
    try:
        await asyncio.wait_for(task, 60)
    except RolloutError as error:
        return type(error).__name__
    return "answered"


@pytest.mark.parametrize("way", ["twice", "update"])
async def test_sigterm(ray_cluster: Any, tiny_qwen3_path: Path, way: str) -> None:
    tensors = tensors_of(version_path(tiny_qwen3_path, 1))
    before = set(workers())
    async with served(ray_cluster, tiny_qwen3_path) as (process, address), AsyncRolloutClient(address) as client:
        # Longer than the drain may take, and one that fits.
        lengths = [2000] * 4 + [10]
        asked = [
            asyncio.ensure_future(client.generate(PROMPT, sampling(seed=i, max_tokens=length)))
            for i, length in enumerate(lengths)
        ]
        while (await client.info()).replicas[0].running < 4:
            await asyncio.sleep(0)
        assert len(set(workers()) - before) == 1, "control"
        if way == "update":
            # It waits for samples that will not end in time.
            asked.append(asyncio.ensure_future(client.update_weights(tensors, version=1, policy=UpdatePolicy.WAIT)))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        process.send_signal(signal.SIGTERM)
        if way == "twice":
            process.send_signal(signal.SIGTERM)
        outcomes = [await ended(task) for task in asked]
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert set(outcomes) <= {"answered", "RequestAborted", "ReplicaUnavailable", "WeightUpdateError"}, outcomes
    assert outcomes[0] != "answered", "control: they were cut off"
    async with asyncio.timeout(60):
        while set(workers()) - before:
            await asyncio.sleep(0.1)
