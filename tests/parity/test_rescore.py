"""Property 2: rollout decode = Score = training forward, every log-prob and row digest, at every edge (D10, D11)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.model import SharedModel
from tests.engines import (
    assert_three_ways_equal,
    build_engine,
    fresh_model,
    random_prompt,
    rescore,
    run,
    sample,
    shared_model,
    torch_threads,
    train_forward,
    training_sample,
    unequal,
)
from trainer_bridge.contrast import OrdinaryTrainer

EDGES = (
    1,
    2,
    3,
    15,
    16,
    17,
    23,
    24,
    25,
    31,
    32,
    33,
    47,
    48,
    49,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    300,
    599,
    600,
)
"""Prompt lengths around pages of 16, chunks of 24, steps of 64 rows, and pages of 128."""
MIX: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1, "barred_token_ids": (3, 9)},
)


@pytest.mark.parametrize(
    ("threads", "lengths"), [(1, EDGES), (2, (1, 17, 64, 129, 256))], ids=["one thread", "two threads"]
)
def test_every_edge(model: SharedModel, threads: int, lengths: tuple[int, ...]) -> None:
    """Mixed parameters, all lengths in one engine at once; 2 to 4 tokens each."""
    requests = [
        sample(random_prompt(n, n), f"p{n}", n % 3, seed=n, max_tokens=2 + n % 3, **MIX[i % len(MIX)])
        for i, n in enumerate(lengths)
    ]
    with torch_threads(threads):
        generated = run(build_engine(model, shuffle=threads), requests)
        count = assert_three_ways_equal(model, requests, generated, build_engine(model, chunk=64, batch_tokens=200))
    assert count >= 2 * len(lengths)


@pytest.mark.parametrize("page_size", [128, 32])
def test_other_page_sizes(tiny_qwen3_path: Path, page_size: int) -> None:
    model = shared_model(tiny_qwen3_path, torch.bfloat16, page_size)
    requests = [
        sample(random_prompt(n, n), f"p{n}", max_tokens=4) for n in (1, 30, 126, 127, 128, 129, 254, 255, 256, 600)
    ]
    generated = run(build_engine(model, kv_tokens=8192, chunk=100, batch_tokens=256), requests)
    assert_three_ways_equal(model, requests, generated, build_engine(model, kv_tokens=8192))


def test_generate_forty_then_rescore(model: SharedModel) -> None:
    """D11, also as a continuation from the tenth token."""
    request = sample(random_prompt(70, 1), max_tokens=40)
    generated = run(build_engine(model), [request])
    assert_three_ways_equal(model, [request], generated, build_engine(model))
    one = generated["s"]
    resumed = sample((*request.prompt_ids, *one.token_ids[:10]), "r", max_tokens=30)
    rest = run(build_engine(model), [resumed])["r"]
    assert rest.token_ids == one.token_ids[10:] and rest.digests == one.digests[10:]
    assert unequal(rest.policy, one.policy[10:]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_architecture_with_biases(tiny_qwen2_path: Path, dtype: torch.dtype) -> None:
    model = shared_model(tiny_qwen2_path, dtype)
    requests = [sample(random_prompt(n, n), f"p{n}", max_tokens=4, **MIX[n % 6]) for n in (1, 2, 16, 17, 65, 200)]
    assert_three_ways_equal(model, requests, run(build_engine(model), requests), build_engine(model))


def test_the_fused_forward_is_the_modules(model: SharedModel) -> None:
    requests = [sample(random_prompt(n, n), f"p{n}", max_tokens=3) for n in (1, 17, 64, 129)]
    fused, plain = (run(build_engine(model, fused=f), requests) for f in (True, False))
    assert {n: g.bits() for n, g in fused.items()} == {n: g.bits() for n, g in plain.items()}


def test_an_engine_built_inside_the_mode_says_the_same(model: SharedModel) -> None:
    """Whatever an engine prepares at its start must not depend on who else holds invariant mode at that moment."""
    request = sample(random_prompt(200, 5))
    with model.kernels.invariant_mode():
        inside = build_engine(model)
    assert run(inside, [request])["s"].bits() == run(build_engine(model), [request])["s"].bits()


def test_scores_of_parts_and_of_the_whole(model: SharedModel) -> None:
    """A score does not depend on where it starts, nor on the sequences beside it."""
    ids = random_prompt(90, 2)
    engine = build_engine(model)
    together = rescore(engine, [ids, ids[:50], ids, (5, 6)], [1, 20, 89, 1], [1.0, 1.0, 1.0, 0.5])
    assert [len(s.logprobs) for s in together] == [89, 30, 1, 1]
    assert unequal(together[0].logprobs[19:49], together[1].logprobs) == 0
    assert unequal(together[0].logprobs[88:], together[2].logprobs) == 0
    assert not any(np.isnan(s.logprobs).any() for s in together)


# ---- negative controls ------------------------------------------------------------------------------------------


def generated_for_controls(model: SharedModel) -> tuple[list[Any], dict[str, Any]]:
    requests = [sample(random_prompt(n, n), f"p{n}", max_tokens=20, temperature=0.8) for n in (7, 40, 130)]
    return requests, run(build_engine(model), requests)


def test_an_ordinary_trainer_differs(model: SharedModel) -> None:
    """The same weights and tokens through padding, SDPA and torch's own kernels."""
    requests, generated = generated_for_controls(model)
    samples = [training_sample(r, generated[r.sample_id]) for r in requests]
    ordinary = OrdinaryTrainer(model).logprobs(samples, micro_batch=3, threads=1)
    differing = sum(unequal(generated[r.sample_id].policy, o) for r, o in zip(requests, ordinary, strict=True))
    assert differing > 0
    # Different bits, not another function.
    assert all(np.allclose(generated[r.sample_id].policy, o, atol=0.3) for r, o in zip(requests, ordinary, strict=True))


def test_a_training_forward_outside_the_mode_differs(qwen3: SharedModel) -> None:
    requests = [sample(random_prompt(n, n), f"p{n}", max_tokens=20) for n in (1, 2, 3)]
    generated = run(build_engine(qwen3), requests)
    samples = [training_sample(r, generated[r.sample_id]) for r in requests]
    aligned = train_forward(qwen3, samples)
    outside = train_forward(qwen3, samples, aligned=False, micro_batch=1)
    assert sum(unequal(a[0], o[0]) for a, o in zip(aligned, outside, strict=True)) > 0
    assert all(a[1].tolist() != o[1].tolist() for a, o in zip(aligned, outside, strict=True))


@pytest.mark.parametrize("broken", ["temperature", "prompt", "shift", "weights"])
def test_a_broken_side_is_caught(model: SharedModel, path_and_dtype: tuple[Path, torch.dtype], broken: str) -> None:
    requests, generated = generated_for_controls(model)
    samples = [training_sample(r, generated[r.sample_id]) for r in requests]
    trained_model = model
    if broken == "temperature":
        samples = [dataclasses.replace(s, temperature=0.8000001) for s in samples]
    elif broken == "prompt":
        samples = [dataclasses.replace(s, prompt_ids=np.roll(s.prompt_ids, 1)) for s in samples]
    elif broken == "weights":
        trained_model = fresh_model(*path_and_dtype)
        with torch.no_grad():
            trained_model.hf.get_decoder().layers[0].mlp.down_proj.weight.view(-1)[0] *= 1.01
    trained = train_forward(trained_model, samples)
    values = [np.roll(t[0], 1) if broken == "shift" else t[0] for t in trained]
    differing = [unequal(generated[r.sample_id].policy, v) for r, v in zip(requests, values, strict=True)]
    assert all(d > 0 for d in differing)
