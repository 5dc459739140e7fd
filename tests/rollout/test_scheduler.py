"""Which rows a step computes: budgets kept, decoding first, admission by worst case, first come first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import CapacityExceeded, InvalidRequest
from rollout.kvcache import PageAllocator
from rollout.scheduler import Scheduler, SchedulerLimits
from rollout.sequence import Sequence
from rollout.types import SampleRequest, SamplingParams, ScoreSequence

PAGE = 16


def scheduler(pages: int = 64, *, tokens: int = 32, running: int = 8, waiting: int = 100, chunk: int = 10) -> Scheduler:
    return Scheduler(SchedulerLimits(tokens, running, waiting, chunk, PAGE), PageAllocator(pages))


def sequence(prompt: int, most: int = 20, name: str = "s") -> Sequence:
    request = SampleRequest(name, (2,) * prompt, SamplingParams(seed=1, max_tokens=most))
    return Sequence(name, [2] * prompt, prompt, prompt + most, request=request)


def advance(sched: Scheduler) -> list[tuple[str, int]]:
    """One step with a model that samples token 3."""
    rows = sched.schedule()
    for r in rows:
        sched.ensure_pages(r.sequence, r.sequence.num_computed + r.count)
        r.sequence.num_computed += r.count
        if r.sequence.num_uncomputed == 0:
            r.sequence.token_ids.append(3)
    sched.pages.check()
    return [(r.sequence.sample_id, r.count) for r in rows]


def test_prefill_comes_in_chunks_then_decodes() -> None:
    sched = scheduler()
    sched.add(sequence(25))
    assert [advance(sched) for _ in range(5)] == [[("s", 10)], [("s", 10)], [("s", 5)], [("s", 1)], [("s", 1)]]


def test_decoding_comes_first_and_prefill_gets_the_rest() -> None:
    sched = scheduler(tokens=12)
    for name in "ab":
        sched.add(sequence(1, name=name))
    advance(sched)
    for name in "cd":
        sched.add(sequence(30, name=name))
    assert advance(sched) == [("a", 1), ("b", 1), ("c", 10)]
    assert advance(sched) == [("a", 1), ("b", 1), ("c", 10)]
    assert advance(sched) == [("a", 1), ("b", 1), ("c", 10)]
    assert advance(sched) == [("a", 1), ("b", 1), ("c", 1), ("d", 9)]


def test_admission_is_first_come_first() -> None:
    """A small request does not overtake a large one that waits for pages."""
    sched = scheduler(pages=4)
    for name, prompt in (("a", 40), ("b", 30), ("c", 2)):
        sched.add(sequence(prompt, most=2, name=name))
    assert [s.sample_id for s in (sched.schedule(), sched.running)[1]] == ["a"]
    sched.remove(sched.running[0])
    sched.schedule()
    assert [s.sample_id for s in sched.running] == ["b", "c"]


def test_held_admission_admits_nothing() -> None:
    sched = scheduler()
    sched.hold_admission = True
    sched.add(sequence(3))
    assert sched.schedule() == [] and len(sched.waiting) == 1
    sched.hold_admission = False
    assert len(sched.schedule()) == 1


def test_limits_of_the_queue_and_of_the_cache() -> None:
    sched = scheduler(pages=2, waiting=1)
    with pytest.raises(InvalidRequest, match="33 tokens need 3 KV pages, the cache has 2") as caught:
        sched.add(sequence(13, most=20))
    assert caught.value.field == "sampling.max_tokens"
    sched.add(sequence(12, most=20))
    with pytest.raises(CapacityExceeded, match="1 sequences"):
        sched.add(sequence(1))
    assert len(sched.waiting) == 1


def test_running_is_limited() -> None:
    sched = scheduler(running=3)
    for i in range(5):
        sched.add(sequence(2, name=str(i)))
    sched.schedule()
    assert len(sched.running) == 3 and len(sched.waiting) == 2


@pytest.mark.parametrize("where", ["waiting", "running", "half taken"])
def test_removal_frees_everything(where: str) -> None:
    sched = scheduler()
    one = sequence(25, most=30)
    sched.add(one)
    if where != "waiting":
        sched.schedule()
    if where == "half taken":
        advance(sched)
    sched.remove(one)
    sched.pages.check()
    assert sched.pages.num_unpromised == 64 and not sched.waiting and not sched.running
    assert one.pages == [] and one.promised_pages == 0


def test_a_scored_sequence_never_feeds_its_last_token() -> None:
    sched = scheduler()
    sched.add(Sequence("s", [2] * 21, 21, 21, score=ScoreSequence((2,) * 21)))
    rows = [sched.schedule()[0]]
    rows[0].sequence.num_computed += 10
    rows.append(sched.schedule()[0])
    rows[0].sequence.num_computed += 10
    assert [r.count for r in rows] == [10, 10]
    assert sched.schedule() == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 8)), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(5, 20),
)
def test_any_load_is_served_within_budget(
    load: list[tuple[int, int]], tokens: int, chunk: int, running: int, pages: int
) -> None:
    running = min(running, tokens)
    sched = scheduler(pages, tokens=tokens, chunk=chunk, running=running)
    sequences = [sequence(p, m, str(i)) for i, (p, m) in enumerate(load)]
    for one in sequences:
        sched.add(one)
    fed: dict[str, int] = {s.sample_id: 0 for s in sequences}
    for _ in range(2000):
        rows = advance(sched)
        assert sum(count for _, count in rows) <= tokens and len(rows) <= running
        assert all(1 <= count <= chunk for _, count in rows) and len({name for name, _ in rows}) == len(rows)
        for name, count in rows:
            fed[name] += count
        for done in [s for s in sched.running if len(s.token_ids) >= s.max_len]:
            sched.remove(done)
        if not sched.running and not sched.waiting:
            break
    assert fed == {s.sample_id: s.max_len - 1 for s in sequences}
    assert sched.pages.num_unpromised == pages
