"""Weight updates over gRPC, with requests in flight and with failures on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import torch

from rollout import codec
from rollout.errors import WeightUpdateError
from rollout.serving import Service
from rollout.types import FinishReason, SampleSummary, ScoreSequence, TokenChunk, UpdatePolicy, VersionSpan
from rollout.v1 import rollout_pb2 as pb
from rollout.v1 import rollout_pb2_grpc
from tests.messages import parsed_messages
from tests.services import (
    PROMPT,
    CallSignal,
    StepGate,
    assert_idle,
    bits,
    bits_of_chunks,
    check_pages,
    engine_threads,
    queued,
    sampling,
    soon,
    tensors_of,
    tiny_service,
    training_bits,
    version_path,
)
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.wire import GenerateResult, SampledSequence, plan_update

PROBE = PROMPT * 9


async def probe(client: AsyncRolloutClient) -> list[object]:
    """Bits of two samples and a score, asked often enough at once that every replica takes its share."""
    generated = await soon(asyncio.gather(*(client.generate(PROMPT, sampling(max_tokens=8), n=2) for _ in range(4))))
    scored = await soon(asyncio.gather(*(client.score([ScoreSequence(PROBE)]) for _ in range(4))))
    answers = {repr((bits(g), s.scores[0].logprobs.tobytes())) for g, s in zip(generated, scored, strict=True)}
    assert len(answers) == 1, "replicas differ"
    return [
        *answers,
        {span.version for g in generated for s in g.samples for span in s.spans},
        scored[0].weight_version,
    ]


def assert_spans_rescore(base: Path, sample: SampledSequence, prompt: tuple[int, ...]) -> None:
    """Each span has the bits that its version's weights give to the whole sequence (G3). Version v has seed v."""
    ids = tuple(sample.token_ids.tolist())
    for span in sample.spans:
        path = base if span.version == 0 else version_path(base, span.version)
        ((logprobs, _),) = training_bits(path, [(prompt, ids)])
        here = slice(4 * span.start, 4 * span.end)
        assert logprobs[here] == sample.policy_logprobs.tobytes()[here]
        for other in {s.version for s in sample.spans} - {span.version}:
            path = base if other == 0 else version_path(base, other)
            ((wrong, _),) = training_bits(path, [(prompt, ids)])
            assert wrong[here] != logprobs[here], "control: another version's weights"


async def test_wait_lets_the_running_finish_and_holds_the_new(tiny_qwen3_path: Path) -> None:
    tensors = tensors_of(version_path(tiny_qwen3_path, 1))
    async with tiny_service(tiny_qwen3_path) as (service, client):
        (thread,) = engine_threads(service)
        async with StepGate(thread, 5) as gate:
            running = asyncio.ensure_future(client.generate(PROMPT, sampling()))
            await gate.reached()
            update = await queued(thread, client.update_weights(tensors, version=1, policy=UpdatePolicy.WAIT))
            late = await queued(thread, client.generate(PROMPT, sampling()))
            gate.open()
        before, state, after = await soon(asyncio.gather(running, update, late))
        assert state.version == 1
        assert before.samples[0].spans == (VersionSpan(0, 0, 40),)
        assert after.samples[0].spans == (VersionSpan(1, 0, 40),)
        for result in (before, after):
            assert_spans_rescore(tiny_qwen3_path, result.samples[0], PROMPT)
        await assert_idle(client)


async def test_abort_returns_the_partial_output(tiny_qwen3_path: Path) -> None:
    tensors = tensors_of(version_path(tiny_qwen3_path, 1))
    async with tiny_service(tiny_qwen3_path, max_running=2) as (service, client):
        (thread,) = engine_threads(service)
        undisturbed = bits(await client.generate(PROMPT, sampling()))[0]
        async with StepGate(thread, 6) as gate:
            running = asyncio.ensure_future(client.generate(PROMPT, sampling(), n=3))
            await gate.reached()
            update = await queued(thread, client.update_weights(tensors, version=1, policy=UpdatePolicy.ABORT))
            gate.open()
        result, state = await soon(asyncio.gather(running, update))
        first, second, third = result.samples
        assert [s.finish.reason for s in (first, second)] == [FinishReason.ABORTED] * 2
        assert "weight update" in first.finish.message
        assert first.spans == second.spans == (VersionSpan(0, 0, 6),)
        assert tuple(first.token_ids.tolist()) == undisturbed.ids[:6]
        assert first.policy_logprobs.tobytes() == undisturbed.policy[:24]
        # The third had not begun: it belongs to the new weights from its first token on.
        assert third.spans == (VersionSpan(1, 0, 40),)
        for sample in result.samples:
            assert_spans_rescore(tiny_qwen3_path, sample, PROMPT)
        assert state.version == 1
        await assert_idle(client)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 21], ids=["decode", "prefill"])
async def test_recompute_goes_on_under_the_new_weights(tiny_qwen3_path: Path, prompt: tuple[int, ...]) -> None:
    """Two updates cross the sample; the second prompt is still in its chunked prefill at the first."""
    async with tiny_service(tiny_qwen3_path) as (service, client):
        (thread,) = engine_threads(service)
        async with StepGate(thread, 2) as first, StepGate(thread, 16) as second:
            running = asyncio.ensure_future(client.generate(prompt, sampling(), n=2, row_digests=True))
            for version, gate in ((1, first), (2, second)):
                await gate.reached()
                tensors = tensors_of(version_path(tiny_qwen3_path, version))
                update = await queued(
                    thread, client.update_weights(tensors, version=version, policy=UpdatePolicy.RECOMPUTE)
                )
                gate.open()
                await soon(update)
        result = await soon(running)
        for sample in result.samples:
            versions = [span.version for span in sample.spans]
            assert versions == ([0, 1, 2] if prompt == PROMPT else [1, 2])
            assert sample.spans[-1].end == len(sample.token_ids) == 40
            assert sample.finish.reason is FinishReason.LENGTH
            assert_spans_rescore(tiny_qwen3_path, sample, prompt)
        check_pages(service)


async def test_after_updates_the_service_equals_a_fresh_one(tiny_qwen3_path: Path) -> None:
    """A -> B -> A, on two replicas, with the prompts warm."""
    first, second = tensors_of(tiny_qwen3_path), tensors_of(version_path(tiny_qwen3_path, 1))
    async with tiny_service(version_path(tiny_qwen3_path, 1), replicas=2) as (_, client):
        fresh = await probe(client)
        fresh_digest = (await client.info()).weights.digest
    async with tiny_service(tiny_qwen3_path, replicas=2) as (_, client):
        a = await probe(client)
        state = await client.update_weights(second, version=5)
        b = await probe(client)
        back = await client.update_weights(first, version=6)
        a_again = await probe(client)
        info = await client.info()
    assert b[0] == fresh[0] and a_again[0] == a[0]
    assert a[0] != b[0], "control: the weights matter"
    assert [x[1:] for x in (a, b, a_again)] == [[{0}, 0], [{5}, 5], [{6}, 6]]
    assert state.digest == fresh_digest
    assert info.weights == back and {r.weights for r in info.replicas} == {back}


# ---- failures ---------------------------------------------------------------------------------------------------


def broken(kind: str, tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    name, first = tensors[0]
    match kind:
        case "a tensor is missing":
            return tensors[:-1]
        case "an unknown tensor comes too":
            return [*tensors, ("model.typo.weight", torch.zeros(2))]
        case "NaN":
            bad = first.clone()
            bad.view(-1)[3] = float("nan")
            return [(name, bad), *tensors[1:]]
        case "another dtype":
            return [(name, first.to(torch.bfloat16)), *tensors[1:]]
        case "another shape":
            return [(name, first[:-1]), *tensors[1:]]
        case "another tied head":
            return [*tensors, ("lm_head.weight", first + 1)]
    raise AssertionError(kind)


KINDS = (
    "a tensor is missing",
    "an unknown tensor comes too",
    "NaN",
    "another dtype",
    "another shape",
    "another tied head",
)


async def test_failed_updates_leave_the_old_version_serving(tiny_qwen3_path: Path) -> None:
    tensors = tensors_of(version_path(tiny_qwen3_path, 1))
    async with tiny_service(tiny_qwen3_path, replicas=2) as (_, client):
        before = await probe(client)
        weights = (await client.info()).weights
        for kind in KINDS:
            with pytest.raises(WeightUpdateError):
                await soon(client.update_weights(broken(kind, tensors), version=1))
            assert await probe(client) == before, kind
        with pytest.raises(WeightUpdateError, match="digest"):
            await soon(client.update_weights(tensors, version=1, digest="ab" * 32))
        assert await probe(client) == before
        assert (await client.info()).weights == weights
        assert (await soon(client.update_weights(tensors, version=1))).version == 1
        after = await probe(client)
        assert after[0] != before[0], "control: without the faults it takes effect"
        for version in (1, 1):
            with pytest.raises(WeightUpdateError, match="does not exceed"):
                await soon(client.update_weights(tensors_of(tiny_qwen3_path), version=version))
        assert await probe(client) == after
        await assert_idle(client)


async def dying_sender(service: Service, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """A sender that goes away with half its buckets sent, once both replicas have staged some."""
    staged = [CallSignal(thread, "stage_chunks") for thread in engine_threads(service)]
    update = plan_update(tensors, version=1, digest=None, policy=UpdatePolicy.WAIT)
    messages = list(parsed_messages(update, tensors, 4096))

    async def half() -> AsyncIterator[pb.UpdateWeightsRequest]:
        for message in messages[: len(messages) // 2]:
            yield message
        await asyncio.Event().wait()

    assert len(messages) > 10
    async with grpc.aio.insecure_channel(service.address) as channel:
        call = rollout_pb2_grpc.RolloutServiceStub(channel).UpdateWeights(half())
        for signal in staged:
            await signal.called()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_sender_that_dies_mid_stream(tiny_qwen3_path: Path) -> None:
    tensors = tensors_of(version_path(tiny_qwen3_path, 1))
    async with tiny_service(tiny_qwen3_path, replicas=2) as (service, client):
        before = await probe(client)
        await dying_sender(service, tensors)
        assert await probe(client) == before
        assert (await soon(client.update_weights(tensors, version=1, bucket_bytes=4096))).version == 1
        assert (await probe(client))[0] != before[0]


async def test_updates_one_after_another_while_clients_generate(tiny_qwen3_path: Path) -> None:
    """Every policy in turn, on two replicas under load; each token has the bits of its version."""
    versions = {v: tensors_of(version_path(tiny_qwen3_path, v)) for v in (1, 2, 3)}
    policies = dict(zip(versions, (UpdatePolicy.WAIT, UpdatePolicy.ABORT, UpdatePolicy.RECOMPUTE), strict=True))
    results: list[GenerateResult] = []
    finished: asyncio.Queue[None] = asyncio.Queue()
    stop = asyncio.Event()
    async with tiny_service(tiny_qwen3_path, replicas=2) as (service, client):

        async def ask(number: int) -> None:
            while not stop.is_set():
                results.append(await client.generate(PROMPT, sampling(seed=number + len(results) * 4, max_tokens=10)))
                finished.put_nowait(None)

        clients = [asyncio.ensure_future(ask(number)) for number in range(4)]
        for version, tensors in versions.items():
            # Of eight, four at most were sampled before the last update.
            for _ in range(8):
                await soon(finished.get())
            state = await soon(client.update_weights(tensors, version=version, policy=policies[version]))
            assert state.version == version
        stop.set()
        await soon(asyncio.gather(*clients))
        await assert_idle(client)
        check_pages(service)
    assert {span.version for r in results for span in r.samples[0].spans} >= {0, 1, 2}
    crossed = [r for r in results if len(r.samples[0].spans) > 1]
    for result in [*crossed, *results[::8]]:
        if len(result.samples[0].token_ids):
            assert_spans_rescore(tiny_qwen3_path, result.samples[0], PROMPT)


async def test_the_stream_says_which_weights_made_each_chunk(tiny_qwen3_path: Path) -> None:
    tensors = tensors_of(version_path(tiny_qwen3_path, 1))
    async with tiny_service(tiny_qwen3_path) as (service, client):
        (thread,) = engine_threads(service)
        async with StepGate(thread, 7) as gate:
            events = client.stream(PROMPT, sampling(max_tokens=12))
            collecting = asyncio.ensure_future(_collect(events))
            await gate.reached()
            update = await queued(thread, client.update_weights(tensors, version=1, policy=UpdatePolicy.RECOMPUTE))
            gate.open()
            await soon(update)
        chunks, summary = await soon(collecting)
    assert bits_of_chunks(chunks)[0].ids
    assert summary.spans == (VersionSpan(0, 0, 7), VersionSpan(1, 7, 12))
    for chunk in chunks:
        assert chunk.weight_version == (0 if chunk.offset < 7 else 1)
        assert not chunk.offset < 7 < chunk.offset + len(chunk.token_ids), "a chunk has one version"


async def _collect(events: AsyncIterator[codec.GenerateEvent]) -> tuple[list[TokenChunk], SampleSummary]:
    seen = [event async for event in events]
    (summary,) = (e for e in seen if isinstance(e, SampleSummary))
    return [e for e in seen if isinstance(e, TokenChunk)], summary
