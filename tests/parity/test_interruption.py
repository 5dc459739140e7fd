"""Property 4: chunk size, budget, waiting, abort and resume change nothing (D6)."""

from __future__ import annotations

import pytest

from rollout.model import SharedModel
from rollout.types import FinishReason
from tests.engines import Record, build_engine, drain, isolated, random_prompt, run, sample, unequal

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
            engine.store.poison()
            engine.restart_kv()

    assert drain(engine, record, between=rebuild).samples["s"].bits() == whole
