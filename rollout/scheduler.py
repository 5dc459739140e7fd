"""Which rows the next step computes: every decoding sequence, then prefill chunks within a token budget.

Continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi, Agrawal et al. 2023), preemption by recompute
(vLLM, Kwon et al. 2023) and reuse of equal prefixes (docs/prefix_cache.md). The choice changes speed only: rows are
independent, so no schedule changes a bit. docs/scheduling.md says why every sequence ends.

Who is admitted next is up to ``WaitingRoom``. Those admitted share the token budget in order of admission. Pages are
taken as sequences grow; when none is left, the last in rank gives its pages up and waits in front of all that never
ran. Rank: those that were preempted before, then by priority; within each, by admission. So nobody is set back twice
for one admitted after it, and the first in rank alone always fits: it ends, then the next one is the first.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass

from rollout.coming import ComingRows
from rollout.errors import InvalidRequest
from rollout.kvcache import PageAllocator
from rollout.page_tables import CopyRows, PageTables
from rollout.sequence import Sequence
from rollout.shares import ClientShares
from rollout.waiting import WaitingRoom


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
    max_waiting_per_client: int | None = None
    """of them, those of one client; None: all but an eighth, so that nobody shuts the others out"""


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """``count`` rows of one sequence, starting at its ``num_computed``; their pages are in its table."""

    sequence: Sequence
    count: int


def _rank(sequence: Sequence) -> tuple[bool, int, int]:
    return (not sequence.set_back, 0 if sequence.set_back else -sequence.priority, sequence.ticket)


def _ticket(sequence: Sequence) -> int:
    return sequence.ticket


class Scheduler:
    """Admission by priority and fair share, the budget by admission, preemption by rank."""

    def __init__(self, limits: SchedulerLimits, pages: PageAllocator, copy_rows: CopyRows | None = None) -> None:
        """Args: copy_rows: how rows get from page to page; None: only full pages are taken from others."""
        self.limits = limits
        self.pages = pages
        self.tables = PageTables(pages, limits.page_size, copy_rows)
        self.shares = ClientShares()
        most = limits.max_waiting
        per_client = limits.max_waiting_per_client
        self.waiting = WaitingRoom(self.shares, most, most - most // 8 if per_client is None else per_client)
        self.preempted: list[Sequence] = []
        """ran before and run again before anything that waits; in order of admission"""
        self.running: list[Sequence] = []
        """in order of rank"""
        self.hold_admission = False
        """admit nothing that never ran; preempted sequences still come back"""
        self.num_preemptions = 0
        self._arrivals = 0
        self._tickets = 0

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
            InvalidRequest: it could never fit the cache. CapacityExceeded: the queue, or its client's part, is full.
        """
        need = self.worst_case_pages(sequence)
        if need > self.pages.num_pages:
            raise InvalidRequest(
                f"{sequence.max_len} tokens need {need} KV pages, the cache has {self.pages.num_pages}; "
                "ask for fewer tokens or raise engine.kv_cache_tokens",
                field="sequences" if sequence.score is not None else "sampling.max_tokens",
            )
        self.waiting.check_room(sequence.client)
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.add(sequence)
        self.shares.join(sequence.client)

    # ---- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> list[ScheduledRows]:
        """Admit what fits, pick the rows of the next step and take their pages. Empty when there is nothing to do."""
        self._admit()
        while True:
            before = self.num_preemptions
            rows = self._take_pages(self._share_budget())
            # No rows since whoever was given the budget had to be preempted: the others go on without it.
            if rows or self.num_preemptions == before:
                break
        for scheduled in rows:
            self._charge(scheduled.sequence, scheduled.sequence.num_computed + scheduled.count)
        return rows

    def _admit(self) -> None:
        while len(self.running) < self.limits.max_running:
            if self.preempted:
                if not self._fits(self.preempted[0]):
                    return
                sequence = self.preempted.pop(0)
            else:
                chosen = None if self.hold_admission else self.waiting.next()
                if chosen is None or not self._fits(chosen):
                    return
                sequence = chosen
                self.waiting.admit(sequence)
                sequence.ticket = self._tickets
                self._tickets += 1
                # Ahead of the work, so that the next turn already knows of it.
                self._charge(sequence, len(sequence.token_ids))
            bisect.insort(self.running, sequence, key=_rank)

    def _charge(self, sequence: Sequence, num_tokens: int) -> None:
        """The client pays for each token once: not for what a preemption repeats."""
        if num_tokens > sequence.num_charged:
            self.shares.charge(sequence.client, num_tokens - sequence.num_charged)
            sequence.num_charged = num_tokens

    def _fits(self, sequence: Sequence) -> bool:
        """Whether its tokens and one page to grow fit beside what those running have and take next."""
        need = min(self.tables.pages_for(len(sequence.token_ids)) + 1, self.worst_case_pages(sequence))
        room = self.pages.num_free - sum(self.tables.num_missing(s, len(s.token_ids)) for s in self.running)
        if need > room:
            need -= sum(self.pages.references(entry.page) > 0 for entry in self.tables.hits(sequence))
        return need <= room

    def _share_budget(self) -> list[tuple[Sequence, int]]:
        """Rows for the running sequences: decoding ones first, the rest to prefill, each in order of admission.

        Not by priority: a stream of urgent prompts could keep an admitted one from its prefill for ever.
        """
        budget = self.limits.max_batch_tokens
        counts: dict[Sequence, int] = {}
        prefill: list[Sequence] = []
        for sequence in sorted(self.running, key=_ticket):
            if sequence.num_uncomputed > 1:
                self.tables.adopt(sequence)
            if sequence.num_uncomputed == 1 and budget > 0:
                counts[sequence] = 1
                budget -= 1
            elif sequence.num_uncomputed > 1:
                prefill.append(sequence)
        coming = ComingRows(self.tables)
        for sequence in prefill:
            if budget > 0 and not coming.brings(sequence):
                self.tables.copy(sequence)
                counts[sequence] = min(sequence.num_uncomputed, self.limits.chunk_size, budget)
                budget -= counts[sequence]
                coming.add(sequence, counts[sequence])
        return [(s, counts[s]) for s in self.running if s in counts]

    def _take_pages(self, shares: list[tuple[Sequence, int]]) -> list[ScheduledRows]:
        """First in rank first, so that whoever is preempted on the way has no pages promised yet."""
        rows: list[ScheduledRows] = []
        for sequence, count in shares:
            gone = bool(self.preempted) and sequence in self.preempted
            if not gone and self._make_room(sequence, sequence.num_computed + count):
                rows.append(ScheduledRows(sequence, count))
        return rows

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the table at the expense of those behind; False when the sequence is the last itself and had to go."""
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
        sequence.set_back = True
        bisect.insort(self.preempted, sequence, key=_rank)
        self.num_preemptions += 1

    def remove(self, sequence: Sequence, *, spoiled: bool = False) -> None:
        """Take a finished or aborted sequence out and free its pages at once.

        Args:
            spoiled: its KV may be broken, so nobody else may find it in the cache.
        """
        if spoiled:
            self.tables.distrust(sequence)
        next(q for q in (self.running, self.preempted, self.waiting) if sequence in q).remove(sequence)
        self.tables.release(sequence, keep=not spoiled)
        self.shares.leave(sequence.client)

    def restart_kv(self, version: int) -> None:
        """Forget all KV, cached or held; what is computed from here on is of weight version ``version``."""
        for sequence in self.running:
            self.tables.release(sequence, keep=False)
        self.pages.restart(version)

    def check(self) -> None:
        """Raise AssertionError unless pages, tables and queues are in order (tests call it after every step)."""
        self.tables.check(self.running)
        self.waiting.check()
        for queue in (self.running, self.preempted):
            ranks = [_rank(s) for s in queue]
            assert ranks == sorted(ranks), "a queue is out of order"
        waiters = [*self.preempted, *self.waiting]
        assert all(not s.pages and not s.chain and s.num_computed == 0 for s in waiters), "a waiter holds pages"
        self.shares.check(dict(Counter(s.client for s in [*self.running, *waiters])))
