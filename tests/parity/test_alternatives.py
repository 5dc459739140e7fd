"""Top-n and prompt log-probs: the same bits by decode, prefill, Score and the training forward (B1, B2, B6, D10)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from rollout.attention import PackedStep
from rollout.errors import InvalidRequest, ParityError
from rollout.logprobs import policy_logprob_rows
from rollout.model import SharedModel
from rollout.types import PromptChunk, SampleEvent, SampleRequest, ScoreSequence, TokenChunk, TopLogprobs
from tests.engines import build_engine, drain, random_prompt, run, sample

PROMPT = random_prompt(37, 3)


def asked(request: SampleRequest, **fields: Any) -> SampleRequest:
    return dataclasses.replace(request, **fields)


def listen(engine: Any, *requests: SampleRequest) -> dict[str, tuple[list[TokenChunk], list[PromptChunk]]]:
    """Chunks and prompts of each request, run together."""
    said: dict[str, tuple[list[TokenChunk], list[PromptChunk]]] = {r.sample_id: ([], []) for r in requests}
    for request in requests:
        engine.add(engine.effective_request(request))
    with engine.model.kernels.invariant_mode():
        while engine.live_ids:
            for event in engine.step():
                assert isinstance(event, SampleEvent)
                chunks, prompts = said[event.sample_id]
                if event.prompt is not None:
                    assert not chunks, "the prompt comes before the first token"
                    prompts.append(event.prompt)
                if event.chunk is not None:
                    chunks.append(event.chunk)
            engine.scheduler.check()
    return said


def dense_rows(model: SharedModel, ids: tuple[int, ...], temperature: float) -> np.ndarray:
    """Log-prob rows [S - 1, V] by the training side's packed pass."""
    with torch.no_grad(), model.kernels.invariant_mode():
        edges = torch.tensor([0, len(ids)], dtype=torch.int32)
        hidden = model.hidden_states(torch.tensor(ids), torch.arange(len(ids)), PackedStep(model.kernels, edges))
        logits = model.logits(hidden[:-1])
        return policy_logprob_rows(logits, torch.full((len(ids) - 1,), temperature), model.spec.vocab_size).numpy()


def expect(row: np.ndarray, top: TopLogprobs, at: int, n: int) -> None:
    ids = sorted(range(len(row)), key=lambda i: (-row[i], i))[:n]
    assert top.token_ids[at].tolist() == ids
    assert top.logprobs[at].tobytes() == row[ids].tobytes()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_alternatives_are_those_of_the_training_rows(model: SharedModel, temperature: float) -> None:
    request = asked(
        sample(PROMPT, temperature=temperature, top_k=5, max_tokens=20), top_logprobs=4, prompt_logprobs=True
    )
    chunks, (prompt,) = listen(build_engine(model), request)["s"]
    ids = (*PROMPT, *(int(c.token_ids[0]) for c in chunks))
    rows = dense_rows(model, ids, temperature)
    assert prompt.start == 1 and prompt.top is not None and len(prompt.logprobs) == 36
    for position in range(1, len(ids)):
        row = rows[position - 1]
        if position < 37:
            assert prompt.logprobs[position - 1].tobytes() == row[ids[position]].tobytes()
            expect(row, prompt.top, position - 1, 4)
        else:
            chunk = chunks[position - 37]
            assert chunk.top is not None and chunk.policy_logprobs.tobytes() == row[ids[position]].tobytes()
            expect(row, chunk.top, 0, 4)
    assert len({int(top) for top in prompt.top.token_ids[:, 0]}) > 1, "B6: not one row for all positions"


def test_score_gives_the_same_alternatives_cold_and_warm(model: SharedModel) -> None:
    engine = build_engine(model)
    ids = random_prompt(50, 8)
    rows = dense_rows(model, ids, 1.0)
    for start in (1, 17, 33, 49):
        for name in ("cold", "warm"):
            engine.add_score(name, ScoreSequence(ids, start), temperature=1.0, want_digests=False, top_logprobs=3)
            score = drain(engine).samples[name].score
            assert score is not None and score.top is not None and score.top.token_ids.shape == (50 - start, 3)
            for i, row in enumerate(rows[start - 1 :]):
                expect(row, score.top, i, 3)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 48])
def test_prompt_scores_with_a_warm_cache_are_those_of_a_cold_engine(qwen3: SharedModel, length: int) -> None:
    """B1, B2: the cache holds every full page of the prompt; the rows are computed all the same, and it says so."""
    prompt = PROMPT[:length] if length <= 37 else random_prompt(length, 3)
    warm = build_engine(qwen3)
    run(warm, [sample(prompt, "first")])
    request = asked(sample(prompt), prompt_logprobs=True, top_logprobs=2)
    cold = listen(build_engine(qwen3, prefix_cache=False), request)["s"]
    again = listen(warm, request)["s"]
    assert len(cold[1]) == len(again[1]) == (length > 1)
    for one, other in zip(cold[1], again[1], strict=True):
        assert np.isfinite(one.logprobs).all() and one.top is not None and other.top is not None
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert one.top.logprobs.tobytes() == other.top.logprobs.tobytes()
        assert one.row_digests is not None and one.row_digests.tolist() == other.row_digests.tolist()  # type: ignore[union-attr]
    plain = run(warm, [sample(prompt, "plain")])["plain"]
    assert plain.token_ids == [int(c.token_ids[0]) for c in again[0]]
    summary = plain.summary
    assert summary is not None and summary.num_cached_tokens == length - 1, "control: the cache was warm"


def test_what_one_asks_for_changes_nobodys_bits(model: SharedModel) -> None:
    plain = [sample(random_prompt(20 + i, i), f"s{i}", i) for i in range(4)]
    alone = run(build_engine(model), plain)
    curious = [asked(r, top_logprobs=5 * (i % 2), prompt_logprobs=i == 2) for i, r in enumerate(plain)]
    for request in curious:
        assert run(build_engine(model), curious)[request.sample_id].bits() == alone[request.sample_id].bits()
    said = listen(build_engine(model), *curious)
    assert [len(prompts) for _, prompts in said.values()] == [0, 0, 1, 0]
    assert all((c.top is not None) == (i % 2 == 1) for i, (chunks, _) in enumerate(said.values()) for c in chunks)


@pytest.mark.parametrize("batch", [7, 100])
def test_whole_distributions_do_not_depend_on_the_batch(qwen3: SharedModel, batch: int) -> None:
    """D10: a hundred prompts by one, seven and all at once; all 64 alternatives of every position, by bytes."""
    requests = [
        asked(sample(random_prompt(1 + i % 23, i), f"s{i}", max_tokens=8), top_logprobs=64, prompt_logprobs=i % 3 == 0)
        for i in range(100)
    ]

    def everything(size: int) -> dict[str, bytes]:
        engine = build_engine(qwen3, running=size, batch_tokens=200, chunk=100, kv_tokens=16 * 200)
        said = listen(engine, *requests)
        return {
            name: b"".join(
                part.top.token_ids.tobytes() + part.top.logprobs.tobytes()
                for part in (*prompts, *chunks)
                if part.top is not None
            )
            for name, (chunks, prompts) in said.items()
        }

    one, many = everything(1), everything(batch)
    assert min(map(len, one.values())) >= 8 * 64 * 8 and one == many


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_prompt_that_is_preempted_is_told_once_and_whole(qwen3: SharedModel, at: int) -> None:
    request = asked(sample(PROMPT), prompt_logprobs=True)
    (expected,) = listen(build_engine(qwen3), request)["s"][1]
    engine = build_engine(qwen3, chunk=10)
    engine.add(engine.effective_request(request))
    prompts = []
    with qwen3.kernels.invariant_mode():
        for taken in range(100):
            if taken == at:
                engine.scheduler.preempt(engine.scheduler.running[0])
                engine.store.poison() if not engine.pages.cached_pages else None
            prompts += [e.prompt for e in engine.step() if isinstance(e, SampleEvent) and e.prompt is not None]
            if not engine.live_ids:
                break
    assert [p.logprobs.tobytes() for p in prompts] == [expected.logprobs.tobytes()]


def test_a_prompt_token_that_is_impossible_fails_the_sample_once(
    qwen3: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that would draw the first token is whole; the sample has failed before it."""
    engine = build_engine(qwen3, chunk=64)
    real = type(engine._decoder).logits  # type: ignore[union-attr]

    def logits(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        out = real(self, hidden)
        if len(out) == 37:
            out[3, PROMPT[4]] = -torch.inf
        return out

    monkeypatch.setattr(type(engine._decoder), "logits", logits)
    one = run(engine, [asked(sample(PROMPT), prompt_logprobs=True)])["s"]
    assert isinstance(one.error, ParityError) and not one.token_ids
    assert run(engine, [sample(PROMPT)])["s"].bits() == run(build_engine(qwen3), [sample(PROMPT)])["s"].bits()


def test_siblings_use_the_pages_of_the_one_that_tells(qwen3: SharedModel) -> None:
    engine = build_engine(qwen3)
    requests = [asked(sample(PROMPT, f"s{i}", i), prompt_logprobs=i == 0) for i in range(3)]
    cached = [run(engine, requests)[r.sample_id].summary for r in requests]
    assert [s.num_cached_tokens for s in cached if s is not None] == [0, 36, 36]


@pytest.mark.parametrize("count", [-1, 65])
def test_more_alternatives_than_tokens_are_refused(qwen3: SharedModel, count: int) -> None:
    engine = build_engine(qwen3)
    with pytest.raises(InvalidRequest, match=rf"top_logprobs = {count} is outside \[0, 64\]"):
        engine.effective_request(asked(sample(PROMPT), top_logprobs=count))
    with pytest.raises(InvalidRequest, match="top_logprobs"):
        engine.add_score("z", ScoreSequence(PROMPT), temperature=1.0, want_digests=False, top_logprobs=count)


def test_many_sequences_are_scored_in_one_step(qwen3: SharedModel) -> None:
    """Packed prefill: thirty sequences of 17 rows in steps of 128."""
    engine = build_engine(qwen3, batch_tokens=128, chunk=64)
    sequences = [random_prompt(18, i) for i in range(30)]
    for i, ids in enumerate(sequences):
        engine.add_score(f"z{i}", ScoreSequence(ids), temperature=1.0, want_digests=False)
    rows: list[int] = []
    real = engine._hidden_states
    engine._hidden_states = lambda batch: (rows.append(len(batch.input_ids)), real(batch))[1]  # type: ignore[method-assign,func-returns-value]
    scores = drain(engine).samples
    assert rows == [128] * 3 + [30 * 17 - 3 * 128]
    for i, ids in enumerate(sequences[::7]):
        score = scores[f"z{7 * i}"].score
        assert score is not None
        rows_of = dense_rows(qwen3, ids, 1.0)
        assert score.logprobs.tobytes() == rows_of[np.arange(17), ids[1:]].tobytes()
