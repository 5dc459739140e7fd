"""Binding, health, reflection, limits and shutdown."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollout.errors import CapacityExceeded, ConfigError, ReplicaUnavailable
from rollout.server import SERVICE_NAME, start_server
from rollout.types import SamplingParams
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving
from trainer_bridge.aio_client import AsyncRolloutClient

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(server: Any, name: str) -> int:
    async with grpc.aio.insecure_channel(address(server)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org"])
async def test_beyond_loopback_needs_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.allow_insecure") as caught:
        await start_server(FakeBackend(), host=host, port=0, reflection=False)
    assert caught.value.field == "server.allow_insecure"


@pytest.mark.parametrize(("host", "insecure"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
async def test_what_may_be_bound(host: str, insecure: bool) -> None:
    server = await start_server(FakeBackend(), host=host, port=0, reflection=False, allow_insecure=insecure)
    try:
        assert await health(server, "") == NOT_SERVING
    finally:
        await server.stop(None)


async def test_a_taken_port_is_refused() -> None:
    async with serving(FakeBackend()) as first:
        with pytest.raises(ConfigError) as caught:
            await start_server(FakeBackend(), host="127.0.0.1", port=first.port, reflection=False)
        assert caught.value.field == "server.port"


async def test_health_follows_set_serving() -> None:
    server = await start_server(FakeBackend(), host="127.0.0.1", port=0, reflection=False)
    try:
        for serving_now, status in ((None, NOT_SERVING), (True, SERVING), (False, NOT_SERVING), (True, SERVING)):
            if serving_now is not None:
                await server.set_serving(serving_now)
            assert [await health(server, name) for name in ("", SERVICE_NAME)] == [status, status]
    finally:
        await server.stop(None)


@pytest.mark.parametrize("reflection", [True, False])
async def test_reflection_is_a_choice(reflection: bool) -> None:
    server = await start_server(FakeBackend(), host="127.0.0.1", port=0, reflection=reflection)
    try:
        async with grpc.aio.insecure_channel(address(server)) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            try:
                answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
                names = {service.name for service in answers[0].list_services_response.service}
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED
                names = set()
    finally:
        await server.stop(None)
    assert (SERVICE_NAME in names) == reflection


async def test_calls_over_the_limit_are_refused() -> None:
    backend = FakeBackend()
    backend.hold()
    async with serving(backend, max_concurrent_rpcs=1) as server, AsyncRolloutClient(address(server)) as client:
        holder = asyncio.create_task(client.generate([1], SamplingParams(seed=1, max_tokens=8)))
        await asyncio.wait_for(backend.reached.wait(), 20)
        with pytest.raises(CapacityExceeded):
            await client.info()
        backend.gate.set()
        assert len((await holder).samples[0].token_ids) == 8


async def test_stop_lets_live_streams_end_and_takes_no_new_calls() -> None:
    backend = FakeBackend()
    backend.hold()
    async with serving(backend) as server, AsyncRolloutClient(address(server)) as client:
        async with grpc.aio.insecure_channel(address(server)) as channel:
            watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
            assert (await watch.read()).status == SERVING
            live = asyncio.create_task(client.generate([1], SamplingParams(seed=1, max_tokens=8)))
            await asyncio.wait_for(backend.reached.wait(), 20)
            stopping = asyncio.create_task(server.stop(20))
            assert (await watch.read()).status == NOT_SERVING
            watch.cancel()
            await server.set_serving(True)
        backend.gate.set()
        assert len((await live).samples[0].token_ids) == 8
        await stopping
        await server.wait()
        with pytest.raises(ReplicaUnavailable):
            await client.info()
    assert backend.closed == []


async def test_stop_without_grace_closes_what_is_live() -> None:
    backend = FakeBackend()
    backend.hold()
    async with serving(backend) as server, AsyncRolloutClient(address(server)) as client:
        live = asyncio.create_task(client.generate([1], SamplingParams(seed=1, max_tokens=8), request_id="x"))
        await asyncio.wait_for(backend.reached.wait(), 20)
        await server.stop(None)
        with pytest.raises(ReplicaUnavailable):
            await live
        await asyncio.wait_for(backend.ended.wait(), 20)
    assert backend.closed == ["x"]
