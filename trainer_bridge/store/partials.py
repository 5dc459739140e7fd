"""Aggregates of one part, small enough to be read whole: cells that can be summed over parts for every view.

Dimensions and their cells (``key``, ``bin``):

- ``delta``: bin = floor(4 * log10 |D|), clipped to [-48, 12]; EQUAL_BIN: equal bits.
- ``ulp``: bin = 0 for equal bits, k for a distance in [2**(k-1), 2**k - 1].
- ``probability``: bin = x * 80 + y, x from the rollout's probability, y from the trainer's, in cells of 1/80.
- ``position``: bin = lower edge of the position's bucket; 4 wide below 64, then 16 buckets an octave.
- ``length``: bin = largest power of two that is <= the sample's tokens.
- ``replica``, ``version``, ``filter``: key = the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.types import Float32Array
from trainer_bridge.metrics import Float64Array, k3_terms, probabilities
from trainer_bridge.records import ScoredSample
from trainer_bridge.store.facts import SampleFacts, filter_name
from trainer_bridge.ulp import ulp_distance

IntArray = npt.NDArray[np.int64]

EQUAL_BIN = -1000
DELTA_LOW, DELTA_HIGH, DELTA_PER_DECADE = -48, 12, 4
PROBABILITY_CELLS = 80


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The compared tokens (mask 1) of a part, side by side; N tokens."""

    sample: IntArray
    """[N] index of the sample"""
    position: IntArray
    """[N] index among the sample's tokens"""
    rollout: Float32Array
    trainer: Float32Array
    delta: Float64Array
    """[N] trainer - rollout, nats"""
    ulp: IntArray
    """[N] 0 = equal bits"""

    @property
    def absolute(self) -> Float64Array:
        """[N] |D| nats"""
        return np.abs(self.delta)


def columns_of(samples: Sequence[ScoredSample]) -> TokenColumns:
    """Put the tokens with mask 1 of all samples side by side."""
    positions = [np.flatnonzero(s.mask) for s in samples]
    rollout = _join([s.rollout_logprobs[s.mask] for s in samples], np.float32)
    trainer = _join([s.trainer_logprobs[s.mask] for s in samples], np.float32)
    return TokenColumns(
        sample=np.repeat(np.arange(len(samples)), [p.size for p in positions]),
        position=_join(positions, np.int64),
        rollout=rollout,
        trainer=trainer,
        delta=trainer.astype(np.float64) - rollout.astype(np.float64),
        ulp=ulp_distance(rollout, trainer),
    )


def effective_sample_size(delta: Float64Array) -> float:
    """(sum w)^2 / (N sum w^2) in (0, 1] with w = exp(D): 1 exactly where every weight is equal; NaN without tokens.

    Weights are scaled by the largest, so nothing overflows.
    """
    if delta.size == 0:
        return float("nan")
    weights = np.exp(delta - delta.max())
    return float(weights.sum() ** 2 / (weights.size * np.square(weights).sum()))


def position_bucket(positions: IntArray) -> IntArray:
    """Lower edge of each position's bucket [N]."""
    width = np.left_shift(1, np.maximum(np.frexp(np.maximum(positions, 1).astype(np.float64))[1] - 5, 2))
    edges: IntArray = (positions // width) * width
    return edges


def groups_of(
    tokens: TokenColumns, samples: Sequence[ScoredSample], facts: Sequence[SampleFacts]
) -> list[dict[str, Any]]:
    """Every non-empty cell of every dimension, as rows of ``schema.GROUP``."""
    cells: list[dict[str, Any]] = []
    k3 = k3_terms(tokens.delta)
    for dimension, bins in _binned(tokens, samples).items():
        cells += _cells(dimension, bins, None, tokens, k3)
    for dimension, (codes, names) in _named(tokens, samples, facts).items():
        cells += _cells(dimension, codes, names, tokens, k3)
    return cells


def _binned(tokens: TokenColumns, samples: Sequence[ScoredSample]) -> dict[str, IntArray]:
    absolute, equal = tokens.absolute, tokens.ulp == 0
    tiny = np.maximum(absolute, 1e-300)
    delta_bin = np.clip(np.floor(DELTA_PER_DECADE * np.log10(tiny)), DELTA_LOW, DELTA_HIGH).astype(np.int64)
    x, y = (_cell(side) for side in (tokens.rollout, tokens.trainer))
    lengths = np.array([s.token_ids.size for s in samples], dtype=np.int64)
    octave = np.left_shift(1, np.frexp(np.maximum(lengths, 1).astype(np.float64))[1] - 1)
    return {
        "delta": np.where(equal, EQUAL_BIN, delta_bin),
        "ulp": np.frexp(tokens.ulp.astype(np.float64))[1].astype(np.int64),
        "probability": x * PROBABILITY_CELLS + y,
        "position": position_bucket(tokens.position),
        "length": octave[tokens.sample],
    }


def _named(
    tokens: TokenColumns, samples: Sequence[ScoredSample], facts: Sequence[SampleFacts]
) -> dict[str, tuple[IntArray, list[str]]]:
    """Code of each token [N] and the names that the codes stand for."""
    versions: list[IntArray] = []
    for sample in samples:
        at = np.full(sample.token_ids.size, -1, dtype=np.int64)
        for span in sample.spans:
            at[span.start : span.end] = span.version
        versions.append(at[sample.mask])
    found, codes = np.unique(_join(versions, np.int64), return_inverse=True)
    named = {"version": (codes, ["unknown" if v < 0 else str(v) for v in found.tolist()])}
    by_sample: dict[str, list[str | None]] = {
        "replica": [s.replica for s in samples],
        "filter": [*(filter_name(f.sampling) for f in facts)],
    }
    for dimension, names in by_sample.items():
        known = sorted({name or "unknown" for name in names})
        place = {name: i for i, name in enumerate(known)}
        of_sample = np.array([place[name or "unknown"] for name in names], dtype=np.int64)
        named[dimension] = (of_sample[tokens.sample], known)
    return named


def _cell(logprobs: Float32Array) -> IntArray:
    scaled = np.clip(probabilities(logprobs), 0.0, 1.0) * PROBABILITY_CELLS
    return np.minimum(scaled.astype(np.int64), PROBABILITY_CELLS - 1)


def _cells(
    dimension: str, codes: IntArray, names: list[str] | None, tokens: TokenColumns, k3: Float64Array
) -> list[dict[str, Any]]:
    found, inverse = np.unique(codes, return_inverse=True)
    count = np.bincount(inverse, minlength=found.size)
    unequal = np.bincount(inverse, weights=tokens.ulp != 0, minlength=found.size)
    largest = np.zeros(found.size)
    np.maximum.at(largest, inverse, tokens.absolute)
    sum_abs = np.bincount(inverse, weights=tokens.absolute, minlength=found.size)
    sum_k3 = np.bincount(inverse, weights=k3, minlength=found.size)
    return [
        {
            "dimension": dimension,
            "key": names[code] if names is not None else "",
            "bin": code if names is None else 0,
            "tokens": tokens_here,
            "unequal": int(unequal_here),
            "max_abs": max_here,
            "sum_abs": abs_here,
            "sum_k3": k3_here,
        }
        for code, tokens_here, unequal_here, max_here, abs_here, k3_here in zip(
            found.tolist(), count.tolist(), unequal.tolist(), largest.tolist(), sum_abs.tolist(), sum_k3.tolist(),
            strict=True,
        )
    ]  # fmt: skip


def _join(parts: list[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
