"""Property 8: both sides against an independent float64 reference, since two sides can agree and both be wrong (I4)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.model import SharedModel
from tests.engines import assert_three_ways_equal, build_engine, fresh_model, random_prompt, run, sample
from tests.oracle.dense import DenseOracle

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
ROUNDINGS = 16
"""Roundings to the model's dtype along a layer: two norms, projections, head norms, rotation, attention, gate, sums."""


def allowed(dtype: torch.dtype, layers: int) -> tuple[float, float]:
    """(root mean square, largest) difference of a log-prob.

    ROUNDINGS * layers errors of one unit that add like a random walk, into logits with a standard deviation of 2.5 (as
    the tiny models are drawn); twice that for the mean, six times that for the largest of some hundred.
    """
    walk = UNIT[dtype] * (ROUNDINGS * layers) ** 0.5 * 2.5
    return 2 * walk, 6 * walk


def differences(model: SharedModel, oracle: DenseOracle) -> np.ndarray:
    """Of all log-probs, which decode, Score and training forward agree on to the bit."""
    requests = [
        sample(random_prompt(n, n), f"p{n}", temperature=t, max_tokens=12)
        for n, t in ((1, 1.0), (17, 0.7), (64, 1.0), (129, 1.5), (300, 1.0))
    ]
    generated = run(build_engine(model), requests)
    assert_three_ways_equal(model, requests, generated, build_engine(model))
    found = []
    for r in requests:
        one = generated[r.sample_id]
        right = oracle.logprobs([*r.prompt_ids, *one.token_ids], len(r.prompt_ids), r.sampling.temperature).numpy()
        # A difference of logits is divided by T: state all at T = 1.
        found.append((np.array(one.policy, np.float64) - right) * r.sampling.temperature)
    return np.concatenate(found)


def within(found: np.ndarray, dtype: torch.dtype, layers: int) -> bool:
    mean, most = allowed(dtype, layers)
    return bool(np.sqrt((found**2).mean()) <= mean and np.abs(found).max() <= most)


def test_both_sides_are_right(model: SharedModel, path_and_dtype: tuple[Path, torch.dtype]) -> None:
    found = differences(model, DenseOracle(*path_and_dtype))
    assert within(found, path_and_dtype[1], 2), (np.sqrt((found**2).mean()), np.abs(found).max())


def test_a_fault_that_both_sides_share_is_caught(path_and_dtype: tuple[Path, torch.dtype], tmp_path: Path) -> None:
    """Rollout and trainer load one wrong rotary base: they agree on every bit, and both are wrong."""
    path, dtype = path_and_dtype
    shutil.copytree(path, tmp_path / "wrong")
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (tmp_path / "wrong" / "config.json").write_text(json.dumps(config))
    found = differences(fresh_model(tmp_path / "wrong", dtype), DenseOracle(path, dtype))
    assert not within(found, dtype, 2)


@pytest.mark.parametrize("fault", ["norm", "temperature", "position"])
def test_other_shared_faults(qwen3: SharedModel, tiny_qwen3_path: Path, fault: str) -> None:
    """Negative controls of the bound, in float32: each is a fault that would be on both sides."""
    oracle = DenseOracle(tiny_qwen3_path, torch.float32)
    ids = [*random_prompt(40, 1), 7, 8, 9]
    if fault == "norm":
        oracle._weights["model.layers.1.input_layernorm.weight"] *= 1 + 1e-3
    right = DenseOracle(tiny_qwen3_path, torch.float32).logprobs(ids, 20)
    wrong = {
        "norm": lambda: oracle.logprobs(ids, 20),
        "temperature": lambda: oracle.logprobs(ids, 20, 1 + 1e-4),
        "position": lambda: oracle.logprobs(ids[1:], 19),
    }[fault]()
    assert not within((wrong - right).numpy(), torch.float32, 2)
