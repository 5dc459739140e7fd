"""Rows kept at the first positions whose digests differ: the very rows that the digests were taken of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rollout.logprobs import row_digests
from tests.engines import random_prompt, shared_model
from tests.trainer_bridge.samples import f32, sample
from trainer_bridge.forward import TrainingForward, TrainingSample
from trainer_bridge.kept_rows import differing_positions, keep_rows
from trainer_bridge.records import ScoredSample


def test_the_kept_row_has_the_trainers_digest(tiny_qwen3_path: Path) -> None:
    forward = TrainingForward(shared_model(tiny_qwen3_path, torch.bfloat16))
    prompt, tokens = np.array(random_prompt(7, 0), np.int32), np.array(random_prompt(9, 1), np.int32)
    with torch.no_grad(), forward.aligned():
        out = forward([TrainingSample(prompt, tokens)], digests=True)
        assert out.digests is not None
        told = out.digests.copy()
        told[[2, 5, 6]] += np.uint64(1)
        scored = sample(
            out.logprobs.numpy(),
            mask=np.array([1, 1, 1, 1, 1, 0, 1, 1, 1], np.uint8),
            prompt_ids=prompt,
            token_ids=tokens,
            rollout_digests=told,
            trainer_digests=out.digests,
        )
        rows = keep_rows(forward, [scored], limit=2)
        assert keep_rows(forward, [scored], limit=1)[0].position == 2
    assert [(r.position, r.token_id) for r in rows] == [(2, int(tokens[2])), (6, int(tokens[6]))], "5 has mask 0"
    for row in rows:
        again = row_digests(torch.from_numpy(row.logits)[None], 64)
        assert int(again[0]) == row.trainer_digest != row.rollout_digest


def test_equal_or_absent_digests_keep_nothing() -> None:
    digests = np.arange(2, dtype=np.uint64)
    equal: list[ScoredSample] = [sample(f32([-1.0, -2.0]), rollout_digests=digests, trainer_digests=digests), sample()]
    assert differing_positions(equal, 4) == []
