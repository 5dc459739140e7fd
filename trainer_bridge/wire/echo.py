"""Whether a service used what was asked of it: every response carries the effective parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from rollout.types import SamplingParams


def same_temperature(asked: float, used: float) -> bool:
    """Whether float32 makes them one: what divides the logits."""
    return bool(np.float32(asked) == np.float32(used))


def echo_difference(asked: SamplingParams, used: SamplingParams) -> str:
    """The first parameter that was not honoured, in words; "" where all were.

    The service draws a seed where none was asked, rounds the temperature to float32, bounds ``max_tokens`` by the
    context, and may bar more ids (a multimodal model's placeholders); nothing else is its to change.
    """
    for field in dataclasses.fields(SamplingParams):
        want, got = getattr(asked, field.name), getattr(used, field.name)
        if not _honoured(field.name, want, got):
            return f"{field.name} {_short(want)} was asked, {_short(got)} was used"
    return ""


def _honoured(name: str, want: Any, got: Any) -> bool:
    match name:
        case "temperature":
            return same_temperature(want, got)
        case "top_k":
            return bool(max(want, 0) == max(got, 0))
        case "seed":
            return got is not None and (want is None or (int(want) - int(got)) % 2**64 == 0)
        case "max_tokens":
            return got is not None and (want is None or got <= want)
        case "barred_token_ids":
            return set(want) <= set(got)
        case "stop" | "stop_token_ids":
            return tuple(want) == tuple(got)
    return bool(want == got)


def _short(value: Any) -> str:
    return f"{value!r:.60}"
