"""One sample as a rollout engine produced it, before any trainer has seen it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.errors import InvalidRequest, ParityError
from rollout.types import (
    FinishReason,
    Float32Array,
    Int32Array,
    LogprobMode,
    SamplingParams,
    TopLogprobs,
    UInt64Array,
    VersionSpan,
)
from trainer_bridge.checks import Mask, check_spans, freeze, label, require_finite
from trainer_bridge.records import ScoredSample
from trainer_bridge.wire.result import PromptScore


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRecord:
    """One sample as it came from a rollout engine. None is "the source did not say", never a default.

    Errors: InvalidRequest when lengths, dtypes or spans disagree or a log-prob of a model token is not finite.
    """

    request_id: str
    sample_index: int
    prompt_ids: Int32Array
    """[P]"""
    token_ids: Int32Array
    """[L]"""
    policy_logprobs: Float32Array
    """[L] nats; NaN where absent (mask 0)"""
    mask: Mask
    """[L] True = sampled by the model; False = tool token, synthetic EOS, padding. uint8 0/1 is taken too."""
    finish: FinishReason | None
    seed: int | None
    """Base seed of the request, 64-bit."""
    sampling: SamplingParams | None
    mode: LogprobMode | None
    spans: tuple[VersionSpan, ...] = ()
    """Weight versions over [0, L); empty: unknown."""
    behavior_logprobs: Float32Array | None = None
    """[L] nats, under the distribution sampled from (after filters)"""
    row_digests: UInt64Array | None = None
    """[L]; values at mask 0 mean nothing"""
    replica: str | None = None
    weight_version: int | None = None
    """Version that sampled the last token."""
    manifest_digest: str | None = None
    temperature: float | None = None
    """Set by itself only when ``sampling`` is None (another engine's file)."""
    top: TopLogprobs | None = None
    """[L, n] likeliest tokens at each position, if they were asked for"""
    prompt_score: PromptScore | None = None
    """log-probs of prompt tokens 1..P-1, if they were asked for; the same in every sample of a request"""

    def __post_init__(self) -> None:
        """Check and freeze."""
        where = label(self.request_id, self.sample_index)
        freeze(self, "prompt_ids", np.int32, None, where)
        freeze(self, "token_ids", np.int32, None, where)
        length = self.token_ids.size
        freeze(self, "mask", np.bool_, length, where)
        for name in ("policy_logprobs", "behavior_logprobs"):
            freeze(self, name, np.float32, length, where)
            require_finite(name, getattr(self, name), self.mask, where)
        freeze(self, "row_digests", np.uint64, length, where)
        check_spans(self.spans, self.mask, where)
        _check_top("top", self.top, length, where)
        if self.prompt_score is not None:
            _check_prompt_score(self.prompt_score, self.prompt_ids.size - 1, where)
        if self.sampling is not None and self.temperature not in (None, self.sampling.temperature):
            raise InvalidRequest(
                f"{where}: temperature {self.temperature} contradicts sampling.temperature "
                f"{self.sampling.temperature}; leave temperature out when sampling is given",
                field="temperature",
            )

    def scored(
        self,
        trainer_logprobs: Float32Array,
        *,
        trainer_digests: UInt64Array | None = None,
        mode: LogprobMode | None = None,
    ) -> ScoredSample:
        """Join with the trainer's values: float32 [L] nats and, if both sides have them, uint64 [L] row digests.

        ``mode`` labels a record whose source named none; a record's own label is never overruled.
        """
        where = label(self.request_id, self.sample_index)
        stated = self.mode if self.mode is not None else mode
        temperature = self.sampling.temperature if self.sampling is not None else self.temperature
        if stated is None or temperature is None:
            raise ParityError(
                f"{where}: mode is {stated}, temperature is {temperature}; log-probs mean nothing without both: "
                "state them (scored(mode=...), or zerodrift compare --policy-logprobs)"
            )
        if mode is not None and mode is not stated:
            raise ParityError(f"{where}: the record's mode is {stated.name}, not {mode.name}")
        return ScoredSample(
            request_id=self.request_id,
            sample_index=self.sample_index,
            prompt_ids=self.prompt_ids,
            token_ids=self.token_ids,
            rollout_logprobs=self.policy_logprobs,
            trainer_logprobs=trainer_logprobs,
            mask=self.mask,
            mode=stated,
            temperature=temperature,
            filtered=self.sampling is not None and self.sampling.filtered,
            finish=self.finish,
            seed=self.seed,
            spans=self.spans,
            replica=self.replica,
            behavior_logprobs=self.behavior_logprobs,
            rollout_digests=None if trainer_digests is None else self.row_digests,
            trainer_digests=trainer_digests,
        )


def _check_length(name: str, found: int | None, wanted: int, where: str) -> None:
    if found is not None and found != wanted:
        raise InvalidRequest(f"{where}: {name} holds {found} positions, must hold {wanted}", field=name)


def _check_top(name: str, top: TopLogprobs | None, positions: int, where: str) -> None:
    if top is None:
        return
    if top.token_ids.ndim != 2 or top.token_ids.shape != top.logprobs.shape:
        raise InvalidRequest(
            f"{where}: {name} has token_ids {top.token_ids.shape} and logprobs {top.logprobs.shape}; both must be "
            "[positions, n]",
            field=name,
        )
    _check_length(name, top.token_ids.shape[0], positions, where)


def _check_prompt_score(score: PromptScore, positions: int, where: str) -> None:
    digests = None if score.row_digests is None else score.row_digests.size
    _check_length("prompt_score.logprobs", score.logprobs.size, positions, where)
    _check_length("prompt_score.row_digests", digests, positions, where)
    _check_top("prompt_score.top", score.top, positions, where)
