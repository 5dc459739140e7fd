"""Page tables of sequences: growing them, taking from the content index what others computed, giving them back.

The rule that keeps this safe: rows are written only at or after ``num_computed``, which lies at or after the end of
every shared page and of the rows that an entry of an open page counts. docs/prefix_cache.md has the whole argument.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout.kvcache import PageAllocator
from rollout.prefix_cache import CachedPage, PageContent
from rollout.sequence import Sequence

CopyRows = Callable[[int, int, int], None]
"""``KVStore.copy_rows``."""


class PageTables:
    """Moves pages between an allocator and sequences."""

    def __init__(self, pages: PageAllocator, page_size: int, copy_rows: CopyRows | None = None) -> None:
        """Args: copy_rows: None: only full pages are taken from others."""
        self.pages = pages
        self.page_size = page_size
        self._copy_rows = copy_rows
        self.num_copied = 0
        """rows taken by copy so far"""

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages still to take until the table covers ``num_tokens`` tokens."""
        return max(0, self.pages_for(num_tokens) - len(sequence.pages))

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Take pages until the table covers ``num_tokens`` tokens."""
        self._note_version(sequence)
        for _ in range(self.num_missing(sequence, num_tokens)):
            sequence.pages.append(self.pages.take())

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Give every page back; what was computed is forgotten by the sequence, not by the index.

        Args:
            keep: index the rows of its open page, too.
        """
        if keep:
            self._offer_tail(sequence)
        self.pages.release(sequence.pages)
        sequence.pages, sequence.chain, sequence.num_computed, sequence.tail_offered = [], [], 0, False

    # ---- taking -------------------------------------------------------------------------------------------------

    def hits(self, sequence: Sequence) -> list[CachedPage]:
        """Indexed pages that the sequence can use next: the longest contiguous run from ``num_computed`` on."""
        found: list[CachedPage] = []
        index = self.pages.index
        if index is None or not self._may_take(sequence):
            return found
        parent = _last(sequence)
        for number in range(len(sequence.chain), sequence.num_reusable // self.page_size):
            entry = index.find(parent, self.key(sequence, number), self.content(sequence, number))
            if entry is None:
                break
            found.append(entry)
            parent = entry
        return found

    def adopt(self, sequence: Sequence) -> None:
        """Put the hits into the sequence's table and count their tokens as computed."""
        self._note_version(sequence)
        for entry in self.hits(sequence):
            sequence.pages.append(self.pages.share(entry))
            sequence.chain.append(entry)
            self._count_taken(sequence, self.page_size)

    def next_rows(self, sequence: Sequence) -> PageContent | None:
        """Of the page that the sequence is about to begin, the rows that it may take; None: there are none."""
        if not self._may_take(sequence):
            return None
        full = sequence.num_computed + self.page_size
        end = min(sequence.num_reusable, full)
        if end <= sequence.num_computed or (self._copy_rows is None and end < full):
            return None
        return self.content(sequence, len(sequence.chain), end)

    def nearest(self, sequence: Sequence, rows: PageContent) -> tuple[CachedPage, int] | None:
        """The indexed page that begins like ``rows``, which the sequence needs next, longest; and how many agree."""
        index = self.pages.index
        return None if index is None else index.nearest(_last(sequence), rows)

    def copy(self, sequence: Sequence) -> None:
        """Begin the sequence's next page with the rows of the indexed page that agrees longest, if one does."""
        rows = self.next_rows(sequence)
        found = None if rows is None else self.nearest(sequence, rows)
        if found is None or self._copy_rows is None or not self.pages.num_free:
            return
        entry, count = found
        self._note_version(sequence)
        self.pages.touch(entry)
        page = self.pages.take()
        # The very page, when it was the last that could be evicted: then the rows are where they belong.
        if page != entry.page:
            self._copy_rows(entry.page, page, count)
        self.num_copied += count
        sequence.pages.append(page)
        self._count_taken(sequence, count)

    def _may_take(self, sequence: Sequence) -> bool:
        """Whether it is about to begin a page, after indexed ones alone: else it has rows of its own there."""
        indexed = len(sequence.chain)
        at_start = len(sequence.pages) == indexed and sequence.num_computed == indexed * self.page_size
        return at_start and self.pages.index is not None

    @staticmethod
    def _count_taken(sequence: Sequence, count: int) -> None:
        before = max(sequence.num_computed, sequence.num_seen)
        sequence.num_computed += count
        sequence.num_cached_tokens += max(0, min(sequence.num_computed, sequence.prompt_len) - before)
        sequence.num_seen = max(sequence.num_seen, sequence.num_computed)

    # ---- offering -----------------------------------------------------------------------------------------------

    def register(self, sequence: Sequence) -> None:
        """Index the pages that the sequence has filled; a twin that is indexed already takes the place of its own.

        Once its prefill is done, its open page as well.
        """
        sequence.num_seen = max(sequence.num_seen, sequence.num_computed)
        index = self.pages.index
        if index is None or sequence.kv_version != index.version:
            return
        for number in range(len(sequence.chain), sequence.num_computed // self.page_size):
            parent = _last(sequence)
            key, content, page = self.key(sequence, number), self.content(sequence, number), sequence.pages[number]
            if index.has_page(page):
                index.remove(page)  # its first rows alone, from when it was open
            entry = index.find(parent, key, content)
            if entry is None:
                entry = index.insert(parent, key, content, page)
                if entry is None:
                    return
            else:
                # Equal prefix, equal bits (C2, C3). Holding the indexed page keeps its followers reachable.
                sequence.pages[number] = self.pages.share(entry)
                self.pages.release([page])
            sequence.chain.append(entry)
        if not sequence.tail_offered and sequence.num_uncomputed <= 1:
            sequence.tail_offered = True
            self._offer_tail(sequence)

    def _offer_tail(self, sequence: Sequence) -> None:
        """Index the open page with every row that is computed."""
        index, number = self.pages.index, len(sequence.chain)
        count = sequence.num_computed - number * self.page_size
        if self._copy_rows is None or index is None or sequence.kv_version != index.version:
            return
        if not 0 < count < self.page_size:
            return
        page = sequence.pages[number]
        if index.has_page(page):
            index.remove(page)
        content = self.content(sequence, number, sequence.num_computed)
        index.insert(_last(sequence), index.key(self.key(sequence, number - 1), content), content, page)

    def distrust(self, sequence: Sequence) -> None:
        """Never serve anyone what the sequence read or wrote: its pages, and all that it may have copied from."""
        index = self.pages.index
        if index is not None:
            self.pages.forget([*sequence.pages, *index.alike(self.content(sequence, 0))])

    def key(self, sequence: Sequence, number: int) -> bytes:
        """Content key of the sequence's page ``number``, which must be full of known tokens; of -1: the root."""
        index = self.pages.index
        assert index is not None
        if sequence.key_root != index.root:
            sequence.key_root, sequence.page_keys = index.root, []
        keys = sequence.page_keys
        while len(keys) <= number:
            keys.append(index.key(keys[-1] if keys else index.root, self.content(sequence, len(keys))))
        return keys[number] if number >= 0 else index.root

    def content(self, sequence: Sequence, number: int, end: int | None = None) -> PageContent:
        """What the sequence's page ``number`` holds of tokens before ``end``; None: of a full page."""
        first, last = number * self.page_size, (number + 1) * self.page_size
        last = last if end is None else min(last, end)
        return PageContent(tuple(sequence.token_ids[first:last]), sequence.placement.marks(first, last))

    def _note_version(self, sequence: Sequence) -> None:
        if not sequence.pages and self.pages.index is not None:
            sequence.kv_version = self.pages.index.version

    # ---- invariants ---------------------------------------------------------------------------------------------

    def check(self, holders: list[Sequence]) -> None:
        """Raise AssertionError unless the books balance and no page that others may read can still be written."""
        self.pages.check([sequence.pages for sequence in holders])
        index = self.pages.index
        for sequence in holders:
            assert [e.page for e in sequence.chain] == sequence.pages[: len(sequence.chain)], "chain and table differ"
            full = sequence.num_computed // self.page_size
            assert len(sequence.chain) <= full, "a page counts as shared before it is full"
            for number, page in enumerate(sequence.pages):
                if number < full:
                    continue
                assert self.pages.references(page) == 1, f"page {page} is shared while it is written"
                computed = max(0, sequence.num_computed - number * self.page_size)
                assert index is None or index.rows_of(page) <= computed, f"page {page} is indexed early"


def _last(sequence: Sequence) -> CachedPage | None:
    """Entry of the last of its leading pages that are indexed."""
    return sequence.chain[-1] if sequence.chain else None
