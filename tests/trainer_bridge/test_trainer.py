"""The small trainer: advantages, masters, one rounding, and that learning moves log-probs the right way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.kernels.registry import resolve_kernels
from rollout.model import load_model
from rollout.weights import model_digest
from trainer_bridge.contrast import OrdinaryTrainer
from trainer_bridge.forward import TrainingSample
from trainer_bridge.trainer import TrainedSample, Trainer, group_advantages


def test_advantages() -> None:
    assert group_advantages([1, 0, 1, 1], 2) == [1.0, -1.0, 0.0, 0.0]
    assert group_advantages([0, 0, 0, 1], 4) == pytest.approx([-0.57735, -0.57735, -0.57735, 1.73205], abs=1e-4)


def _batch() -> list[TrainedSample]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(2, 64, (2, 12)).astype(np.int32) for _ in range(4)]
    return [
        TrainedSample(TrainingSample(a, b), advantage)
        for (a, b), advantage in zip(ids, [1.0, -1.0, 1.0, -1.0], strict=True)
    ]


def _trainer(path: Path) -> Trainer:
    model = load_model(path, dtype=torch.bfloat16, kernels=resolve_kernels(), trainable=True)
    return Trainer(model, learning_rate=1e-2, threads=1)


def test_learning_raises_what_was_rewarded(tiny_qwen3_path: Path) -> None:
    trainer, batch = _trainer(tiny_qwen3_path), _batch()
    before = trainer.learn(batch, micro_batch=4, digests=False).logprobs
    after = trainer.learn(batch, micro_batch=4, digests=False).logprobs
    for sample, old, new in zip(batch, before, after, strict=True):
        assert (new.sum() - old.sum()) * sample.advantage > 0


def test_micro_batches_change_no_forward_bit_and_runs_repeat(tiny_qwen3_path: Path) -> None:
    digests = []
    for micro_batch in (4, 4, 1):
        trainer = _trainer(tiny_qwen3_path)
        scored = trainer.learn(_batch(), micro_batch=micro_batch, digests=True)
        digests.append((b"".join(lp.tobytes() for lp in scored.logprobs), trainer.digest()))
    assert digests[0] == digests[1], "run to run"
    assert digests[0][0] == digests[2][0], "forward bits do not know the micro-batch"


def test_the_model_holds_the_single_rounding_of_the_masters(tiny_qwen3_path: Path) -> None:
    trainer = _trainer(tiny_qwen3_path)
    start = trainer.digest()
    assert start == model_digest(trainer.model)
    trainer.learn(_batch(), micro_batch=2, digests=False)
    assert trainer.digest() == model_digest(trainer.model) != start
    for name, parameter in trainer.model.parameters():
        assert torch.equal(trainer._masters[name].bfloat16(), parameter), name


def test_the_ordinary_trainer_shares_weights_and_is_close_but_not_equal(tiny_qwen3_path: Path) -> None:
    trainer = _trainer(tiny_qwen3_path)
    ordinary = OrdinaryTrainer(trainer.model)
    samples = [b.sample for b in _batch()]
    theirs = np.concatenate(ordinary.logprobs(samples, micro_batch=3, threads=1))
    ours = np.concatenate(trainer.learn(_batch(), micro_batch=4, digests=False).logprobs)
    assert np.abs(theirs - ours).max() < 0.5
    assert (theirs != ours).any()
    moved = np.concatenate(ordinary.logprobs(samples, micro_batch=3, threads=1))
    assert (moved != theirs).any(), "it sees the update, for it holds the same parameters"
