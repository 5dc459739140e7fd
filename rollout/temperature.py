"""The one range of temperatures: float32 divides the logits, so nothing outside float32's own range has a meaning."""

from __future__ import annotations

import math

import numpy as np

from rollout.errors import InvalidRequest

LEAST_TEMPERATURE = float(np.float32(1e-6))
MOST_TEMPERATURE = float(np.finfo(np.float32).max)


def checked_temperature(value: float, field: str) -> float:
    """The temperature rounded once to float32; 0 (greedy) stays 0, and -0.0 is 0.

    Raises:
        InvalidRequest: not a finite number, negative, or so small or large that float32 makes it 0 or infinite.
    """
    name = field.rpartition(".")[2]
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} = {str(value)[:40]} is not a finite number; use a value >= 0", field=field)
    if not 0 <= number <= MOST_TEMPERATURE:
        raise InvalidRequest(f"{name} = {value!r} is outside [0, 3.4e38]; 0 is greedy", field=field)
    rounded = float(np.float32(number)) + 0.0
    if number > 0 and rounded < LEAST_TEMPERATURE:
        raise InvalidRequest(f"{name} = {value!r} is outside {{0}} or [1e-6, 3.4e38]; use 0 for greedy", field=field)
    return rounded
