"""Page tables of sequences: growing them, sharing full pages through the content index, giving them back.

The rule that keeps sharing safe: a shared page is full, and rows are written only at or after ``num_computed``, which
lies at or after the end of every shared page. Nothing is ever copied or written twice.
"""

from __future__ import annotations

from rollout.kvcache import PageAllocator
from rollout.prefix_cache import CachedPage, TokenIds
from rollout.sequence import Sequence


class PageTables:
    """Moves pages between an allocator and sequences."""

    def __init__(self, pages: PageAllocator, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size

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

    def release(self, sequence: Sequence) -> None:
        """Give every page back; what was computed is forgotten by the sequence, not by the index."""
        self.pages.release(sequence.pages)
        sequence.pages, sequence.chain, sequence.num_computed = [], [], 0

    # ---- sharing ------------------------------------------------------------------------------------------------

    def hits(self, sequence: Sequence) -> list[CachedPage]:
        """Indexed pages that the sequence can use next: the longest contiguous run from ``num_computed`` on."""
        found: list[CachedPage] = []
        index = self.pages.index
        first = len(sequence.chain)
        if index is None or sequence.num_computed != first * self.page_size:
            return found
        parent = sequence.chain[-1] if sequence.chain else None
        for number in range(first, sequence.num_reusable // self.page_size):
            entry = index.find(parent, self.key(sequence, number), self._ids(sequence, number))
            if entry is None:
                break
            found.append(entry)
            parent = entry
        return found

    def adopt(self, sequence: Sequence) -> None:
        """Put the hits into the sequence's table and count their tokens as computed."""
        # A table that already reaches past num_computed has rows of its own there.
        if len(sequence.pages) != len(sequence.chain):
            return
        self._note_version(sequence)
        for entry in self.hits(sequence):
            sequence.pages.append(self.pages.share(entry))
            sequence.chain.append(entry)
            before = max(sequence.num_computed, sequence.num_seen)
            sequence.num_computed += self.page_size
            sequence.num_cached_tokens += max(0, min(sequence.num_computed, sequence.prompt_len) - before)
        sequence.num_seen = max(sequence.num_seen, sequence.num_computed)

    def register(self, sequence: Sequence) -> None:
        """Index the pages that the sequence has filled; a twin that is indexed already takes the place of its own."""
        sequence.num_seen = max(sequence.num_seen, sequence.num_computed)
        index = self.pages.index
        if index is None or sequence.kv_version != index.version:
            return
        for number in range(len(sequence.chain), sequence.num_computed // self.page_size):
            parent = sequence.chain[-1] if sequence.chain else None
            key, ids, page = self.key(sequence, number), self._ids(sequence, number), sequence.pages[number]
            entry = index.find(parent, key, ids)
            if entry is None:
                entry = index.insert(parent, key, ids, page)
                if entry is None:
                    return
            else:
                # Equal prefix, equal bits (C2, C3). Holding the indexed page keeps its followers reachable.
                sequence.pages[number] = self.pages.share(entry)
                self.pages.release([page])
            sequence.chain.append(entry)

    def key(self, sequence: Sequence, number: int) -> bytes:
        """Content key of the sequence's page ``number``, which must be full of known tokens."""
        index = self.pages.index
        assert index is not None
        if sequence.key_root != index.root:
            sequence.key_root, sequence.page_keys = index.root, []
        keys = sequence.page_keys
        while len(keys) <= number:
            keys.append(index.key(keys[-1] if keys else index.root, self._ids(sequence, len(keys))))
        return keys[number]

    def _ids(self, sequence: Sequence, number: int) -> TokenIds:
        """What the page holds: token ids, then the images that lie in it, since a placeholder's id says nothing."""
        first, last = number * self.page_size, (number + 1) * self.page_size
        return (*sequence.token_ids[first:last], *sequence.placement.marks(first, last))

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
                open_page = number >= full
                assert not (open_page and self.pages.references(page) > 1), f"page {page} is shared while it is written"
                assert not (open_page and index is not None and index.has_page(page)), f"page {page} is indexed early"
