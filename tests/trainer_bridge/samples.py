"""Builders of small samples for the tests of the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.types import FinishReason, LogprobMode, SamplingParams
from trainer_bridge.records import ScoredSample
from trainer_bridge.rollout_record import RolloutRecord


def f32(values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def i32(values: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def _mask(length: int, mask: Sequence[int] | np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    if isinstance(mask, np.ndarray):
        return mask
    return np.array([1] * length if mask is None else mask, dtype=np.uint8)


def sample(
    rollout: Any = (-1.0, -2.0),
    trainer: Any = None,
    mask: Sequence[int] | np.ndarray[Any, Any] | None = None,
    **changes: Any,
) -> ScoredSample:
    """A sample of len(rollout) tokens; the trainer agrees and every token enters unless said otherwise."""
    fields: dict[str, Any] = {
        "request_id": "r0",
        "sample_index": 0,
        "prompt_ids": i32([5, 6, 7]),
        "token_ids": i32(range(10, 10 + len(rollout))),
        "rollout_logprobs": f32(rollout),
        "trainer_logprobs": f32(rollout if trainer is None else trainer),
        "mask": _mask(len(rollout), mask),
        "mode": LogprobMode.TEMPERED,
        "temperature": 1.0,
        "filtered": False,
        "finish": FinishReason.LENGTH,
        "seed": 7,
    }
    return ScoredSample(**(fields | changes))


def record(
    logprobs: Any = (-1.0, -2.0),
    prompt: Sequence[int] = (5, 6, 7),
    tokens: Sequence[int] | None = None,
    mask: Sequence[int] | np.ndarray[Any, Any] | None = None,
    **changes: Any,
) -> RolloutRecord:
    """A rollout of len(logprobs) tokens."""
    fields: dict[str, Any] = {
        "request_id": "r0",
        "sample_index": 0,
        "prompt_ids": i32(prompt),
        "token_ids": i32(range(10, 10 + len(logprobs)) if tokens is None else tokens),
        "policy_logprobs": f32(logprobs),
        "mask": _mask(len(logprobs), mask),
        "finish": FinishReason.LENGTH,
        "seed": 7,
        "sampling": SamplingParams(seed=7, max_tokens=8),
        "mode": LogprobMode.TEMPERED,
    }
    return RolloutRecord(**(fields | changes))
