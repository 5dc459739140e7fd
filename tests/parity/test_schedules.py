"""Properties 3, 4 and 7 under random schedules: whatever happens around a sample, it says what it says alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.kvcache import PageAllocator
from rollout.model import SharedModel
from rollout.types import FinishReason, ScoreSequence
from tests.engines import Generated, Record, build_engine, drain, isolated, random_prompt, sample

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"temperature": 0.0},
    {"top_p": 0.7, "min_p": 0.01},
    {"barred_token_ids": (5, 6, 7)},
)
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 50)
POOL = tuple(
    sample(random_prompt(LENGTHS[i % 8], i), f"r{i}", i % 4, seed=i // 2, max_tokens=1 + 5 * i % 13, **KINDS[i % 6])
    for i in range(24)
)
"""A fixed pool, so that isolated runs are made once."""


@dataclass(frozen=True)
class Schedule:
    """One random life of an engine."""

    order: list[int]
    """requests of the pool, in order of arrival"""
    joins: list[int]
    """step at which each arrives"""
    aborts: dict[int, int]
    """request -> step at which it is aborted"""
    scores: list[int]
    """steps at which a stranger is scored"""
    chunk: int
    batch_tokens: int
    running: int
    pages: int
    shuffle: int


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    order = draw(st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=10, unique=True))
    joins = draw(st.lists(st.integers(0, 12), min_size=len(order), max_size=len(order)))
    aborts = draw(st.dictionaries(st.sampled_from(order), st.integers(0, 20), max_size=3))
    batch_tokens = draw(st.integers(1, 70))
    return Schedule(
        order, joins, aborts, draw(st.lists(st.integers(0, 10), max_size=2)), draw(st.integers(1, 60)), batch_tokens,
        draw(st.integers(1, 8)), draw(st.integers(4, 30)), draw(st.integers(0, 99)),
    )  # fmt: skip


def live_through(model: SharedModel, schedule: Schedule) -> Record:
    engine = build_engine(
        model,
        chunk=schedule.chunk,
        batch_tokens=schedule.batch_tokens,
        running=schedule.running,
        kv_tokens=schedule.pages * 16,
        shuffle=schedule.shuffle,
    )
    record, todo = Record(), sorted(zip(schedule.joins, schedule.order, strict=True), key=lambda pair: pair[0])
    scores = list(schedule.scores)
    rng = random.Random(schedule.shuffle)

    def act(taken: int) -> None:
        while todo and todo[0][0] <= taken:
            engine.add(engine.effective_request(POOL[todo.pop(0)[1]]))
        while scores and scores[0] <= taken:
            ids = ScoreSequence(random_prompt(20, scores.pop(0)))
            engine.add_score(f"score{len(scores)}", ids, temperature=1.0, want_digests=False)
        for index, step in schedule.aborts.items():
            if taken == step and POOL[index].sample_id in engine.live_ids:
                record.take([engine.abort(POOL[index].sample_id, "schedule")])
        if rng.random() < 0.2:
            engine.pages.shuffle(rng)

    for taken in range(2000):
        act(taken)
        if not engine.live_ids and not todo and not scores:
            break
        drain(engine, record, steps=1)
    assert not engine.live_ids
    assert engine.pages.num_free == engine.pages.num_pages
    return record


def check(schedule: Schedule, record: Record, alone: Any) -> None:
    """Each sample answered once, with its own tokens; an aborted one with the first of them."""
    for index in schedule.order:
        request = POOL[index]
        one, expected = record.samples[request.sample_id], alone(index)
        assert one.summary is not None and one.error is None
        count = len(one.token_ids)
        if one.summary.finish.reason is FinishReason.ABORTED:
            assert index in schedule.aborts
        else:
            assert count == len(expected.token_ids) and one.summary.finish == expected.summary.finish
        assert prefix_bits(one, count) == prefix_bits(expected, count), request.sample_id
    assert len(record.samples) == len(schedule.order) + len(schedule.scores)


def prefix_bits(one: Generated, count: int) -> tuple[object, ...]:
    cut = Generated(one.token_ids[:count], one.policy[:count], one.behavior[:count], one.digests[:count])
    return cut.bits()


@pytest.fixture(scope="module")
def alone(qwen3: SharedModel) -> Any:
    @cache
    def lookup(index: int) -> Generated:
        return isolated(qwen3, POOL[index])

    return lookup


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(schedule=schedules())
def test_any_schedule(qwen3: SharedModel, alone: Any, schedule: Schedule) -> None:
    check(schedule, live_through(qwen3, schedule), alone)


def test_a_sequence_that_reads_anothers_pages_is_caught(
    qwen3: SharedModel, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: two sequences handed the same page, as in E3."""
    real, handed = PageAllocator.take, list[int]()

    def take(self: PageAllocator) -> int:
        handed.append(real(self))
        return handed[0] if len(handed) == 2 else handed[-1]

    schedule = Schedule([3, 4], [0, 0], {}, [], 60, 70, 8, 30, 0)
    check(schedule, live_through(qwen3, schedule), alone)
    monkeypatch.setattr(PageAllocator, "take", take)
    monkeypatch.setattr(PageAllocator, "release", lambda self, pages: None)
    record = Record()
    engine = build_engine(qwen3, chunk=60, batch_tokens=70)
    for index in schedule.order:
        engine.add(engine.effective_request(POOL[index]))
    with qwen3.kernels.invariant_mode():
        while engine.live_ids:
            record.take(engine.step())
    differing = [i for i in schedule.order if record.samples[f"r{i}"].bits() != alone(i).bits()]
    assert differing
