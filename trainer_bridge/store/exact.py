"""Sums that stay exact until they are rounded once.

A float64 sum of many terms is stored as a short expansion: floats whose mathematical sum is the sum of the terms.
Expansions of parts can be put together and rounded by ``math.fsum``, which gives the bits that one ``fsum`` over all
terms gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def expansion(values: npt.NDArray[np.float64]) -> list[float]:
    """Floats whose exact sum is the exact sum of float64 [N]; one alone when the sum is not finite."""
    terms = values[values != 0.0].tolist()
    parts: list[float] = []
    try:
        while (rest := math.fsum([*terms, *(-p for p in parts)])) != 0.0:
            if not math.isfinite(rest):
                return [rest]
            parts.append(rest)
    except OverflowError:
        return [math.inf]
    return parts or [0.0]


def rounded(expansions: Iterable[Iterable[float]]) -> float:
    """The sum of several expansions, rounded once."""
    try:
        return math.fsum(value for parts in expansions for value in parts)
    except OverflowError:
        return math.inf
