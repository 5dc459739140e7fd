"""Over gRPC: what was generated is what is scored is what the trainer's forward says, bit for bit."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rollout.assets import tiny_model
from rollout.types import GenerateRequest, LogprobMode, ScoreSequence
from tests.services import (
    PROMPT,
    assert_idle,
    bits,
    engine_bits,
    mixed_requests,
    sampling,
    soon,
    tiny_service,
    tiny_settings,
    training_bits,
)
from trainer_bridge.client import RolloutClient
from trainer_bridge.wire import GenerateResult


def sequences(results: list[GenerateResult]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(r.prompt_ids, tuple(s.token_ids.tolist())) for r in results for s in r.samples]


def sampled(results: list[GenerateResult]) -> list[tuple[bytes, bytes]]:
    return [(b.policy, b.digests) for r in results for b in bits(r)]


@pytest.mark.parametrize("replicas", [1, 2])
async def test_the_service_answers_as_a_bare_engine(tiny_qwen3_path: Path, replicas: int) -> None:
    requests = mixed_requests(7)
    expected = engine_bits(tiny_settings(tiny_qwen3_path), requests)
    async with tiny_service(tiny_qwen3_path, replicas=replicas) as (_, client):
        alone = [bits(r) for r in await soon(client.generate_many(requests, concurrency=1))]
        crowd = [bits(r) for r in await soon(client.generate_many(requests[::-1], concurrency=64))][::-1]
        assert alone == crowd == expected
        await assert_idle(client)
        other = [dataclasses.replace(requests[0], sampling=sampling(seed=1, max_tokens=6))]
        assert [bits(r) for r in await client.generate_many(other)] != expected[:1], "control: another seed"


async def test_both_clients_agree(tiny_qwen3_path: Path) -> None:
    requests = mixed_requests(4)
    async with tiny_service(tiny_qwen3_path) as (service, client):
        theirs = [bits(r) for r in await soon(client.generate_many(requests))]

        def blocking() -> list[GenerateResult]:
            with RolloutClient(service.address) as other:
                return other.generate_many(requests)

        assert [bits(r) for r in await soon(asyncio.to_thread(blocking))] == theirs


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
async def test_generate_score_and_training_forward_agree(kind: str, tmp_path: Path) -> None:
    path = tiny_model("qwen3" if kind == "qwen3" else "llama", tmp_path / kind)
    prompts = [tuple(2 + (i * 11 + n) % 60 for i in range(n)) for n in (1, 15, 16, 17, 24, 25, 60)]
    requests = [
        GenerateRequest(f"r{i}", p, sampling(seed=i, max_tokens=35), row_digests=True) for i, p in enumerate(prompts)
    ]
    async with tiny_service(path, replicas=2) as (_, client):
        results = await soon(client.generate_many(requests))
        pairs = sequences(results)
        asked = [ScoreSequence(prompt + ids, start=len(prompt)) for prompt, ids in pairs]
        scored = await soon(client.score(asked, row_digests=True))
    score_bits = [(s.logprobs.tobytes(), s.row_digests.tobytes()) for s in scored.scores if s.row_digests is not None]
    assert sampled(results) == score_bits == training_bits(path, pairs)
    # Control: one other token in the middle changes everything after it, and nothing before.
    prompt, ids = pairs[-1]
    (changed,) = training_bits(path, [(prompt, (*ids[:10], (ids[10] + 1) % 64, *ids[11:]))])
    ours = np.frombuffer(sampled(results)[-1][1], np.uint64)
    theirs = np.frombuffer(changed[1], np.uint64)
    assert (ours[:11] == theirs[:11]).all() and (ours[11:] != theirs[11:]).all()


async def test_temperature_is_part_of_the_agreement(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path) as (_, client):
        result = await client.generate(PROMPT, sampling(temperature=0.7), row_digests=True)
        (pair,) = sequences([result])
        sequence = [ScoreSequence(pair[0] + pair[1], start=len(PROMPT))]
        warm = await client.score(sequence, temperature=0.7, row_digests=True)
        plain = await client.score(sequence, row_digests=True)
    ours = bits(result)[0]
    assert warm.scores[0].logprobs.tobytes() == ours.policy
    assert training_bits(tiny_qwen3_path, [pair], 0.7) == [(ours.policy, ours.digests)]
    assert warm.temperature == result.sampling.temperature
    assert plain.scores[0].logprobs.tobytes() != ours.policy, "control: another temperature"
    digests = plain.scores[0].row_digests
    assert digests is not None and digests.tobytes() == ours.digests, "rows are hashed before the temperature"


async def test_greedy_is_scored_with_temperature_one(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path) as (_, client):
        result = await client.generate(PROMPT, sampling(temperature=0.0), row_digests=True)
        (pair,) = sequences([result])
        sequence = [ScoreSequence(pair[0] + pair[1], start=len(PROMPT))]
        zero, one = await client.score(sequence, temperature=0.0), await client.score(sequence)
    assert (result.mode, zero.mode, one.mode) == (LogprobMode.GREEDY_T1, LogprobMode.GREEDY_T1, LogprobMode.TEMPERED)
    assert zero.scores[0].logprobs.tobytes() == one.scores[0].logprobs.tobytes() == bits(result)[0].policy
    assert training_bits(tiny_qwen3_path, [pair], 0.0)[0][0] == bits(result)[0].policy


@pytest.mark.model
async def test_the_real_model_agrees_too(smollm2_path: Path) -> None:
    """bfloat16, 49152 ids, text in and out."""
    from rollout.config import Settings
    from rollout.serving import running_service
    from rollout.worker import load_served_model
    from trainer_bridge.aio_client import AsyncRolloutClient
    from trainer_bridge.forward import TrainingForward, TrainingSample

    settings = Settings.model_validate(
        {
            "model": {"path": str(smollm2_path), "dtype": "bfloat16"},
            "engine": {"kv_cache_tokens": 4096, "chunk_size": 16, "max_batch_tokens": 64},
            "server": {"port": 0},
        }
    )
    async with running_service(settings, in_process=True) as service, AsyncRolloutClient(service.address) as client:
        result = await asyncio.wait_for(
            client.generate("The capital of France is", sampling(max_tokens=12), n=2, row_digests=True), 60
        )
    forward = TrainingForward(load_served_model(settings, smollm2_path))
    prompt = np.array(result.prompt_ids, np.int32)
    import torch

    with torch.no_grad(), forward.aligned():
        out = forward([TrainingSample(prompt, s.token_ids) for s in result.samples], digests=True)
    ours = [(b.policy, b.digests) for b in bits(result)]
    theirs = [(lp.numpy(), d) for lp, d in zip(out.split(), out.split_digests(), strict=True)]
    assert ours == [(lp.tobytes(), d.tobytes()) for lp, d in theirs if d is not None]
    assert ours[0] != ours[1], "control: siblings differ"
    assert all(s.text for s in result.samples)
