"""Which rows the next step computes: every decoding sequence, then prefill chunks within a token budget.

Continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi, Agrawal et al. 2023). The choice changes
speed only: rows are independent, so no schedule changes a bit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rollout.errors import CapacityExceeded, InvalidRequest
from rollout.kvcache import PageAllocator
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
    """``count`` rows of one sequence, starting at its ``num_computed``."""

    sequence: Sequence
    count: int


class Scheduler:
    """First come, first admitted; promises the worst case of pages at admission, so nothing running ever starves."""

    def __init__(self, limits: SchedulerLimits, pages: PageAllocator) -> None:
        self.limits = limits
        self.pages = pages
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.hold_admission = False

    def worst_case_pages(self, sequence: Sequence) -> int:
        """KV pages of the sequence at its ``max_len``."""
        return -(-sequence.max_len // self.limits.page_size)

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
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledRows]:
        """Admit what fits, then pick the rows of the next step. Empty when there is nothing to do."""
        self._admit()
        budget = self.limits.max_batch_tokens
        rows: list[ScheduledRows] = []
        for sequence in self.running:
            if sequence.num_uncomputed == 1 and budget > 0:
                rows.append(ScheduledRows(sequence, 1))
                budget -= 1
        for sequence in self.running:
            if sequence.num_uncomputed > 1 and budget > 0:
                count = min(sequence.num_uncomputed, self.limits.chunk_size, budget)
                rows.append(ScheduledRows(sequence, count))
                budget -= count
        return rows

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_running and not self.hold_admission:
            need = self.worst_case_pages(self.waiting[0])
            if not self.pages.promise(need):
                return
            sequence = self.waiting.popleft()
            sequence.promised_pages = need
            self.running.append(sequence)

    def ensure_pages(self, sequence: Sequence, num_tokens: int) -> None:
        """Take promised pages until the sequence's table covers ``num_tokens`` tokens."""
        while len(sequence.pages) * self.limits.page_size < num_tokens:
            sequence.pages.append(self.pages.take())
            sequence.promised_pages -= 1

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out and free its pages at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.pages.give_back(sequence.pages, sequence.promised_pages)
            sequence.pages, sequence.promised_pages = [], 0
        else:
            self.waiting.remove(sequence)
