"""Both clients against a real server; conservation and error classes on the client's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rollout.codec import GenerateEvent
from rollout.errors import (
    CapacityExceeded,
    ConfigError,
    DuplicateRequest,
    InvalidRequest,
    NotFound,
    ParityError,
    PermissionDenied,
    ReplicaUnavailable,
    RequestAborted,
    RolloutError,
    Unauthenticated,
    UnsupportedFeature,
    WeightUpdateError,
)
from rollout.types import (
    GenerateRequest,
    LogprobMode,
    SamplingParams,
    ScoreSequence,
    UpdatePolicy,
    VersionSpan,
    WeightState,
)
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving
from tests.messages import parsed_messages
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.client import RolloutClient
from trainer_bridge.wire import Assembler, GenerateResult, plan_update

SAMPLING = SamplingParams(seed=3, max_tokens=10)
REQUEST = GenerateRequest("x", (5, 6), SAMPLING, n=2, sample_index=1, row_digests=True)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[AsyncRolloutClient]:
    async with serving(backend) as server, AsyncRolloutClient(address(server), timeout_s=30) as client:
        yield client


@pytest.fixture
async def blocking(backend: FakeBackend) -> AsyncIterator[RolloutClient]:
    async with serving(backend) as server:
        with RolloutClient(address(server), timeout_s=30) as client:
            yield client


def bits(result: GenerateResult) -> list[tuple[bytes, ...]]:
    return [
        (
            sample.token_ids.tobytes(),
            sample.policy_logprobs.tobytes(),
            sample.behavior_logprobs.tobytes(),
            b"" if sample.row_digests is None else sample.row_digests.tobytes(),
        )
        for sample in result.samples
    ]


async def test_both_clients_and_all_paths_give_the_same_bits(backend: FakeBackend) -> None:
    async with serving(backend) as server, AsyncRolloutClient(address(server)) as client:
        asynchronous = await client.generate([5, 6], SAMPLING, n=2, row_digests=True)
        streamed = Assembler(replace(REQUEST, request_id="", sample_index=0))
        async for event in client.stream([5, 6], SAMPLING, n=2, row_digests=True):
            streamed.add(event)
        with RolloutClient(address(server)) as blocking:
            synchronous = await asyncio.to_thread(blocking.generate, [5, 6], SAMPLING, n=2, row_digests=True)
        singles = [await client.generate([5, 6], SAMPLING, sample_index=i, row_digests=True) for i in range(2)]
        other = await client.generate([5, 6], replace(SAMPLING, seed=4), n=2, row_digests=True)
    assert bits(asynchronous) == bits(synchronous) == bits(streamed.result())
    assert bits(asynchronous) == [bits(single)[0] for single in singles]
    assert bits(asynchronous) != bits(other), "control: another seed"


async def test_the_result_is_whole(client: AsyncRolloutClient) -> None:
    result = await client.generate(np.asarray([5, 6]), SAMPLING, n=3, sample_index=4, request_id="mine")
    assert (result.request_id, result.prompt_ids, result.mode) == ("mine", (5, 6), LogprobMode.TEMPERED)
    assert (result.sampling, result.manifest_digest) == (SAMPLING, "fa4e")
    assert [sample.sample_index for sample in result.samples] == [4, 5, 6]
    for sample in result.samples:
        dtypes = [a.dtype for a in (sample.token_ids, sample.policy_logprobs, sample.behavior_logprobs, sample.mask)]
        assert dtypes == [np.int32, np.float32, np.float32, np.uint8]
        assert sample.row_digests is None
        assert sample.spans == (VersionSpan(1, 0, 10),)
        assert (sample.text, sample.replica) == ("sampled", "fake-0")
        # Arrays are writable, or torch.from_numpy would warn, which is an error here.
        assert torch.from_numpy(sample.policy_logprobs).shape == (10,)


async def test_text_prompts(client: AsyncRolloutClient, backend: FakeBackend) -> None:
    result = await client.generate("hello", SAMPLING)
    assert result.prompt_ids == backend.encode("hello")
    backend.tokenizer = False
    with pytest.raises(UnsupportedFeature, match="no tokenizer"):
        await client.generate("hello", SAMPLING)


class TestBlockingClient:
    async def test_every_call(self, backend: FakeBackend, blocking: RolloutClient) -> None:
        def calls() -> None:
            assert len(list(blocking.stream([1], SAMPLING, n=2))) == 6 + 2 + 1
            assert len(blocking.score([ScoreSequence((1, 2, 3))]).scores[0].logprobs) == 2
            state = blocking.update_weights([("a", np.zeros(3, np.float32))], version=2, digest="ab")
            assert state == WeightState(2, "ab")
            assert blocking.pause() == state
            assert blocking.info().paused
            assert blocking.resume() == state
            assert blocking.abort(all_requests=True) == 0

        await asyncio.to_thread(calls)
        assert backend.received == {"a": bytearray(12)}

    async def test_closing_a_stream_cancels(self, backend: FakeBackend, blocking: RolloutClient) -> None:
        backend.hold()
        stream = blocking.stream([1], SAMPLING, request_id="x")
        await asyncio.to_thread(next, stream)
        await asyncio.wait_for(backend.reached.wait(), 20)
        stream.close()
        await asyncio.wait_for(backend.ended.wait(), 20)
        assert backend.closed == ["x"]

    async def test_generate_many(self, backend: FakeBackend, blocking: RolloutClient) -> None:
        requests = [GenerateRequest(f"r{i}", (i + 1,), replace(SAMPLING, seed=i)) for i in range(20)]
        results = await asyncio.to_thread(blocking.generate_many, requests, concurrency=4)
        assert [result.request_id for result in results] == [request.request_id for request in requests]
        assert await asyncio.to_thread(blocking.generate_many, []) == []

    async def test_generate_many_ends_with_the_first_failure(
        self, backend: FakeBackend, blocking: RolloutClient
    ) -> None:
        backend.hold()
        requests = [GenerateRequest("stays", (1,), SAMPLING), GenerateRequest("fails", (99,), SAMPLING)]
        # Less than the client's deadline, which would end the call that stays just as well.
        async with asyncio.timeout(20):
            with pytest.raises(InvalidRequest, match="id 99"):
                await asyncio.to_thread(blocking.generate_many, requests, concurrency=2)
        if backend.live:
            await asyncio.wait_for(backend.ended.wait(), 20)
        assert backend.live == set()


class TestGenerateMany:
    async def test_results_are_in_order_and_bounded(self, backend: FakeBackend, client: AsyncRolloutClient) -> None:
        most = 0

        class Counting(FakeBackend):
            async def _events(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
                nonlocal most
                most = max(most, len(self.live))
                async for event in super()._events(request):
                    yield event

        requests = [GenerateRequest(f"r{i}", (i + 1,), replace(SAMPLING, seed=i)) for i in range(20)]
        async with serving(Counting()) as server, AsyncRolloutClient(address(server)) as counted:
            results = await counted.generate_many(requests, concurrency=3)
        assert [result.request_id for result in results] == [request.request_id for request in requests]
        assert 1 <= most <= 3
        alone = [await client.generate(r.prompt_ids, r.sampling) for r in requests]
        assert [bits(result) for result in results] == [bits(result) for result in alone]

    async def test_a_failure_cancels_the_rest(self, backend: FakeBackend, client: AsyncRolloutClient) -> None:
        backend.hold()
        stays = asyncio.create_task(
            client.generate_many([GenerateRequest("stays", (1,), SAMPLING), GenerateRequest("late", (99,), SAMPLING)])
        )
        with pytest.raises(InvalidRequest, match="id 99"):
            await stays
        if "stays" in backend.live:
            await asyncio.wait_for(backend.ended.wait(), 20)
        assert backend.live == set()


class TestErrors:
    @pytest.mark.parametrize(
        "kind",
        [
            CapacityExceeded,
            ConfigError,
            DuplicateRequest,
            InvalidRequest,
            NotFound,
            ParityError,
            PermissionDenied,
            ReplicaUnavailable,
            RequestAborted,
            Unauthenticated,
            UnsupportedFeature,
            WeightUpdateError,
        ],
        ids=lambda kind: kind.__name__,
    )
    async def test_the_same_class_message_and_field(self, backend: FakeBackend, kind: type[RolloutError]) -> None:
        backend.error = kind("näme, limit, way out", field="some.field[3]")
        async with serving(backend) as server, AsyncRolloutClient(address(server)) as client:
            calls: list[Callable[[], Any]] = [
                lambda: client.generate([1], SAMPLING),
                lambda: client.score([ScoreSequence((1, 2))]),
                lambda: client.update_weights([("a", np.zeros(3, np.float32))], version=2, digest="ab"),
                client.info,
            ]
            with RolloutClient(address(server)) as blocking:
                calls.append(lambda: asyncio.to_thread(blocking.info))
                calls.append(lambda: asyncio.to_thread(blocking.generate, [1], SAMPLING))
                for call in calls:
                    with pytest.raises(RolloutError) as caught:
                        await call()
                    assert type(caught.value) is kind
                    assert (caught.value.message, caught.value.field) == ("näme, limit, way out", "some.field[3]")

    async def test_no_server(self) -> None:
        async with serving(FakeBackend()) as server:
            gone = address(server)
        async with AsyncRolloutClient(gone, timeout_s=20) as client:
            with pytest.raises(ReplicaUnavailable):
                await client.info()

    async def test_local_mistakes_never_reach_the_wire(self, backend: FakeBackend, client: AsyncRolloutClient) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate([1], replace(SAMPLING, seed=2**64))
        assert caught.value.field == "sampling.seed"
        with pytest.raises(InvalidRequest):
            await client.abort("a", all_requests=True)
        assert backend.seen == []


class TestUpdateWeights:
    async def test_torch_and_numpy_bytes(self, backend: FakeBackend, client: AsyncRolloutClient) -> None:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(5, 3, generator=generator)
        tensors: list[tuple[str, Any]] = [
            ("bf16", weight.bfloat16()),
            ("parameter", torch.nn.Parameter(weight)),
            ("transposed", weight.t()),
            ("scalar", torch.tensor(7, dtype=torch.int64)),
            ("numpy", np.arange(6, dtype=">f8").reshape(2, 3)),
        ]
        await client.update_weights(tensors, version=2, digest="ab", policy=UpdatePolicy.RECOMPUTE, bucket_bytes=16)
        received = {name: bytes(data) for name, data in backend.received.items()}
        assert received == {
            "bf16": weight.bfloat16().view(torch.uint16).numpy().tobytes(),
            "parameter": weight.numpy().tobytes(),
            "transposed": weight.t().contiguous().numpy().tobytes(),
            "scalar": (7).to_bytes(8, "little"),
            "numpy": np.arange(6, dtype="<f8").tobytes(),
        }
        assert received["transposed"] != received["parameter"], "control: layout counts"
        assert max(backend.messages) <= 16

    async def test_the_digest_is_that_of_the_bytes(self, backend: FakeBackend, client: AsyncRolloutClient) -> None:
        from rollout.weights import root_digest, tensor_digest

        data = np.arange(3, dtype=np.float32)
        state = await client.update_weights([("a", data)], version=2)
        assert state.digest == root_digest({"a": tensor_digest("a", "float32", (3,), data.tobytes())})
        assert state.digest != root_digest({"a": tensor_digest("a", "float32", (3,), bytes(12))}), "control"

    @pytest.mark.parametrize("bucket_bytes", [1, 7, 8, 20, 1000])
    def test_each_byte_once_in_bounded_buckets(self, bucket_bytes: int) -> None:
        ints, longs = np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int64)
        tensors = [("a", ints), ("empty", ints[:0]), ("b", longs)]
        update = plan_update(tensors, version=2, digest="ab", policy=UpdatePolicy.WAIT)
        head, *buckets = parsed_messages(update, tensors, bucket_bytes)
        assert head.begin.num_tensors == 3
        rebuilt: dict[str, bytearray] = {}
        for message in buckets:
            assert sum(len(chunk.data) for chunk in message.bucket.chunks) <= bucket_bytes
            for chunk in message.bucket.chunks:
                target = rebuilt.setdefault(chunk.name, bytearray())
                assert chunk.offset == len(target)
                target.extend(chunk.data)
        assert rebuilt == {name: bytearray(array.tobytes()) for name, array in tensors}

    def test_a_bucket_without_room(self) -> None:
        a = ("a", np.zeros(1, np.float32))
        update = plan_update([a], version=1, digest="ab", policy=UpdatePolicy.WAIT)
        with pytest.raises(InvalidRequest, match="bucket_bytes = 0"):
            parsed_messages(update, [a], 0)


class Waiting(FakeBackend):
    """Answers nothing before ``test`` is over."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Semaphore(0)

    async def _wait(self) -> None:
        self.asked.release()
        await asyncio.Event().wait()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Any]:
        async for event in super().generate(request):
            yield event
            await self._wait()

    async def score(self, request: Any) -> Any:
        await self._wait()

    async def update_weights(self, update: Any, parts: Any) -> Any:
        await self._wait()


class TestAClosedClient:
    """Closing ends what runs by an error: a CancelledError would stop the caller as if its own task were cancelled."""

    def calls(self, client: Any) -> list[Callable[[], Any]]:
        return [
            lambda: client.generate([5, 6], SAMPLING),
            lambda: client.score([ScoreSequence((5, 6, 7), 1)]),
            lambda: client.update_weights([("a", np.zeros(3, np.float32))], version=2),
        ]

    @pytest.mark.parametrize("number", [0, 1, 2])
    async def test_ends_its_calls_and_takes_no_more(self, number: int) -> None:
        backend = Waiting()
        async with serving(backend) as server:
            client = AsyncRolloutClient(address(server), timeout_s=30)
            call = self.calls(client)[number]
            running = asyncio.ensure_future(call())
            await backend.asked.acquire()
            await client.close()
            with pytest.raises(RequestAborted, match="this client was closed"):
                await running
            with pytest.raises(RequestAborted, match="this client was closed"):
                await call()

    @pytest.mark.parametrize("number", [0, 1, 2])
    async def test_the_same_of_the_blocking_one(self, number: int) -> None:
        backend = Waiting()
        async with serving(backend) as server:
            client = RolloutClient(address(server), timeout_s=30)
            call = self.calls(client)[number]
            running = asyncio.create_task(asyncio.to_thread(call))
            await backend.asked.acquire()
            client.close()
            with pytest.raises(RequestAborted, match="this client was closed"):
                await running
            with pytest.raises(RequestAborted, match="this client was closed"):
                await asyncio.to_thread(call)

    async def test_a_cancelled_caller_is_told_so(self) -> None:
        backend = Waiting()
        async with serving(backend) as server, AsyncRolloutClient(address(server), timeout_s=30) as client:
            for call in self.calls(client):
                running = asyncio.ensure_future(call())
                await backend.asked.acquire()
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0):
                        await call()


@pytest.mark.parametrize("concurrency", [0, -1])
async def test_no_concurrency_is_refused_and_does_not_hang(
    client: AsyncRolloutClient, blocking: RolloutClient, concurrency: int
) -> None:
    with pytest.raises(InvalidRequest, match="must be at least 1"):
        await asyncio.wait_for(client.generate_many([REQUEST], concurrency=concurrency), 20)
    with pytest.raises(InvalidRequest, match="must be at least 1"):
        blocking.generate_many([REQUEST], concurrency=concurrency)


BAD_UPDATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a version with a fraction": ([("a", np.zeros(2, np.float32))], {"version": 5.5}),
    "a version beyond 64 bits": ([("a", np.zeros(2, np.float32))], {"version": 2**63}),
    "a policy as text": ([("a", np.zeros(2, np.float32))], {"version": 5, "policy": "wait"}),
    "a tensor without data": ([("a", torch.zeros(2, device="meta"))], {"version": 5}),
    "a sparse tensor": ([("a", torch.eye(2).to_sparse())], {"version": 5}),
    "a number for a name": ([(5, np.zeros(2, np.float32))], {"version": 5}),
}


@pytest.mark.parametrize("case", BAD_UPDATES)
async def test_an_update_that_cannot_be_sent_says_why(
    backend: FakeBackend, client: AsyncRolloutClient, blocking: RolloutClient, case: str
) -> None:
    """gRPC cancelled the asyncio caller, as if its own task had been cancelled, and told the other one nothing."""
    tensors, options = BAD_UPDATES[case]
    for send in (client.update_weights, partial(asyncio.to_thread, blocking.update_weights)):
        with pytest.raises(InvalidRequest) as caught:
            await asyncio.wait_for(send(tensors, **options), 20)  # type: ignore[operator]
        assert "iterating" not in caught.value.message
    assert (await client.info()).weights.version == 1, "control: the service goes on with what it had"
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_a_caller_that_is_cancelled_stays_cancelled(backend: FakeBackend, client: AsyncRolloutClient) -> None:
    """Control of the test above."""
    backend.hold()
    sent = asyncio.Event()

    def tensors() -> Any:
        yield "a", np.zeros(2, np.float32)
        sent.set()

    task = asyncio.create_task(client.update_weights(list(tensors()), version=5))
    await asyncio.wait_for(sent.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
