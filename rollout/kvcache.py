"""Pages of the KV cache: who holds which, and how many are promised. The tensors belong to the kernel set."""

from __future__ import annotations

import random
from collections import deque

from rollout.errors import CapacityExceeded


class PageAllocator:
    """Free list over a fixed number of pages, with promises.

    A sequence is admitted only when its worst case fits beside the promises already made, so a running sequence can
    always take its next page. (Preemption, when it comes, replaces the promise; the interface stays.)
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: deque[int] = deque(range(num_pages))
        self._held: set[int] = set()
        self._promised = 0

    @property
    def num_free(self) -> int:
        """Pages not held by any sequence."""
        return len(self._free)

    @property
    def num_unpromised(self) -> int:
        """Pages neither held nor promised."""
        return len(self._free) - self._promised

    def promise(self, count: int) -> bool:
        """Set ``count`` pages aside for later ``take``; False when they are not there."""
        if count > self.num_unpromised:
            return False
        self._promised += count
        return True

    def take(self) -> int:
        """One page out of the promised ones."""
        if self._promised <= 0:
            raise CapacityExceeded("a sequence asked for a page beyond its promise; this is a scheduler fault")
        page = self._free.popleft()
        self._held.add(page)
        self._promised -= 1
        return page

    def give_back(self, pages: list[int], unused_promise: int) -> None:
        """Free pages and drop what is left of a promise."""
        for page in pages:
            self._held.remove(page)
            self._free.append(page)
        self._promised -= unused_promise

    def shuffle(self, rng: random.Random) -> None:
        """Permute the free list (tests: page numbers must not matter)."""
        pages = list(self._free)
        rng.shuffle(pages)
        self._free = deque(pages)

    def check(self) -> None:
        """Raise AssertionError unless every page is free or held, never both, and the promises can be met."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert not free & self._held, "a held page is in the free list"
        assert len(free) + len(self._held) == self.num_pages, "a page is lost"
        assert 0 <= self._promised <= len(self._free), "promises exceed the free pages"
