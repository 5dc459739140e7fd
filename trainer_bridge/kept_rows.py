"""Whole logits rows of the first positions whose digests differ, kept for whoever explains the difference.

Digests say that two distributions differ, not how. The trainer's rows are computed again; the rollout's come from its
own side (``zerodrift explain`` or an engine at hand), since a service sends digests only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout.attention import PackedStep
from rollout.types import Float32Array
from trainer_bridge.forward import TrainingForward, TrainingSample, pack
from trainer_bridge.records import ScoredSample

KEPT = 4
"""Rows kept unless told otherwise; one row is 600 kB at a vocabulary of 150,000."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptRow:
    """One position whose row digests differ."""

    request_id: str
    sample_index: int
    position: int
    """index among the sample's tokens"""
    token_id: int
    rollout_digest: int
    trainer_digest: int
    logits: Float32Array
    """[V] the trainer's float32 logits, before temperature"""


def differing_positions(samples: Sequence[ScoredSample], limit: int) -> list[tuple[int, int]]:
    """(sample, position) of the first ``limit`` tokens at mask 1 with unequal digests, sample after sample."""
    found: list[tuple[int, int]] = []
    for number, sample in enumerate(samples):
        if sample.rollout_digests is not None and sample.trainer_digests is not None:
            differ = np.flatnonzero(sample.mask & (sample.rollout_digests != sample.trainer_digests))
            found += [(number, int(i)) for i in differ[: limit - len(found)]]
    return found


@torch.no_grad()
def keep_rows(forward: TrainingForward, samples: Sequence[ScoredSample], *, limit: int = KEPT) -> list[KeptRow]:
    """Compute the trainer's whole rows at the first differing positions; call inside ``forward.aligned()``."""
    kept = []
    model = forward.model
    for number, position in differing_positions(samples, limit):
        sample = samples[number]
        batch = pack([TrainingSample(sample.prompt_ids, sample.token_ids, sample.temperature)])
        step = PackedStep(model.kernels, batch.cu_seqlens)
        hidden = model.hidden_states(batch.input_ids, batch.positions, step)[batch.rows[position : position + 1]]
        row = model.logits(hidden)[0, : model.spec.vocab_size].float().cpu().numpy()
        assert sample.rollout_digests is not None and sample.trainer_digests is not None
        kept.append(
            KeptRow(
                request_id=sample.request_id,
                sample_index=sample.sample_index,
                position=position,
                token_id=int(sample.token_ids[position]),
                rollout_digest=int(sample.rollout_digests[position]),
                trainer_digest=int(sample.trainer_digests[position]),
                logits=row,
            )
        )
    return kept


def write_rows(path: str | os.PathLike[str], rows: Sequence[KeptRow]) -> None:
    """One ``.npz``: ``logits`` float32 [N, V], and a column for every other field of ``KeptRow``."""
    with open(path, "wb") as file:
        np.savez(
            file,
            request_id=np.array([row.request_id for row in rows], np.str_),
            sample_index=np.array([row.sample_index for row in rows], np.int64),
            position=np.array([row.position for row in rows], np.int64),
            token_id=np.array([row.token_id for row in rows], np.int64),
            rollout_digest=np.array([row.rollout_digest for row in rows], np.uint64),
            trainer_digest=np.array([row.trainer_digest for row in rows], np.uint64),
            logits=np.stack([row.logits for row in rows]) if rows else np.zeros((0, 0), np.float32),
        )
