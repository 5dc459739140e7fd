"""E3 with a model that is a hash of what it can see: a wrong page, row or order of writing changes what it says."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from rollout.kvcache import PageAllocator
from rollout.page_tables import PageTables
from rollout.prefix_cache import PrefixIndex
from rollout.scheduler import Scheduler, SchedulerLimits
from rollout.sequence import Sequence
from rollout.types import SampleRequest, SamplingParams

PAGE = 4
TOKENS = 3
"""A small vocabulary, so that strangers often hold equal pages after different ones."""


def mix(*values: int) -> int:
    return hash(values)


def expected(prompt: list[int], count: int) -> list[int]:
    """What a sequence says alone under one version."""
    ids, rows = list(prompt), list[int]()
    while len(ids) < len(prompt) + count:
        while len(rows) < len(ids):
            rows.append(mix(rows[-1] if rows else 0, ids[len(rows)]))
        ids.append(mix(*rows) % TOKENS)
    return ids[len(prompt) :]


@dataclass
class FakeEngine:
    """The scheduler, and memory cells in place of KV; a cell is written once and never while others hold its page."""

    scheduler: Scheduler
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    done: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, prompt: list[int], count: int) -> None:
        request = SampleRequest(name, tuple(prompt), SamplingParams(seed=1, max_tokens=count))
        self.scheduler.add(Sequence(name, list(prompt), len(prompt), len(prompt) + count, request=request))

    def step(self) -> None:
        rows = self.scheduler.schedule()
        for r in rows:
            for position in range(r.sequence.num_computed, r.sequence.num_computed + r.count):
                before = self._read(r.sequence, position - 1) if position else 0
                page, offset = r.sequence.pages[position // PAGE], position % PAGE
                assert self.scheduler.pages.references(page) == 1, "a shared page is written"
                self.cells[page, offset] = mix(before, r.sequence.token_ids[position])
        for r in rows:
            r.sequence.num_computed += r.count
            if r.sequence.num_uncomputed == 0:
                seen = [self._read(r.sequence, p) for p in range(len(r.sequence.token_ids))]
                r.sequence.token_ids.append(mix(*seen) % TOKENS)
            self.scheduler.tables.register(r.sequence)
            if len(r.sequence.token_ids) == r.sequence.max_len:
                self.end(r.sequence)
        self.scheduler.check()

    def _read(self, sequence: Sequence, position: int) -> int:
        return self.cells.get((sequence.pages[position // PAGE], position % PAGE), -1)

    def end(self, sequence: Sequence) -> None:
        self.done[sequence.sample_id] = sequence.token_ids[sequence.prompt_len :]
        self.scheduler.remove(sequence)

    @property
    def live(self) -> list[Sequence]:
        return [*self.scheduler.in_flight, *self.scheduler.waiting]


def live_through(seed: int) -> tuple[int, int, int]:
    """One random life; (samples that differ from their isolated run, preemptions, pages shared)."""
    rng = random.Random(seed)
    limits = SchedulerLimits(rng.randint(4, 20), rng.randint(1, 4), 100, rng.randint(1, 9), PAGE)
    pages = PageAllocator(rng.randint(6, 10), PrefixIndex(b"fake", 0))
    pages.shuffle(rng)
    engine = FakeEngine(Scheduler(limits, pages))
    prefix = [rng.randrange(TOKENS) for _ in range(12)]
    todo = {}
    for i in range(rng.randint(3, 9)):
        tail = [rng.randrange(TOKENS) for _ in range(rng.randint(1, 6))]
        todo[f"s{i}"] = (prefix[: rng.choice((0, 4, 8, 12))] + tail, rng.randint(1, 24 - len(prefix) - len(tail)))
    waiting, shared = dict(todo), 0
    for _ in range(2000):
        if not waiting and not engine.live:
            break
        if waiting and rng.random() < 0.5:
            name = next(iter(waiting))
            engine.add(name, *waiting.pop(name))
        if engine.live and rng.random() < 0.03:
            engine.end(rng.choice(engine.live))
        if engine.scheduler.running and rng.random() < 0.1:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        if rng.random() < 0.02:
            engine.scheduler.restart_kv(pages.index.version + 1 if pages.index is not None else 0)
            engine.cells.clear()
        pages.shuffle(rng)
        engine.step()
        shared += sum(pages.references(page) > 1 for page in range(pages.num_pages))
    assert not engine.live and not waiting, "a sample never ended"
    assert pages.num_free == pages.num_pages
    wrong = sum(said != expected(todo[name][0], todo[name][1])[: len(said)] for name, said in engine.done.items())
    assert engine.done.keys() == todo.keys()
    return wrong, engine.scheduler.num_preemptions, shared


def test_six_hundred_random_lives() -> None:
    """Each sample says what it says alone; the lives did share and did preempt."""
    lives = [live_through(seed) for seed in range(600)]
    assert sum(wrong for wrong, _, _ in lives) == 0
    assert sum(p for _, p, _ in lives) > 600 and sum(s for _, _, s in lives) > 600


def test_a_cache_blind_to_what_stands_before_a_page_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: pages found by their own ids alone."""
    monkeypatch.setattr(PrefixIndex, "key", staticmethod(lambda before, ids: bytes(ids)))
    monkeypatch.setattr(PrefixIndex, "find", lambda self, parent, key, ids: self._by_key.get(key))
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    with pytest.raises(AssertionError):
        assert sum(live_through(seed)[0] for seed in range(40)) == 0


def test_adopting_one_page_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a page that is not full is indexed, and read by others before its rows are written."""

    def register(self: PageTables, sequence: Sequence) -> None:
        number = len(sequence.chain)
        index = self.pages.index
        if index is None or len(sequence.token_ids) // PAGE <= number or len(sequence.pages) <= number:
            return
        parent = sequence.chain[-1] if sequence.chain else None
        entry = index.insert(parent, self.key(sequence, number), self._ids(sequence, number), sequence.pages[number])
        if entry is not None:
            sequence.chain.append(entry)

    monkeypatch.setattr(PageTables, "register", register)
    with pytest.raises(AssertionError):
        assert sum(live_through(seed)[0] for seed in range(40)) == 0
