"""Cases A2, A7, B1, B2, C3, C4, D1, D2, D3, K4 against a whole service over gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.sampling import kept_tokens
from rollout.types import FinishReason, GenerateRequest, LogprobMode, SamplingParams, ScoreSequence
from tests.services import (
    PROMPT,
    assert_idle,
    bits,
    make_engine,
    sampling,
    soon,
    tiny_service,
    tiny_settings,
    training_bits,
    word_tokenizer,
)
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.wire import SampledSequence

EOS = 1


def assert_lengths(sample: SampledSequence) -> None:
    count = len(sample.token_ids)
    assert len(sample.policy_logprobs) == len(sample.behavior_logprobs) == len(sample.mask) == count
    assert sum(span.end - span.start for span in sample.spans) == count
    assert np.isfinite(sample.policy_logprobs).all() and (sample.mask == 1).all()


def rows(path: Path, ids: tuple[int, ...], temperature: float) -> np.ndarray:
    """Log-prob rows [S - 1, V] of a sequence, by dense scoring of every id at every position."""
    import torch

    from rollout.attention import PackedStep
    from rollout.logprobs import policy_logprob_rows

    model = make_engine(tiny_settings(path)).model
    with torch.no_grad(), model.kernels.invariant_mode():
        edges = torch.tensor([0, len(ids)], dtype=torch.int32)
        hidden = model.hidden_states(torch.tensor(ids), torch.arange(len(ids)), PackedStep(model.kernels, edges))
        logits = model.logits(hidden[:-1])
        warm = torch.full((len(ids) - 1,), temperature)
        return policy_logprob_rows(logits, warm, model.spec.vocab_size).numpy()


async def test_a2_both_logprobs_come_with_their_label(tiny_qwen3_path: Path) -> None:
    params = sampling(temperature=0.7, top_k=5, max_tokens=20)
    async with tiny_service(tiny_qwen3_path) as (_, client):
        filtered = await client.generate(PROMPT, params)
        free = await client.generate(PROMPT, dataclasses.replace(params, top_k=0))
    (sample,) = filtered.samples
    ids = tuple(sample.token_ids.tolist())
    assert filtered.mode is LogprobMode.TEMPERED
    # Policy: the trainer's values, whatever the filter. Behavior: renormalised over the five that were kept.
    assert training_bits(tiny_qwen3_path, [(PROMPT, ids)], 0.7)[0][0] == sample.policy_logprobs.tobytes()
    table = rows(tiny_qwen3_path, PROMPT + ids, 0.7)[len(PROMPT) - 1 :]
    for row, token, policy, behavior in zip(table, ids, sample.policy_logprobs, sample.behavior_logprobs, strict=True):
        keep = kept_tokens(row, params, np.empty(0, np.int64))
        assert keep.sum() == 5 and keep[token]
        mass = np.exp(row[keep].astype(np.float64)).sum()
        assert behavior == np.float32(float(policy) - np.log(mass)) > policy
    (plain,) = free.samples
    assert plain.behavior_logprobs.tobytes() == plain.policy_logprobs.tobytes(), "control: no filter, the same bits"


async def test_a7_greedy_beside_sampled(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path) as (_, client):
        alone = await client.generate(PROMPT, sampling())
        greedy, beside = await soon(
            asyncio.gather(client.generate(PROMPT, sampling(temperature=0.0)), client.generate(PROMPT, sampling()))
        )
        other_seed = await client.generate(PROMPT, sampling(seed=99, temperature=0.0))
    assert bits(beside) == bits(alone)
    assert (greedy.mode, beside.mode) == (LogprobMode.GREEDY_T1, LogprobMode.TEMPERED)
    (sample,) = greedy.samples
    ids = tuple(sample.token_ids.tolist())
    assert ids == tuple(rows(tiny_qwen3_path, PROMPT + ids, 1.0)[len(PROMPT) - 1 :].argmax(1))
    assert_lengths(sample)
    assert bits(other_seed) == bits(greedy), "greedy has no seed"
    assert bits(greedy) != bits(beside), "control"


async def test_b1_b2_scores_depend_on_no_earlier_request(tiny_qwen3_path: Path) -> None:
    ids = tuple(2 + i * 13 % 60 for i in range(20))
    orders = [(12, 20, 20), (20, 12, 12), (12,), (20,)]
    seen: dict[int, set[bytes]] = {12: set(), 20: set()}
    for order in orders:
        async with tiny_service(tiny_qwen3_path) as (_, client):
            for count in order:
                (score,) = (await client.score([ScoreSequence(ids[:count])])).scores
                assert np.isfinite(score.logprobs).all()
                seen[count].add(score.logprobs.tobytes())
            # Lengths around a page and a chunk, cold and warm.
            for length in (2, 15, 16, 17):
                cold, warm = [await client.score([ScoreSequence(ids[:length])]) for _ in range(2)]
                assert cold.scores[0].logprobs.tobytes() == warm.scores[0].logprobs.tobytes()
    assert [len(values) for values in seen.values()] == [1, 1]
    (short,), (long,) = seen[12], seen[20]
    assert long.startswith(short) and training_bits(tiny_qwen3_path, [(ids[:1], ids[1:])])[0][0] == long


async def ends(client: AsyncRolloutClient, **fields: Any) -> SampledSequence:
    (sample,) = (await client.generate(PROMPT, SamplingParams(**({"seed": 11, "max_tokens": 200} | fields)))).samples
    assert_lengths(sample)
    return sample


async def test_c3_every_way_to_stop_keeps_the_lengths(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    """EOS, a second stop id, and a stop string of two tokens, with the string kept in the text or not."""
    words = word_tokenizer(tmp_path / "words", defined=64)
    async with tiny_service(tiny_qwen3_path, tokenizer=words) as (_, client):
        free = await ends(client, ignore_eos=True)
        ids = free.token_ids.tolist()
        # The first pair of tokens of which none came before.
        at = next(i for i in range(4, 190) if not {ids[i], ids[i + 1]} & {*ids[:i], EOS} and ids[i] != ids[i + 1])
        before, last = ids[at], ids[at + 1]
        for stops in ((last,), (last, *set(range(64)) - set(ids[: at + 1]) - {EOS, last})):
            by_id = await ends(client, ignore_eos=True, stop_token_ids=stops)
            assert (by_id.finish.reason, by_id.finish.stop_token_id) == (FinishReason.STOP, last)
            assert by_id.token_ids.tolist() == ids[: at + 2]
        text = f"w{before} w{last}"
        for keep in (True, False):
            by_text = await ends(client, ignore_eos=True, stop=("never", text), include_stop=keep)
            assert (by_text.finish.reason, by_text.finish.stop_string) == (FinishReason.STOP, text)
            assert by_text.token_ids.tolist() == ids[: at + 2], "ids are never trimmed"
            assert by_text.policy_logprobs.tobytes() == free.policy_logprobs[: at + 2].tobytes()
            assert by_text.text is not None and by_text.text.endswith(text) == keep
        assert free.finish.reason is FinishReason.LENGTH, "control: without them it goes on"
        await assert_idle(client)


async def test_c4_a_sampled_eos_is_kept_and_scored(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path) as (_, client):
        requests = [GenerateRequest(f"r{i}", PROMPT, SamplingParams(seed=i, max_tokens=120)) for i in range(8)]
        samples = [r.samples[0] for r in await soon(client.generate_many(requests))]
        stopped = [s for s in samples if s.finish.reason is FinishReason.STOP]
        assert stopped, "of 960 tokens one should be EOS"
        for sample in stopped:
            assert_lengths(sample)
            assert (sample.finish.stop_token_id, sample.token_ids[-1], sample.mask[-1]) == (EOS, EOS, 1)
            assert EOS not in sample.token_ids[:-1]
            ids = tuple(sample.token_ids.tolist())
            (again,) = (await client.score([ScoreSequence(PROMPT + ids, start=len(PROMPT))])).scores
            assert again.logprobs.tobytes() == sample.policy_logprobs.tobytes()
        seed = next(i for i, s in enumerate(samples) if s is stopped[0])
        longer = await ends(client, seed=seed, ignore_eos=True, max_tokens=120)
        assert longer.token_ids[: len(stopped[0].token_ids)].tolist() == stopped[0].token_ids.tolist()
        assert len(longer.token_ids) == 120, "control: ignore_eos goes past it"


async def test_d1_siblings_differ_and_do_not_depend_on_n(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, replicas=2) as (_, client):
        eight = bits(await client.generate(PROMPT, sampling(), n=8))
        three = bits(await client.generate(PROMPT, sampling(), n=3))
        calls = [client.generate(PROMPT, sampling(), sample_index=i) for i in range(8)]
        singles = [bits(r)[0] for r in await soon(asyncio.gather(*calls))]
    assert three == eight[:3] and singles == eight
    assert len({sample.ids for sample in eight}) == 8


async def test_d2_without_a_seed_runs_differ_and_can_be_repeated(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, replicas=2) as (_, client):
        drawn = await soon(asyncio.gather(*(client.generate(PROMPT, sampling(seed=None)) for _ in range(8))))
        seeds = {r.sampling.seed for r in drawn}
        assert len(seeds) == 8 and None not in seeds
        assert len({bits(r)[0].ids for r in drawn}) == 8
        for result in drawn[:3]:
            again = await client.generate(PROMPT, result.sampling)
            assert bits(again) == bits(result)


async def test_d3_a_neighbour_with_other_parameters_changes_nothing(tiny_qwen3_path: Path) -> None:
    neighbours = [{"top_k": 2}, {"temperature": 0.0}, {"top_p": 0.3, "min_p": 0.1}, {"barred_token_ids": (7, 8)}]
    async with tiny_service(tiny_qwen3_path) as (_, client):
        alone = bits(await client.generate(PROMPT, sampling(), row_digests=True))
        for count in range(1, len(neighbours) + 1):
            calls = [client.generate(PROMPT, sampling(**fields)) for fields in neighbours[:count]]
            mine, *theirs = await soon(asyncio.gather(client.generate(PROMPT, sampling(), row_digests=True), *calls))
            assert bits(mine) == alone
            assert all(bits(other)[0].ids != alone[0].ids for other in theirs), "control: the parameters matter"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limit"), [(3, 10, "max_tokens"), (500, 40, "context"), (500, None, "context")]
)
async def test_k4_a_cut_sample_says_what_cut_it(
    tiny_qwen3_path: Path, prompt: int, max_tokens: int | None, limit: str
) -> None:
    async with tiny_service(tiny_qwen3_path) as (_, client):
        result = await client.generate([3] * prompt, sampling(max_tokens=max_tokens))
    (sample,) = result.samples
    assert (sample.finish.reason, sample.finish.limit) == (FinishReason.LENGTH, limit)
    assert len(sample.token_ids) == (10 if limit == "max_tokens" else 12) == result.sampling.max_tokens
