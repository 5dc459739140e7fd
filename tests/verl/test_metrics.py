"""Our figures against verl's own helpers, to the last float32 bit."""

from __future__ import annotations

import itertools
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.debug.metrics import calculate_debug_metrics

from rollout.errors import ConfigError, InvalidRequest
from trainer_bridge.correction import correct
from trainer_bridge.correction_config import RS_OPTIONS, CorrectionConfig
from trainer_bridge.offpolicy import probability_metrics


def batch(seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random log-probs, with the edges that a trainer meets."""
    draw = np.random.default_rng(seed)
    rows, width = int(draw.integers(1, 7)), int(draw.integers(1, 40))
    # Wide and tall enough that torch sums in pieces, in an order of its own.
    rows, width = {"one token": (1, 1), "wide": (2, 6000), "tall": (700, 9)}.get(kind, (rows, width))
    rollout = -draw.exponential(1.5, (rows, width)).astype(np.float32)
    trainer = (rollout + draw.normal(0, 0.4, (rows, width))).astype(np.float32)
    mask = (draw.random((rows, width)) < 0.6).astype(np.int64)
    mask[0, 0] = 1
    if kind == "empty rows" and rows > 1:
        mask[-1] = 0
    if kind == "infinite":
        trainer[0, 0] = -np.inf
    if kind == "infinite rollout":
        rollout[0, 0] = -np.inf
    if kind == "both infinite":
        trainer[0, 0] = rollout[0, 0] = -np.inf
    if kind == "not a number":
        trainer[-1, -1] = np.nan
        mask[-1, -1] = 1
    if kind == "most rows empty":
        mask[1:] = 0
    if kind == "whole rows":
        mask[:] = 1
    if kind == "huge":
        trainer[0] -= 60.0
    if kind == "equal":
        trainer = rollout.copy()
    tensors = torch.from_numpy(trainer), torch.from_numpy(rollout), torch.from_numpy(mask)
    return (*tensors[:2], tensors[2].float()) if kind == "float mask" else tensors


KINDS = (
    *(
        "plain",
        "one token",
        "empty rows",
        "most rows empty",
        "whole rows",
        "float mask",
        "equal",
        "huge",
        "wide",
        "tall",
    ),
    *("infinite", "infinite rollout", "both infinite", "not a number"),
)
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
    """Equal float32 bits; any NaN is one NaN. Both are float32 values that ``item()`` widened."""
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return struct.pack("<d", left) == struct.pack("<d", right)


@pytest.mark.parametrize(("kind", "config"), list(itertools.product(KINDS, CONFIGS)), ids=str)
def test_correction_is_verls(kind: str, config: dict[str, Any]) -> None:
    for seed in range(3 if kind in ("wide", "tall") else 12):
        trainer, rollout, mask = batch(seed, kind)
        try:
            weights, kept, want = compute_rollout_correction_and_rejection_mask(trainer, rollout, mask, **config)
        except ZeroDivisionError:
            # IcePop that masks every weight: verl divides by zero, we report an effective sample size of 0.
            got = correct(trainer, rollout, mask, CorrectionConfig(**config), drop_empty=False, allow_nonfinite=True)
            assert got.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
            continue
        got = correct(trainer, rollout, mask, CorrectionConfig(**config), drop_empty=False, allow_nonfinite=True)
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


THRESHOLDS = st.floats(0.01, 30).map(lambda value: round(value, 3))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from(KINDS[:8]),
    st.sampled_from([None, "token", "sequence"]),
    st.sampled_from(RS_OPTIONS),
    THRESHOLDS,
    THRESHOLDS,
    st.booleans(),
)
def test_correction_is_verls_at_any_threshold(
    seed: int, kind: str, level: str | None, option: str, first: float, second: float, normalise: bool
) -> None:
    low, high = sorted((first, second))
    config = {
        "rollout_is": level,
        "rollout_is_threshold": high if seed % 2 else f"{low}_{high}",
        "rollout_is_batch_normalize": normalise,
        "rollout_rs": option,
        "rollout_rs_threshold": f"{low}_{high}" if option.endswith("k1") and seed % 3 else str(high),
    }
    trainer, rollout, mask = batch(seed, kind)
    try:
        weights, kept, want = compute_rollout_correction_and_rejection_mask(trainer, rollout, mask, **config)
    except ZeroDivisionError:
        if option.endswith("k1") and "_" not in str(config["rollout_rs_threshold"]) and high < 1:
            # verl divides before it looks at this threshold, which it refuses as well.
            with pytest.raises(ConfigError):
                CorrectionConfig(**config)
            return
        got = correct(trainer, rollout, mask, CorrectionConfig(**config), drop_empty=False, allow_nonfinite=True)
        assert got.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
        return
    except ValueError:
        with pytest.raises(ConfigError):
            CorrectionConfig(**config)
        return
    got = correct(trainer, rollout, mask, CorrectionConfig(**config), drop_empty=False, allow_nonfinite=True)
    assert got.metrics.keys() == want.keys()
    wrong = {k: (got.metrics[k], want[k]) for k in want if not same(got.metrics[k], want[k])}
    assert not wrong
    assert torch.equal(got.mask, kept)
    assert (weights is None) == (got.weights is None)
    if weights is not None and got.weights is not None:
        theirs = weights.batch["rollout_is_weights"]
        assert torch.equal(got.weights.view(torch.int32), theirs.view(torch.int32))


def test_a_batch_without_a_token_is_refused_as_verl_refuses_it() -> None:
    trainer, rollout, mask = batch(0, "plain")
    with pytest.raises(ValueError, match="mask"):
        compute_rollout_correction_and_rejection_mask(trainer, rollout, torch.zeros_like(mask))
    with pytest.raises(InvalidRequest, match="no token has mask 1"):
        correct(trainer, rollout, torch.zeros_like(mask), CorrectionConfig())


def test_correction_that_stays_on_changes_no_bit_of_an_exact_run() -> None:
    """What docs/verl.md says of the fall back: weights are exactly 1, so verl's loss and gradient are the same bits."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import ActorConfig

    trainer, rollout, mask = batch(3, "equal")
    advantages = torch.randn(trainer.shape, generator=torch.Generator().manual_seed(0))
    weights = correct(trainer, rollout, mask, CorrectionConfig("token", 2.0)).weights
    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    results = []
    for factor in (None, weights):
        leaf = trainer.clone().requires_grad_()
        loss, _ = compute_policy_loss_vanilla(trainer, leaf, advantages, mask, config=config, rollout_is_weights=factor)
        loss.backward()
        assert leaf.grad is not None
        results.append((loss.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][1].abs().sum() > 0


def test_the_comparison_can_fail() -> None:
    trainer, rollout, mask = batch(0, "plain")
    _, _, want = compute_rollout_correction_and_rejection_mask(trainer, rollout, mask)
    other = trainer.clone()
    first = mask.nonzero()[0]
    other[first[0], first[1]] = torch.nextafter(other[first[0], first[1]], torch.tensor(0.0))
    got = correct(other, rollout, mask, CorrectionConfig(), drop_empty=False, allow_nonfinite=True)
    assert any(not same(got.metrics[k], want[k]) for k in want)
