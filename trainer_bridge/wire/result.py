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
