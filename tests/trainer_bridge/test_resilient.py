"""Lost streams: what a client has of a sample and what it asks for again are one sample."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.codec import GenerateEvent
from rollout.errors import InvalidRequest, ReplicaUnavailable, RequestAborted, WeightsMoved
from rollout.serving import Service
from rollout.spans import BegunSample
from rollout.types import (
    Completion,
    GenerateRequest,
    PromptChunk,
    SampleSummary,
    ServerInfo,
    TokenChunk,
    UpdatePolicy,
    VersionSpan,
)
from tests.e2e.chaos.proxy import Proxy
from tests.services import (
    PROMPT,
    StepGate,
    assert_idle,
    bits,
    engine_bits,
    engine_threads,
    mixed_requests,
    sampling,
    soon,
    tensors_of,
    tiny_service,
    tiny_settings,
    version_path,
)
from trainer_bridge import resilient
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.resilient import generate_resumed


@asynccontextmanager
async def behind_a_proxy(path: Path) -> AsyncIterator[tuple[Service, AsyncRolloutClient, Proxy]]:
    """A service, and a client whose connections can be cut."""
    async with tiny_service(path) as (service, _):
        proxy = Proxy(int(service.address.rpartition(":")[2]))
        port = await proxy.start()
        try:
            async with AsyncRolloutClient(f"127.0.0.1:{port}", timeout_s=60) as client:
                yield service, client, proxy
        finally:
            await proxy.stop()


async def test_a_stream_that_is_cut_again_and_again(tiny_qwen3_path: Path) -> None:
    """Two samples, cut at five places each time the request is made: the bits of a bare engine, each event once."""
    (request,) = [r for r in mixed_requests(2) if r.n == 2]
    request = replace(request, sampling=replace(request.sampling, max_tokens=120), prompt_logprobs=True)
    (expected,) = engine_bits(tiny_settings(tiny_qwen3_path), [replace(request, prompt_logprobs=False)])
    async with behind_a_proxy(tiny_qwen3_path) as (service, client, proxy):
        (thread,) = engine_threads(service)
        events: list[GenerateEvent] = []
        asked = asyncio.ensure_future(generate_resumed(client, request, within_s=20, on_event=events.append))
        for steps in (1, 9, 3, 17, 5):
            async with StepGate(thread, steps) as gate:
                await gate.reached()
                proxy.cut()
        result = await soon(asked)
        assert bits(result) == expected and proxy.cuts == 5
        assert result.request_id == request.request_id and result.sampling.max_tokens == 120
        assert sum(len(e.token_ids) for e in events if isinstance(e, TokenChunk)) == 240
        assert len([e for e in events if isinstance(e, PromptChunk)]) == 1 and result.prompt is not None
        nothing = replace(request, n=1, prompt_logprobs=False, resume=BegunSample((), ()))
        assert len(await _tokens(client, nothing)) == 120, "a client may have an id and no token yet"
        calm = await generate_resumed(client, request)
        assert bits(calm) == expected and calm.prompt is not None
        assert calm.prompt.logprobs.tobytes() == result.prompt.logprobs.tobytes()
        await assert_idle(client)


async def test_a_lost_completion(tiny_qwen3_path: Path) -> None:
    """All tokens and ends came, the last message did not."""
    request = GenerateRequest("", PROMPT, sampling(max_tokens=None))
    async with tiny_service(tiny_qwen3_path) as (_, client):
        whole = await generate_resumed(client, request)
        events = client.events
        broken: list[str] = []

        async def without_end(asked: GenerateRequest) -> AsyncIterator[GenerateEvent]:
            async for event in events(asked):
                if isinstance(event, Completion) and not broken:
                    broken.append(event.request_id)
                    raise ReplicaUnavailable("cut")
                yield event

        client.events = without_end  # type: ignore[method-assign,assignment]
        again = await generate_resumed(client, request)
        assert broken and bits(again) == bits(whole)
        assert again.sampling == whole.sampling and again.manifest_digest == whole.manifest_digest


@pytest.mark.parametrize("silent", ["info", "events"])
async def test_a_lost_completion_of_a_gateway_that_is_gone(
    tiny_qwen3_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """The gateway went with the last message: whatever is asked of the next one waits for it as the samples would."""
    request = GenerateRequest("", PROMPT, sampling(max_tokens=20))
    monkeypatch.setattr(resilient, "_FIRST_WAIT_S", 0.001)
    async with tiny_service(tiny_qwen3_path) as (_, client):
        whole = await generate_resumed(client, request)
        events, info = client.events, client.info
        failures: list[str] = []

        def refuse(what: str, times: int) -> None:
            if failures.count(what) < times:
                failures.append(what)
                raise ReplicaUnavailable("failed to connect to all addresses")

        async def broken_events(asked: GenerateRequest) -> AsyncIterator[GenerateEvent]:
            if "cut" in failures and silent == "events":
                refuse("events", 3)
            async for event in events(asked):
                if isinstance(event, Completion):
                    refuse("cut", 1)
                yield event

        async def broken_info(**options: bool) -> ServerInfo:
            if silent == "info":
                refuse("info", 3)
            return await info(**options)

        monkeypatch.setattr(client, "events", broken_events)
        monkeypatch.setattr(client, "info", broken_info)
        again = await soon(generate_resumed(client, request))
        assert bits(again) == bits(whole) and again.sampling == whole.sampling
        assert failures == ["cut", *[silent] * 3]
        failures.clear()
        with pytest.raises(ReplicaUnavailable):
            await soon(generate_resumed(client, request, within_s=-1))


async def test_without_a_seed_the_client_draws_one(tiny_qwen3_path: Path) -> None:
    request = GenerateRequest("", PROMPT, sampling(seed=None, max_tokens=30))
    async with tiny_service(tiny_qwen3_path) as (_, client):
        first, second = [await generate_resumed(client, request) for _ in range(2)]
        assert first.sampling.seed != second.sampling.seed and bits(first) != bits(second)


async def test_nobody_there(tiny_qwen3_path: Path) -> None:
    async with behind_a_proxy(tiny_qwen3_path) as (_, client, proxy):
        await proxy.stop()
        with pytest.raises(ReplicaUnavailable):
            await soon(generate_resumed(client, GenerateRequest("", PROMPT, sampling()), within_s=0.5))
    async with tiny_service(tiny_qwen3_path) as (_, other):
        with pytest.raises(InvalidRequest, match="empty"):
            await generate_resumed(other, GenerateRequest("", (), sampling()))


async def test_a_resumption_takes_over_the_call_before_it(tiny_qwen3_path: Path) -> None:
    """The gateway has not noticed that the first stream is dead; its client has."""
    async with tiny_service(tiny_qwen3_path) as (service, client):
        calm = await client.generate(PROMPT, sampling(max_tokens=60))
        (thread,) = engine_threads(service)
        first = client.stream(PROMPT, sampling(max_tokens=60), request_id="x")
        async with StepGate(thread, 6) as gate:
            chunk = await soon(anext(first))
            assert isinstance(chunk, TokenChunk)
            have = tuple(chunk.token_ids.tolist())
            await gate.reached()
            request = GenerateRequest(
                "x", PROMPT, sampling(max_tokens=60), resume=BegunSample(have, (VersionSpan(0, 0, len(have)),))
            )
            rest = asyncio.ensure_future(_tokens(client, request))
            gate.open()
            assert [*have, *await soon(rest)] == calm.samples[0].token_ids.tolist()
        with pytest.raises(RequestAborted, match="taken over"):
            await soon(_rest(first))
        await assert_idle(client)


async def _rest(events: AsyncIterator[GenerateEvent]) -> list[GenerateEvent]:
    return [event async for event in events]


async def _tokens(client: AsyncRolloutClient, request: GenerateRequest) -> list[int]:
    return [t for e in [e async for e in client.events(request)] if isinstance(e, TokenChunk) for t in e.token_ids]


async def test_only_the_end_was_lost(tiny_qwen3_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream breaks between the last token and the sample's end: the rest is that end, and the answer is whole."""
    async with tiny_service(tiny_qwen3_path) as (_, client):
        request = GenerateRequest("", PROMPT, sampling(max_tokens=9), row_digests=True)
        calm = await generate_resumed(client, request)
        events, broken = client.events, []

        async def cut(one: GenerateRequest) -> AsyncIterator[GenerateEvent]:
            async with aclosing(events(one)) as stream:
                async for event in stream:
                    if isinstance(event, SampleSummary) and not broken:
                        broken.append(event)
                        raise ReplicaUnavailable("the stream broke")
                    yield event

        monkeypatch.setattr(client, "events", cut)
        seen: list[GenerateEvent] = []
        again = await generate_resumed(client, request, on_event=seen.append)
        assert len(broken) == 1 and bits(again) == bits(calm)
        assert [s.finish for s in again.samples] == [s.finish for s in calm.samples]
        assert sum(len(e.token_ids) for e in seen if isinstance(e, TokenChunk)) == 9
        await assert_idle(client)


async def test_d6_the_rest_is_drawn_as_the_beginning_was(tiny_qwen3_path: Path) -> None:
    """Without its seed the service drew a new one for the rest, and two streams of noise made one sample."""
    begun = BegunSample((5, 6), (VersionSpan(0, 0, 2),))
    async with tiny_service(tiny_qwen3_path) as (_, client):
        plain = GenerateRequest("x", PROMPT, sampling(max_tokens=6), resume=begun)
        for odd, match in (
            (sampling(seed=None, max_tokens=6), "resume without a seed"),
            (sampling(max_tokens=6, barred_token_ids=(6,)), r"resume.tokens\[1\] = 6 is barred"),
        ):
            with pytest.raises(InvalidRequest, match=match):
                await _tokens(client, replace(plain, sampling=odd))
        for fine in (sampling(seed=None, max_tokens=6, temperature=0.0), sampling(max_tokens=6, barred_token_ids=(7,))):
            assert len(await _tokens(client, replace(plain, sampling=fine))) == 4
        unbegun = replace(plain, sampling=sampling(seed=None, max_tokens=6), resume=BegunSample((), ()))
        assert len(await _tokens(client, unbegun)) == 6
        await assert_idle(client)


async def test_weights_that_are_gone(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path) as (_, client):
        begun = BegunSample((5,), (VersionSpan(0, 0, 1),))
        request = GenerateRequest("x", PROMPT, sampling(max_tokens=6), resume=begun)
        assert len(await _tokens(client, request)) == 5
        tensors = tensors_of(version_path(tiny_qwen3_path, 1))
        await client.update_weights(tensors, version=1, policy=UpdatePolicy.WAIT)
        with pytest.raises(WeightsMoved, match="submit the request anew"):
            await _tokens(client, request)
        await client.update_weights(tensors_of(tiny_qwen3_path), version=2, policy=UpdatePolicy.RECOMPUTE)
        newer = replace(request, resume=replace(begun, spans=(VersionSpan(1, 0, 1),)))
        assert len(await _tokens(client, newer)) == 5, "control: that policy lets samples cross"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"n": 2}, "one at a time"),
        ({"resume": BegunSample((5, 6), (VersionSpan(0, 0, 1),))}, "do not cover"),
        ({"resume": BegunSample((5, 6), (VersionSpan(0, 0, 1), VersionSpan(0, 0, 2)))}, "do not cover"),
        ({"resume": BegunSample((5, 6), (VersionSpan(-3, 0, 2),))}, "do not cover"),
        ({"resume": BegunSample((), (VersionSpan(0, 0, 1),))}, "do not cover"),
        ({"resume": BegunSample((5,) * 41, (VersionSpan(0, 0, 41),))}, "and may have"),
        ({"resume": BegunSample((64,), (VersionSpan(0, 0, 1),))}, r"resume\.tokens"),
    ],
)
async def test_beginnings_that_cannot_be(tiny_qwen3_path: Path, fields: dict[str, object], match: str) -> None:
    base = {"resume": BegunSample((5,), (VersionSpan(0, 0, 1),))}
    async with tiny_service(tiny_qwen3_path) as (_, client):
        request = GenerateRequest("x", PROMPT, sampling(), **(base | fields))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=match):
            await _tokens(client, request)
        await assert_idle(client)
