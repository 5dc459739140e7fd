"""How many calls, how long, how large; and bytes that are no messages."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from rollout.config import ServerSettings
from rollout.errors import CapacityExceeded, InvalidRequest, RequestAborted
from rollout.types import SamplingParams, ScoreSequence
from rollout.v1 import rollout_pb2 as pb
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving
from trainer_bridge.aio_client import AsyncRolloutClient

SERVICE = "/rollout.v1.RolloutService/"
SAMPLING = SamplingParams(seed=1, max_tokens=8)


async def hold(backend: FakeBackend, client: AsyncRolloutClient) -> asyncio.Task[Any]:
    """A live call that stands at the gate."""
    backend.hold()
    backend.reached.clear()
    task = asyncio.create_task(client.generate([3], SAMPLING))
    await asyncio.wait_for(backend.reached.wait(), 20)
    return task


async def test_beyond_the_limit_retry_info_says_when_and_probes_pass() -> None:
    backend = FakeBackend()
    async with serving(backend, max_concurrent_rpcs=1) as server, AsyncRolloutClient(address(server)) as client:
        live = await hold(backend, client)
        async with grpc.aio.insecure_channel(address(server)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(SERVICE + "GetServerInfo")(b"")
            retry = error_details_pb2.RetryInfo()
            status = rpc_status.from_call(caught.value)
            assert status is not None and any(d.Unpack(retry) for d in status.details)
            assert retry.retry_delay.seconds > 0 and "server.max_concurrent_rpcs" in status.message
            probe: Any = health_pb2_grpc.HealthStub(channel)
            assert (await probe.Check(health_pb2.HealthCheckRequest())).status == 1
        backend.gate.set()
        await live
        await client.info()


async def test_one_client_leaves_room_for_others() -> None:
    backend = FakeBackend()
    settings = ServerSettings(max_concurrent_rpcs_per_client=1)
    async with serving(backend, settings=settings) as server:
        where = address(server)
        async with AsyncRolloutClient(where, client_id="a") as a, AsyncRolloutClient(where, client_id="b") as b:
            live = await hold(backend, a)
            with pytest.raises(CapacityExceeded, match=r"'a' has 1 live calls.*max_concurrent_rpcs_per_client"):
                await a.generate([3], SAMPLING)
            other = asyncio.create_task(b.generate([3], SAMPLING))
            backend.gate.set()
            await asyncio.gather(live, other)
            await a.generate([3], SAMPLING)
    assert ServerSettings(max_concurrent_rpcs=80).calls_per_client == 70


async def test_a_call_ends_after_its_time_and_frees_its_place() -> None:
    backend = FakeBackend()
    backend.hold()
    settings = ServerSettings(max_call_s=0.2)
    async with serving(backend, max_concurrent_rpcs=1, settings=settings) as server:  # noqa: SIM117
        async with AsyncRolloutClient(address(server), timeout_s=60) as client:
            with pytest.raises(RequestAborted, match=r"server\.max_call_s"):
                await client.generate([3], SAMPLING)
            assert len(backend.closed) == 1
            await client.info()


async def test_a_deadline_of_the_client_closes_the_backend() -> None:
    backend = FakeBackend()
    backend.hold()
    async with serving(backend) as server, AsyncRolloutClient(address(server), timeout_s=0.2) as client:
        with pytest.raises(RequestAborted, match="timeout_s"):
            await client.generate([3], SAMPLING)
        await asyncio.wait_for(backend.ended.wait(), 20)
    assert len(backend.closed) == 1


LIMITS = ServerSettings(
    max_request_bytes=4096, max_prompt_tokens=20, max_prompt_bytes=30, max_sequences=2, max_stop_strings=2,
    max_stop_bytes=5, max_listed_ids=3,
)  # fmt: skip


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=4, **fields)


@pytest.mark.parametrize(
    ("setting", "prompt", "params"),
    [
        ("max_request_bytes", "x" * 5000, sampling()),
        ("max_prompt_tokens", [3] * 21, sampling()),
        ("max_prompt_bytes", "ü" * 16, sampling()),
        ("max_stop_strings", [3], sampling(stop=("a", "b", "c"))),
        ("max_stop_bytes", [3], sampling(stop=("a", "üüü"))),
        ("max_listed_ids", [3], sampling(stop_token_ids=(3, 4, 5, 6))),
        ("max_listed_ids", [3], sampling(barred_token_ids=(3, 4, 5, 6))),
    ],
)
async def test_each_limit_is_named(setting: str, prompt: Any, params: SamplingParams) -> None:
    backend = FakeBackend()
    async with serving(backend, settings=LIMITS) as server, AsyncRolloutClient(address(server)) as client:
        with pytest.raises(InvalidRequest, match=rf"server\.{setting}"):
            await client.generate(prompt, params)
        assert backend.seen == []
        await client.generate([3] * 20, sampling(stop=("a", "bbbbb"), stop_token_ids=(3, 4, 5)))
        await client.generate("ü" * 15, sampling())


async def test_limits_of_score_and_of_names() -> None:
    async with serving(FakeBackend(), settings=LIMITS) as server, AsyncRolloutClient(address(server)) as client:
        with pytest.raises(InvalidRequest, match=r"server\.max_sequences"):
            await client.score([ScoreSequence((3, 4))] * 3)
        with pytest.raises(InvalidRequest, match=r"server\.max_prompt_tokens") as caught:
            await client.score([ScoreSequence((3, 4)), ScoreSequence((3,) * 21)])
        assert caught.value.field == "sequences[1].tokens.ids"
        for call in (client.generate([3], SAMPLING, request_id="x" * 513), client.abort("x" * 513)):
            with pytest.raises(InvalidRequest, match="request_id has 513 bytes"):
                await call
        await client.score([ScoreSequence((3, 4))] * 2, request_id="x" * 512)


@pytest.mark.parametrize("method", ["Generate", "Score", "UpdateWeights", "Abort"])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f"])
async def test_bytes_that_are_no_message_are_refused_by_name(method: str, data: bytes) -> None:
    async with serving(FakeBackend()) as server, grpc.aio.insecure_channel(address(server)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_stream(SERVICE + method)(iter([data])).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "rollout.v1" in str(caught.value.details()) and "<class" not in str(caught.value.details())


@pytest.mark.parametrize("method", ["Generate", "Score", "Pause", "UpdateWeights"])
async def test_a_call_without_a_message_is_answered(method: str) -> None:
    """grpc.aio by itself would leave it without an answer for ever."""
    async with serving(FakeBackend()) as server, grpc.aio.insecure_channel(address(server)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_stream(SERVICE + method)(iter([]), timeout=20).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_that_never_comes_ends_the_call() -> None:
    settings = ServerSettings(receive_timeout_s=0.2)
    async with serving(FakeBackend(), settings=settings) as server:  # noqa: SIM117
        async with grpc.aio.insecure_channel(address(server)) as channel:
            call = channel.stream_stream(SERVICE + "Score")(timeout=20)
            assert await call.code() is grpc.StatusCode.ABORTED
            assert "server.receive_timeout_s" in str(await call.details())


async def test_compressed_bombs_are_refused_before_they_fill_the_memory() -> None:
    bomb = pb.ScoreRequest(request_id="x" * 30_000_000).SerializeToString()
    async with serving(FakeBackend(), max_message_bytes=2**20) as server:  # noqa: SIM117
        async with grpc.aio.insecure_channel(
            address(server), options=[("grpc.max_send_message_length", -1)]
        ) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(SERVICE + "Score")(bomb, compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
