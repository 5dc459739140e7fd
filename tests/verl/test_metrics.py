"""Our figures against verl's own helpers, to the last float32 bit."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.debug.metrics import calculate_debug_metrics

from trainer_bridge.correction import correct
from trainer_bridge.correction_config import RS_OPTIONS, CorrectionConfig
from trainer_bridge.offpolicy import probability_metrics


def batch(seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random log-probs, with the edges that a trainer meets."""
    draw = np.random.default_rng(seed)
    rows, width = (1, 1) if kind == "one token" else (int(draw.integers(1, 7)), int(draw.integers(1, 40)))
    rollout = -draw.exponential(1.5, (rows, width)).astype(np.float32)
    trainer = (rollout + draw.normal(0, 0.4, (rows, width))).astype(np.float32)
    mask = (draw.random((rows, width)) < 0.6).astype(np.int64)
    mask[0, 0] = 1
    if kind == "empty rows" and rows > 1:
        mask[-1] = 0
    if kind == "infinite":
        trainer[0, 0] = -np.inf
    if kind == "huge":
        trainer[0] -= 60.0
    if kind == "equal":
        trainer = rollout.copy()
    return torch.from_numpy(trainer), torch.from_numpy(rollout), torch.from_numpy(mask)


KINDS = ("plain", "one token", "empty rows", "infinite", "huge", "equal")
CONFIGS: list[dict[str, Any]] = [
    {},
    {"rollout_is": "token", "rollout_is_threshold": 2.0},
    {"rollout_is": "token", "rollout_is_threshold": "0.5_1.5", "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_is_threshold": 1.7, "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_is_threshold": "0.3_3.0"},
    {"rollout_rs": ",".join(RS_OPTIONS), "rollout_rs_threshold": "1.3"},
    {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.4_1.9,0.05"},
]


def same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


@pytest.mark.parametrize(("kind", "config"), list(itertools.product(KINDS, CONFIGS)), ids=str)
def test_correction_is_verls(kind: str, config: dict[str, Any]) -> None:
    for seed in range(12):
        trainer, rollout, mask = batch(seed, kind)
        try:
            weights, kept, want = compute_rollout_correction_and_rejection_mask(trainer, rollout, mask, **config)
        except ZeroDivisionError:
            # IcePop that masks every weight: verl divides by zero, we report an effective sample size of 0.
            got = correct(trainer, rollout, mask, CorrectionConfig(**config), drop_empty=False)
            assert got.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
            continue
        got = correct(trainer, rollout, mask, CorrectionConfig(**config), drop_empty=False)
        assert got.metrics.keys() == want.keys()
        wrong = {k: (got.metrics[k], want[k]) for k in want if not same(got.metrics[k], want[k])}
        assert not wrong, (seed, wrong)
        assert torch.equal(got.mask, kept)
        if weights is not None:
            theirs = weights.batch["rollout_is_weights"]
            assert got.weights is not None
            assert torch.equal(got.weights.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_probability_metrics_are_verls(kind: str) -> None:
    for seed in range(20):
        trainer, rollout, mask = batch(seed, kind)
        if kind == "empty rows":
            mask[:] = 0
        data = DataProto.from_dict(
            {
                "rollout_log_probs": rollout,
                "old_log_probs": trainer,
                "response_mask": mask,
                "responses": torch.zeros_like(mask),
            }
        )
        want, got = calculate_debug_metrics(data), probability_metrics(trainer, rollout, mask)
        assert got.keys() == want.keys()
        wrong = {k: (got[k], want[k]) for k in want if not same(got[k], float(want[k]))}
        assert not wrong, (seed, wrong)


def test_the_comparison_can_fail() -> None:
    trainer, rollout, mask = batch(0, "plain")
    _, _, want = compute_rollout_correction_and_rejection_mask(trainer, rollout, mask)
    other = trainer.clone()
    first = mask.nonzero()[0]
    other[first[0], first[1]] = torch.nextafter(other[first[0], first[1]], torch.tensor(0.0))
    got = correct(other, rollout, mask, CorrectionConfig(), drop_empty=False)
    assert any(not same(got.metrics[k], want[k]) for k in want)
