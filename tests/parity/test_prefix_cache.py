"""Prefix cache: a hit changes no bit, no score, and never crosses weights (B1, B2, E1, E3, E4, F1, F2)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.engine import Engine
from rollout.errors import ParityError
from rollout.kernels.cpu.kernel_set import CpuKVStore
from rollout.model import SharedModel
from rollout.prefix_cache import PrefixIndex
from rollout.scheduler import Scheduler
from rollout.types import FinishReason, SampleRequest, ScoreSequence
from tests.engines import (
    Generated,
    Record,
    build_engine,
    drain,
    fresh_model,
    isolated,
    random_prompt,
    rescore,
    run,
    sample,
    torch_threads,
    unequal,
)
from tests.parity.test_poison import poison_unused

PAGE = 16
LENGTHS = (*range(1, 18), 31, 32, 33, 47, 48, 49, 63, 64, 65)
PROMPT = random_prompt(70, 7)


def cached(one: Generated) -> int:
    assert one.summary is not None
    return one.summary.num_cached_tokens


def counted(engine: Engine) -> list[int]:
    """Rows of every pass of the engine from here on."""
    rows: list[int] = []
    real = engine._hidden_states

    def count(batch: Any) -> torch.Tensor:
        rows.append(len(batch.input_ids))
        return real(batch)

    engine._hidden_states = count  # type: ignore[method-assign]
    return rows


# ---- scores (B1, B2) --------------------------------------------------------------------------------------------


def scores(engine: Engine, *lengths: int, start: int = 1) -> list[bytes]:
    """Score the leading ``lengths`` of one prompt, one after the other."""
    return [rescore(engine, [PROMPT[:n]], [min(start, n - 1)], [1.0])[0].logprobs.tobytes() for n in lengths]


@pytest.mark.parametrize("start", [1, 17, 33])
def test_scores_do_not_depend_on_what_came_before(qwen3: SharedModel, start: int) -> None:
    """B1: shorter first, longer first, cache off; nothing that was not computed shows."""
    up = scores(build_engine(qwen3, kv_tokens=256), 40, 60, start=start)
    down = scores(build_engine(qwen3, kv_tokens=256), 60, 40, start=start)
    off = scores(build_engine(qwen3, kv_tokens=256, prefix_cache=False), 40, 60, start=start)
    assert up == down[::-1] == off
    assert all(np.isfinite(np.frombuffer(s, np.float32)).all() for s in up)


def test_every_length_cold_and_warm(qwen3: SharedModel) -> None:
    """B2, E1: samples and scores of each length, twice in one engine, against engines of their own."""
    engine = build_engine(qwen3, kv_tokens=1024, chunk=5)
    for length in LENGTHS:
        request = sample(PROMPT[:length], max_tokens=3)
        alone = isolated(qwen3, request, prefix_cache=False)
        whole = [*PROMPT[:length], *alone.token_ids]
        (expected,) = rescore(build_engine(qwen3, prefix_cache=False), [whole], [length], [1.0])
        for _ in range(2):
            one = run(engine, [request])["s"]
            assert one.bits() == alone.bits(), length
            (score,) = rescore(engine, [whole], [length], [1.0])
            assert unequal(score.logprobs, expected.logprobs) == unequal(score.logprobs, alone.policy) == 0, length
        assert cached(one) == length - 1


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_a_prompt_of_whole_pages(qwen3: SharedModel, pages: int) -> None:
    """E1: of the last page all rows but one are copied, into a page of its own; at least one row is always computed."""
    engine = build_engine(qwen3, kv_tokens=256)
    request = sample(PROMPT[: pages * PAGE])
    first = run(engine, [request])["s"]
    rows = counted(engine)
    second = run(engine, [request])["s"]
    assert first.bits() == second.bits() == isolated(qwen3, request, prefix_cache=False).bits()
    assert (cached(first), cached(second)) == (0, pages * PAGE - 1)
    assert rows[0] == 1 and engine.scheduler.tables.num_copied == PAGE - 1


# ---- reuse ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [3, 16, 24, 100])
def test_n_samples_prefill_the_prompt_once(model: SharedModel, chunk: int) -> None:
    """Rows computed: the prompt, its last token for each sibling, and the decode rows."""
    engine = build_engine(model, chunk=chunk, batch_tokens=100)
    rows = counted(engine)
    requests = [sample(PROMPT, f"s{i}", i, max_tokens=6) for i in range(8)]
    samples = run(engine, requests)
    assert sum(rows) == 70 + 7 + 8 * 5
    assert sorted(map(cached, samples.values())) == [0] + [69] * 7
    assert [samples[r.sample_id].bits() for r in requests[::3]] == [isolated(model, r).bits() for r in requests[::3]]


def test_siblings_that_come_while_the_first_prefills(qwen3: SharedModel) -> None:
    engine, record = build_engine(qwen3, chunk=10), Record()
    rows = counted(engine)
    engine.add(engine.effective_request(sample(PROMPT, "s0")))

    def join(taken: int) -> None:
        if taken in (2, 5):
            engine.add(engine.effective_request(sample(PROMPT, f"s{taken}", taken)))

    drain(engine, record, between=join)
    assert sum(rows) == 70 + 2 + 3 * 11
    for index in (2, 5):
        assert record.samples[f"s{index}"].bits() == isolated(qwen3, sample(PROMPT, index=index)).bits()


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_siblings_go_on_when_the_first_is_aborted(qwen3: SharedModel, steps: int) -> None:
    engine, record = build_engine(qwen3, chunk=10), Record()
    for i in range(3):
        engine.add(engine.effective_request(sample(PROMPT, f"s{i}", i)))
    drain(engine, record, steps=steps)
    record.take([engine.abort("s0", "gone")])
    drain(engine, record)
    for i in (1, 2):
        assert record.samples[f"s{i}"].bits() == isolated(qwen3, sample(PROMPT, index=i)).bits()


def test_the_next_turn_finds_prompt_and_answer(model: SharedModel) -> None:
    """Generated pages are indexed as they fill; the last sampled token was never fed."""
    engine = build_engine(model)
    first = run(engine, [sample(PROMPT[:30], max_tokens=35)])["s"]
    turn = sample((*PROMPT[:30], *first.token_ids, 5, 6, 7), "next")
    second = run(engine, [turn])["next"]
    assert cached(second) == 64
    assert second.bits() == isolated(model, turn, prefix_cache=False).bits()


def test_twins_share_what_they_generate(qwen3: SharedModel) -> None:
    """Two greedy samples of one prompt hold the same full pages."""
    engine = build_engine(qwen3)
    for name in "ab":
        engine.add(engine.effective_request(sample(PROMPT[:20], name, temperature=0.0, max_tokens=40)))
    drain(engine, steps=36)
    tables = [s.pages for s in engine.scheduler.running]
    assert len(tables) == 2 and tables[0][:3] == tables[1][:3] and not set(tables[0][3:]) & set(tables[1][3:])


def test_off_means_off(qwen3: SharedModel) -> None:
    engine = build_engine(qwen3, prefix_cache=False)
    rows = counted(engine)
    samples = run(engine, [sample(PROMPT, f"s{i}", i, max_tokens=2) for i in range(3)])
    assert sum(rows) == 3 * 71 and not any(map(cached, samples.values())) and engine.pages.num_cached == 0


# ---- pressure (E3, E4) ------------------------------------------------------------------------------------------


def test_fifty_requests_through_a_pool_for_three(qwen3: SharedModel) -> None:
    """E4: pages come back as cached ones, are evicted, and nobody holds any at the end."""
    engine = build_engine(qwen3, kv_tokens=3 * 4 * PAGE)
    for i in range(50):
        request = sample(random_prompt(33, i // 2), max_tokens=28, seed=i)
        one = run(engine, [request])["s"]
        assert one.bits() == isolated(qwen3, request, prefix_cache=False).bits()
        assert cached(one) == 32 if i % 2 else cached(one) < 4
    assert engine.pages.num_free == engine.pages.num_pages and engine.pages.num_cached > 6


FUZZ = tuple(
    sample(
        (*PROMPT[: PAGE * (i % 4)], *random_prompt(1 + 7 * i % 17, i)), f"r{i}", seed=i % 4, max_tokens=3 + 11 * i % 29
    )
    for i in range(18)
)
"""Prompts that share 0 to 3 pages; none needs more than 6."""


@pytest.fixture(scope="module")
def fuzz_alone(qwen3: SharedModel) -> dict[str, Generated]:
    with torch_threads(1):
        return {r.sample_id: isolated(qwen3, r, prefix_cache=False) for r in FUZZ}


def fuzz(engine: Engine, seed: int, alone: dict[str, Generated]) -> int:
    """Random arrivals, aborts, scores and preemptions in a pool of a few pages; returns how many samples differ."""
    rng, record = random.Random(seed), Record()
    todo = rng.sample(FUZZ, rng.randint(3, 12))
    names = [r.sample_id for r in todo]
    for taken in range(3000):
        if not todo and not engine.live_ids:
            break
        while todo and rng.random() < 0.4:
            engine.add(engine.effective_request(todo.pop()))
        if taken % 7 == 3:
            engine.add_score(
                f"score{taken}", ScoreSequence((*PROMPT[:50], taken % 60), 40), temperature=1.0, want_digests=False
            )
        if engine.live_ids and rng.random() < 0.06:
            record.take([engine.abort(rng.choice(engine.live_ids), "fuzz")])
        if engine.scheduler.running and rng.random() < 0.15:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        if rng.random() < 0.2:
            engine.pages.shuffle(rng)
        drain(engine, record, steps=1)
    assert not engine.live_ids and engine.pages.num_free == engine.pages.num_pages
    wrong = 0
    for name in names:
        one, count = record.samples[name], len(record.samples[name].token_ids)
        assert one.error is None and one.summary is not None
        assert count == len(alone[name].token_ids) or one.summary.finish.reason is FinishReason.ABORTED
        expected = alone[name]
        wrong += (one.token_ids, one.digests) != (expected.token_ids[:count], expected.digests[:count])
        wrong += unequal(one.policy, expected.policy[:count]) > 0
    return wrong


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(seed=st.integers(0, 10**6), pages=st.integers(6, 12), chunk=st.integers(3, 40), running=st.integers(1, 6))
def test_shared_prefixes_under_pressure(
    qwen3: SharedModel, fuzz_alone: dict[str, Generated], seed: int, pages: int, chunk: int, running: int
) -> None:
    """E3."""
    engine = build_engine(qwen3, kv_tokens=pages * PAGE, chunk=chunk, batch_tokens=48, running=running, shuffle=seed)
    assert fuzz(engine, seed, fuzz_alone) == 0


@pytest.mark.parametrize("trusting", [False, True])
def test_colliding_hashes(
    qwen3: SharedModel, fuzz_alone: dict[str, Generated], monkeypatch: pytest.MonkeyPatch, trusting: bool
) -> None:
    """All keys equal: still exact, as ids and parents are compared. Control: an index that trusts its keys is not."""
    monkeypatch.setattr(PrefixIndex, "key", staticmethod(lambda before, token_ids: b"same"))
    if trusting:
        monkeypatch.setattr(PrefixIndex, "find", lambda self, parent, key, token_ids: self._by_key.get(key))
        monkeypatch.setattr(Scheduler, "check", lambda self: None)
    wrong = hits = 0
    for request in FUZZ:
        engine = build_engine(qwen3, kv_tokens=256, chunk=20)
        run(engine, [sample(PROMPT[:40], "first", max_tokens=2)])
        one = run(engine, [request])[request.sample_id]
        wrong += one.bits() != fuzz_alone[request.sample_id].bits()
        hits += cached(one) > 0
    assert hits > 0, "the one page that such an index can hold is found by those who have it"
    assert (wrong > 0) == trusting


def test_equal_pages_after_different_ones_are_not_the_same(qwen3: SharedModel) -> None:
    """A page's content alone says nothing of what stands before it."""
    engine = build_engine(qwen3, kv_tokens=256)
    a, b, c, d = (PROMPT[i : i + PAGE] for i in (0, 16, 32, 48))
    for prompt in ((*a, *b, *d), (*c, *b, *d), (*b, *d), (*b, *a, *d)):
        request = sample(prompt, max_tokens=4)
        one = run(engine, [request])["s"]
        assert one.bits() == isolated(qwen3, request, prefix_cache=False).bits()
    assert cached(one) == PAGE


# ---- weights (F1, F2) -------------------------------------------------------------------------------------------


def scale(model: SharedModel, factor: float) -> None:
    with torch.no_grad():
        model.hf.get_decoder().layers[0].self_attn.v_proj.weight.mul_(factor)


def across_an_update(path: Path, *, running: bool) -> tuple[Generated, Generated, Generated, int]:
    """A sample after the update, the same in a fresh engine, a second one after it; tokens cached before."""
    model, second = (fresh_model(path, torch.float32) for _ in range(2))
    scale(second, 1.5)
    engine, record = build_engine(model, version=1), Record()
    warm = run(engine, [sample(PROMPT, "warm"), sample(PROMPT, "warm1", 1)])
    if running:
        engine.add(engine.effective_request(sample((*PROMPT, 9, 9), "late", 5, max_tokens=40)))
        drain(engine, record, steps=12)
    scale(model, 1.5)
    engine.weights_changed(2)
    drain(engine, record)
    probe = sample((*PROMPT, 3), "probe")
    after = run(engine, [probe])["probe"]
    again = run(engine, [probe])["probe"]
    if running:
        assert set(record.samples["late"].versions) == {1, 2}
    return after, isolated(second, probe, prefix_cache=False), again, max(map(cached, warm.values()))


def test_nothing_cached_survives_an_update(tiny_qwen3_path: Path) -> None:
    """F1; a hit within one version still works."""
    after, fresh, again, before = across_an_update(tiny_qwen3_path, running=False)
    assert after.bits() == fresh.bits() == again.bits()
    assert (before, cached(after), cached(again)) == (69, 0, 70)


def test_a_sample_that_crosses_an_update_feeds_only_the_new_version(tiny_qwen3_path: Path) -> None:
    """F2: it goes on under the new weights, with its KV rebuilt, so what it leaves behind is of the new version."""
    after, fresh, again, _ = across_an_update(tiny_qwen3_path, running=True)
    assert after.bits() == fresh.bits() == again.bits()
    assert (cached(after), cached(again)) == (70, 70), "pages that were rebuilt under the new weights serve it"


def test_a_cache_that_ignores_the_version_is_caught(tiny_qwen3_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(PrefixIndex, "restart", lambda self, version: None)
    monkeypatch.setattr("rollout.kvcache.PageAllocator._uncache", lambda self, pages: None)
    after, fresh, _, _ = across_an_update(tiny_qwen3_path, running=False)
    assert cached(after) > 0 and after.bits() != fresh.bits()


def test_weights_there_and_back(tiny_qwen3_path: Path) -> None:
    """A, B, A: pages of the first A are gone, the bits are not."""
    model = fresh_model(tiny_qwen3_path, torch.float32)
    engine, request = build_engine(model), sample(PROMPT)
    saved = model.hf.get_decoder().layers[0].self_attn.v_proj.weight.detach().clone()
    first = run(engine, [request])["s"]
    scale(model, 1.5)
    engine.weights_changed(1)
    other = run(engine, [request])["s"]
    with torch.no_grad():
        model.hf.get_decoder().layers[0].self_attn.v_proj.weight.copy_(saved)
    engine.weights_changed(2)
    back = run(engine, [request])["s"]
    assert first.bits() == back.bits() != other.bits() and cached(back) == 0


# ---- poison -----------------------------------------------------------------------------------------------------


def store_of(engine: Engine) -> CpuKVStore:
    assert isinstance(engine.store, CpuKVStore)
    return engine.store


def poisoned(store: CpuKVStore, pages: list[int]) -> None:
    store.keys[:, pages] = torch.nan
    store.values[:, pages] = torch.nan


def test_poison_behind_the_rows_of_a_tail_is_never_read(qwen3: SharedModel) -> None:
    """Slots that no copy may take: behind what an entry counts, in its page and in the page of the copy."""
    engine, first = build_engine(qwen3, kv_tokens=1024), sample(PROMPT[:40])
    run(engine, [first])
    assert poison_unused(engine) > 0
    others = [sample((*PROMPT[:n], 9, 9, 9, 9), f"o{n}", n) for n in (3, 20, 36, 40)]
    said = run(engine, others)
    assert [cached(said[r.sample_id]) for r in others] == [3, 20, 36, 40]
    assert [said[r.sample_id].bits() for r in others] == [isolated(qwen3, r).bits() for r in others]


def test_copying_a_row_too_many_is_caught_by_its_bits(qwen3: SharedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: the row of another token, then a slot that nobody wrote."""
    real = PrefixIndex.nearest

    def generous(self: PrefixIndex, parent: Any, content: Any) -> Any:
        found = real(self, parent, content)
        return found and (found[0], min(found[1] + 1, len(content.ids)))

    monkeypatch.setattr(PrefixIndex, "nearest", generous)
    engine = build_engine(qwen3, kv_tokens=1024)
    first = run(engine, [sample(PROMPT[:40])])["s"]
    other = sample((*PROMPT[:36], 9, 9, 9), "other")
    assert run(engine, [other])["other"].bits() != isolated(qwen3, other).bits()
    beyond = sample((*PROMPT[:40], *first.token_ids[:11], 9, 9), "beyond")
    assert isinstance(run(engine, [beyond])["beyond"].error, ParityError)


@pytest.mark.parametrize("length", [9, 40])
def test_a_broken_tail_is_seen_once(qwen3: SharedModel, length: int) -> None:
    """Of a prompt within one page, and after full pages."""
    engine, request = build_engine(qwen3, kv_tokens=1024), sample(PROMPT[:length], max_tokens=3)
    run(engine, [request])
    poisoned(store_of(engine), [engine.pages.cached_pages[0]])
    assert isinstance(run(engine, [request])["s"].error, ParityError)
    one = run(engine, [request])["s"]
    assert cached(one) == 0 and one.bits() == isolated(qwen3, request).bits()


@pytest.fixture
def warm(qwen3: SharedModel) -> Iterator[Engine]:
    engine = build_engine(qwen3)
    run(engine, [sample(PROMPT)])
    yield engine


def test_poison_in_free_pages_is_never_read(qwen3: SharedModel, warm: Engine) -> None:
    kept = set(warm.pages.cached_pages)
    poisoned(store_of(warm), [p for p in range(warm.pages.num_pages) if p not in kept])
    one = run(warm, [sample(PROMPT)])["s"]
    assert cached(one) == 69 and one.bits() == isolated(qwen3, sample(PROMPT)).bits()


def test_broken_pages_are_seen_once_and_never_served_again(qwen3: SharedModel, warm: Engine) -> None:
    """Control: cached pages are read. The failed sample's pages leave the cache, so the next one is whole again."""
    poisoned(store_of(warm), warm.pages.cached_pages)
    requests: list[SampleRequest] = [sample(PROMPT)]
    assert isinstance(run(warm, requests)["s"].error, ParityError)
    one = run(warm, requests)["s"]
    assert cached(one) == 0 and one.bits() == isolated(qwen3, sample(PROMPT)).bits()
