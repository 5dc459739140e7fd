"""Cases G1 and G4 over gRPC: a resume's budget counts what was generated; a fresh start knows nothing of before."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import NotFound, UnsupportedFeature
from rollout.types import FinishReason, UpdatePolicy
from tests.services import (
    StepGate,
    assert_idle,
    bits,
    engine_threads,
    queued,
    sampling,
    soon,
    tensors_of,
    tiny_service,
    version_path,
    word_tokenizer,
)
from trainer_bridge.collect import records_of
from trainer_bridge.resume import resume_request
from trainer_bridge.turns import merge_turns
from trainer_bridge.wire import GenerateResult

PROMPT = (3, 4, 5, 6, 7)
BUDGET = 10


async def stopped(service: Any, client: Any, steps: int, **fields: Any) -> GenerateResult:
    """A request of two samples, aborted after so many steps."""
    (thread,) = engine_threads(service)
    async with StepGate(thread, steps) as gate:
        asked = client.generate(PROMPT, sampling(max_tokens=BUDGET, **fields), n=2, sample_index=1, request_id="x")
        task = asyncio.ensure_future(asked)
        await gate.reached()
        abort = await queued(thread, client.abort("x"))
        gate.open()
        assert await soon(abort) == 2
    result: GenerateResult = await soon(task)
    return result


async def test_g1_a_resume_ends_at_the_budget_of_the_whole(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path) as (service, client):
        whole = await client.generate(PROMPT, sampling(max_tokens=BUDGET), n=2, sample_index=1)
        for done in range(1, BUDGET):
            first = await stopped(service, client, done)
            for index in (1, 2):
                again = resume_request(first, index)
                assert again is not None and again.sampling.max_tokens == BUDGET - done
                assert again.prompt_ids[:5] == PROMPT and len(again.prompt_ids) == 5 + done
                (rest,) = await client.generate_many([again])
                parts = [r for r in (*records_of([first]), *records_of([rest])) if r.sample_index == index]
                row = merge_turns(parts)
                expected = next(s for s in whole.samples if s.sample_index == index)
                assert row.token_ids.tolist() == expected.token_ids.tolist() and len(row.token_ids) == BUDGET
                assert row.policy_logprobs.tobytes() == expected.policy_logprobs.tobytes()
                assert rest.samples[0].finish.reason is row.finish is FinishReason.LENGTH
        await assert_idle(client)


async def test_g1_counting_the_generated_as_prompt_is_caught(tiny_qwen3_path: Path) -> None:
    """Negative control: the old budget on top of the new prompt."""
    async with tiny_service(tiny_qwen3_path) as (service, client):
        first = await stopped(service, client, 4)
        again = resume_request(first, 1)
        assert again is not None
        wrong = dataclasses.replace(again, sampling=dataclasses.replace(again.sampling, max_tokens=BUDGET))
        (rest,) = await client.generate_many([wrong])
        assert 4 + len(rest.samples[0].token_ids) > BUDGET


async def test_g4_a_fresh_start_is_whole_and_of_one_version(tiny_qwen3_path: Path) -> None:
    """Aborted under version 0, sent again as it was under version 1: nothing of the first try is in it."""
    new = version_path(tiny_qwen3_path, 1)
    async with tiny_service(new) as (_, client):
        fresh = await client.generate(PROMPT, sampling(max_tokens=BUDGET), n=2, sample_index=1)
    async with tiny_service(tiny_qwen3_path) as (service, client):
        first = await stopped(service, client, 4)
        await client.update_weights(tensors_of(new), version=1, policy=UpdatePolicy.ABORT)
        again = await client.generate(PROMPT, first.sampling, n=2, sample_index=1, request_id="x")
        assert again.prompt_ids == PROMPT and bits(again) == bits(fresh)
        for sample in again.samples:
            assert [(s.version, s.start, s.end) for s in sample.spans] == [(1, 0, BUDGET)]
        mixed = resume_request(first, 1)
        assert mixed is not None
        (rest,) = await client.generate_many([mixed])
        row = merge_turns([records_of([first])[0], *records_of([rest])])
        assert [s.version for s in row.spans] == [0, 1], "control: a resume says that it is of two versions"


async def test_what_cannot_go_on(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, tokenizer=word_tokenizer(tmp_path / "words")) as (service, client):
        ended = await client.generate(PROMPT, sampling(max_tokens=BUDGET))
        assert resume_request(ended, 0) is None
        with pytest.raises(NotFound, match=r"no sample 3; it has \[0\]"):
            resume_request(ended, 3)
        with pytest.raises(UnsupportedFeature, match="stop_token_ids"):
            resume_request(await stopped(service, client, 2, stop=("never",)), 1)
