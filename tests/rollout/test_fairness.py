"""Priorities, shares and the promise that every sequence ends, on the whole scheduler."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import CapacityExceeded
from rollout.kvcache import PageAllocator
from rollout.prefix_cache import PrefixIndex
from rollout.scheduler import Scheduler, SchedulerLimits
from rollout.sequence import Sequence
from rollout.types import SampleRequest, SamplingParams

PAGE = 16


def scheduler(pages: int, *, tokens: int = 32, running: int = 8, chunk: int = 10, share: bool = False) -> Scheduler:
    limits = SchedulerLimits(tokens, min(running, tokens), 1000, chunk, PAGE)
    return Scheduler(limits, PageAllocator(pages, PrefixIndex(b"model", 0) if share else None))


def sequence(name: str, prompt: int, most: int, priority: int = 0, client: str = "") -> Sequence:
    request = SampleRequest(name, (2,) * prompt, SamplingParams(seed=1, max_tokens=most))
    ids = [2 + sum(map(ord, name)) % 5] * prompt
    return Sequence(name, ids, prompt, prompt + most, request=request, priority=priority, client=client)


def step(sched: Scheduler) -> list[Sequence]:
    """One step with a model that samples token 3; those that end with it, removed."""
    rows = sched.schedule()
    assert rows or not sched.running, "a step without work although something runs"
    for r in rows:
        r.sequence.num_computed += r.count
        sched.tables.register(r.sequence)
        if r.sequence.num_uncomputed == 0:
            r.sequence.token_ids.append(3)
    sched.check()
    done = [s for s in sched.running if len(s.token_ids) >= s.max_len]
    for one in done:
        sched.remove(one)
    return done


def names(sequences: list[Sequence]) -> list[str]:
    return [s.sample_id for s in sequences]


def test_the_lower_priority_is_preempted() -> None:
    sched = scheduler(pages=5)
    for name, priority in (("low", -1), ("high", 1), ("middle", 0)):
        sched.add(sequence(name, 16, 40, priority))
        sched.schedule()
    while not sched.preempted:
        step(sched)
    assert names(sched.preempted) == ["low"] and names(sched.running) == ["high", "middle"]


def test_once_set_back_a_sequence_outranks_whoever_comes_later() -> None:
    sched = scheduler(pages=6, running=2)
    low = sequence("low", 16, 70, -1)
    sched.add(low)
    step(sched)
    sched.add(sequence("high0", 16, 70, 5))
    while not sched.preempted:
        step(sched)
    assert names(sched.preempted) == ["low"]
    sched.remove(sched.running[0])
    sched.add(sequence("high1", 16, 70, 5))
    while low.num_generated < 69:
        step(sched)
        assert low in sched.running, "it was set back twice"


def test_an_urgent_stream_of_prompts_does_not_stop_an_admitted_prefill() -> None:
    """The budget goes by admission: here by priority, the long prompt would never get a row."""
    sched = scheduler(pages=64, tokens=8, running=4, chunk=8)
    slow = sequence("slow", 60, 1)
    sched.add(slow)
    step(sched)
    for i in range(40):
        sched.add(sequence(f"urgent{i}", 30, 1, 9))
        if slow in step(sched):
            return
    raise AssertionError(f"{slow.num_computed} of 60 rows in 40 steps")


def served_together(sched: Scheduler, steps: int) -> dict[str, int]:
    """Rows fed by client while all of them wait."""
    fed: dict[str, int] = {}
    for _ in range(steps):
        before = {s: s.num_computed for s in [*sched.in_flight, *sched.waiting]}
        step(sched)
        for one, computed in before.items():
            fed[one.client] = fed.get(one.client, 0) + max(0, one.num_computed - computed)
    return fed


@pytest.mark.parametrize("many", [40, 200])
def test_two_clients_get_equal_work_however_many_requests_they_send(many: int) -> None:
    sched = scheduler(pages=200, tokens=64)
    for i in range(many):
        sched.add(sequence(f"a{i}", 20, 10, client="a"))
    for i in range(20):
        sched.add(sequence(f"b{i}", 20, 10, client="b"))
    fed = served_together(sched, 30)
    assert any(s.client == "b" for s in sched.waiting), "both had more to ask"
    assert 0.8 < fed["a"] / fed["b"] < 1.25, fed


def test_by_arrival_alone_they_would_not() -> None:
    """Negative control: everybody is one client."""
    sched = scheduler(pages=200, tokens=64)
    for i in range(40):
        sched.add(sequence(f"a{i}", 20, 10))
    for i in range(20):
        sched.add(sequence(f"b{i}", 20, 10))
    for _ in range(30):
        step(sched)
    assert all(s.sample_id.startswith("a") for s in sched.in_flight)


def test_a_client_is_not_charged_for_what_a_preemption_repeats() -> None:
    sched = scheduler(pages=16)
    sched.add(sequence("s", 30, 10, client="a"))
    for _ in range(5):
        step(sched)
    paid = sched.shares.served("a")
    sched.preempt(sched.running[0])
    assert sched.preempted[0].num_uncomputed == paid + 1, "all that was fed, and the newest token"
    while sched.preempted or sched.running[0].num_uncomputed > 1:
        step(sched)
    assert sched.shares.served("a") == paid + 1


def test_a_full_queue_names_the_client() -> None:
    limits = SchedulerLimits(32, 1, 8, 10, PAGE)
    sched = Scheduler(limits, PageAllocator(8))
    for i in range(7):
        sched.add(sequence(f"a{i}", 2, 2, client="a"))
    with pytest.raises(CapacityExceeded, match="client 'a' has 7"):
        sched.add(sequence("a7", 2, 2, client="a"))
    sched.add(sequence("b", 2, 2, client="b"))
    with pytest.raises(CapacityExceeded, match="the queue holds 8"):
        sched.add(sequence("c", 2, 2, client="c"))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**9), st.booleans())
def test_everyone_ends_under_an_adversary(seed: int, share: bool) -> None:
    """Few pages, and at every step new requests of the highest priority from new clients: the first ones still end.

    Rivals never cease while a victim lives, so ending needs the bounds on overtaking, not the end of the load.
    """
    rng = random.Random(seed)
    sched = scheduler(
        rng.randint(4, 8), tokens=rng.randint(4, 40), running=rng.randint(2, 6), chunk=rng.randint(2, 20), share=share
    )
    victims = [sequence(f"victim{i}", rng.randint(1, 40), rng.randint(1, 20), -5, "v") for i in range(4)]
    for one in victims:
        sched.add(one)
    left = set(victims)
    for taken in range(4000):
        if len(sched.waiting) < 20:
            sched.add(sequence(f"rival{taken}", rng.randint(1, 40), rng.randint(1, 20), 9, f"c{taken}"))
        left -= set(step(sched))
        if not left:
            return
    raise AssertionError(f"{names(list(left))} never ended")
