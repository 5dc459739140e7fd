"""What a finished Generate call yields."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.types import (
    FinishDetail,
    Float32Array,
    Int32Array,
    LogprobMode,
    SamplingParams,
    TopLogprobs,
    UInt64Array,
    VersionSpan,
)


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One finished sample. All arrays have length L; nothing is padded."""

    sample_index: int
    token_ids: Int32Array
    """[L]"""
    policy_logprobs: Float32Array
    """[L] nats: what the trainer recomputes."""
    behavior_logprobs: Float32Array
    """[L] nats: under the filtered distribution that was sampled from."""
    row_digests: UInt64Array | None
    """[L] or None when not asked for."""
    mask: npt.NDArray[np.uint8]
    """[L] all 1: every token here was sampled, the EOS included."""
    finish: FinishDetail
    spans: tuple[VersionSpan, ...]
    """Weight versions, covering [0, L) in order."""
    text: str | None
    """Decoded sample, when the service has a tokenizer."""
    replica: str
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    top: TopLogprobs | None = None
    """[L, n] likeliest tokens at each position; None when not asked for."""


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Log-probs of the prompt's own tokens."""

    logprobs: Float32Array
    """[P - 1] nats; entry i belongs to prompt_ids[1 + i]."""
    weight_version: int
    row_digests: UInt64Array | None
    """[P - 1] or None when not asked for."""
    top: TopLogprobs | None
    """[P - 1, n] or None when not asked for."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A prompt and its n samples."""

    request_id: str
    prompt_ids: tuple[int, ...]
    """[P] as fed to the model."""
    samples: tuple[SampledSequence, ...]
    """[n] by sample_index."""
    sampling: SamplingParams
    """Effective values; seed and max_tokens are set."""
    mode: LogprobMode
    """What ``policy_logprobs`` mean."""
    manifest_digest: str
    prompt: PromptScore | None = None
    """When asked for; None for a prompt of one token, and when the first sample ended before its first token."""
