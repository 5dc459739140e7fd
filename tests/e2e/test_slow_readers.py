"""Readers that do not read: others are answered, memory stays bounded, pages become free, nobody hangs."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import grpc.aio
import pytest

from rollout.config import Settings
from rollout.errors import RequestAborted
from rollout.serving import running_service
from rollout.types import SamplingParams
from tests.services import PROMPT, assert_idle, bits, check_pages, sampling, soon, tiny_service, tiny_settings
from trainer_bridge.aio_client import AsyncRolloutClient

FAT = SamplingParams(seed=3, max_tokens=400, ignore_eos=True)


def with_server(settings: Settings, **server: object) -> Settings:
    return Settings.model_validate(
        settings.model_dump(by_alias=True) | {"server": settings.server.model_dump() | server}
    )


async def test_slow_readers_on_the_same_channel_stall_nobody(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path) as (service, client):
        expected = bits(await soon(client.generate(PROMPT, sampling())))
        streams = [client.stream(PROMPT, FAT, n=2, top_logprobs=64) for _ in range(3)]
        async with aclosing(streams[0]), aclosing(streams[1]), aclosing(streams[2]):
            for stream in streams:
                await soon(anext(stream))
            for _ in range(3):
                assert bits(await soon(client.generate(PROMPT, sampling()))) == expected
        await assert_idle_soon(client)
        check_pages(service)
        assert service.pool._buffers.waiting_bytes == 0


async def assert_idle_soon(client: AsyncRolloutClient) -> None:
    """Aborts take effect between two steps."""
    async with asyncio.timeout(20):
        while True:
            try:
                await assert_idle(client)
            except AssertionError:
                await asyncio.sleep(0)
            else:
                return


async def test_a_reader_beyond_the_limit_is_ended_and_its_pages_are_free(tiny_qwen3_path: Path) -> None:
    """A receive window of 64 KiB, so that what is not read stays on the server."""
    settings = with_server(tiny_settings(tiny_qwen3_path), stream_buffer_bytes=400_000)
    options = [("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0)]
    async with running_service(settings, in_process=True) as service, AsyncRolloutClient(service.address) as other:
        from rollout import codec
        from rollout.types import GenerateRequest
        from rollout.v1 import rollout_pb2_grpc

        message = codec.generate_request_to_proto(GenerateRequest("slow", PROMPT, FAT, n=8, top_logprobs=64))
        async with grpc.aio.insecure_channel(service.address, options=options) as channel:
            call = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(message, timeout=60)
            await call.read()  # type: ignore[attr-defined]
            # Idle although the client neither reads nor leaves.
            await assert_idle_soon(other)
            check_pages(service)
            assert service.pool._buffers.waiting_bytes == 0
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    pass
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "server.stream_buffer_bytes" in str(caught.value.details())
        assert bits(await soon(other.generate(PROMPT, sampling())))


@pytest.mark.parametrize("grace_s", [1000.0, 0.0])
async def test_a_burst_ends_no_reader_who_reads(tiny_qwen3_path: Path, grace_s: float) -> None:
    """64 samples with 64 alternatives each: far more at once than the least limit. Control: without grace it ends."""
    settings = with_server(tiny_settings(tiny_qwen3_path, max_running=64), max_n=64, stream_buffer_bytes=65536)
    asked = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)
    async with running_service(settings, in_process=True) as service, AsyncRolloutClient(service.address) as client:
        service.pool._buffers.grace_s = grace_s
        call = client.generate(PROMPT, asked, n=64, top_logprobs=64, prompt_logprobs=True)
        if grace_s:
            whole = await soon(call)
            assert [s.token_ids.size for s in whole.samples] == [24] * 64
        else:
            with pytest.raises(RequestAborted, match=r"server\.stream_buffer_bytes"):
                await soon(call)
        assert service.pool._buffers.waiting_bytes == 0


async def test_the_same_reader_within_the_limit_gets_everything(tiny_qwen3_path: Path) -> None:
    """Control: it is the limit that ends it, and what waited is whole."""
    async with tiny_service(tiny_qwen3_path) as (_, client):
        quick = await soon(client.generate(PROMPT, FAT, n=2, top_logprobs=8))
        stream = client.stream(PROMPT, FAT, n=2, top_logprobs=8)
        async with aclosing(stream):
            await soon(anext(stream))
            await assert_idle_soon(client)
            rest = [event async for event in stream]
    assert rest and quick.samples[0].token_ids.size == 400


async def test_a_deadline_and_a_leaving_client_free_their_pages(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path) as (service, client):
        async with AsyncRolloutClient(service.address, timeout_s=0.15) as hasty:
            with pytest.raises(RequestAborted, match="timeout_s"):
                await soon(hasty.generate(PROMPT, FAT, n=8, top_logprobs=64))
        async with AsyncRolloutClient(service.address) as leaving:
            stream = leaving.stream(PROMPT, FAT, n=8)
            await soon(anext(stream))
            await stream.aclose()
        await assert_idle_soon(client)
        check_pages(service)
        assert service.pool._buffers.waiting_bytes == 0
