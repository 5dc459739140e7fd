"""Property 4: chunk size, budget, waiting, abort and resume change nothing (D6)."""

from __future__ import annotations

import pytest

from rollout.engine import Engine
from rollout.model import SharedModel
from rollout.types import FinishReason, ScoreSequence
from tests.engines import Record, build_engine, drain, isolated, random_prompt, rescore, run, sample, unequal, wipe

PROMPT = random_prompt(37, 0)
WHOLE = sample(PROMPT, index=3, seed=5, max_tokens=18)


@pytest.fixture(scope="module")
def whole(model: SharedModel) -> tuple[object, ...]:
    return isolated(model, WHOLE).bits()


@pytest.mark.parametrize("chunk", [1, 2, 3, 15, 16, 17, 36, 37, 38, 500])
def test_chunk_size(model: SharedModel, whole: tuple[object, ...], chunk: int) -> None:
    assert isolated(model, WHOLE, chunk=chunk).bits() == whole


@pytest.mark.parametrize("tokens", [1, 5, 16, 40])
def test_token_budget(model: SharedModel, whole: tuple[object, ...], tokens: int) -> None:
    mates = [sample(random_prompt(20, 9), "mate", max_tokens=4)]
    samples = run(build_engine(model, batch_tokens=tokens, running=min(tokens, 2)), [*mates, WHOLE])
    assert samples["s"].bits() == whole


def test_waiting_in_the_queue(model: SharedModel, whole: tuple[object, ...]) -> None:
    mates = [sample(random_prompt(20, i), f"m{i}", max_tokens=3) for i in range(4)]
    assert run(build_engine(model, running=1), [*mates, WHOLE])["s"].bits() == whole
    assert run(build_engine(model, kv_tokens=64), [*mates, WHOLE])["s"].bits() == whole


def test_abort_anywhere_and_resume_elsewhere(model: SharedModel, whole: tuple[object, ...]) -> None:
    """Stopped after any number of steps, sent again as prompt + generated with the same seed and sample index."""
    expected = isolated(model, WHOLE)
    points = set()
    for steps in range(19):
        engine, record = build_engine(model), Record()
        engine.add(engine.effective_request(WHOLE))
        drain(engine, record, steps=steps)
        event = engine.abort("s", "stop here")
        assert event.summary is not None and event.summary.finish.reason is FinishReason.ABORTED
        record.take([event])
        first = record.samples["s"]
        done = len(first.token_ids)
        points.add(done)
        again = sample((*PROMPT, *first.token_ids), "again", 3, seed=5, max_tokens=18 - done)
        rest = isolated(model, again, chunk=16, shuffle=steps)
        assert first.token_ids + rest.token_ids == expected.token_ids
        assert unequal([*first.policy, *rest.policy], expected.policy) == 0
        assert first.digests + rest.digests == expected.digests
    assert points == set(range(18))


@pytest.mark.parametrize("change", [{"seed": 6}, {"index": 4}, {"shift": 1}])
def test_a_resume_under_another_key_is_caught(model: SharedModel, change: dict[str, int]) -> None:
    """Negative control: the stream restarted, a sibling's stream, or a position off by one."""
    expected = isolated(model, WHOLE)
    shift = change.get("shift", 0)
    kept = expected.token_ids[:4]
    again = sample((*PROMPT[shift:], *kept), "again", change.get("index", 3), seed=change.get("seed", 5), max_tokens=14)
    assert isolated(model, again).token_ids != expected.token_ids[4:]


@pytest.mark.parametrize("at", [0, 1, 2, 5, 12])
def test_rebuilding_the_cache_midway(model: SharedModel, whole: tuple[object, ...], at: int) -> None:
    """What a weight update with policy recompute does to the KV, with weights that did not change."""
    engine, record = build_engine(model), Record()
    engine.add(engine.effective_request(WHOLE))

    def rebuild(taken: int) -> None:
        if taken == at:
            wipe(engine)

    assert drain(engine, record, between=rebuild).samples["s"].bits() == whole


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_at_every_step(model: SharedModel, prefix_cache: bool) -> None:
    """D6: ten tokens, pages taken away before each step in turn, and once before every step that makes progress."""
    request = sample(PROMPT, index=3, seed=5, max_tokens=10)
    expected = isolated(model, request).bits()
    chunks = 4
    for at in range(1, chunks + 10):
        engine, record = build_engine(model, chunk=10, prefix_cache=prefix_cache), Record()
        engine.add(engine.effective_request(request))

        def preempt(taken: int, engine: Engine = engine, at: int = at) -> None:
            if taken == at and engine.scheduler.running:
                if not prefix_cache:
                    engine.store.poison()
                engine.scheduler.preempt(engine.scheduler.running[0])

        drain(engine, record, between=preempt)
        assert engine.scheduler.num_preemptions == (at < chunks + 9)
        assert record.samples["s"].bits() == expected, at


def test_preemption_after_every_token(model: SharedModel, whole: tuple[object, ...]) -> None:
    engine, record = build_engine(model, chunk=100, batch_tokens=100), Record()
    engine.add(engine.effective_request(WHOLE))

    def preempt(taken: int) -> None:
        if engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[0])

    assert drain(engine, record, between=preempt).samples["s"].bits() == whole
    assert engine.scheduler.num_preemptions == 17


@pytest.mark.parametrize("at", [1, 2, 3])
def test_preemption_of_a_score(model: SharedModel, at: int) -> None:
    ids = random_prompt(80, 4)
    (expected,) = rescore(build_engine(model), [ids], [40], [1.0])
    engine, record = build_engine(model), Record()
    engine.add_score("z", ScoreSequence(ids, 40), temperature=1.0, want_digests=True)

    def preempt(taken: int) -> None:
        if taken == at:
            engine.scheduler.preempt(engine.scheduler.running[0])

    score = drain(engine, record, between=preempt).samples["z"].score
    assert score is not None and score.row_digests is not None and expected.row_digests is not None
    assert unequal(score.logprobs, expected.logprobs) == 0
    assert score.row_digests.tolist() == expected.row_digests.tolist()


def test_a_pool_too_small_for_all(model: SharedModel) -> None:
    """Preempted for want of pages, not by hand; the cache holds what two of six would need at their ends."""
    requests = [sample(random_prompt(10 + i, i), f"s{i}", i, max_tokens=50) for i in range(6)]
    engine = build_engine(model, kv_tokens=9 * 16)
    samples = run(engine, requests)
    assert engine.scheduler.num_preemptions > 3
    assert all(samples[r.sample_id].bits() == isolated(model, r).bits() for r in requests)


def test_a_stream_that_restarts_at_a_preemption_is_caught(qwen3: SharedModel) -> None:
    """Negative control: positions counted from the resume on, as in the report behind D6."""
    request = sample(PROMPT, index=3, seed=5, max_tokens=10)
    engine, record = build_engine(qwen3), Record()
    engine.add(engine.effective_request(request))

    def preempt(taken: int) -> None:
        if taken == 6:
            (sequence,) = engine.scheduler.running
            engine.scheduler.preempt(sequence)
            sequence.seed += 1

    assert drain(engine, record, between=preempt).samples["s"].bits() != isolated(qwen3, request).bits()
