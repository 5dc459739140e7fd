"""Loads and stores of model values inside compiled code: float32 as it is, bfloat16 as its uint16 bits.

Arithmetic between a load and a store is float32; a store rounds once, to nearest even, as torch does after each
bfloat16 operation.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import overload

QUIET_NAN = np.uint16(0x7FC0)


@numba.njit
def round_bfloat16(value: np.float32) -> np.uint16:
    """Nearest even; NaN stays NaN (the carry of rounding could otherwise wrap its payload)."""
    bits = np.float32(value).view(np.uint32)
    rounded = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    return rounded if value == value else QUIET_NAN


def load(stored: Any) -> np.float32:
    """float32 value of a stored element."""
    raise NotImplementedError("compiled code only")


@overload(load)
def _load(stored: Any) -> Any:
    def bfloat16(stored: Any) -> Any:
        return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)

    def float32(stored: Any) -> Any:
        return stored

    return bfloat16 if stored == numba.types.uint16 else float32


def store(value: np.float32, like: Any) -> Any:
    """``value`` rounded to the stored type of ``like``."""
    raise NotImplementedError("compiled code only")


@overload(store)
def _store(value: Any, like: Any) -> Any:
    def bfloat16(value: Any, like: Any) -> Any:
        return round_bfloat16(value)

    def float32(value: Any, like: Any) -> Any:
        return np.float32(value)

    return bfloat16 if like == numba.types.uint16 else float32
