"""Where a mismatch sits: by position, length, replica, weight version and filter, and the worst tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest
from trainer_bridge.metrics import Float64Array, exact_mean
from trainer_bridge.records import ScoredSample, version_at
from trainer_bridge.ulp import ulp_distance

Key = TypeVar("Key", int, str)


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens that share a key; only mask 1 enters."""

    key: str
    tokens: int
    equal_tokens: int
    """tokens with equal float32 bits"""
    max_abs: float
    """max |trainer - rollout|, nats"""
    mean_abs: float
    max_ulp: int

    @property
    def equal_fraction(self) -> float:
        """In [0, 1]."""
        return self.equal_tokens / self.tokens


@dataclass(frozen=True, slots=True)
class WorstToken:
    """One token, by distance."""

    request_id: str
    sample_index: int
    position: int
    """index among the sample's tokens"""
    token_id: int
    rollout_logprob: float
    trainer_logprob: float
    ulp: int
    replica: str | None
    weight_version: int | None


def by_position(samples: Sequence[ScoredSample], width: int = 64) -> list[Slice]:
    """Bins of ``width`` positions among a sample's tokens: "0-63", "64-127". Errors: InvalidRequest for width < 1."""
    if width < 1:
        raise InvalidRequest(f"width = {width} must be at least 1 token", field="width")
    return _sliced(samples, lambda s, i: i // width, lambda k: f"{k * width}-{k * width + width - 1}")


def by_length(samples: Sequence[ScoredSample]) -> list[Slice]:
    """By the sample's number of tokens, in powers of two: "1", "2-3", "4-7", ..."""

    def name(k: int) -> str:
        low, high = 2 ** (k - 1), 2**k - 1
        return str(low) if low == high else f"{low}-{high}"

    return _sliced(samples, lambda s, i: int(s.token_ids.size).bit_length(), name)


def by_replica(samples: Sequence[ScoredSample]) -> list[Slice]:
    """By the replica that sampled; "unknown" where the source did not say."""
    return _sliced(samples, lambda s, i: s.replica or "unknown", str)


def by_version(samples: Sequence[ScoredSample]) -> list[Slice]:
    """By the weight version that sampled each token; "unknown" where no span covers it."""

    def key(sample: ScoredSample, i: int) -> int:
        version = version_at(sample.spans, i)
        return -1 if version is None else version

    return _sliced(samples, key, lambda k: "unknown" if k == -1 else str(k))


def by_filter(samples: Sequence[ScoredSample]) -> list[Slice]:
    """Samples with and without a sampling filter."""
    return _sliced(samples, lambda s, i: s.filtered, lambda k: "filtered" if k else "unfiltered")


def worst_tokens(samples: Sequence[ScoredSample], count: int = 10) -> list[WorstToken]:
    """The ``count`` unequal tokens with the largest |difference| in nats, worst first; ties in order of the samples."""
    found: list[tuple[float, int, int]] = []
    for number, sample in enumerate(samples):
        ulps = ulp_distance(sample.rollout_logprobs, sample.trainer_logprobs)
        at = np.flatnonzero(sample.mask & (ulps > 0))
        gaps = np.abs(sample.trainer_logprobs[at].astype(np.float64) - sample.rollout_logprobs[at].astype(np.float64))
        found += [(float(gap), number, int(i)) for gap, i in zip(gaps, at, strict=True)]
    found.sort(key=lambda item: (-item[0], item[1], item[2]))
    return [_worst(samples[number], i) for _, number, i in found[:count]]


def _worst(sample: ScoredSample, i: int) -> WorstToken:
    one = slice(i, i + 1)
    return WorstToken(
        request_id=sample.request_id,
        sample_index=sample.sample_index,
        position=i,
        token_id=int(sample.token_ids[i]),
        rollout_logprob=float(sample.rollout_logprobs[i]),
        trainer_logprob=float(sample.trainer_logprobs[i]),
        ulp=int(ulp_distance(sample.rollout_logprobs[one], sample.trainer_logprobs[one])[0]),
        replica=sample.replica,
        weight_version=version_at(sample.spans, i),
    )


def _sliced(
    samples: Sequence[ScoredSample], key: Callable[[ScoredSample, int], Key], name: Callable[[Key], str]
) -> list[Slice]:
    distances: dict[Key, list[int]] = {}
    gaps: dict[Key, list[float]] = {}
    for sample in samples:
        # Selected first: what stands at mask 0 enters no arithmetic.
        at = np.flatnonzero(sample.mask)
        rollout, trainer = sample.rollout_logprobs[at], sample.trainer_logprobs[at]
        ulps: npt.NDArray[np.int64] = ulp_distance(rollout, trainer)
        absolute: Float64Array = np.abs(trainer.astype(np.float64) - rollout.astype(np.float64))
        for i, ulp, gap in zip(at.tolist(), ulps.tolist(), absolute.tolist(), strict=True):
            where = key(sample, i)
            distances.setdefault(where, []).append(ulp)
            gaps.setdefault(where, []).append(gap)
    return [
        Slice(
            key=name(k),
            tokens=len(distances[k]),
            equal_tokens=distances[k].count(0),
            max_abs=max(gaps[k]),
            mean_abs=exact_mean(np.array(gaps[k])),
            max_ulp=max(distances[k]),
        )
        for k in sorted(distances)
    ]
