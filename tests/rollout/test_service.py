"""RolloutService on a real server over the fake backend: ids, cancellation, updates, message sizes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc.aio
import numpy as np
import pytest

from rollout import codec
from rollout.codec import GenerateEvent
from rollout.errors import DuplicateRequest, InvalidRequest, NotFound, RequestAborted, WeightUpdateError
from rollout.types import (
    FinishDetail,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    ScoreSequence,
    UpdatePolicy,
    WeightState,
    WeightUpdate,
)
from rollout.v1 import rollout_pb2 as pb
from rollout.v1 import rollout_pb2_grpc
from tests.fakes.backend import EOS, FakeBackend, digests_of, logprobs_of
from tests.fakes.server import address, serving
from trainer_bridge.aio_client import AsyncRolloutClient

SAMPLING = SamplingParams(seed=3, max_tokens=10)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[AsyncRolloutClient]:
    async with serving(backend) as server, AsyncRolloutClient(address(server), timeout_s=30) as client:
        yield client


@pytest.fixture
async def stub(backend: FakeBackend) -> AsyncIterator[Any]:
    async with serving(backend) as server, grpc.aio.insecure_channel(address(server)) as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)


async def wait(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 20)


async def test_the_stream_is_the_backends_own_events(backend: FakeBackend, stub: Any) -> None:
    request = GenerateRequest("a", (5, 6), SAMPLING, n=2, sample_index=1, row_digests=True)
    expected = [codec.generate_event_to_proto(event) async for event in backend.generate(request)]
    found = [message async for message in stub.Generate(codec.generate_request_to_proto(request))]
    assert [m.SerializeToString(deterministic=True) for m in found] == [
        m.SerializeToString(deterministic=True) for m in expected
    ]
    other = GenerateRequest("a", (5, 6), SamplingParams(seed=4, max_tokens=10), n=2, sample_index=1, row_digests=True)
    assert found != [codec.generate_event_to_proto(e) async for e in backend.generate(other)], "control: another seed"


async def test_scores_are_those_of_generate(client: AsyncRolloutClient) -> None:
    """L4: the same bits through either call, after the wire."""
    result = await client.generate([5, 6, 7], SAMPLING, n=3, row_digests=True)
    sequences = [ScoreSequence((*result.prompt_ids, *s.token_ids.tolist()), start=3) for s in result.samples]
    scores = await client.score(sequences, row_digests=True)
    for sample, score in zip(result.samples, scores.scores, strict=True):
        assert score.row_digests is not None
        assert sample.row_digests is not None
        assert sample.policy_logprobs.tobytes() == score.logprobs.tobytes()
        assert sample.row_digests.tobytes() == score.row_digests.tobytes()
    first = result.samples[0]
    assert first.policy_logprobs.tobytes() == logprobs_of(first.token_ids.tolist(), 3, 1).tobytes()
    assert first.policy_logprobs.tobytes() != logprobs_of(first.token_ids.tolist(), 4, 1).tobytes(), "control: shifted"
    assert first.row_digests is not None
    assert first.row_digests.tobytes() == digests_of(first.token_ids.tolist(), 3).tobytes()


async def test_ids_are_echoed_or_made(backend: FakeBackend, client: AsyncRolloutClient) -> None:
    assert (await client.generate([1], SAMPLING, request_id="mine")).request_id == "mine"
    made = {(await client.generate([1], SAMPLING)).request_id for _ in range(3)}
    made.add((await client.score([ScoreSequence((1, 2))])).request_id)
    assert len(made) == 4
    assert all(len(name) == 32 for name in made)
    assert backend.seen[0].request_id == "mine"
    assert made == {request.request_id for request in backend.seen[1:]}


async def test_a_drawn_seed_is_echoed(client: AsyncRolloutClient) -> None:
    """D2: unset is never a hidden constant on this layer; what the backend drew comes back and reproduces."""
    drawn = await client.generate([1, 2], SamplingParams(max_tokens=5))
    again = await client.generate([1, 2], drawn.sampling)
    assert again.samples[0].token_ids.tobytes() == drawn.samples[0].token_ids.tobytes()


@pytest.mark.parametrize("limit", ["max_tokens", "context"])
async def test_length_reaches_the_client(backend: FakeBackend, client: AsyncRolloutClient, limit: str) -> None:
    """K4"""
    backend.finish = FinishDetail(FinishReason.LENGTH, limit=limit)
    sample = (await client.generate([1], SAMPLING)).samples[0]
    assert (sample.finish.reason, sample.finish.limit) == (FinishReason.LENGTH, limit)


async def test_the_sampled_eos_stays(backend: FakeBackend, client: AsyncRolloutClient) -> None:
    """C3, C4: either EOS id keeps its id, log-prob and mask 1; include_stop changes no length."""
    for include_stop in (False, True):
        for eos in (EOS, 11):
            backend.ends_with, backend.finish = (eos,), FinishDetail(FinishReason.STOP, stop_token_id=eos)
            sampling = SamplingParams(seed=3, max_tokens=3, include_stop=include_stop)
            sample = (await client.generate([1], sampling)).samples[0]
            assert sample.token_ids[-1] == eos
            assert sample.finish.stop_token_id == eos
            assert len(sample.token_ids) == len(sample.policy_logprobs) == len(sample.behavior_logprobs) == 3
            assert sample.mask.tolist() == [1, 1, 1]
            assert np.isfinite(sample.policy_logprobs).all()


class TestLiveNames:
    async def test_a_live_id_is_refused_and_the_holder_goes_on(
        self, backend: FakeBackend, client: AsyncRolloutClient
    ) -> None:
        expected = await client.generate([1], SAMPLING, request_id="x")
        backend.hold()
        backend.reached.clear()
        holder = asyncio.create_task(client.generate([1], SAMPLING, request_id="x"))
        await wait(backend.reached)
        with pytest.raises(DuplicateRequest) as caught:
            await client.generate([9, 9], SAMPLING, request_id="x")
        assert caught.value.field == "request_id"
        with pytest.raises(DuplicateRequest):
            await client.score([ScoreSequence((1, 2))], request_id="x")
        backend.gate.set()
        result = await holder
        assert result.samples[0].token_ids.tobytes() == expected.samples[0].token_ids.tobytes()
        assert len(backend.seen) == 2, "the duplicates never reached the backend"

    async def test_an_id_is_free_after_its_call_however_that_ended(
        self, backend: FakeBackend, client: AsyncRolloutClient
    ) -> None:
        await client.generate([1], SAMPLING, request_id="x")
        with pytest.raises(InvalidRequest):
            await client.generate([64], SAMPLING, request_id="x")
        backend.error = ValueError("secret")
        with pytest.raises(Exception, match="internal error"):
            await client.generate([1], SAMPLING, request_id="x")
        backend.error = None
        assert (await client.generate([1], SAMPLING, request_id="x")).request_id == "x"

    async def test_a_retry_waits_for_the_cleanup_of_the_call_its_client_left(self) -> None:
        """K1: the retry is neither refused nor mixed with what is being cleaned up."""

        class SlowToClose(FakeBackend):
            cleaning, clean = asyncio.Event(), asyncio.Event()
            order: list[str]

            async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
                self.order.append("begin")
                try:
                    async for event in super().generate(request):
                        yield event
                finally:
                    self.cleaning.set()
                    await self.clean.wait()
                    self.order.append("end")

        backend = SlowToClose()
        backend.order = []
        async with serving(backend) as server, AsyncRolloutClient(address(server), timeout_s=30) as client:
            backend.hold()
            stream = client.stream([1], SAMPLING, request_id="x")
            await anext(stream)
            await wait(backend.reached)
            await stream.aclose()
            await wait(backend.cleaning)
            backend.gate.set()
            retry = asyncio.create_task(client.generate([1], SAMPLING, request_id="x"))
            # A call made after the retry has been answered, so the server has had the retry too.
            await client.info()
            assert not retry.done()
            backend.clean.set()
            assert (await retry).request_id == "x"
        assert backend.order == ["begin", "end", "begin", "end"]


class TestCancel:
    async def test_closing_the_stream_closes_the_backends_iterator(
        self, backend: FakeBackend, client: AsyncRolloutClient
    ) -> None:
        backend.hold()
        stream = client.stream([1], SAMPLING, request_id="x")
        await anext(stream)
        await wait(backend.reached)
        assert backend.closed == []
        await stream.aclose()
        await wait(backend.ended)
        assert backend.closed == ["x"]
        assert backend.live == set()

    async def test_a_stream_blocked_on_a_slow_reader_is_closed_too(self) -> None:
        class Flood(FakeBackend):
            """Never waits, so a cancel always meets the service in its write; kept alive, so no collector closes it."""

            streams: list[Any]

            def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
                self.streams.append(self._flood(request))
                return self.streams[-1]

            async def _flood(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
                try:
                    while True:
                        yield self._chunk(request, request.sampling, 0, 0, 10)
                finally:
                    self.ended.set()

        backend = Flood()
        backend.streams = []
        async with serving(backend) as server, AsyncRolloutClient(address(server), timeout_s=30) as client:
            stream = client.stream([1], SAMPLING)
            await anext(stream)
            await stream.aclose()
            await wait(backend.ended)

    async def test_cancel_of_score(self, backend: FakeBackend, client: AsyncRolloutClient) -> None:
        """K6: unary calls too."""
        backend.hold()
        task = asyncio.create_task(client.score([ScoreSequence((1, 2))], request_id="s"))
        await wait(backend.reached)
        task.cancel()
        await wait(backend.ended)
        assert backend.closed == ["s"]
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_deadline_of_stream_and_score(self, backend: FakeBackend) -> None:
        """K6"""
        backend.hold()
        async with serving(backend) as server, AsyncRolloutClient(address(server), timeout_s=1) as hasty:
            await hasty.info()
            with pytest.raises(RequestAborted, match="timeout_s"):
                await hasty.generate([1], SAMPLING, request_id="g")
            await wait(backend.ended)
            backend.ended.clear()
            with pytest.raises(RequestAborted, match="timeout_s"):
                await hasty.score([ScoreSequence((1, 2))], request_id="s")
            await wait(backend.ended)
        assert backend.closed == ["g", "s"]

    async def test_a_stream_read_to_its_end_counts_as_ended(
        self, backend: FakeBackend, client: AsyncRolloutClient
    ) -> None:
        """Control of the tests above."""
        await client.generate([1], SAMPLING)
        assert backend.closed == []


class TestAbort:
    async def test_partial_output_comes_back(self, backend: FakeBackend, client: AsyncRolloutClient) -> None:
        backend.hold()
        task = asyncio.create_task(client.generate([1], SAMPLING, n=2, request_id="x"))
        await wait(backend.reached)
        assert await client.abort("x") == 1
        result = await task
        for sample in result.samples:
            assert sample.finish.reason is FinishReason.ABORTED
            assert len(sample.token_ids) == backend.chunk_tokens
        backend.gate.set()
        whole = await client.generate([1], SAMPLING, n=2)
        assert whole.samples[0].token_ids[:4].tobytes() == result.samples[0].token_ids.tobytes()

    async def test_unknown_and_unnamed(self, backend: FakeBackend, client: AsyncRolloutClient, stub: Any) -> None:
        with pytest.raises(NotFound):
            await client.abort("nobody")
        with pytest.raises(InvalidRequest):
            await client.abort()
        with pytest.raises(grpc.aio.AioRpcError, match="name one request or set all"):
            await stub.Abort(pb.AbortRequest())
        assert await client.abort(all_requests=True) == 0

    @pytest.mark.parametrize("everything", [False, True])
    async def test_a_score_that_runs_ends_too(
        self, backend: FakeBackend, client: AsyncRolloutClient, everything: bool
    ) -> None:
        """Its name was live, "abort it" was the advice to whoever used it again, and Abort knew no such request."""
        backend.hold()
        score = asyncio.create_task(client.score([ScoreSequence((1, 2)), ScoreSequence((1, 3))], request_id="s"))
        await wait(backend.reached)
        with pytest.raises(DuplicateRequest, match="abort it"):
            await client.score([ScoreSequence((1, 2))], request_id="s")
        assert await (client.abort(all_requests=True) if everything else client.abort("s")) == 2
        with pytest.raises(RequestAborted, match="'s' was aborted by the client"):
            await asyncio.wait_for(score, 20)
        assert backend.closed == ["s"]
        backend.gate.set()
        # The name is free, and nothing of the abort is left.
        assert len((await client.score([ScoreSequence((1, 2))], request_id="s")).scores) == 1
        with pytest.raises(NotFound):
            await client.abort("s")


async def test_pause_resume_and_info(backend: FakeBackend, client: AsyncRolloutClient) -> None:
    assert await client.pause() == WeightState(1, "01")
    assert (await client.info()).paused
    assert await client.resume() == WeightState(1, "01")
    assert await client.info() == await backend.info()


class TestUpdateWeights:
    async def send(self, stub: Any, *messages: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        return await stub.UpdateWeights(iter(messages))

    async def test_bytes_version_and_policy_arrive(self, backend: FakeBackend, client: AsyncRolloutClient) -> None:
        tensors = [("a", np.arange(5, dtype=np.float32)), ("b", np.zeros((0, 2), np.int32)), ("c", np.float64(1.5))]
        tensors = [(name, np.asarray(value)) for name, value in tensors]
        state = await client.update_weights(
            tensors, version=2, digest="beef", policy=UpdatePolicy.ABORT, bucket_bytes=12
        )
        assert state == backend.weights == WeightState(2, "beef")
        assert {name: bytes(data) for name, data in backend.received.items()} == {
            name: array.tobytes() for name, array in tensors
        }

    @pytest.mark.parametrize("case", ["nothing", "no begin", "two begins", "unknown field", "bad chunk"])
    async def test_a_bad_stream_leaves_the_old_weights(self, backend: FakeBackend, stub: Any, case: str) -> None:
        begin = codec.update_to_proto(WeightUpdate(2, "ab", 1))
        bucket = pb.TensorBucket(chunks=[pb.TensorChunk(name="a", dtype=pb.DTYPE_INT32, shape=[1], data=b"\0\0\0\0")])
        good = pb.UpdateWeightsRequest(bucket=bucket)
        odd = pb.UpdateWeightsRequest(bucket=bucket)
        if case == "unknown field":
            odd.bucket.chunks[0].MergeFromString(b"\x98\x06\x01")
        if case == "bad chunk":
            odd.bucket.chunks[0].offset = 1
        messages = {"nothing": [], "no begin": [good], "two begins": [begin, good, begin]}.get(case, [begin, good, odd])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.send(stub, *messages)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert backend.weights == WeightState(1, "01")
        await self.send(stub, begin, good)
        assert backend.weights == WeightState(2, "ab")

    async def test_the_backends_refusal_comes_back(self, backend: FakeBackend, client: AsyncRolloutClient) -> None:
        backend.error = WeightUpdateError("digest differs; send again")
        with pytest.raises(WeightUpdateError, match="digest differs"):
            await client.update_weights([("a", np.zeros(3, np.float32))], version=2, digest="ab")
        assert backend.weights == WeightState(1, "01")


async def test_a_refusal_during_a_large_update_keeps_its_reason() -> None:
    """The sender is still writing when the head is refused: it must read why, not an internal error, every time."""
    backend = FakeBackend()
    async with serving(backend) as server, AsyncRolloutClient(address(server)) as client:
        tensors = [(f"t{i}", np.zeros(1 << 20, np.float32)) for i in range(8)]
        for _ in range(5):
            backend.error = WeightUpdateError("version 1 does not exceed version 9 being served", field="begin.version")
            with pytest.raises(WeightUpdateError, match="does not exceed"):
                await client.update_weights(tensors, version=1, digest="ab" * 32, bucket_bytes=1 << 20)
