"""Element-wise functions with one formula for every element.

torch's CPU kernels use one implementation in the vector body and another in the scalar tail, so an element's bits may
depend on where in the buffer it lies. Here every element takes the same steps and rounds once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollout.kernels.cpu.arrays import array_of
from rollout.kernels.cpu.compiler import compiled
from rollout.kernels.cpu.elements import load, store
from rollout.kernels.cpu.numerics import exp_lanes
from rollout.kernels.cpu.parallel import run_split
from rollout.kernels.cpu.vector import WIDTH, in_all_lanes, put, take

_CHUNK = 16384
_ONE = np.float32(1.0)
_GELU_OUTER = np.float32(2.0 * math.sqrt(2.0 / math.pi))
_GELU_INNER = np.float32(0.044715)
_SQRT_HALF = math.sqrt(0.5)


@compiled
def _silu(x: np.ndarray, out: np.ndarray) -> None:
    one = in_all_lanes(_ONE)
    for i in range(0, x.size, WIDTH):
        v = take(x, i)
        put(out, i, v / (one + exp_lanes(-v)))


@compiled
def _sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    one = in_all_lanes(_ONE)
    for i in range(0, x.size, WIDTH):
        put(out, i, one / (one + exp_lanes(-take(x, i))))


@compiled
def _cos(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = store(np.float32(math.cos(np.float64(load(x[i])))), x[i])


@compiled
def _sin(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = store(np.float32(math.sin(np.float64(load(x[i])))), x[i])


@compiled
def _gelu_tanh(x: np.ndarray, out: np.ndarray) -> None:
    # (1 + tanh(u)) / 2 is 1 / (1 + e**-2u).
    one, outer, inner = in_all_lanes(_ONE), in_all_lanes(_GELU_OUTER), in_all_lanes(_GELU_INNER)
    for i in range(0, x.size, WIDTH):
        v = take(x, i)
        put(out, i, v / (one + exp_lanes(-(outer * (v + inner * v * v * v)))))


@compiled
def _gelu(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        v = np.float64(load(x[i]))
        out[i] = store(np.float32(0.5 * v * (1.0 + math.erf(v * _SQRT_HALF))), x[i])


def _apply(kernel: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    source, target = array_of(x.view(-1)), array_of(out.view(-1))
    chunks = max(1, x.numel() // _CHUNK)

    def part(first: int, last: int) -> None:
        span = slice(first * _CHUNK, last * _CHUNK if last < chunks else x.numel())
        kernel(source[span], target[span])

    run_split(part, np.full(chunks, _CHUNK, np.int64), worth=4 * _CHUNK)
    return out


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), any shape, float32 or bfloat16, rounded once to x's dtype."""
    return _apply(_silu, x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e**-x), any shape, float32 or bfloat16, rounded once to x's dtype."""
    return _apply(_sigmoid, x)


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """GELU, "none" by erf in float64 or "tanh"; any shape, float32 or bfloat16, rounded once to x's dtype."""
    return _apply(_gelu_tanh if approximate == "tanh" else _gelu, x)


def cos(x: torch.Tensor) -> torch.Tensor:
    """Cosine by the C library's scalar function in float64, rounded once: rotary tables and calls agree."""
    return _apply(_cos, x)


def sin(x: torch.Tensor) -> torch.Tensor:
    """Sine, likewise."""
    return _apply(_sin, x)
