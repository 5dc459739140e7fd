"""Which rows a step computes: budgets kept, decoding first, first come first, last come first preempted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import CapacityExceeded, InvalidRequest
from rollout.given_scores import GivenScores
from rollout.kvcache import PageAllocator
from rollout.prefix_cache import PrefixIndex
from rollout.scheduler import Scheduler, SchedulerLimits
from rollout.sequence import Sequence
from rollout.types import SampleRequest, SamplingParams, ScoreSequence

PAGE = 16


def scheduler(
    pages: int = 64,
    *,
    tokens: int = 32,
    running: int = 8,
    waiting: int = 100,
    chunk: int = 10,
    index: PrefixIndex | None = None,
) -> Scheduler:
    return Scheduler(SchedulerLimits(tokens, running, waiting, chunk, PAGE), PageAllocator(pages, index))


def sequence(
    prompt: int, most: int = 20, name: str = "s", token: int = 2, *, priority: int = 0, client: str = ""
) -> Sequence:
    request = SampleRequest(name, (token,) * prompt, SamplingParams(seed=1, max_tokens=most))
    return Sequence(name, [token] * prompt, prompt, prompt + most, request=request, priority=priority, client=client)


def index() -> PrefixIndex:
    return PrefixIndex(b"model", 0)


def advance(sched: Scheduler) -> list[tuple[str, int]]:
    """One step with a model that samples token 3."""
    rows = sched.schedule()
    for r in rows:
        assert r.sequence.num_computed + r.count <= len(r.sequence.pages) * PAGE
        r.sequence.num_computed += r.count
        sched.tables.register(r.sequence)
        if r.sequence.num_uncomputed == 0:
            r.sequence.token_ids.append(3)
    sched.check()
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


@pytest.mark.parametrize("where", ["waiting", "running", "half taken", "preempted"])
def test_removal_frees_everything(where: str) -> None:
    sched = scheduler()
    one = sequence(25, most=30)
    sched.add(one)
    if where != "waiting":
        sched.schedule()
    if where in ("half taken", "preempted"):
        advance(sched)
    if where == "preempted":
        sched.preempt(one)
    sched.remove(one)
    sched.check()
    assert sched.pages.num_free == 64 and not sched.waiting and not sched.in_flight
    assert one.pages == []


def test_a_scored_sequence_never_feeds_its_last_token() -> None:
    sched = scheduler()
    sched.add(Sequence("s", [2] * 21, 21, 21, score=ScoreSequence((2,) * 21)))
    rows = [sched.schedule()[0]]
    rows[0].sequence.num_computed += 10
    rows.append(sched.schedule()[0])
    rows[0].sequence.num_computed += 10
    assert [r.count for r in rows] == [10, 10]
    assert sched.schedule() == []


# ---- preemption -------------------------------------------------------------------------------------------------


def names(sequences: list[Sequence]) -> list[str]:
    return [s.sample_id for s in sequences]


def until_idle(sched: Scheduler, limit: int = 3000) -> dict[str, int]:
    """Run dry; rows computed by name."""
    fed: dict[str, int] = {}
    for _ in range(limit):
        for name, count in advance(sched):
            fed[name] = fed.get(name, 0) + count
        for done in [s for s in sched.running if len(s.token_ids) >= s.max_len]:
            sched.remove(done)
        if not sched.in_flight and not sched.waiting:
            return fed
    raise AssertionError(f"{names([*sched.in_flight, *sched.waiting])} never ended")


def test_admission_needs_the_prompt_and_one_page() -> None:
    sched = scheduler(pages=5)
    sched.add(sequence(15, most=60, name="a"))
    sched.add(sequence(30, most=40, name="b"))
    sched.add(sequence(17, most=30, name="c"))
    sched.schedule()
    assert names(sched.running) == ["a", "b"], "worst cases of 5 pages each; c needs two and one more"
    sched.remove(sched.running[0])
    sched.schedule()
    assert names(sched.running) == ["b", "c"]


def test_the_latest_is_preempted_and_comes_back_before_those_that_wait() -> None:
    sched = scheduler(pages=4, running=2)
    for name, prompt in (("a", 16), ("b", 16), ("c", 1)):
        sched.add(sequence(prompt, most=45, name=name))
    while not sched.preempted:
        advance(sched)
    assert (names(sched.running), names(sched.preempted), names(list(sched.waiting))) == (["a"], ["b"], ["c"])
    (victim,) = sched.preempted
    assert (victim.pages, victim.num_computed) == ([], 0) and victim.num_generated > 10, "its tokens are kept"
    missing = {s.sample_id: s.max_len - 1 - s.num_computed for s in sched.in_flight}
    fed = until_idle(sched)
    assert (fed["a"], fed["b"]) == (missing["a"], missing["b"]) and sched.num_preemptions == 1
    assert sched.pages.num_free == 4


def test_a_sequence_gives_way_to_older_ones_also_when_it_is_the_one_that_grows() -> None:
    sched = scheduler(pages=5, tokens=3, chunk=1, running=2)
    sched.add(sequence(34, most=14, name="old"))
    advance(sched)
    sched.add(sequence(16, most=60, name="young"))
    seen = []
    while sched.in_flight or sched.waiting:
        advance(sched)
        seen.append((names(sched.running), names(sched.preempted)))
        for done in [s for s in sched.running if len(s.token_ids) >= s.max_len]:
            sched.remove(done)
    assert (["old"], ["young"]) in seen
    assert all(preempted != ["old"] for _, preempted in seen)


def test_a_preempted_sequence_keeps_its_place_by_age() -> None:
    sched = scheduler()
    for name in "abc":
        sched.add(sequence(5, name=name))
    advance(sched)
    for name in ("b", "a"):
        sched.preempt(next(s for s in sched.running if s.sample_id == name))
    sched.check()
    assert names(sched.preempted) == ["a", "b"]
    assert advance(sched) == [("a", 6), ("b", 6), ("c", 1)]
    assert names(sched.running) == ["a", "b", "c"]


def test_held_admission_lets_preempted_ones_come_back() -> None:
    """A weight update that waits for what runs must not strand one of them."""
    sched = scheduler()
    sched.add(sequence(5, name="a"))
    advance(sched)
    sched.hold_admission = True
    sched.add(sequence(5, name="b"))
    sched.preempt(sched.running[0])
    assert until_a_ends(sched) and names(list(sched.waiting)) == ["b"]


def until_a_ends(sched: Scheduler) -> bool:
    for _ in range(50):
        advance(sched)
        if len(sched.running[0].token_ids) >= sched.running[0].max_len:
            sched.remove(sched.running[0])
            return not sched.in_flight
    return False


# ---- sharing ----------------------------------------------------------------------------------------------------


def test_siblings_prefill_a_prompt_once() -> None:
    """Also with chunks that do not end on pages, and for one that comes while the first is at it."""
    sched = scheduler(index=index(), tokens=60, chunk=10)
    for name in "abc":
        sched.add(sequence(70, name=name, most=1))
    first = [advance(sched) for _ in range(3)]
    assert first == [[("a", 10)]] * 3
    sched.add(sequence(70, name="d", most=1))
    assert until_idle(sched) == {"a": 40, "b": 6, "c": 6, "d": 6}
    assert sched.pages.num_free == 64


def test_strangers_do_not_wait_for_each_other() -> None:
    sched = scheduler(index=index(), tokens=60)
    for token, name in enumerate("ab", 2):
        sched.add(sequence(70, name=name, token=token))
    assert advance(sched) == [("a", 10), ("b", 10)]


def test_a_sibling_goes_on_when_the_first_is_gone() -> None:
    sched = scheduler(index=index())
    for name in "ab":
        sched.add(sequence(70, name=name, most=1))
    for _ in range(4):
        assert advance(sched) == [("a", 10)]
    sched.remove(sched.running[0])
    assert until_idle(sched) == {"b": 70 - 32}, "two pages were finished"


def test_a_scored_sequence_shares_only_what_it_need_not_score() -> None:
    sched = scheduler(index=index())
    sched.add(sequence(70, most=1))
    until_idle(sched)
    for start, rows in ((1, 69), (16, 69), (17, 53), (69, 5)):
        one = Sequence("s", [2] * 70, 70, 70, score=ScoreSequence((2,) * 70, start))
        one.given = GivenScores(start, 70 - start, digests=False, top=0)
        sched.add(one)
        computed = 0
        while one.num_uncomputed or not computed:
            computed += sum(count for _, count in advance_score(sched))
        assert computed == rows, start
        sched.remove(one)


def advance_score(sched: Scheduler) -> list[tuple[str, int]]:
    rows = sched.schedule()
    for r in rows:
        r.sequence.num_computed += r.count
        sched.tables.register(r.sequence)
    sched.check()
    return [(r.sequence.sample_id, r.count) for r in rows]


def test_page_tables_never_index_under_a_newer_version() -> None:
    """F2: a sequence whose KV is of the old weights fills a page after the change."""
    sched = scheduler(index=index())
    old = sequence(20, name="old")
    sched.add(old)
    sched.schedule()
    assert sched.pages.index is not None
    sched.pages.restart(1)
    old.num_computed = 16
    sched.tables.register(old)
    assert len(sched.pages.index) == 0 and old.chain == []
    sched.remove(old)
    assert sched.pages.num_cached == 0


# ---- any load ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(5, 20),
    st.booleans(),
)
def test_any_load_is_served_within_budget(
    load: list[tuple[int, int]], tokens: int, chunk: int, running: int, pages: int, share: bool
) -> None:
    """Every sequence ends; the oldest is never set back; without sharing and preemption every row is computed once."""
    running = min(running, tokens)
    sched = scheduler(pages, tokens=tokens, chunk=chunk, running=running, index=index() if share else None)
    sequences = [sequence(p, m, str(i), 2 + i % 3) for i, (p, m) in enumerate(load)]
    for one in sequences:
        sched.add(one)
    fed: dict[str, int] = {s.sample_id: 0 for s in sequences}
    for _ in range(6000):
        rows = advance(sched)
        assert not sched.preempted or min(s.ticket for s in sched.running) < sched.preempted[0].ticket
        assert sum(count for _, count in rows) <= tokens and len(rows) <= running
        assert all(1 <= count <= chunk for _, count in rows) and len({name for name, _ in rows}) == len(rows)
        for name, count in rows:
            fed[name] += count
        for done in [s for s in sched.running if len(s.token_ids) >= s.max_len]:
            sched.remove(done)
        if not sched.in_flight and not sched.waiting:
            break
    assert all(len(s.token_ids) == s.max_len for s in sequences)
    if not share and not sched.num_preemptions:
        assert fed == {s.sample_id: s.max_len - 1 for s in sequences}
    assert sched.pages.num_free == pages
