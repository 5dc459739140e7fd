"""Pause, abort, cancel and deadline over gRPC: what was sampled is valid, pages come back, others never notice."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import NotFound, RequestAborted, WeightUpdateError
from rollout.types import FinishReason, GenerateRequest, ScoreSequence, TokenChunk, UpdatePolicy
from tests.services import (
    PROMPT,
    CallSignal,
    StepGate,
    assert_idle,
    bits,
    check_pages,
    engine_bits,
    engine_threads,
    generated,
    loop_turns,
    mixed_requests,
    queued,
    sampling,
    soon,
    tensors_of,
    tiny_service,
    tiny_settings,
    version_path,
)
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.wire import GenerateResult

LONG_PROMPT = PROMPT * 40


async def test_no_token_is_sampled_between_pause_and_resume(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, replicas=2) as (service, client):
        undisturbed = bits(await client.generate(PROMPT, sampling()))
        threads = engine_threads(service)
        async with StepGate(threads[0], 5) as first, StepGate(threads[1], 5) as second:
            tasks = [asyncio.ensure_future(client.generate(PROMPT, sampling())) for _ in range(2)]
            await first.reached()
            await second.reached()
            pause = await queued(threads[1], client.pause())
            first.open()
            second.open()
            await soon(pause)
        counts = [generated(thread) for thread in threads]
        late = asyncio.ensure_future(client.generate(PROMPT, sampling()))
        for thread in threads:
            await loop_turns(thread)
        assert (await client.info()).paused
        assert [list(c.values()) for c in counts] == [[5], [5]]
        assert sorted(n for thread in threads for n in generated(thread).values()) == [0, 5, 5]
        with pytest.raises(WeightUpdateError, match=r"wait.*paused"):
            await soon(client.update_weights(tensors_of(tiny_qwen3_path), version=1, policy=UpdatePolicy.WAIT))
        await client.resume()
        assert not (await client.info()).paused
        for result in await soon(asyncio.gather(*tasks, late)):
            assert bits(result) == undisturbed
        await assert_idle(client)


async def test_pause_and_resume_may_be_repeated(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path) as (_, client):
        for call in (client.resume, client.pause, client.pause):
            await soon(call())
        task = asyncio.ensure_future(client.generate(PROMPT, sampling(max_tokens=4)))
        await soon(client.resume())
        assert len((await soon(task)).samples[0].token_ids) == 4


async def partial(task: asyncio.Future[GenerateResult], whole: list[int], count: int) -> None:
    (sample,) = (await soon(task)).samples
    assert sample.finish.reason is FinishReason.ABORTED
    assert sample.token_ids.tolist() == whole[:count]
    assert sum(s.end - s.start for s in sample.spans) == count


async def test_abort_one_request_or_all(tiny_qwen3_path: Path) -> None:
    """Three requests: decoding, in the middle of their prefill, and waiting. The named one goes first."""
    async with tiny_service(tiny_qwen3_path, max_running=2) as (service, client):
        (thread,) = engine_threads(service)
        whole = (await client.generate(PROMPT, sampling())).samples[0].token_ids.tolist()
        await client.pause()
        prompts = {"decoding": PROMPT, "prefill": LONG_PROMPT, "waiting": PROMPT}
        tasks = {
            name: await queued(thread, client.generate(prompt, sampling(), request_id=name))
            for name, prompt in prompts.items()
        }
        async with StepGate(thread, 3) as gate, StepGate(thread, 8) as second:
            await client.resume()
            await gate.reached()
            assert sorted(generated(thread).values()) == [0, 0, 3] and thread.engine.num_waiting == 1
            one = await queued(thread, client.abort("prefill"))
            gate.open()
            assert await soon(one) == 1
            await partial(tasks["prefill"], [], 0)
            assert not tasks["waiting"].done(), "control: the others go on"
            with pytest.raises(NotFound, match="prefill"):
                await client.abort("prefill")
            await second.reached()
            everything = await queued(thread, client.abort(all_requests=True))
            second.open()
            assert await soon(everything) == 2
        ended = [(await soon(task)).samples[0] for name, task in tasks.items() if name != "prefill"]
        for sample in ended:
            assert sample.finish.reason is FinishReason.ABORTED
            assert sample.token_ids.tolist() == whole[: len(sample.token_ids)]
        assert [len(sample.token_ids) for sample in ended] == [8, 5]
        check_pages(service)
        await assert_idle(client)
        assert await client.abort(all_requests=True) == 0


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode"])
@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_a_client_that_leaves(tiny_qwen3_path: Path, way: str, state: str) -> None:
    """K6: the sample ends within one step, in whatever state it is; the one beside it never notices."""
    async with tiny_service(tiny_qwen3_path, max_running=2 if state != "waiting" else 1) as (service, client):
        (thread,) = engine_threads(service)
        undisturbed = bits(await client.generate(PROMPT, sampling(max_tokens=60)))
        impatient = AsyncRolloutClient(service.address, timeout_s=1.0 if way == "deadline" else 60)
        async with impatient, StepGate(thread, 2 if state == "prefill" else 6) as gate:
            await client.pause()
            beside = await queued(thread, client.generate(PROMPT, sampling(max_tokens=60)))
            aborted = CallSignal(thread.engine, "abort")
            victim = await queued(
                thread, impatient.generate(LONG_PROMPT if state == "prefill" else PROMPT, sampling(max_tokens=300))
            )
            await client.resume()
            await gate.reached()
            assert thread.engine.num_waiting == (state == "waiting")
            gone = CallSignal(thread, "call")
            await soon(_leave(victim, way))
            # The engine still stands: the service acts on the client's leaving, not on an event that it cannot deliver.
            await gone.called()
            gate.open()
            await aborted.called()
        assert bits(await soon(beside)) == undisturbed
        assert thread.engine.live_ids == []
        assert thread.broken is None
        check_pages(service)
        await assert_idle(client)


async def _leave(victim: asyncio.Future[Any], way: str) -> None:
    if way == "cancel":
        victim.cancel()
        await asyncio.gather(victim, return_exceptions=True)
        return
    with pytest.raises(RequestAborted, match="timeout_s"):
        await victim


@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_a_score_whose_client_leaves(tiny_qwen3_path: Path, way: str) -> None:
    """A unary call: nothing but its task says that the client is gone."""
    async with tiny_service(tiny_qwen3_path) as (service, client):
        (thread,) = engine_threads(service)
        impatient = AsyncRolloutClient(service.address, timeout_s=1.0 if way == "deadline" else 60)
        async with impatient, StepGate(thread, 1) as gate:
            victim = asyncio.ensure_future(impatient.score([ScoreSequence(LONG_PROMPT)] * 3))
            await gate.reached()
            assert len(thread.engine.live_ids) == 3
            gone = CallSignal(thread, "call")
            await soon(_leave(victim, way))
            # The engine still stands in its first step: nothing has been scored whole.
            await gone.called()
            gate.open()
        await loop_turns(thread, 2)
        assert thread.engine.live_ids == []
        check_pages(service)
        await assert_idle(client)


async def test_a_reader_that_stops_reading(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path) as (service, client):
        async with aclosing(client.stream(PROMPT, sampling(max_tokens=400), n=4)) as events:
            assert isinstance(await soon(anext(events)), TokenChunk)
        (thread,) = engine_threads(service)
        while thread.engine.live_ids:
            await loop_turns(thread, 1)
        assert thread.broken is None
        check_pages(service)


async def test_many_clients_of_every_kind(tiny_qwen3_path: Path) -> None:
    """C6: stay, cancel, be aborted, all at once on two replicas; whoever stays gets the bits of a bare engine."""
    requests = mixed_requests(40)
    expected = engine_bits(tiny_settings(tiny_qwen3_path), requests)
    async with tiny_service(tiny_qwen3_path, replicas=2) as (service, client):

        async def stays(request: GenerateRequest) -> GenerateResult:
            return (await client.generate_many([request]))[0]

        async def leaves(request: GenerateRequest, after: int) -> None:
            events = client.stream(request.prompt_ids, request.sampling, n=request.n, request_id=request.request_id)
            async with aclosing(events):
                for _ in range(after):
                    await anext(events, None)

        staying = [i for i in range(40) if i % 4]
        gone = [leaves(requests[i], i // 4 % 3) for i in range(0, 40, 4)]
        *results, _ = await soon(asyncio.gather(*(stays(requests[i]) for i in staying), asyncio.gather(*gone)))
        assert [bits(r) for r in results] == [expected[i] for i in staying]
        for result, i in zip(results, staying, strict=True):
            assert [s.sample_index for s in result.samples] == list(range(requests[i].n))
        for thread in engine_threads(service):
            while thread.engine.live_ids:
                await loop_turns(thread, 1)
        check_pages(service)
        await assert_idle(client)
        assert service.pool.num_live == 0


async def test_pause_update_resume_under_load(tiny_qwen3_path: Path) -> None:
    """G6: 32 clients in a loop, 20 cycles, each policy that a pause allows; no hang, and no token in a pause."""
    versions = [tensors_of(tiny_qwen3_path), tensors_of(version_path(tiny_qwen3_path, 1))]
    stop = asyncio.Event()
    seen: asyncio.Queue[GenerateResult] = asyncio.Queue()
    async with tiny_service(tiny_qwen3_path, replicas=2) as (service, client):
        threads = engine_threads(service)

        async def ask(seed: int) -> None:
            while not stop.is_set():
                seen.put_nowait(await client.generate(PROMPT, sampling(seed=seed, max_tokens=6)))
                await client.score([ScoreSequence(PROMPT * 4)])
                seed += 32

        clients = [asyncio.ensure_future(ask(number)) for number in range(32)]
        for cycle in range(20):
            policy = (UpdatePolicy.ABORT, UpdatePolicy.RECOMPUTE)[cycle % 2]
            await soon(client.pause())
            before = [generated(thread) for thread in threads]
            state = await soon(client.update_weights(versions[cycle % 2], version=cycle + 1, policy=policy))
            assert state.version == cycle + 1
            for thread, counts in zip(threads, before, strict=True):
                assert all(count == counts.get(name, 0) for name, count in generated(thread).items())
            await soon(client.resume())
            # Control: tokens do flow between the pauses.
            while state.version not in {s.version for s in (await soon(seen.get())).samples[0].spans}:
                pass
        stop.set()
        await soon(asyncio.gather(*clients))
        await assert_idle(client)
        check_pages(service)
        assert all(thread.broken is None for thread in threads)
