"""Which KV pages hold which tokens: a content index, exact also when hashes collide.

A page's key is a hash of the page before it, of its own content, and at the root of model identity and weight version.
A key only finds a candidate: a hit also needs equal content, the same weight version and the very entry matched one
page earlier as parent, so by induction the whole prefix is equal, whatever the hash does. Full pages are shared; rows
of a page that agrees in part are copied, so a page that is not full may be indexed too, as a tail that nothing follows.
"""

from __future__ import annotations

import bisect
import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rollout.placement import MARK


class PageContent(NamedTuple):
    """What the rows of a page are of. Ordered by ids: those that agree longest are neighbours."""

    ids: tuple[int, ...]
    """token ids, at most page_size"""
    marks: tuple[int, ...] = ()
    """what ``Placement.marks`` says of images among them"""


def common_rows(one: PageContent, other: PageContent) -> int:
    """Leading rows that both hold."""
    pairs = zip(one.ids, other.ids, strict=False)
    rows = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.ids), len(other.ids)))
    if one.marks == other.marks:
        return rows
    # Images are in order: rows before the first that is not in both are of the same images.
    for at in range(0, max(len(one.marks), len(other.marks)), MARK):
        mine, theirs = one.marks[at : at + MARK], other.marks[at : at + MARK]
        if mine != theirs:
            return max(0, min(rows, *(mark[0] for mark in (mine, theirs) if mark)))
    return rows


@dataclass(slots=True, eq=False)
class CachedPage:
    """One indexed page. Compared by identity: an entry that was removed never equals its successor."""

    page: int
    """page number"""
    key: bytes
    content: PageContent
    parent: CachedPage | None
    """the page before it; None at the start of a sequence"""
    version: int
    """weight version its KV was computed under"""
    followers: list[CachedPage] = field(default_factory=list)
    """indexed pages whose parent this is, by content"""


def _content(entry: CachedPage) -> PageContent:
    return entry.content


class PrefixIndex:
    """Content -> page, for one model and one weight version at a time. Knows nothing of references."""

    def __init__(self, model_identity: bytes, version: int) -> None:
        self.model_identity = model_identity
        self.version = version
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._first: list[CachedPage] = []
        """those without a parent, by content"""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[CachedPage]:
        """Parents come before their followers."""
        return iter(self._by_key.values())

    @property
    def root(self) -> bytes:
        """What stands before a first page: model identity and weight version."""
        return self.model_identity + self.version.to_bytes(8, "little", signed=True)

    @staticmethod
    def key(before: bytes, content: PageContent) -> bytes:
        """Chained hash: ``before`` is the previous page's key, or ``root``."""
        numbers = array("q", (len(content.ids), *content.ids, *content.marks))
        return hashlib.blake2b(before + numbers.tobytes(), digest_size=16).digest()

    def find(self, parent: CachedPage | None, key: bytes, content: PageContent) -> CachedPage | None:
        """The page that holds ``content`` right after ``parent``; None unless all of it is equal."""
        entry = self._by_key.get(key)
        if entry is None or entry.content != content or entry.parent is not parent or entry.version != self.version:
            return None
        return entry

    def nearest(self, parent: CachedPage | None, content: PageContent) -> tuple[CachedPage, int] | None:
        """The page right after ``parent`` that begins like ``content`` for longest, and for how many rows."""
        if parent is not None and not self.holds(parent):
            return None
        beside = self._after(parent)
        at = bisect.bisect_left(beside, content, key=_content)
        found = [(entry, common_rows(entry.content, content)) for entry in beside[max(0, at - 1) : at + 1]]
        entry, rows = max(found, key=lambda pair: pair[1], default=(None, 0))
        return (entry, rows) if entry is not None and rows else None

    def alike(self, content: PageContent) -> list[int]:
        """First pages that have at least one row in common with ``content``."""
        return [entry.page for entry in self._first if common_rows(entry.content, content)]

    def insert(self, parent: CachedPage | None, key: bytes, content: PageContent, page: int) -> CachedPage | None:
        """Index a page; None when its parent has left the index or another content owns the key."""
        if key in self._by_key or (parent is not None and not self.holds(parent)):
            return None
        entry = CachedPage(page, key, content, parent, self.version)
        self._by_key[key] = self._by_page[page] = entry
        bisect.insort(self._after(parent), entry, key=_content)
        return entry

    def holds(self, entry: CachedPage) -> bool:
        """Whether this very entry is still indexed."""
        return self._by_page.get(entry.page) is entry

    def has_page(self, page: int) -> bool:
        """Whether the page is indexed."""
        return page in self._by_page

    def rows_of(self, page: int) -> int:
        """Rows of the page that are indexed; 0 when none is."""
        return len(self._by_page[page].content.ids) if page in self._by_page else 0

    def remove(self, page: int) -> None:
        """Drop a page that no indexed page follows."""
        entry = self._by_page[page]
        following = len(entry.followers)
        assert not following, f"page {page} leaves the index before the {following} that follow it"
        del self._by_page[page], self._by_key[entry.key]
        beside = self._after(entry.parent)
        at = bisect.bisect_left(beside, entry.content, key=_content)
        assert beside[at] is entry, f"page {page} is misplaced among those after its parent"
        del beside[at]

    def remove_with_followers(self, pages: Iterable[int]) -> list[int]:
        """Drop pages and every indexed page after them, last first; returns all that were dropped."""
        gone: list[int] = []
        for page in pages:
            if page in self._by_page:
                doomed = [self._by_page[page]]
                for entry in doomed:
                    doomed.extend(entry.followers)
                for entry in reversed(doomed):
                    self.remove(entry.page)
                    gone.append(entry.page)
        return gone

    def restart(self, version: int) -> None:
        """Forget everything; what is indexed from here on is of ``version``."""
        self._by_key.clear()
        self._by_page.clear()
        self._first.clear()
        self.version = version

    def _after(self, parent: CachedPage | None) -> list[CachedPage]:
        return self._first if parent is None else parent.followers

    def check(self) -> None:
        """Raise AssertionError unless keys, pages, parents and followers agree."""
        assert {id(e) for e in self._by_key.values()} == {id(e) for e in self._by_page.values()}, "index halves differ"
        seen: set[int] = set()
        after: dict[int, list[CachedPage]] = {}
        for key, entry in self._by_key.items():
            assert entry.key == key and self._by_page.get(entry.page) is entry, f"page {entry.page} is misfiled"
            assert entry.version == self.version, f"page {entry.page} is of version {entry.version}, not {self.version}"
            before = self.root
            if entry.parent is not None:
                assert id(entry.parent) in seen, f"page {entry.page} follows a page that is not indexed before it"
                before = entry.parent.key
            assert self.key(before, entry.content) == key, f"the key of page {entry.page} is not its content's"
            seen.add(id(entry))
            after.setdefault(id(entry.parent), []).append(entry)
        for parent in (None, *self):
            followers = sorted(after.get(id(parent), []), key=_content)
            assert self._after(parent) == followers, f"followers of {parent and parent.page} are not in order"
