"""Property 5: NaN in every unused slot and free page changes nothing, and would show if it were read."""

from __future__ import annotations

import pytest
import torch

from rollout.engine import Engine
from rollout.kernels.cpu.kernel_set import CpuKVStore
from rollout.model import SharedModel
from tests.engines import Record, build_engine, drain, isolated, random_prompt, run, sample

REQUESTS = [sample(random_prompt(n, n), f"s{n}", max_tokens=6) for n in (1, 15, 16, 17, 40, 70)]


def store_of(engine: Engine) -> CpuKVStore:
    assert isinstance(engine.store, CpuKVStore)
    return engine.store


def test_zeros_and_nan_in_unused_slots_are_the_same(model: SharedModel) -> None:
    poisoned, clean = build_engine(model), build_engine(model)
    store_of(clean).keys.zero_()
    store_of(clean).values.zero_()
    assert bool(store_of(poisoned).keys.isnan().all())
    said = [{n: g.bits() for n, g in run(engine, REQUESTS).items()} for engine in (poisoned, clean)]
    assert said[0] == said[1]


def poison_unused(engine: Engine) -> int:
    """NaN into every free page and into every slot past what a sequence has computed; returns the slots poisoned.

    Of pages kept for reuse the rows that are indexed stay as they are.
    """
    store, page_size = store_of(engine), engine.scheduler.limits.page_size
    used = torch.zeros(engine.pages.num_pages, page_size, dtype=torch.bool)
    for page in engine.pages.cached_pages:
        assert engine.pages.index is not None
        used[page, : engine.pages.index.rows_of(page)] = True
    for sequence in engine.scheduler.running:
        for position in range(sequence.num_computed):
            used[sequence.pages[position // page_size], position % page_size] = True
    unused = ~used
    store.keys.masked_fill_(unused[None, :, None, None, :], torch.nan)
    store.values.masked_fill_(unused[None, :, None, :, None], torch.nan)
    return int(unused.sum())


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_poison_before_every_step(model: SharedModel, prefix_cache: bool) -> None:
    """Also what finished samples left behind, and what a running one has not yet written."""
    engine, record = build_engine(model, kv_tokens=512, running=4, prefix_cache=prefix_cache), Record()
    for request in REQUESTS:
        engine.add(engine.effective_request(request))
    counts: list[int] = []
    drain(engine, record, between=lambda _: counts.append(poison_unused(engine)))
    assert min(counts) < 512 == max(counts)
    for request in REQUESTS:
        assert record.samples[request.sample_id].bits() == isolated(model, request).bits()


@pytest.mark.parametrize("what", ["keys", "values"])
def test_poison_in_a_used_slot_is_seen(qwen3: SharedModel, what: str) -> None:
    """Negative control: one NaN among the keys or values that a running sample needs fails it, and no other."""
    engine, record = build_engine(qwen3), Record()
    for request in REQUESTS[3:5]:
        engine.add(engine.effective_request(request))

    def spoil(taken: int) -> None:
        if taken == 4:
            victim = engine.scheduler.running[0]
            assert victim.num_computed > 3
            page, slot = victim.pages[0], 3
            store = store_of(engine)
            cell = store.keys[0, page, 0, :, slot] if what == "keys" else store.values[0, page, 0, slot]
            cell.fill_(torch.nan)

    drain(engine, record, between=spoil)
    assert record.samples["s17"].error is not None
    assert record.samples["s40"].bits() == isolated(qwen3, REQUESTS[4]).bits()
