"""K5: no message size between nothing and ``max_message_bytes`` is special, in either direction."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc.aio
import numpy as np
import pytest

from rollout import codec
from rollout.codec import GenerateEvent
from rollout.config import ServerSettings
from rollout.errors import InvalidRequest
from rollout.types import (
    GenerateRequest,
    SamplingParams,
    ScoreRequest,
    ScoreSequence,
    TokenChunk,
)
from rollout.v1 import rollout_pb2_grpc
from tests.fakes.backend import FakeBackend, logprobs_of
from tests.fakes.server import address, serving
from trainer_bridge.aio_client import AsyncRolloutClient

MIB = 2**20
SAMPLING = SamplingParams(seed=3, max_tokens=10)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[AsyncRolloutClient]:
    # One sequence of 4 MiB has more ids than a server takes by default.
    settings = ServerSettings(max_prompt_tokens=8 * MIB)
    async with serving(backend, settings=settings) as server:  # noqa: SIM117
        async with AsyncRolloutClient(address(server), timeout_s=30) as client:
            yield client


def fit(size_of: Any, target: int) -> int:
    """The n for which size_of(n) == target; a length prefix may take a few rounds to settle."""
    n = target - 64
    for _ in range(8):
        short = target - size_of(n)
        if not short:
            return n
        n += short
    raise AssertionError(f"no message of {target} bytes")


class TestMessageSizes:
    """K5: gRPC's own limit of 4 MiB stands in no direction."""

    SIZES = (4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 64 * MIB)

    @pytest.mark.parametrize("size", SIZES[:3])
    async def test_score_requests(self, client: AsyncRolloutClient, size: int) -> None:
        def request(n: int) -> ScoreRequest:
            return ScoreRequest("", (ScoreSequence((7,) * n),))

        n = fit(lambda n: codec.score_request_to_proto(request(n)).ByteSize(), size)
        scores = (await client.score(request(n).sequences)).scores
        assert scores[0].logprobs.tobytes() == logprobs_of([7] * (n - 1), 1, 1).tobytes()

    @pytest.mark.parametrize("size", SIZES)
    async def test_weight_buckets(self, backend: FakeBackend, client: AsyncRolloutClient, size: int) -> None:
        data = np.resize(np.arange(251, dtype=np.uint8), size - size % 4).view(np.int32)
        await client.update_weights([("a", data)], version=2, digest="ab", bucket_bytes=128 * MIB)
        assert backend.messages == [data.nbytes], "one message"
        assert backend.received["a"] == data.tobytes()

    @pytest.mark.parametrize("size", SIZES)
    async def test_responses(self, backend: FakeBackend, client: AsyncRolloutClient, size: int) -> None:
        request = GenerateRequest("x", (1,), SAMPLING)
        backend.text = ""
        completion = [event async for event in backend.generate(request)][-1]
        message = codec.generate_event_to_proto(completion)

        def size_of(n: int) -> int:
            message.completion.samples[0].text = "x" * n
            return message.ByteSize()

        backend.text = "x" * fit(size_of, size)
        result = await client.generate(request.prompt_ids, SAMPLING, request_id="x")
        assert result.samples[0].text == backend.text

    @pytest.mark.parametrize("size", SIZES)
    async def test_chunks(self, backend: FakeBackend, size: int) -> None:
        class OneChunk(FakeBackend):
            async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
                tokens = size // 12 + 1
                chunk = TokenChunk(0, 0, np.arange(tokens, dtype=np.int32), bits, bits, weight_version=1)
                yield chunk

        bits = np.resize(np.arange(2**31, 2**31 + 997, dtype=np.uint32).view(np.float32), size // 12 + 1)
        async with serving(OneChunk()) as server, AsyncRolloutClient(address(server)) as client:
            stream = client.stream([1], SAMPLING)
            parts: list[TokenChunk] = []
            while sum(len(part.token_ids) for part in parts) < len(bits):
                event = await anext(stream)
                assert isinstance(event, TokenChunk)
                parts.append(event)
            await stream.aclose()
        assert b"".join(part.policy_logprobs.tobytes() for part in parts) == bits.tobytes()
        assert max(12 * len(part.token_ids) for part in parts) <= codec.SPLIT_BYTES

    async def test_over_the_limit_is_refused_and_the_server_goes_on(self, backend: FakeBackend) -> None:
        request = codec.generate_request_to_proto(GenerateRequest("x", (1, 2), SAMPLING))
        big = codec.score_request_to_proto(ScoreRequest("", (ScoreSequence((7,) * (2 * MIB)),)))
        async with serving(backend, max_message_bytes=MIB) as server:
            options = [("grpc.max_send_message_length", 64 * MIB), ("grpc.max_receive_message_length", 64 * MIB)]
            async with grpc.aio.insecure_channel(address(server), options=options) as channel:
                stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
                before = [m.SerializeToString() async for m in stub.Generate(request)]
                with pytest.raises(grpc.aio.AioRpcError) as up:
                    await stub.Score(big)
                backend.text = "x" * 2 * MIB
                with pytest.raises(grpc.aio.AioRpcError) as down:
                    async for _ in stub.Generate(request):
                        pass
                backend.text = "sampled"
                after = [m.SerializeToString() async for m in stub.Generate(request)]
        assert up.value.code() is down.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert before == after

    async def test_the_client_names_the_way_out(self, backend: FakeBackend) -> None:
        async with serving(backend, max_message_bytes=MIB) as server, AsyncRolloutClient(address(server)) as client:
            with pytest.raises(InvalidRequest, match="max_message_bytes"):
                await client.score([ScoreSequence((7,) * (2 * MIB))])
