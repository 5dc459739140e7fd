"""What a model's sizes and rules say of a request, before it is queued."""

from __future__ import annotations

import dataclasses

from rollout.errors import InvalidRequest
from rollout.placement import VisionRules
from rollout.types import SamplingParams


def check_top(count: int, vocab_size: int) -> None:
    """Refuse more alternatives than there are tokens."""
    if not 0 <= count <= vocab_size:
        raise InvalidRequest(
            f"top_logprobs = {count} is outside [0, {vocab_size}], the size of the vocabulary", field="top_logprobs"
        )


def check_ids(ids: tuple[int, ...], field: str, vocab_size: int) -> None:
    """Refuse an empty list and ids outside the vocabulary."""
    if not ids:
        raise InvalidRequest(f"{field} is empty; at least one token id is needed", field=field)
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{field}[{i}] = {token} is outside [0, {vocab_size - 1}]", field=field)


def without_placeholders(sampling: SamplingParams, rules: VisionRules | None) -> SamplingParams:
    """For a multimodal model the same with its placeholders barred: a filter, echoed with the effective values."""
    if rules is None:
        return sampling
    barred = tuple(sorted({*sampling.barred_token_ids, *rules.never_sampled}))
    return dataclasses.replace(sampling, barred_token_ids=barred)
