"""Whose turn it is: priority, then share, then arrival; every eighth turn is the oldest's; the queue is bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import CapacityExceeded
from rollout.sequence import Sequence
from rollout.shares import ClientShares
from rollout.types import SampleRequest, SamplingParams
from rollout.waiting import OLDEST_EVERY, WaitingRoom


class Queue:
    """A waiting room with its shares, as the scheduler drives them."""

    def __init__(self, most: int = 10_000, per_client: int = 10_000) -> None:
        self.shares = ClientShares()
        self.room = WaitingRoom(self.shares, most, per_client)
        self._arrivals = 0

    def add(self, name: str, client: str = "", priority: int = 0) -> Sequence:
        request = SampleRequest(name, (2,), SamplingParams(seed=1, max_tokens=5))
        one = Sequence(name, [2], 1, 6, request=request, client=client, priority=priority, arrival=self._arrivals)
        self._arrivals += 1
        self.room.check_room(client)
        self.room.add(one)
        self.shares.join(client)
        self.room.check()
        return one

    def turn(self, tokens: int = 10) -> str:
        one = self.room.next()
        assert one is not None and one is self.room.next(), "asking changes nothing"
        self.room.admit(one)
        self.shares.charge(one.client, tokens)
        self.room.check()
        return one.sample_id

    def turns(self, count: int) -> list[str]:
        return [self.turn() for _ in range(count)]


def test_one_client_one_priority_is_first_come_first() -> None:
    queue = Queue()
    names = [str(i) for i in range(30)]
    for name in names:
        queue.add(name)
    assert queue.turns(30) == names and queue.room.next() is None


def test_higher_priority_goes_first_and_arrival_decides_within_one() -> None:
    queue = Queue()
    for i, priority in enumerate((0, 2, -1, 2, 0, 1)):
        queue.add(f"{priority}/{i}", priority=priority)
    assert queue.turns(6) == ["2/1", "2/3", "1/5", "0/0", "0/4", "-1/2"]


def test_a_flood_does_not_hold_up_a_second_client() -> None:
    queue = Queue()
    for i in range(100):
        queue.add(f"flood{i}", "a")
    queue.turns(3)
    for i in range(3):
        queue.add(f"late{i}", "b")
    # The newcomer starts at the other's counter, so they take turns; among equals the older goes first.
    assert queue.turns(6) == ["flood3", "late0", "flood4", "late1", "flood5", "late2"]


def test_shares_are_counted_in_tokens() -> None:
    """Where one client's sequences are four times as long, the other gets four for one."""
    queue = Queue()
    for i in range(40):
        queue.add(f"long{i}", "a")
        queue.add(f"short{i}", "b")
    order = []
    for _ in range(40):
        one = queue.room.next()
        assert one is not None
        order.append(queue.turn(tokens=40 if one.client == "a" else 10))
    assert sum(name.startswith("long") for name in order) in range(7, 14), order


def test_priority_comes_before_shares() -> None:
    queue = Queue()
    queue.add("a0", "a", priority=1)
    queue.add("b0", "b")
    queue.shares.charge("a", 1000)
    assert queue.turns(2) == ["a0", "b0"]


@given(st.integers(0, 10**6), st.integers(0, 30))
def test_no_load_starves_anyone(seed: int, before: int) -> None:
    """The bound of the module, against arrivals of higher priority and ever new clients."""
    rng, queue = random.Random(seed), Queue()
    for i in range(before):
        queue.add(f"before{i}", rng.choice("abc"), rng.randint(-2, 2))
    queue.add("victim", "a", priority=-2)
    for taken in range(OLDEST_EVERY * (before + 1)):
        for i in range(rng.randint(1, 3)):
            queue.add(f"rival{taken}/{i}", f"client{taken}", priority=rng.choice((0, 9)))
        if queue.turn() == "victim":
            return
    raise AssertionError(f"not admitted among {OLDEST_EVERY * (before + 1)}")


def test_without_the_turns_of_the_oldest_it_would_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the bound."""
    monkeypatch.setattr("rollout.waiting.OLDEST_EVERY", 10**9)
    queue = Queue()
    queue.add("victim", priority=-2)
    for i in range(200):
        queue.add(f"rival{i}", priority=9)
        assert queue.turn() != "victim"


def test_bounds() -> None:
    queue = Queue(most=5, per_client=3)
    for i in range(3):
        queue.add(f"a{i}", "a")
    with pytest.raises(CapacityExceeded, match=r"client 'a' has 3 .*max_waiting_per_client"):
        queue.add("a3", "a")
    queue.add("b0", "b")
    queue.add("c0", "c")
    with pytest.raises(CapacityExceeded, match=r"holds 5 sequences.*engine.max_waiting\)"):
        queue.add("d0", "d")
    queue.turn()
    assert queue.add("d0", "d") in queue.room and len(queue.room) == 5


def test_leaving_from_the_middle() -> None:
    queue = Queue()
    members = [queue.add(str(i), "ab"[i % 2], i % 3) for i in range(12)]
    for one in members[1::3]:
        queue.room.remove(one)
        queue.room.check()
    assert [s.sample_id for s in queue.room] == [str(i) for i in range(12) if i % 3 != 1]
    assert sorted(queue.turns(8), key=int) == [str(i) for i in range(12) if i % 3 != 1]
    assert not queue.room._levels and not queue.room._by_client
