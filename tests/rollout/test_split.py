"""K5 for alternatives: long chunks go in several messages, and come together bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import grpc.aio
import numpy as np
import pytest

from rollout import codec
from rollout.codec import GenerateEvent
from rollout.errors import ParityError
from rollout.types import GenerateRequest, PromptChunk, SamplingParams, TokenChunk, TopLogprobs
from rollout.v1 import rollout_pb2_grpc
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.wire import Assembler

LENGTH, TOP = 32_768, 20
GRPC_DEFAULT = 4 * 2**20
SAMPLING = SamplingParams(seed=1, max_tokens=LENGTH)


def pattern(*shape: int) -> np.ndarray:
    """Finite negative float32 of many bit patterns."""
    words = np.arange(int(np.prod(shape)), dtype=np.uint32) * np.uint32(2654435761) % np.uint32(2**29) + np.uint32(
        2**31
    )
    return words.view(np.float32).reshape(shape)


def top(length: int) -> TopLogprobs:
    return TopLogprobs(np.arange(length * TOP, dtype=np.int32).reshape(length, TOP), pattern(length, TOP))


class Verbose(FakeBackend):
    """A prompt and a sample of 32,768 tokens with 20 alternatives each, as two events."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        yield PromptChunk(1, pattern(LENGTH), 1, np.arange(LENGTH, dtype=np.uint64), top(LENGTH))
        ids = np.arange(LENGTH, dtype=np.int32)
        yield TokenChunk(
            0, 0, ids, pattern(LENGTH), pattern(LENGTH), 1, np.arange(LENGTH, dtype=np.uint64), top(LENGTH)
        )
        async for event in FakeBackend.generate(self, dataclasses.replace(request, prompt_logprobs=False)):
            if not isinstance(event, TokenChunk):
                yield event


REQUEST = GenerateRequest(
    "x", (3,) * (LENGTH + 1), SAMPLING, row_digests=True, top_logprobs=TOP, prompt_logprobs=True
)  # fmt: skip


async def test_a_client_with_grpcs_own_limits_gets_all_of_it() -> None:
    """7 MB of prompt and as much of sample, in messages below 4 MiB."""
    backend = Verbose(context_length=10**6, chunk_tokens=LENGTH)
    async with serving(backend) as server, grpc.aio.insecure_channel(address(server)) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        assembler = Assembler(REQUEST)
        sizes = []
        async for message in stub.Generate(codec.generate_request_to_proto(REQUEST)):
            sizes.append(message.ByteSize())
            assembler.add(codec.generate_event_from_proto(message))
    result = assembler.result()
    assert sum(sizes) > 2 * GRPC_DEFAULT > GRPC_DEFAULT > max(sizes) and len(sizes) > 12
    (sample,), prompt = result.samples, result.prompt
    assert prompt is not None and prompt.top is not None and sample.top is not None
    for scores in (prompt.logprobs, sample.policy_logprobs):
        assert scores.tobytes() == pattern(LENGTH).tobytes()
    for part in (prompt.top, sample.top):
        assert part.token_ids.tobytes() == top(LENGTH).token_ids.tobytes()
        assert part.logprobs.tobytes() == top(LENGTH).logprobs.tobytes()
    assert prompt.row_digests is not None and prompt.row_digests.tolist() == list(range(LENGTH))


async def test_whole_it_would_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same events unsplit are refused by such a client."""

    def whole(event: GenerateEvent, most_bytes: int) -> Iterator[GenerateEvent]:
        yield event

    monkeypatch.setattr(codec, "split_event", whole)
    backend = Verbose(context_length=10**6, chunk_tokens=LENGTH)
    async with serving(backend) as server, grpc.aio.insecure_channel(address(server)) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.Generate(codec.generate_request_to_proto(REQUEST)):
                pass
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_server_with_a_small_limit_splits_finer() -> None:
    backend = FakeBackend(context_length=30_000, chunk_tokens=20_000)
    request = GenerateRequest("x", (3, 4), SamplingParams(seed=1, max_tokens=20_000), top_logprobs=3)
    async with serving(backend, max_message_bytes=65_536) as server, AsyncRolloutClient(address(server)) as client:
        (result,) = await client.generate_many([request])
    assert len(result.samples[0].token_ids) == 20_000 and result.samples[0].top is not None


@pytest.mark.parametrize("length", [1, 4, 5, 9])
def test_parts_are_consecutive_and_whole(length: int) -> None:
    ids = np.arange(length, dtype=np.int32)
    chunk = TokenChunk(2, 7, ids, pattern(length), pattern(length), 5, top=top(length))
    parts = list(codec.split_event(chunk, 4 * codec.row_bytes(TOP, digests=False)))
    assert [p.offset for p in parts if isinstance(p, TokenChunk)] == list(range(7, 7 + length, 4))
    joined = np.concatenate([p.policy_logprobs for p in parts if isinstance(p, TokenChunk)])
    assert joined.tobytes() == pattern(length).tobytes()
    again = [codec.generate_event_from_proto(codec.generate_event_to_proto(p)) for p in parts]
    assert all(p.top is not None and p.weight_version == 5 for p in again if isinstance(p, TokenChunk))
    tops = codec.join_tops([p.top for p in again if isinstance(p, TokenChunk)])
    assert tops is not None and tops.logprobs.tobytes() == top(length).logprobs.tobytes()


def test_a_row_that_is_too_wide_still_goes() -> None:
    chunk = PromptChunk(1, pattern(3), 0)
    assert [p.start for p in codec.split_event(chunk, 1) if isinstance(p, PromptChunk)] == [1, 2, 3]


# ---- what the client refuses ------------------------------------------------------------------------------------


ASKED = GenerateRequest("x", (5, 6, 7), SamplingParams(seed=3, max_tokens=4), prompt_logprobs=True, top_logprobs=2)
SENT = PromptChunk(1, pattern(2), 1, None, TopLogprobs(np.ones((2, 2), np.int32), pattern(2, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"start": 2}, "position 1 was due"),
        ({"top": None}, "2 alternatives were asked, 0 came"),
        ({"row_digests": np.zeros(2, np.uint64)}, "row_digests = False was asked"),
        ({"logprobs": np.array([0, np.nan], np.float32)}, "not finite"),
    ],
)
def test_prompt_scores_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    assembler, chunk = Assembler(ASKED), dataclasses.replace(SENT, **change)
    if not message:
        assembler.add(chunk)
        return
    with pytest.raises(ParityError, match=message):
        assembler.add(chunk)


@pytest.mark.parametrize("asked", [True, False])
async def test_missing_or_unasked_prompt_scores_are_refused(asked: bool) -> None:
    backend = FakeBackend()
    sent = GenerateRequest("x", (5, 6, 7), SamplingParams(seed=3, max_tokens=4), prompt_logprobs=not asked)
    assembler = Assembler(dataclasses.replace(sent, prompt_logprobs=asked))
    with pytest.raises(ParityError, match="prompt log-probs"):
        async for event in backend.generate(sent):
            assembler.add(event)
