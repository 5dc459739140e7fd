"""Which rows of pages a step's prefills will have computed when it ends, for others that need the same."""

from __future__ import annotations

import bisect

from rollout.page_tables import PageTables
from rollout.prefix_cache import PageContent, common_rows
from rollout.sequence import Sequence


class ComingRows:
    """Of one step. Keys find pages here, nothing is taken: a collision would cost a step of waiting, no bit."""

    def __init__(self, tables: PageTables) -> None:
        self._tables = tables
        self._after: dict[bytes, list[PageContent]] = {}
        """key of the page before -> contents begun or filled, in order"""

    def brings(self, sequence: Sequence) -> bool:
        """Whether it is worth waiting: this step computes or begins all that the sequence could take of its next page,
        and nobody has it yet.
        """
        rows = self._tables.next_rows(sequence) if self._after else None
        if rows is None:
            return False
        there = self._tables.nearest(sequence, rows)
        if there is not None and there[1] == len(rows.ids):
            return False
        number = sequence.num_computed // self._tables.page_size
        beside = self._after.get(self._tables.key(sequence, number - 1), [])
        # Contents that go on from these rows come right behind them.
        at = bisect.bisect_left(beside, rows)
        return at < len(beside) and common_rows(beside[at], rows) == len(rows.ids)

    def add(self, sequence: Sequence, count: int) -> None:
        """The sequence computes ``count`` rows."""
        if self._tables.pages.index is None:
            return
        size, first = self._tables.page_size, sequence.num_computed
        for number in range(first // size, (first + count - 1) // size + 1):
            known = self._tables.content(sequence, number, len(sequence.token_ids))
            bisect.insort(self._after.setdefault(self._tables.key(sequence, number - 1), []), known)
