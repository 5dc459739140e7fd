"""Compare rollout and trainer log-probs bit by bit.

Equality is of bits (int32 views of float32), not of ``==``: -0.0 and +0.0 differ. Only tokens with mask 1 enter; a
value at mask 0, NaN included, influences nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout.errors import ParityError
from rollout.types import Float32Array, LogprobMode
from trainer_bridge.metrics import Float64Array, exact_mean, k3_terms, pearson, perplexity, probabilities, unbiased_std
from trainer_bridge.records import Comparison, DigestMismatch, Mismatch, ScoredSample, version_at
from trainer_bridge.ulp import bits, hex_bits, ulp_distance, ulp_histogram


def compare(
    samples: Sequence[ScoredSample], *, mode: LogprobMode | None = None, temperature: float | None = None
) -> Comparison:
    """Compare every token of every sample that has mask 1.

    ``mode`` and ``temperature`` state what the trainer used for the whole batch; None says that it used each sample's
    own. Temperatures are equal if they round to the same float32, which is what divides the logits.

    Errors: ParityError when a sample's mode or temperature is not the one stated.
    """
    _require_same_meaning(samples, mode, temperature)
    entering = [sample for sample in samples if sample.mask.any()]
    rollout = _gather([s.rollout_logprobs[s.mask] for s in entering])
    trainer = _gather([s.trainer_logprobs[s.mask] for s in entering])
    delta = trainer.astype(np.float64) - rollout.astype(np.float64)
    absolute = np.abs(delta)
    ulps = ulp_distance(rollout, trainer)
    p, q = probabilities(trainer), probabilities(rollout)
    probs_diff = np.abs(p - q)
    digests_equal, digests_total, first_digest = _compare_digests(entering)
    kept = _log_kept_mass(entering)
    return Comparison(
        samples=len(entering),
        empty_samples=len(samples) - len(entering),
        tokens=int(rollout.size),
        equal_tokens=int(np.count_nonzero(ulps == 0)),
        max_abs=_maximum(absolute),
        mean_abs=exact_mean(absolute),
        p50_abs=_quantile(absolute, 0.5),
        p90_abs=_quantile(absolute, 0.9),
        p99_abs=_quantile(absolute, 0.99),
        k1=exact_mean(-delta),
        k3=exact_mean(k3_terms(delta)),
        probs_diff_max=_maximum(probs_diff),
        probs_diff_mean=exact_mean(probs_diff),
        probs_diff_std=unbiased_std(probs_diff),
        pearson=pearson(p, q),
        rollout_ppl=perplexity([s.rollout_logprobs[s.mask] for s in entering]),
        trainer_ppl=perplexity([s.trainer_logprobs[s.mask] for s in entering]),
        ulp_histogram=ulp_histogram(ulps),
        max_ulp=int(ulps.max()) if ulps.size else None,
        first_mismatch=_first_mismatch(entering),
        digests_total=digests_total,
        digests_equal=digests_equal,
        first_unequal_digest=first_digest,
        filtered_tokens=int(kept.size),
        mean_log_kept_mass=exact_mean(kept),
    )


def _require_same_meaning(samples: Sequence[ScoredSample], mode: LogprobMode | None, temperature: float | None) -> None:
    for sample in samples:
        where = f"request {sample.request_id!r} sample {sample.sample_index}"
        if mode is not None and sample.mode is not mode:
            raise ParityError(
                f"{where} has log-probs of mode {sample.mode.name} ({sample.mode.value}), the trainer's are "
                f"{mode.name} ({mode.value}); compare like with like: score this sample in its own mode or leave it out"
            )
        if temperature is not None and np.float32(sample.temperature) != np.float32(temperature):
            raise ParityError(
                f"{where} was sampled at temperature {sample.temperature}, the trainer scored at {temperature}; "
                "score each temperature with its own value"
            )


def _gather(parts: list[Float32Array]) -> Float32Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.float32)


def _maximum(values: Float64Array) -> float:
    return float(values.max()) if values.size else float("nan")


def _quantile(values: Float64Array, q: float) -> float:
    return float(np.quantile(values, q)) if values.size else float("nan")


def _log_kept_mass(samples: Sequence[ScoredSample]) -> Float64Array:
    parts = [
        (s.rollout_logprobs[s.mask].astype(np.float64) - s.behavior_logprobs[s.mask].astype(np.float64))
        for s in samples
        if s.filtered and s.behavior_logprobs is not None
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.float64)


def _first_mismatch(samples: Sequence[ScoredSample]) -> Mismatch | None:
    found = []
    for sample in samples:
        differ = sample.mask & (bits(sample.rollout_logprobs) != bits(sample.trainer_logprobs))
        if differ.any():
            found.append(_mismatch_at(sample, int(np.argmax(differ))))
    # The record's own bits break ties, so that samples sharing a name still give one answer in any order.
    return min(found, key=_mismatch_order, default=None)


def _mismatch_order(found: Mismatch) -> tuple[str, int, int, int, str, str]:
    return (
        found.request_id,
        found.sample_index,
        found.position,
        found.token_id,
        found.rollout_bits,
        found.trainer_bits,
    )


def _mismatch_at(sample: ScoredSample, position: int) -> Mismatch:
    rollout, trainer = sample.rollout_logprobs[position], sample.trainer_logprobs[position]
    one = slice(position, position + 1)
    return Mismatch(
        request_id=sample.request_id,
        sample_index=sample.sample_index,
        position=position,
        absolute_position=sample.prompt_ids.size + position,
        token_id=int(sample.token_ids[position]),
        rollout_logprob=float(rollout),
        trainer_logprob=float(trainer),
        rollout_bits=hex_bits(rollout),
        trainer_bits=hex_bits(trainer),
        ulp=int(ulp_distance(sample.rollout_logprobs[one], sample.trainer_logprobs[one])[0]),
        weight_version=version_at(sample.spans, position),
        replica=sample.replica,
    )


def _compare_digests(samples: Sequence[ScoredSample]) -> tuple[int, int, DigestMismatch | None]:
    equal = total = 0
    found = []
    for sample in samples:
        if sample.rollout_digests is None or sample.trainer_digests is None:
            continue
        differ = sample.mask & (sample.rollout_digests != sample.trainer_digests)
        entering = int(np.count_nonzero(sample.mask))
        total += entering
        equal += entering - int(np.count_nonzero(differ))
        if differ.any():
            found.append(_digest_mismatch_at(sample, int(np.argmax(differ))))
    first = min(found, key=lambda d: (d.request_id, d.sample_index, d.position, d.rollout_digest), default=None)
    return equal, total, first


def _digest_mismatch_at(sample: ScoredSample, position: int) -> DigestMismatch:
    assert sample.rollout_digests is not None and sample.trainer_digests is not None
    return DigestMismatch(
        request_id=sample.request_id,
        sample_index=sample.sample_index,
        position=position,
        absolute_position=sample.prompt_ids.size + position,
        token_id=int(sample.token_ids[position]),
        rollout_digest=f"0x{int(sample.rollout_digests[position]):016x}",
        trainer_digest=f"0x{int(sample.trainer_digests[position]):016x}",
        weight_version=version_at(sample.spans, position),
        replica=sample.replica,
    )
