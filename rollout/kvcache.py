"""Pages of the KV cache: who holds which, which are free, and which are kept for reuse. The tensors belong to the
kernel set.

A page is in exactly one of three places: held (a reference count of at least 1), cached (nobody holds it, but it is
indexed by content), or free.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from rollout.errors import CapacityExceeded
from rollout.prefix_cache import CachedPage, PrefixIndex


class PageAllocator:
    """Reference counts over a fixed number of pages; cached pages are evicted least recently used first."""

    def __init__(self, num_pages: int, index: PrefixIndex | None = None) -> None:
        """Args: index: what pages hold; None: nothing is kept for reuse."""
        self.num_pages = num_pages
        self.index = index
        self._free: deque[int] = deque(range(num_pages))
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that no sequence holds: what ``take`` can still give, evictions included."""
        return self.num_pages - len(self._references)

    @property
    def num_cached(self) -> int:
        """Pages that no sequence holds and that are kept for reuse."""
        return len(self._cached)

    @property
    def cached_pages(self) -> list[int]:
        """Page numbers kept for reuse, next to be evicted first."""
        return list(self._cached)

    def references(self, page: int) -> int:
        """How many page tables hold the page."""
        return self._references.get(page, 0)

    def take(self) -> int:
        """A page for one holder to write: a free one, else the least recently used cached one.

        Raises:
            CapacityExceeded: every page is held.
        """
        if self._free:
            page = self._free.popleft()
        elif self._cached:
            # A page's holders also hold the pages before it, and release it before them: the oldest has no followers.
            page, _ = self._cached.popitem(last=False)
            assert self.index is not None
            self.index.remove(page)
        else:
            raise CapacityExceeded(f"all {self.num_pages} KV pages are held; the scheduler must preempt first")
        self._references[page] = 1
        return page

    def share(self, entry: CachedPage) -> int:
        """One more holder of an indexed page; returns its number."""
        assert self.index is not None and self.index.holds(entry), "a page that left the index cannot be shared"
        self._cached.pop(entry.page, None)
        self._references[entry.page] = self._references.get(entry.page, 0) + 1
        return entry.page

    def touch(self, entry: CachedPage) -> None:
        """An indexed page was read: of those kept for reuse it is evicted last."""
        assert self.index is not None and self.index.holds(entry), "a page that left the index cannot be read"
        if entry.page in self._cached:
            self._cached.move_to_end(entry.page)

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page of a table; last page first, so that eviction cuts prefixes from the end."""
        for page in reversed(pages):
            left = self._references[page] - 1
            if left:
                self._references[page] = left
                continue
            del self._references[page]
            if self.index is not None and self.index.has_page(page):
                self._cached[page] = None
            else:
                self._free.append(page)

    def forget(self, pages: Sequence[int]) -> None:
        """Never serve these pages, nor what follows them, to anyone else: their content is not to be trusted."""
        if self.index is not None:
            self._uncache(self.index.remove_with_followers(pages))

    def restart(self, version: int) -> None:
        """Drop every cached page; pages indexed from here on are of weight version ``version``."""
        if self.index is not None:
            self.index.restart(version)
            self._uncache(list(self._cached))

    def _uncache(self, pages: list[int]) -> None:
        for page in pages:
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def shuffle(self, rng: random.Random) -> None:
        """Permute the free list (tests: page numbers must not matter)."""
        pages = list(self._free)
        rng.shuffle(pages)
        self._free = deque(pages)

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless reference counts are what ``tables`` hold and every page is in one place."""
        held = Counter(page for table in tables for page in table)
        assert all(len(set(table)) == len(table) for table in tables), "a table holds a page twice"
        assert held == self._references, f"tables hold {dict(held)}, the counts say {self._references}"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert not free & held.keys() and not cached & held.keys() and not free & cached, "a page is in two places"
        assert free | cached | held.keys() == set(range(self.num_pages)), "a page is lost"
        if self.index is None:
            assert not cached, "pages are cached without an index"
            return
        self.index.check()
        indexed = {entry.page: entry for entry in self.index}
        assert cached <= indexed.keys(), "a cached page is not indexed"
        assert not free & indexed.keys(), "a free page is indexed"
        place = {page: i for i, page in enumerate(self._cached)}
        for entry in indexed.values():
            if entry.parent is not None and entry.parent.page in place:
                assert entry.page in place, f"page {entry.page} is held, the page before it is not"
                assert place[entry.page] < place[entry.parent.page], "a page would be evicted before its followers"
