"""Which full KV pages hold which tokens: a content index, exact also when hashes collide.

A page's key is a hash of the page before it, of its own token ids, and at the root of model identity and weight
version. A key only finds a candidate: a hit also needs equal ids, the same weight version and the very entry matched
one page earlier as parent, so by induction the whole prefix is equal, whatever the hash does. Where images lie in a
page, their places and 256-bit digests of their pixels count among its ids.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

TokenIds = tuple[int, ...]


@dataclass(slots=True, eq=False)
class CachedPage:
    """One indexed page. Compared by identity: an entry that was removed never equals its successor."""

    page: int
    """page number"""
    key: bytes
    token_ids: TokenIds
    """[page_size], then what ``Placement.marks`` says of images in it"""
    parent: CachedPage | None
    """the page before it; None at the start of a sequence"""
    version: int
    """weight version its KV was computed under"""
    children: int = 0
    """indexed pages whose parent this is"""


class PrefixIndex:
    """Content -> page, for one model and one weight version at a time. Knows nothing of references."""

    def __init__(self, model_identity: bytes, version: int) -> None:
        self.model_identity = model_identity
        self.version = version
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[CachedPage]:
        """Parents come before their children."""
        return iter(self._by_key.values())

    @property
    def root(self) -> bytes:
        """What stands before a first page: model identity and weight version."""
        return self.model_identity + self.version.to_bytes(8, "little", signed=True)

    @staticmethod
    def key(before: bytes, token_ids: TokenIds) -> bytes:
        """Chained hash: ``before`` is the previous page's key, or ``root``."""
        return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=16).digest()

    def find(self, parent: CachedPage | None, key: bytes, token_ids: TokenIds) -> CachedPage | None:
        """The page that holds ``token_ids`` right after ``parent``; None unless all of it is equal."""
        entry = self._by_key.get(key)
        if entry is None or entry.token_ids != token_ids or entry.parent is not parent or entry.version != self.version:
            return None
        return entry

    def insert(self, parent: CachedPage | None, key: bytes, token_ids: TokenIds, page: int) -> CachedPage | None:
        """Index a page; None when its parent has left the index or another content owns the key."""
        if key in self._by_key or (parent is not None and not self.holds(parent)):
            return None
        entry = CachedPage(page, key, token_ids, parent, self.version)
        self._by_key[key] = self._by_page[page] = entry
        if parent is not None:
            parent.children += 1
        return entry

    def holds(self, entry: CachedPage) -> bool:
        """Whether this very entry is still indexed."""
        return self._by_page.get(entry.page) is entry

    def has_page(self, page: int) -> bool:
        """Whether the page is indexed."""
        return page in self._by_page

    def remove(self, page: int) -> None:
        """Drop a page that no indexed page follows."""
        entry = self._by_page.pop(page)
        assert entry.children == 0, f"page {page} leaves the index before the {entry.children} that follow it"
        del self._by_key[entry.key]
        if entry.parent is not None:
            entry.parent.children -= 1

    def remove_with_followers(self, pages: Iterable[int]) -> list[int]:
        """Drop pages and every indexed page after them; returns all that were dropped."""
        doomed = {id(self._by_page[page]): self._by_page[page] for page in pages if page in self._by_page}
        for entry in self:
            if entry.parent is not None and id(entry.parent) in doomed:
                doomed[id(entry)] = entry
        # Followers first: parents stand earlier in the index than their children.
        gone = [entry.page for entry in self if id(entry) in doomed][::-1]
        for page in gone:
            self.remove(page)
        return gone

    def restart(self, version: int) -> None:
        """Forget everything; what is indexed from here on is of ``version``."""
        self._by_key.clear()
        self._by_page.clear()
        self.version = version

    def check(self) -> None:
        """Raise AssertionError unless keys, pages, parents and child counts agree."""
        assert {id(e) for e in self._by_key.values()} == {id(e) for e in self._by_page.values()}, "index halves differ"
        children = dict.fromkeys(self._by_page, 0)
        seen: set[int] = set()
        for key, entry in self._by_key.items():
            assert entry.key == key and self._by_page.get(entry.page) is entry, f"page {entry.page} is misfiled"
            assert entry.version == self.version, f"page {entry.page} is of version {entry.version}, not {self.version}"
            before = self.root
            if entry.parent is not None:
                assert id(entry.parent) in seen, f"page {entry.page} follows a page that is not indexed before it"
                children[entry.parent.page] += 1
                before = entry.parent.key
            assert self.key(before, entry.token_ids) == key, f"the key of page {entry.page} is not its content's"
            seen.add(id(entry))
        for entry in self:
            assert entry.children == children[entry.page], f"page {entry.page} miscounts its followers"
