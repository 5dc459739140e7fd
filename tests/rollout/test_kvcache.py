"""Pages: promised before they are taken, held once, all back at the end (C6)."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.errors import CapacityExceeded
from rollout.kvcache import PageAllocator

PAGES = 9


class AllocatorMachine(RuleBasedStateMachine):
    """Random promises, takes and returns against plain bookkeeping."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(PAGES)
        self.holders: list[tuple[list[int], int]] = []  # (pages held, promise left)

    def _spoken_for(self) -> int:
        return sum(len(held) + left for held, left in self.holders)

    @rule(count=st.integers(0, PAGES + 2))
    def promise(self, count: int) -> None:
        fits = self._spoken_for() + count <= PAGES
        assert self.pages.promise(count) == fits
        if fits:
            self.holders.append(([], count))

    @precondition(lambda self: any(left for _, left in self.holders))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from([i for i, (_, left) in enumerate(self.holders) if left]))
        held, left = self.holders[i]
        page = self.pages.take()
        assert 0 <= page < PAGES and all(page not in other for other, _ in self.holders)
        self.holders[i] = ([*held, page], left - 1)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        held, left = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pages.give_back(held, left)

    @rule(seed=st.integers(0, 9))
    def shuffle(self, seed: int) -> None:
        self.pages.shuffle(random.Random(seed))

    @invariant()
    def balanced(self) -> None:
        self.pages.check()
        assert self.pages.num_free == PAGES - sum(len(held) for held, _ in self.holders)
        assert self.pages.num_unpromised == PAGES - self._spoken_for()


AllocatorMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestAllocator = AllocatorMachine.TestCase


def test_nothing_is_taken_beyond_a_promise() -> None:
    pages = PageAllocator(2)
    with pytest.raises(CapacityExceeded):
        pages.take()
    assert pages.promise(1) and pages.take() in (0, 1)
    with pytest.raises(CapacityExceeded):
        pages.take()
    assert pages.num_free == 1


def test_returning_a_page_twice_is_a_fault() -> None:
    pages = PageAllocator(2)
    pages.promise(1)
    page = pages.take()
    pages.give_back([page], 0)
    with pytest.raises(KeyError):
        pages.give_back([page], 0)


@pytest.mark.parametrize("fault", ["lost", "doubled", "both", "promise"])
def test_check_sees_a_fault(fault: str) -> None:
    pages = PageAllocator(3)
    pages.promise(1)
    page = pages.take()
    pages.check()
    if fault == "lost":
        pages._held.clear()
    elif fault == "doubled":
        pages._free.append(pages._free[0])
    elif fault == "both":
        pages._free.append(page)
    else:
        pages._promised = 3
    with pytest.raises(AssertionError):
        pages.check()


def test_shuffle_permutes_the_free_pages() -> None:
    pages = PageAllocator(50)
    pages.promise(50)
    pages.shuffle(random.Random(0))
    taken = [pages.take() for _ in range(50)]
    assert sorted(taken) == list(range(50)) != taken
