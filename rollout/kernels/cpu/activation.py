"""Gated-activation functions with one formula for every element.

torch's CPU kernels use one exponential in the vector body and another in the scalar tail, so an element's bits depend
on where in the buffer it lies. Here every element takes the same float32 steps (``numerics.exp_f32``) and rounds once.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from rollout.kernels.cpu.numerics import exp_f32
from rollout.kernels.cpu.parallel import run_split

_CHUNK = 16384
_ONE = np.float32(1.0)
_QUIET_NAN = np.uint16(0x7FC0)


@numba.njit(inline="always")
def _round_bfloat16(value: np.float32) -> np.uint16:
    """Nearest even; NaN stays NaN (the carry of rounding could otherwise wrap its payload)."""
    bits = np.float32(value).view(np.uint32)
    rounded = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    return rounded if value == value else _QUIET_NAN


@numba.njit(cache=True, nogil=True)
def _silu_f32(x: np.ndarray, out: np.ndarray, numerator_is_x: bool) -> None:
    for i in range(x.size):
        v = x[i]
        out[i] = (v if numerator_is_x else _ONE) / (_ONE + exp_f32(-v))


@numba.njit(cache=True, nogil=True)
def _silu_bf16(x: np.ndarray, out: np.ndarray, numerator_is_x: bool) -> None:
    for i in range(x.size):
        v = np.uint32(np.uint32(x[i]) << np.uint32(16)).view(np.float32)
        out[i] = _round_bfloat16((v if numerator_is_x else _ONE) / (_ONE + exp_f32(-v)))


def _apply(x: torch.Tensor, numerator_is_x: bool) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    kernel, bits = (_silu_bf16, torch.uint16) if x.dtype == torch.bfloat16 else (_silu_f32, torch.float32)
    source, target = x.view(-1).view(bits).numpy(), out.view(-1).view(bits).numpy()
    chunks = max(1, x.numel() // _CHUNK)

    def part(first: int, last: int) -> None:
        span = slice(first * _CHUNK, last * _CHUNK if last < chunks else x.numel())
        kernel(source[span], target[span], numerator_is_x)

    run_split(part, np.full(chunks, _CHUNK, np.int64), worth=4 * _CHUNK)
    return out


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), any shape, float32 or bfloat16, rounded once to x's dtype."""
    return _apply(x, True)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e**-x), any shape, float32 or bfloat16, rounded once to x's dtype."""
    return _apply(x, False)
