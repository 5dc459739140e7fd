"""Which rows the next step computes: every decoding sequence, then prefill chunks within a token budget.

Continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi, Agrawal et al. 2023), preemption by recompute
(vLLM, Kwon et al. 2023) and sharing of full prompt pages. The choice changes speed only: rows are independent, so no
schedule changes a bit.

Everything goes by order of arrival. Pages are taken as sequences grow; when none is left, the latest arrival that runs
gives its pages up and waits in front of all that never ran. So the oldest sequence is never set back for a younger one,
and it alone always fits: it ends, then the next one is the oldest.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rollout.errors import CapacityExceeded, InvalidRequest
from rollout.kvcache import PageAllocator
from rollout.page_tables import PageTables
from rollout.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Budgets of one engine."""

    max_batch_tokens: int
    """rows a step may compute"""
    max_running: int
    """sequences in the batch"""
    max_waiting: int
    """sequences queued"""
    chunk_size: int
    """rows of one sequence's prefill a step may compute"""
    page_size: int


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """``count`` rows of one sequence, starting at its ``num_computed``; their pages are in its table."""

    sequence: Sequence
    count: int


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class Scheduler:
    """First come, first admitted; the last to come is the first to be preempted."""

    def __init__(self, limits: SchedulerLimits, pages: PageAllocator) -> None:
        self.limits = limits
        self.pages = pages
        self.tables = PageTables(pages, limits.page_size)
        self.waiting: deque[Sequence] = deque()
        self.preempted: list[Sequence] = []
        """ran before and run again before anything that waits; in order of arrival"""
        self.running: list[Sequence] = []
        """in order of arrival"""
        self.hold_admission = False
        """admit nothing that never ran; preempted sequences still come back"""
        self.num_preemptions = 0
        self._arrivals = 0

    @property
    def in_flight(self) -> list[Sequence]:
        """Admitted and not ended."""
        return [*self.running, *self.preempted]

    def worst_case_pages(self, sequence: Sequence) -> int:
        """KV pages of the sequence at its ``max_len``."""
        return self.tables.pages_for(sequence.max_len)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            InvalidRequest: it could never fit the cache. CapacityExceeded: the queue is full.
        """
        need = self.worst_case_pages(sequence)
        if need > self.pages.num_pages:
            raise InvalidRequest(
                f"{sequence.max_len} tokens need {need} KV pages, the cache has {self.pages.num_pages}; "
                "ask for fewer tokens or raise engine.kv_cache_tokens",
                field="sequences" if sequence.score is not None else "sampling.max_tokens",
            )
        if len(self.waiting) >= self.limits.max_waiting:
            raise CapacityExceeded(f"the queue holds {len(self.waiting)} sequences, its limit; try again later")
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    # ---- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> list[ScheduledRows]:
        """Admit what fits, pick the rows of the next step and take their pages. Empty when there is nothing to do."""
        self._admit()
        return self._take_pages(self._share_budget())

    def _admit(self) -> None:
        while len(self.running) < self.limits.max_running:
            queue = self.preempted or (None if self.hold_admission else self.waiting)
            if not queue or not self._fits(queue[0]):
                return
            sequence = queue[0]
            del queue[0]
            bisect.insort(self.running, sequence, key=_arrival)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether its tokens and one page to grow fit beside what those running have and take next."""
        need = min(self.tables.pages_for(len(sequence.token_ids)) + 1, self.worst_case_pages(sequence))
        room = self.pages.num_free - sum(self.tables.num_missing(s, len(s.token_ids)) for s in self.running)
        if need > room:
            need -= sum(self.pages.references(entry.page) > 0 for entry in self.tables.hits(sequence))
        return need <= room

    def _share_budget(self) -> list[tuple[Sequence, int]]:
        """Rows for each running sequence, in order of arrival: decoding ones first, the rest to prefill."""
        budget = self.limits.max_batch_tokens
        counts: dict[Sequence, int] = {}
        for sequence in self.running:
            if sequence.num_uncomputed > 1:
                self.tables.adopt(sequence)
            if sequence.num_uncomputed == 1 and budget > 0:
                counts[sequence] = 1
                budget -= 1
        coming: set[bytes] = set()
        for sequence in self.running:
            if budget > 0 and sequence.num_uncomputed > 1 and not self._comes(sequence, coming):
                counts[sequence] = min(sequence.num_uncomputed, self.limits.chunk_size, budget)
                budget -= counts[sequence]
                coming.update(self._filling(sequence, counts[sequence]))
        return [(s, counts[s]) for s in self.running if s in counts]

    def _comes(self, sequence: Sequence, coming: set[bytes]) -> bool:
        """Whether an older sequence computes the very page that this one needs next: then it is worth waiting for."""
        number, offset = divmod(sequence.num_computed, self.limits.page_size)
        if offset or not coming or (number + 1) * self.limits.page_size > sequence.num_reusable:
            return False
        return self.tables.key(sequence, number) in coming

    def _filling(self, sequence: Sequence, count: int) -> Iterator[bytes]:
        """Content keys of the pages that the next ``count`` rows fill or begin, as far as their tokens are known."""
        if self.pages.index is None:
            return
        size, first = self.limits.page_size, sequence.num_computed
        last = min((first + count - 1) // size, len(sequence.token_ids) // size - 1)
        for number in range(first // size, last + 1):
            yield self.tables.key(sequence, number)

    def _take_pages(self, shares: list[tuple[Sequence, int]]) -> list[ScheduledRows]:
        """Oldest first, so that whoever is preempted on the way has no pages promised yet."""
        rows: list[ScheduledRows] = []
        for sequence, count in shares:
            if self._running(sequence) and self._make_room(sequence, sequence.num_computed + count):
                rows.append(ScheduledRows(sequence, count))
        return rows

    def _running(self, sequence: Sequence) -> bool:
        """Victims come from the end, and are younger than all that runs."""
        return bool(self.running) and sequence.arrival <= self.running[-1].arrival

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the table at the expense of later arrivals; False when the sequence is the last itself and had to go."""
        while self.tables.num_missing(sequence, num_tokens) > self.pages.num_free:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        self.tables.grow(sequence, num_tokens)
        return True

    # ---- ends ---------------------------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's pages; its tokens stay, and it is prefilled again when there is room (C2)."""
        self.running.remove(sequence)
        self.tables.release(sequence)
        bisect.insort(self.preempted, sequence, key=_arrival)
        self.num_preemptions += 1

    def remove(self, sequence: Sequence, *, spoiled: bool = False) -> None:
        """Take a finished or aborted sequence out and free its pages at once.

        Args:
            spoiled: its KV may be broken, so nobody else may find it in the cache.
        """
        if spoiled:
            self.pages.forget(sequence.pages)
        next(q for q in (self.running, self.preempted, self.waiting) if sequence in q).remove(sequence)
        self.tables.release(sequence)

    def restart_kv(self, version: int) -> None:
        """Forget all KV, cached or held; what is computed from here on is of weight version ``version``."""
        for sequence in self.running:
            self.tables.release(sequence)
        self.pages.restart(version)

    def check(self) -> None:
        """Raise AssertionError unless pages, tables and queues are in order (tests call it after every step)."""
        self.tables.check(self.running)
        for queue in (self.running, self.preempted, self.waiting):
            arrivals = [s.arrival for s in queue]
            assert arrivals == sorted(arrivals), "a queue is out of order"
        waiters = [*self.preempted, *self.waiting]
        assert all(not s.pages and not s.chain and s.num_computed == 0 for s in waiters), "a waiter holds pages"
