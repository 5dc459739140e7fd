"""E3 with a model that is a hash of what it can see: a wrong page, row or order of writing changes what it says."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollout.kvcache import PageAllocator
from rollout.page_tables import PageTables
from rollout.prefix_cache import CachedPage, PageContent, PrefixIndex, common_rows
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

    limits: SchedulerLimits
    pages: PageAllocator
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    done: dict[str, list[int]] = field(default_factory=dict)
    copied: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, self.pages, self.copy_rows)

    def copy_rows(self, source: int, target: int, count: int) -> None:
        assert self.pages.references(target) == 1 and 0 < count < PAGE
        for offset in range(PAGE):
            self.cells[target, offset] = self.cells[source, offset] if offset < count else -1
        self.copied += count

    def add(self, name: str, prompt: list[int], count: int) -> None:
        request = SampleRequest(name, tuple(prompt), SamplingParams(seed=1, max_tokens=count))
        self.scheduler.add(Sequence(name, list(prompt), len(prompt), len(prompt) + count, request=request))

    def step(self) -> None:
        rows = self.scheduler.schedule()
        for r in rows:
            for position in range(r.sequence.num_computed, r.sequence.num_computed + r.count):
                before = self._read(r.sequence, position - 1) if position else 0
                page, offset = r.sequence.pages[position // PAGE], position % PAGE
                assert self.pages.references(page) == 1, "a shared page is written"
                assert self.pages.index is None or self.pages.index.rows_of(page) <= offset, "an indexed row is written"
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


def live_through(seed: int) -> tuple[int, int, int, int]:
    """One random life; (samples that differ from their isolated run, preemptions, pages shared, rows copied)."""
    rng = random.Random(seed)
    limits = SchedulerLimits(rng.randint(4, 20), rng.randint(1, 4), 100, rng.randint(1, 9), PAGE)
    pages = PageAllocator(rng.randint(6, 10), PrefixIndex(b"fake", 0))
    pages.shuffle(rng)
    engine = FakeEngine(limits, pages)
    prefix = [rng.randrange(TOKENS) for _ in range(12)]
    todo = {}
    for i in range(rng.randint(3, 9)):
        tail = [rng.randrange(TOKENS) for _ in range(rng.randint(1, 6))]
        shared_part = prefix[: rng.choice((0, 3, 4, 8, 10, 12))]
        todo[f"s{i}"] = (shared_part + tail, rng.randint(1, 24 - len(prefix) - len(tail)))
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
    return wrong, engine.scheduler.num_preemptions, shared, engine.copied


def test_six_hundred_random_lives() -> None:
    """Each sample says what it says alone; the lives did share, copy and preempt."""
    wrong, *happened = map(sum, zip(*(live_through(seed) for seed in range(600)), strict=True))
    assert wrong == 0 and min(happened) > 600, happened


def test_a_cache_blind_to_what_stands_before_a_page_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: pages found by their own ids alone."""
    monkeypatch.setattr(PrefixIndex, "key", staticmethod(lambda before, content: bytes(content.ids)))
    monkeypatch.setattr(PrefixIndex, "find", lambda self, parent, key, content: self._by_key.get(key))
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
        parent, content = sequence.chain[-1] if sequence.chain else None, self.content(sequence, number)
        entry = index.insert(parent, self.key(sequence, number), content, sequence.pages[number])
        if entry is not None:
            sequence.chain.append(entry)

    monkeypatch.setattr(PageTables, "register", register)
    with pytest.raises(AssertionError):
        assert sum(live_through(seed)[0] for seed in range(40)) == 0


@pytest.mark.parametrize("fault", ["a row too many", "rows after another prefix", "rows not yet written"])
def test_copying_wrongly_is_caught(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Negative controls: without the checks of the books, what is said shows it."""
    nearest = PrefixIndex.nearest
    if fault == "a row too many":

        def generous(self: PrefixIndex, parent: CachedPage | None, content: PageContent) -> Any:
            found = nearest(self, parent, content)
            return found and (found[0], min(found[1] + 1, len(content.ids)))

        monkeypatch.setattr(PrefixIndex, "nearest", generous)
    elif fault == "rows after another prefix":

        def anywhere(self: PrefixIndex, parent: CachedPage | None, content: PageContent) -> Any:
            found = [(entry, common_rows(entry.content, content)) for entry in self]
            return max(found, key=lambda pair: pair[1]) if found and max(rows for _, rows in found) else None

        monkeypatch.setattr(PrefixIndex, "nearest", anywhere)
    else:
        offer = PageTables._offer_tail

        def early(self: PageTables, sequence: Sequence) -> None:
            ahead = min(len(sequence.token_ids), (sequence.num_computed // PAGE + 1) * PAGE - 1)
            computed, sequence.num_computed = sequence.num_computed, max(ahead, sequence.num_computed)
            offer(self, sequence)
            sequence.num_computed = computed

        monkeypatch.setattr(PageTables, "_offer_tail", early)
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    with pytest.raises((AssertionError, KeyError)):
        assert sum(live_through(seed)[0] for seed in range(60)) == 0


# ---- one at a time ----------------------------------------------------------------------------------------------


def engine_of(num_pages: int = 12, running: int = 8) -> FakeEngine:
    return FakeEngine(SchedulerLimits(40, running, 100, 40, PAGE), PageAllocator(num_pages, PrefixIndex(b"fake", 0)))


def finish(engine: FakeEngine) -> None:
    while engine.live:
        engine.step()


def test_siblings_wait_for_the_first_and_copy_its_tail() -> None:
    engine, prompt = engine_of(), [0, 1, 2, 1, 0, 2, 2]
    for i in range(3):
        engine.add(f"s{i}", prompt, 3)
    engine.step()
    assert [s.num_computed for s in engine.scheduler.running] == [7, 0, 0]
    engine.step()
    assert [s.num_computed for s in engine.scheduler.running] == [8, 7, 7]
    assert engine.copied == 2 * 2 and [s.num_cached_tokens for s in engine.scheduler.running] == [0, 6, 6]
    finish(engine)
    assert set(map(tuple, engine.done.values())) == {tuple(expected(prompt, 3))}


def test_a_short_prompt_is_computed_once() -> None:
    engine = engine_of()
    for i in range(3):
        engine.add(f"s{i}", [2, 1, 0], 1)
    engine.step()
    engine.step()
    assert engine.copied == 4 and not engine.live


def test_a_prompt_that_leaves_another_in_mid_page_copies_what_agrees() -> None:
    engine = engine_of()
    engine.add("a", [0, 1, 2, 1, 0, 2, 1], 1)
    finish(engine)
    engine.add("b", [0, 1, 2, 1, 0, 0, 1, 1], 2)
    engine.step()
    assert engine.scheduler.running[0].num_cached_tokens == PAGE + 1
    finish(engine)
    assert engine.done["b"] == expected([0, 1, 2, 1, 0, 0, 1, 1], 2)


def test_the_rows_of_a_full_page_are_copied_where_its_last_must_be_computed() -> None:
    engine, prompt = engine_of(), [0, 1, 2, 1, 0, 2, 2, 1]
    engine.add("a", prompt, 1)
    finish(engine)
    engine.add("b", prompt, 2)
    engine.step()
    (b,) = engine.scheduler.running
    assert (b.num_cached_tokens, engine.copied) == (7, 3)
    finish(engine)
    assert engine.done["b"] == expected(prompt, 2)


def test_an_answer_goes_on_in_its_page() -> None:
    """The next turn takes the last page of the turn before, generated rows included."""
    engine, prompt = engine_of(), [0, 1, 2, 1, 0]
    engine.add("a", prompt, 3)
    finish(engine)
    turn = [*prompt, *engine.done["a"], 1, 1]
    engine.add("b", turn, 2)
    engine.step()
    assert engine.scheduler.running[0].num_cached_tokens == 7, "all but the token that was sampled last and never fed"
    finish(engine)
    assert engine.done["b"] == expected(turn, 2)


def test_the_page_that_is_evicted_may_be_the_one_to_copy_from() -> None:
    """Then its rows stay where they are."""
    engine = engine_of(num_pages=2)
    engine.add("a", [0, 1, 2, 1, 0, 2], 2)
    finish(engine)
    assert engine.pages.num_cached == 2
    engine.add("b", [0, 1, 2, 1, 0, 2, 2], 1)
    engine.step()
    assert engine.copied == 0 and engine.done["b"] == expected([0, 1, 2, 1, 0, 2, 2], 1)


def test_who_is_preempted_takes_its_own_rows_again() -> None:
    engine = engine_of()
    engine.add("a", [0, 1, 2, 1, 0, 2], 6)
    for _ in range(2):
        engine.step()
    (a,) = engine.scheduler.running
    engine.scheduler.preempt(a)
    assert (a.num_computed, engine.pages.num_cached) == (0, 2)
    engine.step()
    assert (a.num_computed, engine.copied, a.num_cached_tokens) == (8, 3, 0), "nothing that it had itself counts"
    finish(engine)
    assert engine.done["a"] == expected([0, 1, 2, 1, 0, 2], 6)


def test_what_begins_like_a_broken_sample_is_not_copied_from_again() -> None:
    engine = engine_of()
    engine.add("a", [0, 1, 2], 1)
    engine.add("other", [1, 1, 2], 1)
    finish(engine)
    engine.add("b", [0, 1, 1], 2)
    engine.step()
    (b,) = engine.scheduler.running
    engine.scheduler.remove(b, spoiled=True)
    assert [entry.content.ids[0] for entry in engine.pages.index or ()] == [1]
    engine.scheduler.check()


def test_without_a_way_to_copy_nobody_waits_for_a_tail() -> None:
    scheduler = Scheduler(SchedulerLimits(40, 8, 9, 40, PAGE), PageAllocator(9, PrefixIndex(b"fake", 0)))
    for i in range(2):
        request = SampleRequest(f"s{i}", (0, 1, 2), SamplingParams(seed=1, max_tokens=1))
        scheduler.add(Sequence(f"s{i}", [0, 1, 2], 3, 4, request=request))
    assert [r.count for r in scheduler.schedule()] == [3, 3]
