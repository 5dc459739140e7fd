"""Distance between float32 values in units in the last place (ULP), and its histogram.

Equality means equal bits. The float32 bit patterns are laid on one line of integers by a bijection, so a distance of 0
means equal bits and nothing else: -0.0 and +0.0 are 1 apart, although ``==`` calls them equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest
from rollout.types import Float32Array

_MAGNITUDE = np.int64(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class UlpBin:
    """Tokens whose distance lies in [low, high]."""

    low: int
    """ULP, inclusive. 0 only in the bin of equal bits."""
    high: int
    """ULP, inclusive."""
    count: int
    """tokens"""


def bits(values: Float32Array) -> npt.NDArray[np.int32]:
    """View float32 [N] as int32 [N]; refuses other dtypes, because a cast would change the bits."""
    if values.dtype != np.float32:
        raise InvalidRequest(
            f"log-probs have dtype {values.dtype}, but bits are compared as float32; keep the values as produced",
            field="logprobs",
        )
    return np.ascontiguousarray(values).view(np.int32)


def hex_bits(value: np.float32) -> str:
    """Bits of one float32 as "0x" and 8 hex digits."""
    return f"0x{int(np.float32(value).view(np.uint32)):08x}"


def ordered(values: Float32Array) -> npt.NDArray[np.int64]:
    """Rank of each float32 [N] among all float32 bit patterns, int64 [N]; adjacent floats are 1 apart."""
    raw = bits(values).astype(np.int64)
    return np.where(raw >= 0, raw, -1 - (raw & _MAGNITUDE))


def ulp_distance(left: Float32Array, right: Float32Array) -> npt.NDArray[np.int64]:
    """Distance in ULP, int64 [N] in [0, 2**32); 0 exactly where the bits are equal."""
    distance: npt.NDArray[np.int64] = np.abs(ordered(left) - ordered(right))
    return distance


def ulp_histogram(distances: npt.NDArray[np.int64]) -> tuple[UlpBin, ...]:
    """Count distances [N] by powers of two: 0 (equal bits), 1, 2-3, 4-7, ... up to the largest one seen.

    Empty input gives no bins: there is no data, which is not the same as nothing unequal.
    """
    if distances.size == 0:
        return ()
    # frexp is exact for integers below 2**53; log2 may round 2**k - 1 up to k.
    exponents = np.frexp(distances.astype(np.float64))[1]
    counts = np.bincount(exponents)
    bins = [UlpBin(low=0, high=0, count=int(counts[0]))]
    bins += [UlpBin(low=2 ** (k - 1), high=2**k - 1, count=int(counts[k])) for k in range(1, counts.size)]
    return tuple(bins)
