"""Priorities, clients, alternatives and prompt log-probs over gRPC: who goes first changes, no bit does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import CapacityExceeded, InvalidRequest
from rollout.types import ScoreSequence
from tests.services import (
    PROMPT,
    assert_idle,
    bits,
    check_pages,
    engine_threads,
    loop_turns,
    queued,
    sampling,
    soon,
    tiny_service,
)
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.client import RolloutClient

LONG = tuple(2 + i * 13 % 60 for i in range(40))


async def order_of_ends(
    service: Any, client: AsyncRolloutClient, asks: list[tuple[str, AsyncRolloutClient, int]]
) -> list[str]:
    """Names in the order in which one slot serves them; all were queued before any ran."""
    (thread,) = engine_threads(service)
    ended: list[str] = []

    async def ask(name: str, who: AsyncRolloutClient, priority: int) -> None:
        await who.generate(PROMPT, sampling(max_tokens=4), request_id=name, priority=priority)

    await client.pause()
    tasks = []
    for name, who, priority in asks:
        task = await queued(thread, ask(name, who, priority))
        await loop_turns(thread, 1)
        tasks.append(task)
    real = thread.engine.scheduler.remove

    def remove(sequence: Any, **options: Any) -> None:
        ended.append(sequence.sample_id.split("/")[0])
        real(sequence, **options)

    thread.engine.scheduler.remove = remove  # type: ignore[method-assign]
    await client.resume()
    await soon(asyncio.gather(*tasks))
    thread.engine.scheduler.remove = real  # type: ignore[method-assign]
    return ended


async def test_priority_and_client_reach_the_scheduler(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, max_running=1) as (service, client):
        a, b = (AsyncRolloutClient(service.address, client_id=name) for name in ("a", "b"))
        async with a, b:
            flood = [(f"a{i}", a, 0) for i in range(4)] + [(f"b{i}", b, 0) for i in range(2)]
            assert await order_of_ends(service, client, flood) == ["a0", "b0", "a1", "b1", "a2", "a3"]
            anonymous = [(name, client, 0) for name in ("x", "y", "z")]
            assert await order_of_ends(service, client, anonymous) == ["x", "y", "z"]
            urgent = [("low", a, -3), ("plain", a, 0), ("high", a, 3)]
            assert await order_of_ends(service, client, urgent) == ["high", "plain", "low"]
        await assert_idle(client)


async def test_priority_and_client_change_no_bit(tiny_qwen3_path: Path) -> None:
    prompts = [LONG[i:] for i in range(4)]
    params = sampling(max_tokens=60)
    async with tiny_service(tiny_qwen3_path, kv_cache_tokens=128) as (service, client):
        alone = [bits(await client.generate(prompt, params, row_digests=True)) for prompt in prompts]
        clients = [AsyncRolloutClient(service.address, client_id=f"c{i}") for i in range(3)]
        calls = [
            clients[i % 3].generate(prompts[i % 4], params, row_digests=True, priority=i % 5 - 2) for i in range(12)
        ]  # fmt: skip
        results = await soon(asyncio.gather(*calls))
        assert [bits(result) for result in results] == alone * 3
        assert sum(t.engine.scheduler.num_preemptions for t in engine_threads(service)) > 0
        for each in clients:
            await each.close()
        check_pages(service)


async def test_limits_are_told_and_kept(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, max_running=1, max_waiting=8, max_waiting_per_client=3) as (_, client):
        limits = (await client.info()).limits
        assert (limits["max_priority"], limits["max_top_logprobs"], limits["max_waiting"]) == (10, 64, 8)
        for fields in ({"priority": 11}, {"priority": -11}, {"top_logprobs": 65}, {"top_logprobs": -1}):
            with pytest.raises(InvalidRequest, match=next(iter(fields))) as refused:
                await client.generate(PROMPT, sampling(), **fields)  # type: ignore[arg-type]
            assert refused.value.field == next(iter(fields))
            with pytest.raises(InvalidRequest, match=next(iter(fields))):
                await client.score([ScoreSequence(LONG)], **fields)  # type: ignore[arg-type]
        await client.pause()
        with pytest.raises(CapacityExceeded, match="max_waiting_per_client"):
            await client.generate(PROMPT, sampling(), n=4)
        with pytest.raises(CapacityExceeded, match=r"has 3 sequences"):
            await client.score([ScoreSequence(LONG)] * 4)
        await client.resume()
        assert len((await soon(client.generate(PROMPT, sampling(), n=3))).samples) == 3
        await assert_idle(client)


async def test_an_answer_that_would_not_fit_is_refused_before_the_work(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path) as (service, client):
        settings = service.pool._settings
        server = settings.server.model_copy(update={"max_message_bytes": 65_536})
        service.pool._settings = settings.model_copy(update={"server": server})
        with pytest.raises(InvalidRequest, match=r"9800 positions with 64 alternatives .* 65536 .*max_message_bytes"):
            await client.score([ScoreSequence(LONG * 5 + (2,))] * 49, top_logprobs=64)
        assert len((await client.score([ScoreSequence(LONG)] * 3, top_logprobs=64)).scores) == 3


def test_alternatives_and_prompt_scores_through_the_blocking_client(tiny_qwen3_path: Path) -> None:
    """Generate and Score speak of the same rows; n samples get one prompt."""

    async def run() -> None:
        async with tiny_service(tiny_qwen3_path) as (service, _):
            await asyncio.to_thread(compare, service.address)

    def compare(address: str) -> None:
        with RolloutClient(address, client_id="trainer") as client:
            result = client.generate(
                LONG, sampling(max_tokens=9), n=3, top_logprobs=4, prompt_logprobs=True, row_digests=True
            )
            prompt = result.prompt
            assert prompt is not None and prompt.top is not None and len(prompt.logprobs) == 39
            assert [s.num_cached_tokens for s in result.samples] == [0, 39, 39]
            for sample in result.samples:
                whole = (*LONG, *sample.token_ids.tolist())
                (score,) = client.score([ScoreSequence(whole)], top_logprobs=4, row_digests=True, priority=2).scores
                assert score.top is not None and sample.top is not None and score.row_digests is not None
                assert prompt.row_digests is not None
                assert score.logprobs.tobytes() == prompt.logprobs.tobytes() + sample.policy_logprobs.tobytes()
                assert score.top.token_ids.tobytes() == prompt.top.token_ids.tobytes() + sample.top.token_ids.tobytes()
                assert score.top.logprobs.tobytes() == prompt.top.logprobs.tobytes() + sample.top.logprobs.tobytes()
                assert score.row_digests[:39].tolist() == prompt.row_digests.tolist()
            plain = client.generate(LONG, sampling(max_tokens=9), n=3, row_digests=True)
            assert bits(plain) == bits(result) and plain.prompt is None and plain.samples[0].top is None

    asyncio.run(run())


async def test_turns_find_what_came_before(tiny_qwen3_path: Path) -> None:
    """Token in, token out: each turn's prompt is the last one's ids and the tool's; cold it says the same."""
    prompt, cached = LONG, []
    async with tiny_service(tiny_qwen3_path) as (_, client), tiny_service(tiny_qwen3_path, prefix_cache=False) as cold:
        for turn in range(3):
            result = await client.generate(prompt, sampling(seed=turn, max_tokens=20))
            assert bits(result) == bits(await cold[1].generate(prompt, sampling(seed=turn, max_tokens=20)))
            cached.append(result.samples[0].num_cached_tokens)
            prompt = (*result.prompt_ids, *result.samples[0].token_ids.tolist(), 9, 8, 7)
    # Each turn: all of the last one's ids but for its last token, which was never fed.
    assert cached == [0, 40 + 19, 63 + 19]
