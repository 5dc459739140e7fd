"""The content index of full pages: a hit needs equal ids, version and the very parent, whatever the hash says."""

from __future__ import annotations

import pytest

from rollout.prefix_cache import CachedPage, PrefixIndex

A, B, C = (1, 2), (3, 4), (5, 6)


def insert(index: PrefixIndex, parent: CachedPage | None, ids: tuple[int, ...], page: int) -> CachedPage:
    entry = index.insert(parent, key_of(index, parent, ids), ids, page)
    assert entry is not None
    index.check()
    return entry


def key_of(index: PrefixIndex, parent: CachedPage | None, ids: tuple[int, ...]) -> bytes:
    return index.key(index.root if parent is None else parent.key, ids)


def find(index: PrefixIndex, parent: CachedPage | None, ids: tuple[int, ...]) -> CachedPage | None:
    return index.find(parent, key_of(index, parent, ids), ids)


def chain(index: PrefixIndex, *contents: tuple[int, ...]) -> list[CachedPage]:
    entries: list[CachedPage] = []
    for page, ids in enumerate(contents):
        entries.append(insert(index, entries[-1] if entries else None, ids, page))
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


def test_ids_of_one_page_do_not_run_into_the_next() -> None:
    assert PrefixIndex.key(b"r", (1, 2)) != PrefixIndex.key(b"r", (12,)) != PrefixIndex.key(b"r", (2, 1))


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
    assert [e.page for e in index] == [0, 2, 4] and first.children == 1
    assert sorted(index.remove_with_followers([0])) == [0, 2, 4] and len(index) == 0


def test_a_new_version_starts_empty() -> None:
    index = PrefixIndex(b"model", 0)
    chain(index, A, B)
    root = index.root
    index.restart(1)
    assert len(index) == 0 and find(index, None, A) is None and index.root != root
    insert(index, None, A, 0)


@pytest.mark.parametrize("fault", ["key", "version", "children", "parent", "half"])
def test_check_sees_a_fault(fault: str) -> None:
    index = PrefixIndex(b"model", 0)
    first, second = chain(index, A, B)
    if fault == "key":
        second.token_ids = C
    elif fault == "version":
        second.version = 9
    elif fault == "children":
        first.children = 2
    elif fault == "parent":
        second.parent = CachedPage(9, first.key, A, None, 0)
    else:
        del index._by_page[1]
    with pytest.raises(AssertionError):
        index.check()
