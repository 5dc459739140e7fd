"""Property 3: batch-mates, their parameters, order and page layout change nothing (D3, D8, D10, A7)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollout import token_sampler
from rollout.errors import ParityError
from rollout.kernels.cpu import invariant
from rollout.model import SharedModel
from rollout.types import SampleRequest
from tests.engines import Record, build_engine, drain, isolated, random_prompt, run, sample, torch_threads

VICTIM = sample(random_prompt(21, 0), "victim", 2, seed=77, max_tokens=14)


def strangers(count: int, seed: int) -> list[SampleRequest]:
    """Requests of every kind, none like the next."""
    rng = random.Random(seed)
    kinds: Sequence[dict[str, Any]] = (
        {"top_k": 2},
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 3},
        {"top_p": 0.3},
        {"min_p": 0.5, "temperature": 2.0},
        {"barred_token_ids": tuple(range(30))},
        {"temperature": 0.01},
        {},
    )
    return [
        sample(
            random_prompt(rng.randint(1, 70), seed * 100 + i),
            f"x{i}",
            i,
            seed=i,
            max_tokens=rng.randint(1, 20),
            **kinds[i % 8],
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def alone(model: SharedModel) -> tuple[object, ...]:
    return isolated(model, VICTIM).bits()


@pytest.mark.parametrize("mate", [{"top_k": 2}, {"temperature": 0.0}, {"top_p": 0.1}, {"min_p": 0.9}])
def test_a_mate_with_other_parameters(model: SharedModel, alone: tuple[object, ...], mate: dict[str, Any]) -> None:
    """D3, A7."""
    other = sample(random_prompt(30, 1), "mate", **mate)
    samples = run(build_engine(model), [other, VICTIM])
    assert samples["victim"].bits() == alone
    assert samples["mate"].bits() == isolated(model, other).bits()
    assert all(np.isfinite(samples["mate"].policy))


@pytest.mark.parametrize(("count", "threads"), [(1, 1), (2, 1), (3, 1), (7, 2), (16, 1), (31, 1)])
def test_any_number_of_strangers(model: SharedModel, alone: tuple[object, ...], count: int, threads: int) -> None:
    requests = strangers(count, count)
    requests.insert(count // 2, VICTIM)
    with torch_threads(threads):
        samples = run(build_engine(model, shuffle=count), requests)
    assert samples["victim"].bits() == alone


def test_every_stranger_is_a_victim_too(model: SharedModel) -> None:
    """Batch of 32: each equals its own isolated run, whatever the order of arrival."""
    requests = strangers(32, 3)
    expected = {r.sample_id: isolated(model, r).bits() for r in requests[::3]}
    for seed in (None, 1):
        order = list(requests)
        if seed is not None:
            random.Random(seed).shuffle(order)
        samples = run(build_engine(model, shuffle=seed), order)
        assert {n: samples[n].bits() for n in expected} == expected


@pytest.mark.parametrize("length", [9, 10, 64])
@pytest.mark.parametrize("at", [1, 4])
def test_a_prefill_injected_into_a_decoding_batch(
    model: SharedModel, alone: tuple[object, ...], length: int, at: int
) -> None:
    """D8: strangers' prefills arrive in the same step as the victim's decode rows."""
    engine, record = build_engine(model, chunk=64, batch_tokens=80), Record()
    engine.add(engine.effective_request(VICTIM))

    def inject(taken: int) -> None:
        if taken == at:
            for i in range(2):
                engine.add(engine.effective_request(sample(random_prompt(length, i), f"late{i}", max_tokens=3)))

    assert drain(engine, record, between=inject).samples["victim"].bits() == alone
    assert record.samples["late1"].ended


def test_page_numbers_do_not_matter(model: SharedModel, alone: tuple[object, ...]) -> None:
    for shuffle in (None, 1, 2):
        engine = build_engine(model, shuffle=shuffle)
        assert run(engine, [VICTIM])["victim"].bits() == alone
        # Once more on pages that others have used.
        run(engine, strangers(5, 9))
        assert run(engine, [VICTIM])["victim"].bits() == alone


# ---- negative controls ------------------------------------------------------------------------------------------


def test_a_sampler_that_shares_noise_by_slot_is_caught(qwen3: SharedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Position counted per batch instead of per sequence: repeatable alone, changed by company."""
    calls = {"n": 0}
    real = token_sampler.row_state

    def by_call(seed: int, position: int) -> int:
        calls["n"] += 1
        return real(seed, calls["n"])

    expected = isolated(qwen3, VICTIM).bits()
    monkeypatch.setattr(token_sampler, "row_state", by_call)
    assert run(build_engine(qwen3), [*strangers(3, 4), VICTIM])["victim"].bits() != expected


def test_kernels_that_choose_by_shape_are_caught(qwen3: SharedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows no longer padded: the victim's float32 bits follow the size of the batch. A new engine refuses to start."""
    expected = isolated(qwen3, VICTIM).bits()
    engines = {count: build_engine(qwen3, chunk=7) for count in (0, 3, 15)}
    monkeypatch.setattr(invariant, "ROW_TILE", 1)
    unpadded = [run(engine, [*strangers(count, 4), VICTIM])["victim"].bits() for count, engine in engines.items()]
    assert any(bits != expected for bits in unpadded)
    with pytest.raises(ParityError):
        build_engine(qwen3)
