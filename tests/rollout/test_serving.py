"""A whole service from start to stop: health, draining, and starts that fail."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollout.config import Settings
from rollout.engine_thread import EngineThread
from rollout.errors import ConfigError, NotFound, ReplicaUnavailable, RolloutError
from rollout.server import SERVICE_NAME
from rollout.serving import Service, running_service
from rollout.serving import ray_cluster as connected
from rollout.types import FinishReason
from rollout.worker import Worker
from tests.services import (
    PROMPT,
    CallSignal,
    StepGate,
    bits,
    engine_bits,
    engine_threads,
    mixed_requests,
    sampling,
    soon,
    tiny_service,
    tiny_settings,
)
from trainer_bridge.aio_client import AsyncRolloutClient

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def with_server(settings: Settings, **fields: Any) -> Settings:
    return settings.model_copy(update={"server": settings.server.model_copy(update=fields)})


async def health_of(channel: grpc.aio.Channel, name: str = SERVICE_NAME) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return int(answer.status)


async def test_a_service_that_is_up_says_so(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, replicas=2) as (service, client):
        async with grpc.aio.insecure_channel(service.address) as channel:
            assert [await health_of(channel, name) for name in ("", SERVICE_NAME)] == [SERVING] * 2
        info = await client.info()
        assert [r.name for r in info.replicas] == ["replica-0", "replica-1"]
        assert info.limits["max_n"] == 16 and info.context_length == 512
        assert not service.address.endswith(":0")
        assert service.model_path == tiny_qwen3_path


async def test_health_follows_the_last_replica(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, replicas=2) as (service, client):
        async with grpc.aio.insecure_channel(service.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
            seen = aiter(watch)
            assert (await soon(anext(seen))).status == SERVING
            service.pool._router.fence("replica-0", ReplicaUnavailable("gone"))
            assert len((await client.generate(PROMPT, sampling())).samples) == 1
            assert await health_of(channel) == SERVING, "control: one is enough"
            service.pool._router.fence("replica-1", ReplicaUnavailable("gone"))
            assert (await soon(anext(seen))).status == NOT_SERVING
            watch.cancel()
        with pytest.raises(ReplicaUnavailable, match="no replica is alive"):
            await client.generate(PROMPT, sampling())
        assert [r.healthy for r in (await client.info()).replicas] == [False, False]


async def stopping(stack: AsyncExitStack, service: Service) -> asyncio.Task[None]:
    """The stop of a service, under way: health has turned, new calls are refused."""
    enter = CallSignal(service.server._health, "enter_graceful_shutdown")
    task = asyncio.ensure_future(stack.aclose())
    await enter.called()
    return task


async def test_stop_lets_running_samples_finish(tiny_qwen3_path: Path) -> None:
    settings = tiny_settings(tiny_qwen3_path)
    expected = engine_bits(settings, mixed_requests(1))
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(running_service(settings, in_process=True))
        (thread,) = engine_threads(service)
        async with AsyncRolloutClient(service.address) as client, StepGate(thread, 3) as gate:
            running = asyncio.ensure_future(client.generate_many(mixed_requests(1)))
            await gate.reached()
            stop = await stopping(stack, service)
            gate.open()
            assert [bits(r) for r in await soon(running)] == expected
            await soon(stop)
            with pytest.raises(RolloutError):
                await client.generate(PROMPT, sampling())
    assert not thread._thread.is_alive()


async def test_stop_ends_what_does_not_finish_in_time(tiny_qwen3_path: Path) -> None:
    """Here it cannot: the service is paused."""
    settings = with_server(tiny_settings(tiny_qwen3_path), drain_s=0.1)
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(running_service(settings, in_process=True))
        async with AsyncRolloutClient(service.address) as client:
            await client.pause()
            running = asyncio.ensure_future(client.generate(PROMPT, sampling()))
            while not service.pool.num_live:
                await asyncio.sleep(0)
            await soon(await stopping(stack, service))
            with pytest.raises(RolloutError):
                await soon(running)
    assert not engine_threads(service)[0]._thread.is_alive()


async def test_starts_that_fail_leave_nothing_behind(tiny_qwen3_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="no-such-model"):
        async with running_service(tiny_settings(Path("no-such-model")), in_process=True):
            pass
    async with tiny_service(tiny_qwen3_path) as (service, _):
        taken = int(service.address.rpartition(":")[2])
        started: list[EngineThread] = []
        start = EngineThread.start
        monkeypatch.setattr(EngineThread, "start", lambda self: (started.append(self), start(self))[1])
        with pytest.raises(ConfigError, match=r"server\.port"):
            async with running_service(with_server(tiny_settings(tiny_qwen3_path), port=taken), in_process=True):
                pass
        assert [thread._thread.is_alive() for thread in started] == [False]


@pytest.mark.ray
async def test_a_connected_driver_is_reused(ray_cluster: Any, tiny_qwen3_path: Path) -> None:
    import ray

    with connected(tiny_settings(tiny_qwen3_path)):
        assert ray.is_initialized()
    assert ray.is_initialized(), "only who started it stops it"


@pytest.mark.ray
async def test_sigterm_drains_and_exits_with_zero(ray_cluster: Any, tiny_qwen3_path: Path) -> None:
    """The real command, its worker in a Ray actor: the sample that runs when the signal comes is finished."""
    address = ray_cluster.address_info["gcs_address"]
    overrides = [
        f"model.path={tiny_qwen3_path}", "model.dtype=float32", "server.port=0", "ray.address=" + address,
        "engine.kv_cache_tokens=4096", "worker.num_cpus=1", "log.level=error",
    ]  # fmt: skip
    command = [sys.executable, "-c", "from rollout.cli import main; main()", "serve", *overrides]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 90)).decode()
        assert line.startswith("serving "), line + (await process.stderr.read()).decode()
        async with AsyncRolloutClient(line.split(" on ")[1].split()[0]) as client:
            events = client.stream(PROMPT, sampling(max_tokens=2000))
            first = await asyncio.wait_for(anext(events), 30)
            process.send_signal(signal.SIGTERM)
            rest = await asyncio.wait_for(_all(events), 60)
        assert rest[-1].samples[0].finish.reason is FinishReason.LENGTH
        assert rest[-1].samples[0].num_tokens == 2000 > len(first.token_ids)  # type: ignore[union-attr]
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _all(events: Any) -> list[Any]:
    return [event async for event in events]


@pytest.mark.parametrize("setting, variable, wanted", [(None, "", "local"), ("1.2.3.4:6379", "", "1.2.3.4:6379")])
def test_without_an_address_a_cluster_is_started_and_none_joined(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, variable: str, wanted: str
) -> None:
    """Ray by itself joins the cluster that was last started on the machine, whosever it is."""
    import ray

    calls: list[dict[str, Any]] = []
    monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}])
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with connected(Settings.model_validate({"ray": {"address": setting}})):
        assert [call["address"] for call in calls] == [wanted]
    assert ("include_dashboard" in calls[0]) == (setting is None)


def test_kv_that_the_machine_can_never_hold_is_refused(tiny_qwen3_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_tokens = 1600000000000000 takes .* bytes, this machine has"):
        Worker(tiny_settings(tiny_qwen3_path, kv_cache_tokens=1_600_000_000_000_000), str(tiny_qwen3_path), "w")
