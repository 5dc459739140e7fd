"""Records of the comparison: what both sides say about a sample, and what comes out.

Shape letters: P prompt tokens, L tokens of one sample (tool tokens of a merged row included).

Arrays are held as read-only views, never cast: a cast would change the bits that are to be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout.errors import InvalidRequest, ParityError
from rollout.types import FinishReason, Float32Array, Int32Array, LogprobMode, UInt64Array, VersionSpan
from trainer_bridge.checks import Mask, check_spans, freeze, label, require_finite
from trainer_bridge.ulp import UlpBin, bits


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSample:
    """One sample with the log-probs of both sides.

    Errors: InvalidRequest when lengths, dtypes or spans disagree or a log-prob at mask 1 is not finite; ParityError
    when mode, temperature and filter contradict the values.
    """

    request_id: str
    sample_index: int
    prompt_ids: Int32Array
    """[P]"""
    token_ids: Int32Array
    """[L]"""
    rollout_logprobs: Float32Array
    """[L] nats, the rollout's policy log-probs; may be NaN at mask 0"""
    trainer_logprobs: Float32Array
    """[L] nats, the training forward's; may be NaN at mask 0"""
    mask: Mask
    """[L] True = model token that enters. uint8 0/1 is taken too. Nothing at mask 0 influences any figure."""
    mode: LogprobMode
    temperature: float
    """As requested; 0 = greedy, and then ``mode`` is GREEDY_T1."""
    filtered: bool
    """top-k, top-p, min-p or barred ids were on."""
    finish: FinishReason | None
    seed: int | None
    spans: tuple[VersionSpan, ...] = ()
    """Weight versions over [0, L); empty: unknown."""
    replica: str | None = None
    behavior_logprobs: Float32Array | None = None
    """[L] nats; policy - behavior is the log of the mass that the filter kept"""
    rollout_digests: UInt64Array | None = None
    """[L] digest of the float32 logits row"""
    trainer_digests: UInt64Array | None = None
    """[L]"""

    def __post_init__(self) -> None:
        """Check and freeze."""
        where = label(self.request_id, self.sample_index)
        freeze(self, "prompt_ids", np.int32, None, where)
        freeze(self, "token_ids", np.int32, None, where)
        length = self.token_ids.size
        freeze(self, "mask", np.bool_, length, where)
        for name in ("rollout_logprobs", "trainer_logprobs", "behavior_logprobs"):
            freeze(self, name, np.float32, length, where)
            require_finite(name, getattr(self, name), self.mask, where)
        for name in ("rollout_digests", "trainer_digests"):
            freeze(self, name, np.uint64, length, where)
        check_spans(self.spans, self.mask, where)
        if (self.rollout_digests is None) != (self.trainer_digests is None):
            missing = "rollout" if self.rollout_digests is None else "trainer"
            raise InvalidRequest(
                f"{where}: row digests of the {missing} side are absent; give both sides or neither",
                field=f"{missing}_digests",
            )
        _check_mode(self, where)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One token whose log-probs differ in bits."""

    request_id: str
    sample_index: int
    position: int
    """Index among the sample's L tokens."""
    absolute_position: int
    """Index in prompt + sample: P + position."""
    token_id: int
    rollout_logprob: float
    """nats"""
    trainer_logprob: float
    """nats"""
    rollout_bits: str
    """float32 bits, "0x" + 8 hex digits"""
    trainer_bits: str
    ulp: int
    """Distance in units in the last place, >= 1."""
    weight_version: int | None
    replica: str | None


@dataclass(frozen=True, slots=True)
class DigestMismatch:
    """One token whose logits rows differ."""

    request_id: str
    sample_index: int
    position: int
    absolute_position: int
    token_id: int
    rollout_digest: str
    """"0x" + 16 hex digits"""
    trainer_digest: str
    weight_version: int | None
    replica: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every figure of one batch, over tokens with mask 1 only. NaN is "no data", never 0.

    D = trainer - rollout, exact in float64. Sums are correctly rounded, so the order of samples changes nothing.
    """

    samples: int
    """Samples with at least one token that enters."""
    empty_samples: int
    """Samples without one: they enter no figure."""
    tokens: int
    equal_tokens: int
    """Tokens with equal float32 bits."""
    max_abs: float
    """max |D|, nats"""
    mean_abs: float
    p50_abs: float
    """Quantiles of |D|, linear between order statistics, nats."""
    p90_abs: float
    p99_abs: float
    k1: float
    """mean(-D): estimates KL(rollout || trainer), nats."""
    k3: float
    """mean(exp(D) - 1 - D), nats; inf if it overflows float64."""
    probs_diff_max: float
    """max |exp(trainer) - exp(rollout)|"""
    probs_diff_mean: float
    probs_diff_std: float
    """Unbiased; NaN below two tokens."""
    pearson: float
    """Of the two sides' probabilities; NaN below two tokens or without variance."""
    rollout_ppl: float
    """Mean over non-empty samples of exp(-mean log-prob)."""
    trainer_ppl: float
    ulp_histogram: tuple[UlpBin, ...]
    """First bin: equal bits; then 1, 2-3, 4-7, ..."""
    max_ulp: int | None
    """None: no data."""
    first_mismatch: Mismatch | None
    """Least by (request_id, sample_index, position)."""
    digests_total: int
    """Tokens with row digests from both sides."""
    digests_equal: int
    first_unequal_digest: DigestMismatch | None
    filtered_tokens: int
    """Tokens of filtered samples that carry a behavior log-prob."""
    mean_log_kept_mass: float
    """mean(policy - behavior) over those, nats, <= 0 up to rounding. A property of the filter, not a mismatch."""

    @property
    def unequal_tokens(self) -> int:
        """Tokens whose bits differ."""
        return self.tokens - self.equal_tokens

    @property
    def has_data(self) -> bool:
        """Whether any token was compared."""
        return self.tokens > 0

    @property
    def bitwise_equal(self) -> bool:
        """All tokens, and all digests that were asked for, hold equal bits; False without data."""
        return self.has_data and self.equal_tokens == self.tokens and self.digests_equal == self.digests_total


def version_at(spans: Sequence[VersionSpan], position: int) -> int | None:
    """Weight version that sampled token ``position``; None where no span covers it."""
    return next((span.version for span in spans if span.start <= position < span.end), None)


def _check_mode(sample: ScoredSample, where: str) -> None:
    greedy = sample.temperature == 0.0
    if not 0.0 <= sample.temperature < float("inf"):
        raise InvalidRequest(f"{where}: temperature {sample.temperature} is not finite and >= 0", field="temperature")
    if greedy != (sample.mode is LogprobMode.GREEDY_T1):
        raise ParityError(
            f"{where}: mode {sample.mode.name} with temperature {sample.temperature}; GREEDY_T1 belongs to temperature "
            "0 and to nothing else"
        )
    if sample.behavior_logprobs is None or sample.filtered or greedy:
        return
    differ = np.flatnonzero(sample.mask & (bits(sample.behavior_logprobs) != bits(sample.rollout_logprobs)))
    if differ.size:
        raise ParityError(
            f"{where}: no filter is on, yet behavior and policy log-prob differ in bits at position {int(differ[0])}; "
            "mark the sample filtered, or the rollout breaks the log-prob contract"
        )
