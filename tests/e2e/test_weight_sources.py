"""Weight sets from folders, and streams that end badly, over gRPC on two replicas: new bits everywhere, or the old."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from safetensors.torch import save_file

from rollout import codec
from rollout.errors import InvalidRequest, ReplicaUnavailable, RolloutError, UnsupportedFeature, WeightUpdateError
from rollout.serving import Service
from rollout.types import GenerateRequest, UpdateEnd, UpdatePolicy
from rollout.v1 import rollout_pb2 as pb
from rollout.v1 import rollout_pb2_grpc
from tests.messages import parsed_messages
from tests.rollout.updates import digest_over
from tests.services import (
    PROMPT,
    assert_idle,
    bits,
    engine_threads,
    sampling,
    soon,
    tensors_of,
    tiny_service,
    version_path,
)
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.client import RolloutClient
from trainer_bridge.wire import plan_update, translated

Tensors = list[tuple[str, torch.Tensor]]


async def said(client: AsyncRolloutClient) -> tuple[object, ...]:
    """Bits and versions that every replica gives, asked often enough at once that each takes its share."""
    requests = [GenerateRequest(f"r{i}", PROMPT, sampling(max_tokens=8)) for i in range(4)]
    results = await soon(client.generate_many(requests))
    assert len({s.replica for r in results for s in r.samples}) == 2, "control: both answered"
    assert len({repr(bits(r)) for r in results}) == 1, "replicas differ"
    return bits(results[0]), {span.version for r in results for span in r.samples[0].spans}


def folder(root: Path, name: str, tensors: Tensors, *, shards: int = 1) -> Path:
    path = root / name
    path.mkdir(parents=True)
    for i in range(shards):
        save_file(dict(tensors[i::shards]), path / f"model-{i}.safetensors")
    return path


@pytest.fixture
def new(tiny_qwen3_path: Path) -> Tensors:
    return tensors_of(version_path(tiny_qwen3_path, 1))


@asynccontextmanager
async def sharing(base: Path, root: Path) -> AsyncIterator[tuple[Service, AsyncRolloutClient]]:
    root.mkdir(exist_ok=True)
    async with tiny_service(base, replicas=2, weights={"root": str(root)}) as pair:
        yield pair


# ---- folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
async def test_a_folder_is_as_good_as_a_stream(
    tiny_qwen3_path: Path, tmp_path: Path, new: Tensors, shards: int
) -> None:
    root = tmp_path / "root"
    folder(root, "run/step-1", new, shards=shards)
    async with sharing(tiny_qwen3_path, root) as (_, client):
        before = await said(client)
        by_stream = await client.update_weights(new, version=1)
        streamed = await said(client)
        await client.update_weights(tensors_of(tiny_qwen3_path), version=2)
        by_folder = await soon(client.update_from_folder("run/step-1", root=root, version=3))
        read = await said(client)
    assert by_folder.digest == by_stream.digest == digest_over(dict(new))
    assert (read[0], read[1]) == (streamed[0], {3}) and streamed[0] != before[0]


async def test_the_blocking_client_reads_folders_too(tiny_qwen3_path: Path, tmp_path: Path, new: Tensors) -> None:
    root = tmp_path / "root"
    folder(root, "a", new)
    async with sharing(tiny_qwen3_path, root) as (service, _):
        with RolloutClient(service.address) as client:
            work = asyncio.to_thread(client.update_from_folder, "a", root=root, version=1, policy=UpdatePolicy.ABORT)
            assert (await soon(work)).version == 1


async def send(service: Service, *messages: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
    async with grpc.aio.insecure_channel(service.address) as channel:
        with translated():
            return await soon(rollout_pb2_grpc.RolloutServiceStub(channel).UpdateWeights(iter(messages)))


def head(tensors: Tensors, **fields: Any) -> pb.UpdateWeightsRequest:
    message = codec.update_to_proto(
        plan_update(tensors, version=1, digest=digest_over(dict(tensors)), policy=UpdatePolicy.WAIT)
    )
    for name, value in fields.items():
        setattr(message.begin, name, value)
    return message


async def test_bad_folders_leave_the_old_weights(tiny_qwen3_path: Path, tmp_path: Path, new: Tensors) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    folder(root, "good", new)
    folder(outside, "secret", new)
    (root / "link").symlink_to(outside / "secret")
    cut = folder(root, "cut", new) / "model-0.safetensors"
    os.truncate(cut, cut.stat().st_size - 1)
    (folder(root, "noise", new) / "model-0.safetensors").write_bytes(os.urandom(5000))
    folder(root, "fewer", new[1:])
    async with sharing(tiny_qwen3_path, root) as (service, client):
        before = await said(client)
        for name in ("../outside/secret", str(outside / "secret"), "link", "absent", "cut", "noise", "fewer", "."):
            with pytest.raises(WeightUpdateError) as caught:
                await send(service, head(new, folder=name))
            assert str(tmp_path) not in caught.value.message.replace(name, "")
        with pytest.raises(WeightUpdateError, match="differs from the sender's"):
            await send(service, head(new, folder="good", digest="ab" * 32))
        buckets = list(parsed_messages(plan_update(new, version=1, digest="ab", policy=UpdatePolicy.WAIT), new))
        with pytest.raises(InvalidRequest, match="came over the stream as well"):
            await send(service, head(new, folder="good"), *buckets[1:])
        assert await said(client) == before
        await send(service, head(new, folder="good"))
        assert (await said(client))[0] != before[0], "control: the good one is taken"


async def test_without_a_root_no_folder_is_read(tiny_qwen3_path: Path, new: Tensors) -> None:
    async with tiny_service(tiny_qwen3_path) as (service, _):
        with pytest.raises(UnsupportedFeature, match=r"weights\.root"):
            await send(service, head(new, folder="good"))


async def test_without_ray_there_is_no_transfer(tiny_qwen3_path: Path, new: Tensors) -> None:
    async with tiny_service(tiny_qwen3_path) as (service, _):
        with pytest.raises((UnsupportedFeature, WeightUpdateError), match=r"transfer|without Ray"):
            await send(service, head(new, transfer="zerodrift-transfer-" + "0" * 32 + "/1"))


# ---- streams ----------------------------------------------------------------------------------------------------


async def test_streams_that_end_badly(tiny_qwen3_path: Path, new: Tensors) -> None:
    """Truncated, endless, ended twice: refused with a reason, and the next update is not held up."""
    update = plan_update(new, version=1, digest=None, policy=UpdatePolicy.WAIT)
    begin, *buckets, end = list(parsed_messages(update, new, 4096))
    named = codec.update_to_proto(plan_update(new, version=1, digest=end.end.digest, policy=UpdatePolicy.WAIT))
    wrong = codec.end_to_proto(UpdateEnd("ab" * 32))
    cases: list[tuple[list[pb.UpdateWeightsRequest], type[RolloutError], str]] = [
        ([begin, *buckets[: len(buckets) // 2], end], WeightUpdateError, "missing|bytes arrived"),
        ([named, *buckets[:-1]], WeightUpdateError, "missing|bytes arrived"),
        ([begin, *buckets], InvalidRequest, "ended without a digest"),
        ([begin, *buckets, end, end], InvalidRequest, "after its end"),
        ([begin, *buckets[:-1], end, buckets[-1]], InvalidRequest, "after its end"),
        ([named, *buckets, end], InvalidRequest, "begin had a digest already"),
        ([begin, *buckets, wrong], WeightUpdateError, "differs from the sender's abab"),
        ([begin, *buckets, pb.UpdateWeightsRequest(end=pb.EndUpdate())], InvalidRequest, "no lower-case hex"),
        ([begin, *buckets, buckets[0], end], WeightUpdateError, "arrived twice"),
    ]
    async with tiny_service(tiny_qwen3_path, replicas=2) as (service, client):
        before = await said(client)
        for messages, kind, words in cases:
            with pytest.raises(kind, match=words):
                await send(service, *messages)
        assert await said(client) == before
        await send(service, begin, *reversed(buckets), end)
        assert (await said(client))[0] != before[0], "control: whole, in any order"
        await assert_idle(client)


async def test_a_silent_sender_is_not_waited_for(tiny_qwen3_path: Path, new: Tensors) -> None:
    silent = asyncio.Event()

    async def half() -> AsyncIterator[pb.UpdateWeightsRequest]:
        update = plan_update(new, version=1, digest="ab", policy=UpdatePolicy.WAIT)
        yield next(iter(parsed_messages(update, new)))
        await silent.wait()

    async with tiny_service(tiny_qwen3_path, replicas=2, weights={"idle_s": 0.2}) as (service, client):
        async with grpc.aio.insecure_channel(service.address) as channel:
            with translated(), pytest.raises(WeightUpdateError, match=r"nothing came for 0.2 s \(weights.idle_s\)"):
                await soon(_translated(rollout_pb2_grpc.RolloutServiceStub(channel).UpdateWeights(half())))
        silent.set()
        assert (await soon(client.update_weights(new, version=1))).version == 1


async def _translated(call: Any) -> Any:
    with translated():
        return await call


# ---- what is in the set -----------------------------------------------------------------------------------------


async def test_identity_changes_the_version_only(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, replicas=2) as (_, client):
        before, held = await said(client), await client.info(tensor_digests=True)
        await client.update_weights(tensors_of(tiny_qwen3_path), version=4)
        after, now = await said(client), await client.info(tensor_digests=True)
    assert (after[0], after[1]) == (before[0], {4})
    assert now.tensor_digests == held.tensor_digests and now.weights.digest == held.weights.digest


async def test_nan_only_when_asked_for(tiny_qwen3_path: Path) -> None:
    """A, then A with a NaN, then A again: the first bits come back."""
    good = tensors_of(tiny_qwen3_path)
    name, first = good[0]
    bad = first.clone()
    bad.view(-1)[3] = float("nan")
    async with tiny_service(tiny_qwen3_path, replicas=2) as (_, client):
        before = await said(client)
        with pytest.raises(WeightUpdateError, match=f"{name} holds NaN or infinity; send with allow_nonfinite"):
            await client.update_weights([(name, bad), *good[1:]], version=1)
        state = await client.update_weights([(name, bad), *good[1:]], version=1, allow_nonfinite=True)
        assert state.digest == digest_over(dict([(name, bad), *good[1:]]))
        await client.update_weights(good, version=2)
        assert (await said(client))[0] == before[0]


async def test_a_replica_that_breaks_while_it_commits(tiny_qwen3_path: Path, new: Tensors) -> None:
    """F9: tensor 3 of one replica cannot be written. It leaves rotation; the other serves the new version alone."""
    async with tiny_service(tiny_qwen3_path, replicas=2) as (service, client):
        broken: Any = engine_threads(service)[1]
        commit = broken._commit

        def breaking() -> Any:
            write, left = broken._stage._written, [3]

            def failing(name: str, parameter: Any) -> bool:
                left[0] -= 1
                if left[0] == 0:
                    raise RuntimeError("planted")
                return bool(write(name, parameter))

            broken._stage._written = failing
            return commit()

        broken._commit = breaking
        assert (await soon(client.update_weights(new, version=1))).version == 1
        info = await client.info(tensor_digests=True)
        assert [(r.name, r.healthy) for r in info.replicas] == [("replica-0", True), ("replica-1", False)]
        assert [d.name for d in info.replica_digests] == ["replica-0"]
        results = await soon(client.generate_many([GenerateRequest(f"r{i}", PROMPT, sampling()) for i in range(4)]))
        assert {(s.replica, span.version) for r in results for s in r.samples for span in s.spans} == {("replica-0", 1)}
        assert broken.broken is not None
        with pytest.raises(RolloutError):
            await asyncio.wrap_future(broken.call(lambda: None))


async def test_no_replica_can_commit(tiny_qwen3_path: Path, new: Tensors) -> None:
    async with tiny_service(tiny_qwen3_path) as (service, client):
        (thread,) = engine_threads(service)
        thread._commit = lambda: (_ for _ in ()).throw(ReplicaUnavailable("planted"))  # type: ignore[method-assign]
        with pytest.raises(ReplicaUnavailable, match="could be committed on no replica"):
            await soon(client.update_weights(new, version=1))
        with pytest.raises(ReplicaUnavailable):
            await soon(client.generate(PROMPT, sampling()))
