"""The content index of pages: a hit needs equal content, version and the very parent, whatever the hash says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.prefix_cache import CachedPage, PageContent, PrefixIndex, common_rows

A, B, C = PageContent((1, 2)), PageContent((3, 4)), PageContent((5, 6))


def insert(index: PrefixIndex, parent: CachedPage | None, content: PageContent, page: int) -> CachedPage:
    entry = index.insert(parent, key_of(index, parent, content), content, page)
    assert entry is not None
    index.check()
    return entry


def key_of(index: PrefixIndex, parent: CachedPage | None, content: PageContent) -> bytes:
    return index.key(index.root if parent is None else parent.key, content)


def find(index: PrefixIndex, parent: CachedPage | None, content: PageContent) -> CachedPage | None:
    return index.find(parent, key_of(index, parent, content), content)


def chain(index: PrefixIndex, *contents: PageContent) -> list[CachedPage]:
    entries: list[CachedPage] = []
    for page, content in enumerate(contents):
        entries.append(insert(index, entries[-1] if entries else None, content, page))
    return entries


def test_a_chain_is_found_page_by_page() -> None:
    index = PrefixIndex(b"model", 3)
    first, second, third = chain(index, A, B, C)
    assert find(index, None, A) is first and find(index, first, B) is second and find(index, second, C) is third
    assert find(index, None, B) is None and find(index, first, C) is None
    assert [e.page for e in index] == [0, 1, 2] and len(index) == 3 and index.has_page(1) and not index.has_page(9)


def test_equal_pages_after_different_ones_are_two() -> None:
    index = PrefixIndex(b"model", 0)
    first = insert(index, None, A, 0)
    other = insert(index, None, B, 1)
    after_first, after_other = insert(index, first, C, 2), insert(index, other, C, 3)
    assert find(index, first, C) is after_first is not after_other is find(index, other, C)


@pytest.mark.parametrize(("identity", "version"), [(b"other", 1), (b"model", 2)])
def test_the_key_begins_with_model_and_version(identity: bytes, version: int) -> None:
    mine, theirs = PrefixIndex(b"model", 1), PrefixIndex(identity, version)
    assert key_of(mine, None, A) != key_of(theirs, None, A)
    assert key_of(mine, None, A) == key_of(PrefixIndex(b"model", 1), None, A)


def test_ids_run_neither_into_each_other_nor_into_marks() -> None:
    assert len({PrefixIndex.key(b"r", PageContent(*c)) for c in (((1, 2),), ((12,),), ((2, 1),), ((1,), (2,)))}) == 4


@pytest.mark.parametrize("differs", ["ids", "parent", "version"])
def test_a_collision_is_no_hit(differs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys are equal here: what is compared besides them has to tell the pages apart."""
    monkeypatch.setattr(PrefixIndex, "key", staticmethod(lambda before, ids: b"same"))
    index = PrefixIndex(b"model", 0)
    entry = insert(index, None, A, 0)
    assert index.find(None, b"same", A) is entry, "control: a true hit"
    if differs == "ids":
        assert index.find(None, b"same", B) is None
    elif differs == "parent":
        twin = CachedPage(7, b"same", A, None, 0)
        assert index.find(twin, b"same", A) is None, "equal to the parent in all but being it"
    else:
        index.version = 1
        assert index.find(None, b"same", A) is None
    assert index.insert(None, b"same", B, 5) is None and not index.has_page(5), "the key has an owner"


def test_nothing_is_indexed_after_a_page_that_has_left() -> None:
    index = PrefixIndex(b"model", 0)
    first = insert(index, None, A, 0)
    index.remove(0)
    assert not index.holds(first)
    assert index.insert(first, key_of(index, first, B), B, 1) is None
    successor = insert(index, None, A, 0)
    assert index.holds(successor) and not index.holds(first), "equal content, another entry"
    assert find(index, first, B) is None


def test_a_page_leaves_after_its_followers() -> None:
    index = PrefixIndex(b"model", 0)
    chain(index, A, B)
    with pytest.raises(AssertionError, match="before the 1 that follow"):
        index.remove(0)


def test_removal_takes_all_that_follows() -> None:
    index = PrefixIndex(b"model", 0)
    first = insert(index, None, A, 0)
    left, right = insert(index, first, B, 1), insert(index, first, C, 2)
    insert(index, left, A, 3)
    insert(index, right, A, 4)
    assert index.remove_with_followers([1, 77]) == [3, 1]
    index.check()
    assert [e.page for e in index] == [0, 2, 4] and first.followers == [right]
    assert sorted(index.remove_with_followers([0])) == [0, 2, 4] and len(index) == 0


def test_a_new_version_starts_empty() -> None:
    index = PrefixIndex(b"model", 0)
    chain(index, A, B)
    root = index.root
    index.restart(1)
    assert len(index) == 0 and find(index, None, A) is None and index.root != root
    insert(index, None, A, 0)


@pytest.mark.parametrize("fault", ["key", "version", "followers", "parent", "half"])
def test_check_sees_a_fault(fault: str) -> None:
    index = PrefixIndex(b"model", 0)
    first, second = chain(index, A, B)
    if fault == "key":
        second.content = C
    elif fault == "version":
        second.version = 9
    elif fault == "followers":
        first.followers.clear()
    elif fault == "parent":
        second.parent = CachedPage(9, first.key, A, None, 0)
    else:
        del index._by_page[1]
    with pytest.raises(AssertionError):
        index.check()


# ---- rows in common ---------------------------------------------------------------------------------------------

IMAGE, OTHER = (9, 8, 7, 6), (9, 8, 7, 5)


@pytest.mark.parametrize(
    ("one", "other", "rows"),
    [
        (((1, 2, 3),), ((1, 2, 4),), 2),
        (((1, 2, 3),), ((1, 2),), 2),
        (((), ()), ((1,),), 0),
        (((1, 5, 5, 2), (1, *IMAGE)), ((1, 5, 5, 3), (1, *IMAGE)), 3),
        (((1, 5, 5, 2), (1, *IMAGE)), ((1, 5, 5, 2), (1, *OTHER)), 1),
        (((5, 5, 2, 3), (-4, *IMAGE)), ((5, 5, 2, 3), (-4, *OTHER)), 0),
        (((1, 5, 2, 5), (1, *IMAGE, 3, *IMAGE)), ((1, 5, 2, 5), (1, *IMAGE, 3, *OTHER)), 3),
        (((1, 5, 2, 5), (1, *IMAGE, 3, *IMAGE)), ((1, 5), (1, *IMAGE)), 2),
    ],
)
def test_rows_in_common_end_where_ids_or_images_differ(one: tuple[Any, ...], other: tuple[Any, ...], rows: int) -> None:
    a, b = PageContent(*one), PageContent(*other)
    assert common_rows(a, b) == common_rows(b, a) == rows


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


@given(held=st.sets(IDS, max_size=12), wanted=IDS)
def test_the_nearest_is_the_nearest_of_all(held: set[tuple[int, ...]], wanted: tuple[int, ...]) -> None:
    index = PrefixIndex(b"model", 0)
    for page, ids in enumerate(held):
        insert(index, None, PageContent(ids), page)
    most = max((common_rows(PageContent(ids), PageContent(wanted)) for ids in held), default=0)
    found = index.nearest(None, PageContent(wanted))
    if most == 0:
        assert found is None
    else:
        assert found is not None and found[1] == most == common_rows(found[0].content, PageContent(wanted))


def test_only_what_follows_the_same_entry_is_near() -> None:
    index = PrefixIndex(b"model", 0)
    first, second = insert(index, None, A, 0), insert(index, None, B, 1)
    after = insert(index, first, PageContent((7, 8, 9)), 2)
    assert index.nearest(first, PageContent((7, 8))) == (after, 2)
    assert index.nearest(second, PageContent((7, 8))) is None
    index.remove_with_followers([0])
    assert index.nearest(first, PageContent((7, 8))) is None
