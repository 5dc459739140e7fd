"""Pages: counted per holder, kept for reuse while nobody needs them, and in exactly one place (C6, E3)."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.errors import CapacityExceeded
from rollout.kvcache import PageAllocator
from rollout.prefix_cache import CachedPage, PageContent, PrefixIndex

PAGES = 9


def indexed() -> PageAllocator:
    return PageAllocator(PAGES, PrefixIndex(b"model", 0))


def index_of(pages: PageAllocator) -> PrefixIndex:
    assert pages.index is not None
    return pages.index


def insert(pages: PageAllocator, parent: CachedPage | None, token: int, page: int) -> CachedPage | None:
    """Index ``page`` as holding one token after ``parent``."""
    index, content = index_of(pages), PageContent((token,))
    return index.insert(parent, index.key(parent.key if parent else index.root, content), content, page)


class AllocatorMachine(RuleBasedStateMachine):
    """Holders that take, index, share and release chains of one-token pages, against plain bookkeeping."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = indexed()
        self.tables: list[tuple[list[int], list[CachedPage]]] = []
        """(pages held, entries of the indexed ones)"""

    @rule()
    def open_table(self) -> None:
        self.tables.append(([], []))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        table, _ = data.draw(st.sampled_from(self.tables))
        held = {page for pages, _ in self.tables for page in pages}
        if len(held) == PAGES:
            with pytest.raises(CapacityExceeded):
                self.pages.take()
        else:
            page = self.pages.take()
            assert 0 <= page < PAGES and page not in held
            table.append(page)

    @precondition(lambda self: any(len(t) > len(c) for t, c in self.tables))
    @rule(data=st.data(), token=st.integers(0, 2))
    def fill(self, data: st.DataObject, token: int) -> None:
        """Index the next page of a table, or share the page that holds the same already."""
        table, chain = data.draw(st.sampled_from([t for t in self.tables if len(t[0]) > len(t[1])]))
        parent, index = chain[-1] if chain else None, index_of(self.pages)
        content = PageContent((token,))
        twin = index.find(parent, index.key(parent.key if parent else index.root, content), content)
        at = len(chain)
        if twin is None:
            entry = insert(self.pages, parent, token, table[at])
            assert (entry is None) == (parent is not None and not index.holds(parent))
        else:
            own, table[at], entry = table[at], self.pages.share(twin), twin
            self.pages.release([own])
        if entry is not None:
            chain.append(entry)

    @precondition(lambda self: len(index_of(self.pages)) > 0)
    @rule(data=st.data())
    def reuse(self, data: st.DataObject) -> None:
        """A new table that shares a whole cached prefix."""
        entry: CachedPage | None = data.draw(st.sampled_from(list(index_of(self.pages))))
        chain: list[CachedPage] = []
        while entry is not None:
            chain.insert(0, entry)
            entry = entry.parent
        self.tables.append(([self.pages.share(e) for e in chain], chain))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pages.release(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        table, _ = data.draw(st.sampled_from(self.tables))
        self.pages.forget(table)
        assert not any(index_of(self.pages).has_page(page) for page in table)

    @rule(seed=st.integers(0, 9))
    def shuffle(self, seed: int) -> None:
        self.pages.shuffle(random.Random(seed))

    @rule(version=st.integers(0, 3))
    def restart(self, version: int) -> None:
        for table, _ in self.tables:
            self.pages.release(table)
        self.tables.clear()
        self.pages.restart(version)
        assert (self.pages.num_free, self.pages.num_cached) == (PAGES, 0)

    @invariant()
    def balanced(self) -> None:
        self.pages.check([table for table, _ in self.tables])
        assert self.pages.num_free == PAGES - len({page for table, _ in self.tables for page in table})


AllocatorMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAllocator = AllocatorMachine.TestCase


def chain_of(pages: PageAllocator, *tokens: int) -> list[int]:
    """Take and index one page a token, as one table."""
    table: list[int] = []
    parent: CachedPage | None = None
    for token in tokens:
        table.append(pages.take())
        parent = insert(pages, parent, token, table[-1])
        assert parent is not None
    return table


def tokens_left(pages: PageAllocator) -> list[int]:
    return [entry.content.ids[0] for entry in index_of(pages)]


def test_eviction_takes_the_least_recently_used_from_its_end() -> None:
    pages = indexed()
    old, new = chain_of(pages, 1, 2, 3), chain_of(pages, 4, 5, 6)
    pages.release(old)
    pages.release(new)
    assert (pages.num_free, pages.num_cached) == (PAGES, 6)
    taken = [pages.take() for _ in range(3)]
    assert not set(taken) & {*old, *new} and pages.num_cached == 6, "free pages go first"
    assert [pages.take(), pages.take()] == [old[2], old[1]] and tokens_left(pages) == [1, 4, 5, 6]
    first = next(iter(index_of(pages)))
    pages.release([pages.share(first)])
    assert [pages.take() for _ in range(4)] == [new[2], new[1], new[0], old[0]], "what was used just now goes last"
    with pytest.raises(CapacityExceeded, match="all 9 KV pages are held"):
        pages.take()


def test_a_held_page_is_never_evicted() -> None:
    pages = PageAllocator(3, PrefixIndex(b"model", 0))
    table = chain_of(pages, 1, 2)
    (one, _) = list(index_of(pages))
    pages.share(one)
    pages.release(table)
    assert {pages.take(), pages.take()} == {2, table[1]}
    with pytest.raises(CapacityExceeded):
        pages.take()
    assert tokens_left(pages) == [1] and pages.references(table[0]) == 1


def test_without_an_index_nothing_is_kept() -> None:
    pages = PageAllocator(2)
    page = pages.take()
    pages.release([page])
    assert (pages.num_free, pages.num_cached) == (2, 0)
    pages.restart(1)
    pages.forget([page])
    pages.check([])


def test_returning_a_page_twice_is_a_fault() -> None:
    pages = PageAllocator(2)
    page = pages.take()
    pages.release([page])
    with pytest.raises(KeyError):
        pages.release([page])


def test_a_page_that_left_the_index_cannot_be_shared() -> None:
    pages = indexed()
    table = chain_of(pages, 1)
    (entry,) = list(index_of(pages))
    pages.forget(table)
    with pytest.raises(AssertionError):
        pages.share(entry)


@pytest.mark.parametrize(
    "fault", ["lost", "doubled", "both", "count", "table", "unindexed", "indexed free page", "order", "orphan"]
)
def test_check_sees_a_fault(fault: str) -> None:
    """Negative control: each kind of disorder, made by hand."""
    pages = indexed()
    cached, table = chain_of(pages, 1, 2), chain_of(pages, 7)
    pages.release(cached)
    tables = [table]
    pages.check(tables)
    if fault == "lost":
        pages._free.pop()
    elif fault == "doubled":
        pages._free.append(pages._free[0])
    elif fault == "both":
        pages._free.append(table[0])
    elif fault == "count":
        pages._references[table[0]] = 2
    elif fault == "table":
        tables = [table, table]
    elif fault == "unindexed":
        index_of(pages).remove(cached[1])
    elif fault == "indexed free page":
        del pages._cached[cached[1]]
        pages._free.append(cached[1])
    elif fault == "order":
        pages._cached.move_to_end(cached[1])
    else:
        del index_of(pages)._by_page[cached[0]]
    with pytest.raises(AssertionError):
        pages.check(tables)


def test_shuffle_permutes_the_free_pages() -> None:
    pages = PageAllocator(50)
    pages.shuffle(random.Random(0))
    taken = [pages.take() for _ in range(50)]
    assert sorted(taken) == list(range(50)) != taken
